"""Bucketed all-reduce of one step's gradients over the data ranks, begun while backward goes on.

Which parameters share a bucket, and the order of the buckets, follow from the model and the plan alone: all
ranks begin the same sums in the same order, whichever gradients they have, and a resumed run sums as the one
that never stopped. So does a run without overlap, which begins them all at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from wanma.collectives.all_reduce.bucket_all_reduce import Begin, Join, Sum
from wanma.collectives.timing.communication_timer import Stopwatch


@dataclass(frozen=True)
class Size:
    """Size of one trained parameter's gradient on this rank."""

    parameter: int
    """Index of the parameter."""
    shape: torch.Size
    dtype: torch.dtype
    is_early: bool
    """True if the gradient can be summed as soon as backward has made it."""

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed in one message."""

    sizes: tuple[Size, ...]

    @property
    def is_early(self) -> bool:
        return self.sizes[0].is_early


def buckets(sizes: Sequence[Size], bucket_bytes: int) -> list[Bucket]:
    """Assign all parameters to buckets, in the order of the sums: from the last, whose gradient is first.

    A large one goes alone, where it is: nothing is copied. Each bucket has one dtype; those that must wait
    for the end of backward come last.
    """
    kinds: dict[tuple[bool, torch.dtype], list[Size]] = {}
    for size in reversed(sizes):
        kinds.setdefault((not size.is_early, size.dtype), []).append(size)
    early_first = sorted(kinds.items(), key=lambda kind: kind[0][0])
    return [bucket for _, members in early_first for bucket in _runs(members, bucket_bytes)]


def _runs(sizes: Iterable[Size], bucket_bytes: int) -> Iterable[Bucket]:
    run: list[Size] = []
    held = 0
    for size in sizes:
        if size.nbytes >= bucket_bytes and run:
            yield Bucket(tuple(run))
            run, held = [], 0
        run.append(size)
        held += size.nbytes
        if held >= bucket_bytes:
            yield Bucket(tuple(run))
            run, held = [], 0
    if run:
        yield Bucket(tuple(run))


class GradientSums:
    """Sums of one step's gradients over one mesh dimension of the data ranks.

    Args:
        layout: buckets, the same on all ranks.
        device: device of the gradients.
        take: hands over the gradient of a parameter that has arrived, if it has one, plain and contiguous.
        begin: begins the sum of a bucket.
        stopwatch: timer of the communication.
        join: puts gradients, each (elements,), one after the other into a new bucket.
    """

    def __init__(
        self,
        layout: Sequence[Bucket],
        device: torch.device,
        take: Callable[[int], Tensor | None],
        begin: Begin,
        stopwatch: Stopwatch,
        join: Join = torch.cat,
    ) -> None:
        self._layout, self._device, self._take, self._begin = layout, device, take, begin
        self._join = join
        self._stopwatch = stopwatch
        self._place = {size.parameter: at for at, bucket in enumerate(layout) for size in bucket.sizes}
        self._missing = [{size.parameter for size in bucket.sizes} for bucket in layout]
        self._begun = 0
        self._under_way: list[Sum] = []
        self._sums: dict[int, Tensor] = {}
        self._has: set[int] = set()
        """Parameters of which this rank had a gradient."""
        self.was_said = False
        """Result of `finish`: some rank passed `says`."""
        self.came_late = False
        """Result of `finish`: some rank's backward changed a gradient whose sum had already begun."""

    def arrived(self, parameter: int) -> None:
        """Begin the sums of all complete buckets, in order; called when backward has made a gradient.

        Only the last micro-batch's gradients count. A bucket of which this rank lacks a gradient holds up
        those behind it until `finish`.
        """
        at = self._place.get(parameter)
        if at is None or at < self._begun:
            return  # it is not trained; or comes a second time, which `finish` will find
        self._missing[at].discard(parameter)
        self._look()
        while self._begun < len(self._layout) and not self._missing[self._begun]:
            if not self._layout[self._begun].is_early:
                return
            self._begin_next()

    def finish(self, take: Callable[[int], Tensor | None], says: bool = False) -> dict[int, Tensor]:
        """Begin the remaining sums, and wait for all: after the last backward.

        Which parameters have a gradient may differ between ranks, as where an expert got no token: all send
        the same buckets, zeros for missing gradients, and flags that say which are missing.

        Args:
            take: hands over the gradient of any parameter, as in the constructor.
            says: flag that the ranks exchange beside the gradients.

        Returns:
            sums by parameter; none of those of which no rank has a gradient.
        """
        if not self._layout:
            return {}
        began = time.perf_counter()
        self._stopwatch.begin("data", began)
        early, self._take = self._begun, take
        while self._begun < len(self._layout):
            self._begin_next()
        late = self._late(early)
        sizes = [size for bucket in self._layout for size in bucket.sizes]
        told = [float(size.parameter in self._has) for size in sizes]
        told += [float(size.parameter in late) for size in sizes]
        told.append(float(says))
        ranks = torch.tensor(told, device=self._device)
        self._start(ranks)
        self._wait()
        # In a dry run tensors have no values, and all ranks have what one has.
        numbers = told if is_fake(ranks) else ranks.tolist()
        has, had_late = numbers[: len(sizes)], numbers[len(sizes) : -1]
        self.was_said = numbers[-1] > 0
        sums = {
            size.parameter: self._sums[size.parameter]
            for size, number in zip(sizes, has, strict=True)
            if number
        }
        again = [size for size, number in zip(sizes, had_late, strict=True) if number]
        self.came_late = bool(again)
        for size in again:
            more = late.get(size.parameter)
            more = torch.zeros(size.shape, dtype=size.dtype, device=self._device) if more is None else more
            self._start(more)
            self._wait()
            sums[size.parameter] += more
        ended = time.perf_counter()
        self._stopwatch.end("data", ended)
        self._stopwatch.waited("data", ended - began)
        return sums

    def _late(self, early: int) -> dict[int, Tensor]:
        """Return gradients made after those of their bucket were taken, of the first `early` buckets.

        A backward may come to a parameter twice, in a reentrant checkpoint or because a user's loop calls it
        twice; nothing says so beforehand.
        """
        found = {}
        for bucket in self._layout[:early]:
            for size in bucket.sizes:
                gradient = self._take(size.parameter)
                if gradient is not None:
                    found[size.parameter] = gradient
        return found

    def _begin_next(self) -> None:
        sizes = self._layout[self._begun].sizes
        self._begun += 1
        gradients = []
        for size in sizes:
            gradient = self._take(size.parameter)
            if gradient is None:
                gradient = torch.zeros(size.shape, dtype=size.dtype, device=self._device)
            else:
                self._has.add(size.parameter)
            gradients.append(gradient)
        if len(sizes) == 1:
            self._sums[sizes[0].parameter] = gradients[0]
            self._start(gradients[0])
            return
        flat = self._join([gradient.view(-1) for gradient in gradients])
        parts = flat.split([size.shape.numel() for size in sizes])
        for size, part in zip(sizes, parts, strict=True):
            self._sums[size.parameter] = part.view(size.shape)
        self._start(flat)

    def _start(self, bucket: Tensor) -> None:
        self._stopwatch.begin("data", time.perf_counter())
        self._under_way.append(self._begin(bucket.view(-1)))

    def _look(self) -> None:
        """Note which sums have ended by now; one that failed raises when it is waited for."""
        while self._under_way and self._under_way[0].is_done():
            self._end_first()

    def _wait(self) -> None:
        while self._under_way:
            self._end_first()

    def _end_first(self) -> None:
        self._under_way.pop(0).wait()
        self._stopwatch.end("data", time.perf_counter())
