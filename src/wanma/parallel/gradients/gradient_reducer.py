"""Bucketed all-reduce of one step's gradients over the data ranks, started during backward.

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

from wanma.collectives.all_reduce.bucket_all_reduce import FlattenBucket, PendingAllReduce, StartAllReduce
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.torch_internals.fake_tensors import is_fake


@dataclass(frozen=True)
class GradientSpec:
    """Size of one trained parameter's gradient on this rank."""

    parameter_index: int
    """Index of the parameter."""
    shape: torch.Size
    dtype: torch.dtype
    is_complete_in_backward: bool
    """True if the gradient can be summed as soon as backward has made it."""

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed in one message."""

    specs: tuple[GradientSpec, ...]

    @property
    def is_complete_in_backward(self) -> bool:
        return self.specs[0].is_complete_in_backward


def assign_buckets(specs: Sequence[GradientSpec], bucket_bytes: int) -> list[Bucket]:
    """Assign all parameters to buckets, in the order of the sums: from the last, whose gradient is first.

    A large one goes alone, where it is: nothing is copied. Each bucket has one dtype; those that must wait
    for the end of backward come last.
    """
    kinds: dict[tuple[bool, torch.dtype], list[GradientSpec]] = {}
    for size in reversed(specs):
        kinds.setdefault((not size.is_complete_in_backward, size.dtype), []).append(size)
    early_first = sorted(kinds.items(), key=lambda kind: kind[0][0])
    return [bucket for _, members in early_first for bucket in _fill_buckets(members, bucket_bytes)]


def _fill_buckets(specs: Iterable[GradientSpec], bucket_bytes: int) -> Iterable[Bucket]:
    run: list[GradientSpec] = []
    run_bytes = 0
    for size in specs:
        if size.nbytes >= bucket_bytes and run:
            yield Bucket(tuple(run))
            run, run_bytes = [], 0
        run.append(size)
        run_bytes += size.nbytes
        if run_bytes >= bucket_bytes:
            yield Bucket(tuple(run))
            run, run_bytes = [], 0
    if run:
        yield Bucket(tuple(run))


class GradientReducer:
    """Sums of one step's gradients over one mesh dimension of the data ranks.

    Args:
        bucket_layout: buckets, the same on all ranks.
        device: device of the gradients.
        pop_gradient: hands over the gradient of a parameter that has arrived, if it has one, plain and
            contiguous.
        start_all_reduce: begins the sum of a bucket.
        communication_timer: timer of the communication.
        flatten_bucket: puts gradients, each (elements,), one after the other into a new bucket.
    """

    def __init__(
        self,
        bucket_layout: Sequence[Bucket],
        device: torch.device,
        pop_gradient: Callable[[int], Tensor | None],
        start_all_reduce: StartAllReduce,
        communication_timer: CommunicationTimer,
        flatten_bucket: FlattenBucket = torch.cat,
    ) -> None:
        self._bucket_layout, self._device, self._pop_gradient, self._start_all_reduce = (
            bucket_layout,
            device,
            pop_gradient,
            start_all_reduce,
        )
        self._flatten_bucket = flatten_bucket
        self._communication_timer = communication_timer
        self._bucket_index = {
            size.parameter_index: bucket_index
            for bucket_index, bucket in enumerate(bucket_layout)
            for size in bucket.specs
        }
        self._missing = [{size.parameter_index for size in bucket.specs} for bucket in bucket_layout]
        self._next_bucket = 0
        self._pending: list[PendingAllReduce] = []
        self._sums: dict[int, Tensor] = {}
        self._parameters_with_gradient: set[int] = set()
        """Parameters of which this rank had a gradient."""
        self.any_flag = False
        """Result of `finalize`: some rank passed `flag`."""
        self.has_late_gradients = False
        """Result of `finalize`: some rank's backward changed a gradient whose sum had already begun."""

    def mark_ready(self, parameter_index: int) -> None:
        """Begin the sums of all complete buckets, in order; called when backward has made a gradient.

        Only the last micro-batch's gradients count. A bucket of which this rank lacks a gradient holds up
        those behind it until `finalize`.
        """
        bucket_index = self._bucket_index.get(parameter_index)
        if bucket_index is None or bucket_index < self._next_bucket:
            return  # it is not trained; or comes a second time, which `finalize` will find
        self._missing[bucket_index].discard(parameter_index)
        self._poll()
        while self._next_bucket < len(self._bucket_layout) and not self._missing[self._next_bucket]:
            if not self._bucket_layout[self._next_bucket].is_complete_in_backward:
                return
            self._begin_next()

    def finalize(self, pop_gradient: Callable[[int], Tensor | None], flag: bool = False) -> dict[int, Tensor]:
        """Begin the remaining sums, and wait for all: after the last backward.

        Which parameters have a gradient may differ between ranks, as where an expert got no token: all send
        the same buckets, zeros for missing gradients, and flags that say which are missing.

        Args:
            pop_gradient: hands over the gradient of any parameter, as in the constructor.
            flag: flag that the ranks exchange beside the gradients.

        Returns:
            sums by parameter; none of those of which no rank has a gradient.
        """
        if not self._bucket_layout:
            return {}
        start = self._communication_timer.now()
        self._communication_timer.begin_transfer("data", start)
        started_buckets, self._pop_gradient = self._next_bucket, pop_gradient
        while self._next_bucket < len(self._bucket_layout):
            self._begin_next()
        late_gradients = self._pop_late_gradients(started_buckets)
        sizes = [size for bucket in self._bucket_layout for size in bucket.specs]
        own_flags = [float(size.parameter_index in self._parameters_with_gradient) for size in sizes]
        own_flags += [float(size.parameter_index in late_gradients) for size in sizes]
        own_flags.append(float(flag))
        ranks = torch.tensor(own_flags, device=self._device)
        self._start_bucket(ranks)
        self._wait()
        # In a dry run tensors have no values, and all ranks have what one has.
        numbers = own_flags if is_fake(ranks) else ranks.tolist()
        gradient_counts, late_counts = numbers[: len(sizes)], numbers[len(sizes) : -1]
        self.any_flag = numbers[-1] > 0
        sums = {
            size.parameter_index: self._sums[size.parameter_index]
            for size, number in zip(sizes, gradient_counts, strict=True)
            if number
        }
        late_specs = [size for size, number in zip(sizes, late_counts, strict=True) if number]
        self.has_late_gradients = bool(late_specs)
        for size in late_specs:
            late_gradient = late_gradients.get(size.parameter_index)
            late_gradient = (
                torch.zeros(size.shape, dtype=size.dtype, device=self._device)
                if late_gradient is None
                else late_gradient
            )
            self._start_bucket(late_gradient)
            self._wait()
            sums[size.parameter_index] += late_gradient
        self._communication_timer.end_wait("data", start)
        return sums

    def _pop_late_gradients(self, started_buckets: int) -> dict[int, Tensor]:
        """Return gradients made after those of their bucket were taken, among the first `started_buckets`.

        A backward may come to a parameter twice, in a reentrant checkpoint or because a user's loop calls it
        twice; nothing says so beforehand.
        """
        gradients = {}
        for bucket in self._bucket_layout[:started_buckets]:
            for size in bucket.specs:
                gradient = self._pop_gradient(size.parameter_index)
                if gradient is not None:
                    gradients[size.parameter_index] = gradient
        return gradients

    def _begin_next(self) -> None:
        sizes = self._bucket_layout[self._next_bucket].specs
        self._next_bucket += 1
        gradients = []
        for size in sizes:
            gradient = self._pop_gradient(size.parameter_index)
            if gradient is None:
                gradient = torch.zeros(size.shape, dtype=size.dtype, device=self._device)
            else:
                self._parameters_with_gradient.add(size.parameter_index)
            gradients.append(gradient)
        if len(sizes) == 1:
            self._sums[sizes[0].parameter_index] = gradients[0]
            self._start_bucket(gradients[0])
            return
        flat = self._flatten_bucket([gradient.view(-1) for gradient in gradients])
        parts = flat.split([size.shape.numel() for size in sizes])
        for size, part in zip(sizes, parts, strict=True):
            self._sums[size.parameter_index] = part.view(size.shape)
        self._start_bucket(flat)

    def _start_bucket(self, bucket: Tensor) -> None:
        self._communication_timer.begin_transfer("data", time.perf_counter())
        self._pending.append(self._start_all_reduce(bucket.view(-1)))

    def _poll(self) -> None:
        """Note which sums have ended by now; one that failed raises when it is waited for."""
        while self._pending and self._pending[0].is_completed():
            self._end_first()

    def _wait(self) -> None:
        while self._pending:
            self._end_first()

    def _end_first(self) -> None:
        self._pending.pop(0).wait()
        self._communication_timer.end_transfer("data", time.perf_counter())
