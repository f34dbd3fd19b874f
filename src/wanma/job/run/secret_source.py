"""Secret that a job file names by its source, so that no record of the run has it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from wanma.job.errors import JobError


def read_secret(value: str, key: str) -> str:
    """Return a secret that a key gives as `env:NAME` or `file:PATH`; empty: the key is empty.

    Raises:
        JobError: the variable or file is missing or empty.
    """
    source, _, name = value.partition(":")
    secret = os.environ.get(name, "") if source == "env" else ""
    if source == "file":
        with contextlib.suppress(OSError):
            secret = Path(name).read_text(encoding="utf-8").strip()
    if value and not secret:
        raise JobError(f"{key} = {value!r} has no content", "set the variable, or write the file")
    return secret
