"""Compressed sums of gradients under a plan: what is kept of each parameter, and which method sums it.

Whoever holds gradients, `whole` or FSDP2 (`compressed_shard`), registers for each parameter a `Slot` that
says how an exchange sees it, and hands over each bucket to `exchange`. What is lost on the way is kept
under the parameter's name as DTensors of one row per rank that takes part: checkpoints save and load them
like other state, and their sum over the rows, over all ranks, is what the model is still owed
(`training.remainders`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from wanma.collectives.compression import int8_codec
from wanma.collectives.compression.bucket_tensors import Memory, Method, Piece
from wanma.collectives.compression.compressor_table import KEEP_ERRORS, method_of
from wanma.collectives.compression.hierarchical import ByNodes, Levels
from wanma.collectives.compression.overlap import Steps, together
from wanma.collectives.compression.power_sgd import first_q, thin_rank
from wanma.collectives.compression.uncompressed import whole_bytes
from wanma.hardware.native.native_library import NativeLibrary, compiled
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression
from wanma.parallel.gradients.reduction_groups import levels_of
from wanma.parallel.mesh.parallel_mesh import Grid

ERROR, Q = "error", "q"
"""Kinds of kept tensors."""


@dataclass(frozen=True)
class Slot:
    """How an exchange sees one parameter's gradient."""

    name: str
    """Of the parameter, in the whole model."""
    state: Callable[[], Tensor]
    """The parameter as checkpoints know it: a DTensor over (replicate, shard, and what else splits it)."""
    destinations: int
    """Ranks among which its sum is scattered; 1 where all get all of it, of what this rank's shard has."""
    length: int
    """Elements for each destination, with what fills up the last."""
    columns: int
    """Elements of a row, as a matrix."""
    shape: tuple[int, ...]
    """Of what this rank hands over, without what fills it up."""

    @property
    def is_scattered(self) -> bool:
        return self.destinations > 1

    @property
    def rows(self) -> int:
        return self.destinations * self.length // self.columns


NamedPieces: TypeAlias = Sequence[tuple[str, Tensor, Tensor | None]]
"""(name, values, result) of registered parameters, as of `Piece`: one or more; all have a result, or none."""


@dataclass(frozen=True)
class Traffic:
    """Of one step, on this rank; of sums within machines first, what goes between them."""

    sent_bytes: int
    saved_bytes: int
    """Fewer than whole gradients would have taken; negative where it was more."""


class GradientCompression:
    """All that a rank's compressed exchanges need and keep.

    Args:
        device: of the buffers that are exchanged.
        seed: of the job.
        levels: where replicas sum within their machines first.
        native: of the codec of int8; None where it is not compiled.

    Attributes:
        note: what to tell the user, or nothing.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        device: torch.device,
        levels: Levels | None = None,
        native: NativeLibrary | None = None,
    ) -> None:
        self._plan, self._seed, self._device = plan, seed, device
        self._levels = levels
        self._native = native.path if native is not None else None
        self.note = ""
        if native is not None and native.path is None:
            self.note = f"int8 compression takes several times its time on this CPU: {native.reason}"
        self._slots: dict[str, Slot] = {}
        self._memories: dict[str, Memory] = {}
        self._methods: dict[Compression, Method] = {}
        self._sent = self._whole = 0
        self.step = 0
        """Optimizer steps done."""
        self.unit = 1.0
        """How many times the mean loss's gradients those are that are exchanged, and so the errors."""

    @property
    def is_on(self) -> bool:
        """Whether this step's gradients are compressed."""
        return self.step >= self._plan.compression_from_step

    def register(self, slot: Slot) -> None:
        self._slots[slot.name] = slot

    def exchange(self, buckets: Iterable[NamedPieces], group: dist.ProcessGroup) -> None:
        """Sum over the ranks of `group`, all of which call it alike."""
        with torch.no_grad():
            self._sent += sum(together(self._sums(buckets, group)))

    def end_step(self, *, applied: bool, unit: float) -> None:
        """After the update of a step.

        Args:
            applied: False where it was left out. Then what was kept goes, too: it has in it what made the
                step wrong, and may not be finite.
            unit: of the next step's gradients.
        """
        if not applied:
            for name, memory in self._memories.items():
                self._begin(self._slots[name], memory)
        self.rescale(unit)
        self.step += 1

    def rescale(self, unit: float) -> None:
        """From now on gradients are `unit` times the mean loss's; what is kept, too."""
        if unit != self.unit:
            for memory in self._memories.values():
                if memory.error is not None:
                    memory.error.mul_(unit / self.unit)
            self.unit = unit

    def tensors(self) -> dict[str, Tensor]:
        """What is kept, in its own memory: 'error.NAME' (ranks, *shape of the parameter), and 'q.NAME'."""
        kept: dict[str, Tensor] = {}
        for slot in self._slots.values():
            if self._kind(slot) not in KEEP_ERRORS or not slot.state().requires_grad:
                continue
            memory = self._memory(slot, self._device)
            if memory.error is not None:
                kept[f"{ERROR}.{slot.name}"] = _error_of(slot, memory.error)
            if memory.q is not None:
                kept[f"{Q}.{slot.name}"] = _q_of(slot, memory.q)
        return kept

    def error_norm(self) -> float:
        """Of all that this rank has left out so far and not yet sent, in gradients of the mean loss."""
        errors = [memory.error for memory in self._memories.values() if memory.error is not None]
        if not errors:
            return 0.0
        norms = torch.stack(list(torch._foreach_norm(errors)))
        return float(torch.linalg.vector_norm(norms)) / self.unit

    def take_traffic(self) -> Traffic:
        """Since the last time."""
        traffic = Traffic(self._sent, self._whole - self._sent)
        self._sent = self._whole = 0
        return traffic

    # ---------------------------------------------------------------- inside

    def _sums(self, buckets: Iterable[NamedPieces], group: dist.ProcessGroup) -> Iterator[Steps[int]]:
        for bucket in buckets:
            by_method: defaultdict[Compression, list[Piece]] = defaultdict(list)
            for name, values, result in bucket:
                slot = self._slots[name]
                kind = self._kind(slot)
                memory = self._memory(slot, values.device) if kind in KEEP_ERRORS else None
                by_method[kind].append(Piece(values, result, slot.columns, memory))
            is_scattered = bucket[0][2] is not None
            for kind, pieces in by_method.items():
                method = self._method(kind)
                if is_scattered:
                    self._whole += whole_bytes(pieces, group.size(), scatter=True)
                    yield from method.reduce_scatter(pieces, group)
                elif self._levels is None:
                    self._whole += whole_bytes(pieces, group.size(), scatter=False)
                    yield from method.all_reduce(pieces, group)
                else:
                    by_nodes = ByNodes(method, self._levels, cuts=kind != "powersgd")
                    self._whole += by_nodes.whole_bytes(pieces)
                    yield from by_nodes.all_reduce(pieces)

    def _kind(self, slot: Slot) -> Compression:
        kind = self._plan.compression_of(slot.name)
        if kind == "powersgd" and not self._rank(slot):
            return "nothing"
        return kind

    def _rank(self, slot: Slot) -> int:
        if len(slot.shape) < 2:
            return 0
        return thin_rank(slot.rows, slot.columns, self._plan.compression_rank)

    def _method(self, kind: Compression) -> Method:
        if kind not in self._methods:
            self._methods[kind] = method_of(kind, self._plan.compression_share, self._native)
        return self._methods[kind]

    def _memory(self, slot: Slot, device: torch.device) -> Memory:
        memory = self._memories.get(slot.name)
        if memory is None:
            error = torch.zeros(slot.destinations, slot.length, device=device)
            memory = self._memories[slot.name] = Memory(error)
            if self._kind(slot) == "powersgd":
                memory.q = torch.empty(slot.columns, self._rank(slot), device=device)
            self._begin(slot, memory)
        return memory

    def _begin(self, slot: Slot, memory: Memory) -> None:
        if memory.error is not None:
            memory.error.zero_()
        if memory.q is not None:
            columns, rank = memory.q.shape
            memory.q.copy_(first_q(slot.name, columns, rank, self._seed))


