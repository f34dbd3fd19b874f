"""Image transforms of other packages, by entry points of the group `wanma.image_transforms`.

Each is a function (pixels, random) that returns the changed pixels; `data.image_transform.augment` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.job.errors import JobError, did_you_mean
from wanma.job.sections.images import BUILT_IN_CHANGES
from wanma.job.user_frames import user_frame_text

ENTRY_POINT_GROUP = f"{__name__.partition('.')[0]}.image_transforms"
"""Group of entry points of image transforms in other packages: `wanma.image_transforms`."""
KEY = "data.image_transform.augment"
_DRAW_BITS = 53


class TransformError(JobError):
    """Failure of a transform of another package, or pixels from it that cannot be used."""


@dataclass(frozen=True)
class OwnTransform:
    """Image transform of another package.

    Args:
        function: function (pixels, random) of uint8 pixels (height, width, channels), and a numpy generator
            for its random numbers, None for images of validation; returns pixels of the same shape.
    """

    name: str
    origin: str
    function: Callable[[NDArray[np.uint8], np.random.Generator | None], Any] = field(repr=False)

    def __call__(self, pixels: NDArray[np.uint8], random: np.random.Generator | None) -> NDArray[np.uint8]:
        """Return the changed pixels.

        Raises:
            TransformError: the function raises, or returns anything but uint8 of the same shape.
        """
        try:
            changed = self.function(pixels.copy(), random)
        except MemoryError:
            raise
        except Exception as error:  # a foreign function may raise anything
            place = user_frame_text(error)
            raise self._error(
                f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
            ) from error
        if not isinstance(changed, np.ndarray) or changed.dtype != np.uint8 or changed.shape != pixels.shape:
            kind = f"{changed.dtype} of shape {changed.shape}" if isinstance(changed, np.ndarray) else None
            raise self._error(
                f"it returns {kind or type(changed).__name__}, not an array of uint8 of shape {pixels.shape}"
            )
        return changed

    def _error(self, cause: str) -> TransformError:
        return TransformError(
            f"{KEY}: the transform '{self.name}' ({self.origin}) fails: {cause}",
            f"correct it in its package, or remove '{self.name}' from {KEY}",
        )


def find_transforms(names: Sequence[str]) -> tuple[OwnTransform, ...]:
    """Return the transforms of other packages among `names`, in their order.

    Raises:
        JobError: there is none of a name, two packages have it, or it cannot be loaded.
    """
    if all(name in BUILT_IN_CHANGES for name in names):
        return ()
    known: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in BUILT_IN_CHANGES or known.setdefault(entry.name, entry).value != entry.value:
            raise JobError(
                f"the entry point {entry.name} = {entry.value} in {ENTRY_POINT_GROUP} takes a name that "
                "another image transform has",
                "remove one of the packages, or rename it there",
            )
    return tuple(_load(name, known) for name in names if name not in BUILT_IN_CHANGES)


def draw_generator(draws: Iterator[float] | None) -> np.random.Generator | None:
    """Return a generator that depends on the next two of `draws` alone; None: no random change is made."""
    if draws is None:
        return None
    return np.random.default_rng([int(next(draws) * 2.0**_DRAW_BITS) for _ in range(2)])


def _load(name: str, known: dict[str, EntryPoint]) -> OwnTransform:
    if name not in known:
        names = [*BUILT_IN_CHANGES, *known]
        raise JobError(
            f"{KEY}: there is no image transform '{name}'.{did_you_mean(name, names)}",
            f"give {', '.join(names)}, or install the package that brings it by an entry point in the group "
            f"{ENTRY_POINT_GROUP}",
        )
    entry = known[name]
    place = f"{KEY}: the entry point {name} = {entry.value} in {ENTRY_POINT_GROUP}"
    try:
        function = entry.load()
    except Exception as error:  # a foreign module may raise anything
        raise JobError(f"{place} cannot be loaded: {error}", "correct or remove its package") from error
    if not callable(function):
        raise JobError(f"{place} is no function: {function!r}", "correct or remove its package")
    return OwnTransform(name, entry.value, function)
