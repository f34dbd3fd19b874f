"""Interface of trackers, and their lookup by name."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wanma.job.errors import JobError, did_you_mean, missing_extra_error
from wanma.job.file.import_path import import_object

ENTRY_POINT_GROUP = f"{__name__.partition('.')[0]}.trackers"
"""Group of the entry points of other packages' trackers."""


@dataclass(frozen=True)
class Scalars:
    """Scalars of one step."""

    step: int
    time: float
    """Time of the record, in unix seconds."""
    values: Mapping[str, float]
    """Values by tag, as TensorBoard has them: `train/loss`."""


@dataclass
class TrackedRun:
    """Run as its tracker sees it."""

    name: str
    settings: Mapping[str, str]
    """Keys of the job with their values as text."""
    folder: Path
    """Folder for files of the tracker, in the run directory."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON-able state that the next start gets: the tracker's own name of the run."""


class Tracker(Protocol):
    """Tracker, called in one thread of a process of its own; whatever it raises is tried again later."""

    def open(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Begin, or go on with the run of `run.state`.

        Returns:
            newest step that has arrived of `step` and of `validation`, 0: none; None: what was recorded
            last holds, or repetition is harmless.
        """

    def log(self, scalars: Sequence[Scalars]) -> None:
        """Write scalars, of ascending steps; on return they are safe."""

    def finish(self, outcome: str) -> None:
        """End the run: `finished`, `interrupted`, `aborted`, `failed` or `crashed`."""


_BUILT_IN = {
    "mlflow": ("wanma.observe.trackers.mlflow_tracker:MlflowTracker", "mlflow-skinny"),
    "wandb": ("wanma.observe.trackers.wandb_tracker:WandbTracker", "wandb"),
}
"""Class of each built-in tracker, and the package that it needs; its name is that of the module."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that cannot work, without the import of their libraries, which may take seconds.

    Raises:
        JobError: there is none of this name.
        WanmaError: its library is not installed.
    """
    for name in names:
        find_tracker(name)
        if name in _BUILT_IN:
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:  # a folder of this name, as wandb makes one
                raise missing_extra_error(_BUILT_IN[name][1], name, f"observe.trackers = ['{name}']")


def find_tracker(name: str) -> Callable[[], Tracker]:
    """Return what makes a tracker: a built-in one, one of another package, or that of 'package.module:Class'.

    Raises:
        JobError: there is none of this name.
    """
    key = "observe.trackers"
    if name in _BUILT_IN or ":" in name:
        return import_object(_BUILT_IN.get(name, (name,))[0], key)  # type: ignore[no-any-return]
    others = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name not in others:
        known = [*_BUILT_IN, *others]
        raise JobError(
            f"{key}: there is no tracker '{name}'.{did_you_mean(name, known)}",
            f"give {', '.join(known)}, or 'package.module:Class'",
        )
    return others[name].load()  # type: ignore[no-any-return]
