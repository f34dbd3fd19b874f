"""State of a process of this node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def is_process_alive(process: Any) -> bool:
    """Return whether a process of this node lives, by its recorded process number.

    One that has ended and that no parent has waited for, as in containers without an init, does not.
    """
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True  # another user's process, but alive
    except (ProcessLookupError, TypeError, ValueError):
        return False
    with suppress(OSError):
        return Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True
