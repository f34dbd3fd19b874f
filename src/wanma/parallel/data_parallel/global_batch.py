"""Gather of the full global batch on every data rank, with gradients, for losses that couple samples.

`global_batch` and `global_rows` are called by a user's loss or forward. A run announces the rows around each
step by `GlobalBatchGatherer.provide`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.torch_internals.distributed import all_gather_single, reduce_scatter_single
from wanma.torch_internals.uncompiled import uncompiled

_SUMMED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""Dtype in which gradients of low precision are summed over ranks, so that no summand is rounded away."""


def global_batch(x: Tensor) -> Tensor:
    """Gather the rows that all data ranks hold of `x` into those of the full global batch.

    For losses that compare samples with each other, and for statistics over a batch. Gradients flow back to
    the rows of every rank: the sum of all ranks' losses has the gradient that it has in a plain loop over the
    global batch. Every rank must call it, equally often. Outside of a run it returns `x`.

    Args:
        x: (rows, ...), one row for each sample of this rank's batch; any dtype.

    Returns:
        (global batch, ...) in the order of the samples, without padding rows.

    Raises:
        JobError: the layout does not have the global batch in memory at once, or not whole samples.
        WanmaError: `x` has another number of rows than the batch, or the run is between two batches.
    """
    rows = _process.rows
    return x if rows is None and _is_alone(x) else _rows().gather(x)


def global_rows(x: Tensor) -> Tensor:
    """Return the indices of this rank's own samples in the global batch: its rows in `global_batch(x)`.

    Args:
        x: tensor as `global_batch` takes it.

    Returns:
        (rows,) int64 on the device of `x`; 0 for padding rows, whose losses do not count.

    Raises:
        JobError: the layout does not have the global batch in memory at once, or not whole samples.
        WanmaError: `x` has another number of rows than the batch, or the run is between two batches.
    """
    rows = _process.rows
    return torch.arange(len(x), device=x.device) if rows is None and _is_alone(x) else _rows().indices(x)


class GlobalBatchRows(Protocol):
    """Global batch of the current step, as `global_batch` and `global_rows` see it."""

    def gather(self, x: Tensor) -> Tensor: ...
    def indices(self, x: Tensor) -> Tensor: ...


@contextmanager
def provide_global_batch(rows: GlobalBatchRows) -> Iterator[None]:
    """Make `rows` the global batch of `global_batch` and `global_rows`, within the context."""
    previous_rows, _process.rows = _process.rows, rows
    try:
        yield
    finally:
        _process.rows = previous_rows