def open_compression(grid: Grid, seed: int) -> GradientCompression | None:
    """What the plan asks for; None where gradients are summed as they are. Every rank calls it."""
    if not grid.plan.compressions:
        return None
    rounds = "int8" in grid.plan.compressions and grid.device.type == "cpu"
    native = compiled(int8_codec.SOURCE) if rounds else None
    return GradientCompression(grid.plan, seed, grid.device, levels_of(grid), native)


def whole_slot(name: str, state: Callable[[], Tensor], shape: tuple[int, ...]) -> Slot:
    """Of a gradient that each rank of the replicas has all of, or the same shard.

    Args:
        shape: of that.
    """
    length = math.prod(shape)
    return Slot(name, state, 1, length, max(length // max(shape[0], 1), 1) if shape else 1, shape)


def _error_of(slot: Slot, error: Tensor) -> Tensor:
    """(ranks, *shape): this rank's row is the memory itself."""
    state = slot.state()
    assert isinstance(state, DTensor)
    local = error.view(-1)[: math.prod(slot.shape)].view(1, *slot.shape)
    mesh, placements = state.device_mesh, state.placements
    shifted = tuple(map(_shifted, placements[2:]))
    if slot.is_scattered:
        # Each rank of the shards holds a whole one; only what splits parameters besides splits it.
        over: tuple[Placement, ...] = (Replicate(), Shard(0), *shifted)
        sizes = _global_sizes(slot.shape, mesh, placements)
        return _laid_out(local, mesh, over, (mesh.size(1), *sizes))
    over = (Shard(0), _shifted(placements[1]), *shifted)
    return _laid_out(local, mesh, over, (mesh.size(0), *state.shape))


def _q_of(slot: Slot, q: Tensor) -> Tensor:
    """(sets of ranks with matrices of their own, columns, rank)."""
    state = slot.state()
    assert isinstance(state, DTensor)
    mesh = state.device_mesh
    own = [axis for axis in range(mesh.ndim) if axis > 1 or (axis == 1 and not slot.is_scattered)]
    over = tuple(Shard(0) if axis in own else Replicate() for axis in range(mesh.ndim))
    sets = math.prod(mesh.size(axis) for axis in own)
    return _laid_out(q[None], mesh, over, (sets, *q.shape))


def _global_sizes(
    local: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Of a tensor of which one data rank has `local`, and the axes behind the data axes split the rest."""
    sizes = list(local)
    for axis in range(2, mesh.ndim):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            sizes[dim] *= mesh.size(axis)
    return tuple(sizes)


def _shifted(placement: Placement) -> Placement:
    """For a tensor with one more dim before the others."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _laid_out(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
