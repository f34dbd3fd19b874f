"""A console that cannot be written to ends no run: what is shown there is in the run directory as well."""

from __future__ import annotations

import os
from typing import Any, TextIO


class LastingStream:
    """A text stream whose failures are no errors: a log on a full disk, a pipe or terminal that has gone.

    Each write is tried anew, so a log goes on once its disk has room again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._is_broken = True
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._is_broken = True
        else:
            self._is_broken = False

    def let_go(self) -> None:
        """At the end: drop what could not be written; Python would try it again as it exits, and fail."""
        self.flush()
        if self._is_broken:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
