"""State of a process of this node."""

from __future__ import annotations

import os
from typing import Any


def is_process_alive(process: Any) -> bool:
    """Return whether a process of this node lives, by its recorded process number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True