class GlobalBatchGatherer:
    """Gatherer of one rank's global batches over a run.

    Args:
        max_samples: samples of the run's largest global batch.
    """

    def __init__(self, parallel_mesh: ParallelMesh, max_samples: int) -> None:
        self._parallel_mesh = parallel_mesh
        self._max_samples = max_samples
        self._group: dist.ProcessGroup | None = None
        self.is_used = False
        """True if a loss or a forward has gathered yet."""

    def provide(self, plan: Plan, samples: int) -> AbstractContextManager[None]:
        """Announce a batch of `samples` samples, around its forward and backward.

        Args:
            plan: plan of the step.
            samples: samples of the global batch.
        """
        return provide_global_batch(_SharedRows(self, plan, samples))

    def require_gatherable(self, plan: Plan, samples: int) -> None:
        """Refuse a gather that the layout cannot make; called for each of them.

        Raises:
            JobError: under `plan` a batch of so many samples is not in memory at once, or not as whole
                samples.
        """
        self.is_used = True
        if obstacle := _gather_obstacle(plan, max(samples, self._max_samples)):
            reason, hint = obstacle
            raise JobError(f"wanma.global_batch cannot gather the global batch: {reason}", hint)

    def all_gather_rows(self, own: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows of all data ranks, one after the other.

        Args:
            own: rows of this rank.
            sizes: number of rows by data rank.
        """
        if len(sizes) == 1:
            return own
        if self._group is None:
            self._group = _data_group(self._parallel_mesh)
        exchange = _RowExchange(self._group, self._parallel_mesh, sizes)
        gathered: Tensor = _AllGatherRows.apply(own, exchange)  # type: ignore[no-untyped-call]  # torch's
        return gathered

    @property
    def data_rank(self) -> int:
        return self._parallel_mesh.data_rank


@dataclass(frozen=True)
class _SharedRows:
    """Rows of one batch that the data ranks share."""

    gatherer: GlobalBatchGatherer
    plan: Plan
    samples: int

    @uncompiled
    def gather(self, x: Tensor) -> Tensor:
        sizes = self._sizes(x)
        return self.gatherer.all_gather_rows(x[: sizes[self.gatherer.data_rank]], sizes)

    @uncompiled
    def indices(self, x: Tensor) -> Tensor:
        sizes, rank = self._sizes(x), self.gatherer.data_rank
        if sizes[rank] == 0:  # one padding row
            return torch.zeros(len(x), dtype=torch.int64, device=x.device)
        start = sum(sizes[:rank])
        return torch.arange(start, start + sizes[rank], device=x.device)

    def _sizes(self, x: Tensor) -> list[int]:
        """Return the number of rows by data rank, after a check that `x` has this rank's."""
        self.gatherer.require_gatherable(self.plan, self.samples)
        sizes = self.plan.rows_per_data_rank(self.samples)
        rows = max(sizes[self.gatherer.data_rank], 1)
        if x.ndim == 0 or x.shape[0] != rows:
            raise WanmaError(
                f"wanma.global_batch: the tensor has shape {tuple(x.shape)}, but the batch of this rank "
                f"has {rows} rows",
                "make dim 0 the samples of the batch: stack the values of one sample along another dim",
            )
        return sizes


@dataclass
class _Process:
    """State of this process. It is no context variable: backward repeats a forward in threads of its own."""

    rows: GlobalBatchRows | None = None


_process = _Process()


def _rows() -> GlobalBatchRows:
    if _process.rows is None:
        raise WanmaError(
            "wanma.global_batch was called between two batches",
            "call it in the loss or the forward pass of a batch of session.batches, or in validate=",
        )
    return _process.rows


def _is_alone(x: Tensor) -> bool:
    """Return whether `x` is the global batch already: no other rank holds rows, or `x` is a meta tensor."""
    return x.is_meta or not dist.is_initialized() or dist.get_world_size() == 1


def _gather_obstacle(plan: Plan, samples: int) -> tuple[str, str] | None:
    """Return the reason and way out of a plan that cannot gather; None where it can."""
    if plan.pp > 1:
        return (
            "a pipeline computes the micro-batches of a step one after another",
            (
                "set parallel.pp = 1; data-parallel dimensions (dp_replicate, dp_shard) hold the global "
                "batch at once"
            ),
        )
    if plan.cp > 1:
        return "ranks of parallel.cp hold parts of each sample", "set parallel.cp = 1"
    if plan.sites > 1:
        return (
            f"{plan.sites} sites train on their own parts of it and do not synchronize at every step",
            "unset parallel.synchronization",
        )
    count = plan.gradient_accumulation_steps(samples)
    if count > 1:
        return (
            (f"a rank computes its part of {samples} samples in {count} micro-batches, one after another"),
            f"set parallel.micro_batch = {plan.max_rows_per_data_rank(samples)}, for one micro-batch per "
            "step; parallel.recompute = 'full' and more data ranks save memory",
        )
    return None


def _data_group(parallel_mesh: ParallelMesh) -> dist.ProcessGroup:
    """Create the group of ranks that hold different rows and are otherwise alike.

    torch wants every rank to make every group. It is a group of its own: gradients are summed over the others
    during backward, in another order.
    """
    plan = parallel_mesh.plan
    own_group: dist.ProcessGroup | None = None
    for first in range(plan.tp):
        group = dist.new_group(list(range(first, plan.world_size, plan.tp)))
        if parallel_mesh.coordinate("tp") == first:
            own_group = group
    assert own_group is not None
    return own_group


@dataclass(frozen=True)
class _RowExchange:
    """Exchange of uneven shares of rows over a group, padded to equal length."""

    group: dist.ProcessGroup
    parallel_mesh: ParallelMesh
    sizes: list[int]

    def gather(self, own: Tensor) -> Tensor:
        """Gather (own rows, ...) of every rank to (all rows, ...)."""
        ranks, max_rows = len(self.sizes), max(self.sizes)
        flat = own.detach().reshape(len(own), math.prod(own.shape[1:])).contiguous()
        byte_rows = _padded(flat, max_rows).view(torch.uint8)  # which every backend knows
        parts = byte_rows.new_empty((ranks * max_rows, byte_rows.shape[1]))
        with self.parallel_mesh.communication_timer.time_blocking_transfer("data"):
            all_gather_single(parts, byte_rows, group=self.group)
        gathered = parts.view(own.dtype)
        if min(self.sizes) < max_rows:
            pieces = gathered.split(max_rows)
            gathered = torch.cat([piece[:size] for piece, size in zip(pieces, self.sizes, strict=True)])
        return gathered.view(sum(self.sizes), *own.shape[1:])

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Reduce (all rows, ...) to (own rows, ...), summed over the ranks: the transpose of `gather`."""
        dtype = _SUMMED_AS.get(whole.dtype, whole.dtype)
        pieces = whole.detach().reshape(len(whole), -1).to(dtype).split(self.sizes)
        max_rows, size = max(self.sizes), self.sizes[self.parallel_mesh.data_rank]
        parts = torch.cat([_padded(piece, max_rows) for piece in pieces])
        if dtype.is_complex:
            parts = torch.view_as_real(parts).flatten(1)
        own_rows = parts.new_empty((max_rows, parts.shape[1]))
        with self.parallel_mesh.communication_timer.time_blocking_transfer("data"):
            reduce_scatter_single(own_rows, parts, group=self.group)
        if dtype.is_complex:
            own_rows = torch.view_as_complex(own_rows.unflatten(1, (-1, 2)))
        return own_rows[:size].to(whole.dtype).view(size, *whole.shape[1:])


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatterRows.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]  # torch's


class _ReduceScatterRows(torch.autograd.Function):
    """Backward of `_AllGatherRows`. It has a backward itself, for penalties on gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.reduce_scatter(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllGatherRows.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]  # torch's


def _padded(rows: Tensor, row_count: int) -> Tensor:
    missing = row_count - len(rows)
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
