"""Compressed sums of gradients under a plan: state kept per parameter, and the method that sums it.

The holder of gradients, `Whole` or FSDP2 (`sharded_compression`), registers for each parameter a `Slot` that
says how an exchange sees it, and hands over each bucket to `exchange`. What compression leaves out of a
gradient (error feedback) is kept under the parameter's name as DTensors of one row per rank that takes part:
checkpoints save and load them like other state, and their sum over the rows, over all ranks, is what the
model is still owed (`training/checkpointing/error_feedback_state.py`).
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
"""Kinds of tensors that are kept per parameter: error feedback, and PowerSGD's matrix Q."""


@dataclass(frozen=True)
class Slot:
    """Layout of one parameter's gradient in a compressed exchange."""

    name: str
    """Name of the parameter in the full model."""
    state: Callable[[], Tensor]
    """Function that returns the parameter as checkpoints know it: a DTensor over (replicate, shard, ...)."""
    destinations: int
    """Ranks among which the sum is scattered; 1 where every rank gets all of it."""
    length: int
    """Elements for each destination, padding included."""
    columns: int
    """Columns of the gradient as a matrix."""
    shape: tuple[int, ...]
    """Shape of what this rank hands over, without padding."""

    @property
    def is_scattered(self) -> bool:
        return self.destinations > 1

    @property
    def rows(self) -> int:
        return self.destinations * self.length // self.columns


NamedPieces: TypeAlias = Sequence[tuple[str, Tensor, Tensor | None]]
"""Tuples (name, values, result) of registered parameters, as in `Piece`; all have a result, or none."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step's compressed exchanges on this rank.

    Where sums are made within nodes first, only the exchange between nodes counts.
    """

    sent_bytes: int
    saved_bytes: int
    """Bytes saved against uncompressed gradients; negative where compression sent more."""


class GradientCompression:
    """Compressed exchanges of one rank and their state.

    Args:
        plan: plan of the run.
        seed: seed of the job.
        device: device of the buffers that are exchanged.
        levels: groups by which replicas sum within their nodes first; None: they do not.
        native: library of the int8 codec; None where it is not compiled.

    Attributes:
        note: message for the user, or empty.
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
        """Number of completed optimizer steps."""
        self.unit = 1.0
        """Ratio of the exchanged gradients, and so of the error feedback, to gradients of the mean loss."""

    @property
    def is_on(self) -> bool:
        """True if this step's gradients are compressed."""
        return self.step >= self._plan.compression_from_step

    def register(self, slot: Slot) -> None:
        self._slots[slot.name] = slot

    def exchange(self, buckets: Iterable[NamedPieces], group: dist.ProcessGroup) -> None:
        """Sum buckets over the ranks of `group`; all of them call it with the same buckets."""
        with torch.no_grad():
            self._sent += sum(together(self._sums(buckets, group)))

    def end_step(self, *, applied: bool, unit: float) -> None:
        """Begin the next step, after the update of a step.

        Args:
            applied: False where the update was left out. Then the error feedback is dropped, too: it contains
                what made the step wrong, and may not be finite.
            unit: ratio of the next step's gradients to gradients of the mean loss.
        """
        if not applied:
            for name, memory in self._memories.items():
                self._begin(self._slots[name], memory)
        self.rescale(unit)
        self.step += 1

    def rescale(self, unit: float) -> None:
        """Set the ratio of gradients to gradients of the mean loss, and rescale the error feedback to it."""
        if unit != self.unit:
            for memory in self._memories.values():
                if memory.error is not None:
                    memory.error.mul_(unit / self.unit)
            self.unit = unit

    def tensors(self) -> dict[str, Tensor]:
        """Return the kept tensors in place: 'error.NAME' (ranks, *shape of the parameter), and 'q.NAME'."""
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
        """Return the norm of this rank's error feedback, in units of the mean loss's gradients."""
        errors = [memory.error for memory in self._memories.values() if memory.error is not None]
        if not errors:
            return 0.0
        norms = torch.stack(list(torch._foreach_norm(errors)))
        return float(torch.linalg.vector_norm(norms)) / self.unit

    def take_traffic(self) -> Traffic:
        """Return the bytes exchanged since the last call."""
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
            return "none"
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
    """Create the compression that the plan asks for; None without compression. Every rank calls it."""
    if not grid.plan.compressions:
        return None
    rounds = "int8" in grid.plan.compressions and grid.device.type == "cpu"
    native = compiled(int8_codec.SOURCE) if rounds else None
    return GradientCompression(grid.plan, seed, grid.device, levels_of(grid), native)


def whole_slot(name: str, state: Callable[[], Tensor], shape: tuple[int, ...]) -> Slot:
    """Return the slot of a gradient that each rank of the replicas holds in full, or the same shard of.

    Args:
        name: name of the parameter in the full model.
        state: function that returns the parameter as checkpoints know it.
        shape: shape of the gradient that a rank holds.
    """
    length = math.prod(shape)
    return Slot(name, state, 1, length, max(length // max(shape[0], 1), 1) if shape else 1, shape)


def _error_of(slot: Slot, error: Tensor) -> Tensor:
    """Return the error feedback as a DTensor (ranks, *shape); this rank's row is the memory itself."""
    state = slot.state()
    assert isinstance(state, DTensor)
    local = error.view(-1)[: math.prod(slot.shape)].view(1, *slot.shape)
    mesh, placements = state.device_mesh, state.placements
    shifted = tuple(map(_shifted, placements[2:]))
    if slot.is_scattered:
        # Each rank of the shards holds a full one; only the other mesh dimensions split it.
        over: tuple[Placement, ...] = (Replicate(), Shard(0), *shifted)
        sizes = _global_sizes(slot.shape, mesh, placements)
        return _laid_out(local, mesh, over, (mesh.size(1), *sizes))
    over = (Shard(0), _shifted(placements[1]), *shifted)
    return _laid_out(local, mesh, over, (mesh.size(0), *state.shape))


def _q_of(slot: Slot, q: Tensor) -> Tensor:
    """Return Q as a DTensor (sets of ranks with matrices of their own, columns, rank)."""
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
    """Return the full shape of a tensor: `local` times the ranks of the mesh dimensions that split it."""
    sizes = list(local)
    for axis in range(2, mesh.ndim):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            sizes[dim] *= mesh.size(axis)
    return tuple(sizes)


def _shifted(placement: Placement) -> Placement:
    """Return the placement for a tensor with one more dim before the others."""
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
