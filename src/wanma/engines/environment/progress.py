"""Progress of the installation of environments on several nodes, printed as lines on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from wanma.engines.environment.archive import EnvironmentArchive
from wanma.observe.units import count_text, duration_text

SECONDS = 10.0
"""Time between two lines, in seconds."""


class InstallProgress:
    """Lines for the user: start, state of the slowest node every few seconds, end.

    Args:
        archive: the environment.
        places: all nodes.
    """

    def __init__(self, archive: EnvironmentArchive, places: Sequence[str]) -> None:
        self._archive, self._places = archive, list(places)
        self._texts: dict[str, str] = {}
        self._done: dict[str, bool] = {}
        self._began = self._printed = time.monotonic()
        self._lock = threading.Lock()

    def start(self, place: str) -> None:
        """Note that a node lacks the environment."""
        with self._lock:
            if not self._texts:
                packages = count_text(self._archive.packages, "package")
                others = " and others that lack them" if len(self._places) > 1 else ""
                self._print(f"installing {packages} of {self._archive.title} on {place}{others} ...")
            self._texts.setdefault(place, "begins")

    def update(self, place: str, text: str) -> None:
        """Note what a node does."""
        with self._lock:
            self._texts[place] = text
            if time.monotonic() - self._printed >= SECONDS:
                waiting = [name for name in self._texts if name not in self._done]
                others = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
                self._print(f"environment: {place}: {text}{others} ({self._elapsed()})")

    def end(self, place: str, *, is_new: bool) -> None:
        """Note that a node has the environment."""
        with self._lock:
            self._done[place] = is_new
            if len(self._done) == len(self._places) and any(self._done.values()):
                names = ", ".join(name for name in self._places if self._done[name])
                self._print(f"environment of {self._archive.title} is ready on {names} ({self._elapsed()})")

    def _elapsed(self) -> str:
        return duration_text(time.monotonic() - self._began)

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=sys.stderr, flush=True)
