"""Compressed sums of gradients under a plan: state kept per parameter, and the method that sums it.

The holder of gradients, `Replicated` or FSDP2 (`sharded_compression`), registers for each parameter a
`GradientLayout` that says how an exchange sees it, and hands over each bucket to `reduce`. What
compression leaves out of a gradient (error feedback) is kept under the parameter's name as DTensors of one
row per rank that takes part: checkpoints save and load them like other state, and their sum over the rows,
over all ranks, is what the model is still owed (`training/checkpointing/error_feedback_state.py`).
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

from wanma.collectives.compression import int8_codec
from wanma.collectives.compression.bucket_tensors import BucketTensor, Compressor, ErrorFeedback
from wanma.collectives.compression.compression_traits import COMPRESSION_TRAITS, ERROR_FEEDBACK_METHODS
from wanma.collectives.compression.compressor_table import make_compressor
from wanma.collectives.compression.hierarchical import HierarchicalCompressor, NodeGroups
from wanma.collectives.compression.overlap import CollectiveSteps, run_interleaved
from wanma.collectives.compression.power_sgd import choose_approximation_rank, draw_initial_q
from wanma.collectives.compression.uncompressed import compute_uncompressed_bytes
from wanma.hardware.native.native_library import NativeLibrary, find_or_build_library
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression
from wanma.parallel.gradients.reduction_groups import build_node_groups
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.torch_internals.loaded import DTensor, Placement, Replicate, Shard, StridedShard
from wanma.torch_internals.operators import foreach_norm

ERROR_KIND, POWER_SGD_Q_KIND = "error", "q"
"""Kinds of tensors that are kept per parameter: error feedback, and PowerSGD's matrix Q."""


@dataclass(frozen=True)
class GradientLayout:
    """Layout of one parameter's gradient in a compressed exchange."""

    name: str
    """Name of the parameter in the full model."""
    get_parameter: Callable[[], Tensor]
    """Function that returns the parameter as checkpoints know it: a DTensor over (replicate, shard, ...)."""
    shard_count: int
    """Ranks among which the sum is scattered; 1 where every rank gets all of it."""
    elements_per_shard: int
    """Elements for each destination, padding included."""
    matrix_columns: int
    """Columns of the gradient as a matrix."""
    shape: tuple[int, ...]
    """Shape of what this rank hands over, without padding."""

    @property
    def is_reduce_scattered(self) -> bool:
        return self.shard_count > 1

    @property
    def matrix_rows(self) -> int:
        return self.shard_count * self.elements_per_shard // self.matrix_columns


NamedGradients: TypeAlias = Sequence[tuple[str, Tensor, Tensor | None]]
"""Tuples (name, values, result) of registered parameters, as in `BucketTensor`; all have a result or none."""


@dataclass(frozen=True)
class CompressionTraffic:
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
        node_groups: groups by which replicas sum within their nodes first; None: they do not.
        native_library: library of the int8 codec; None where it is not compiled.

    Attributes:
        warning: message for the user, or empty.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        device: torch.device,
        node_groups: NodeGroups | None = None,
        native_library: NativeLibrary | None = None,
    ) -> None:
        self._plan, self._seed, self._device = plan, seed, device
        self._node_groups = node_groups
        self._native = native_library.path if native_library is not None else None
        self.warning = ""
        if native_library is not None and native_library.path is None:
            self.warning = (
                "int8 compression is several times slower on this node, because its native library "
                f"is not available: {native_library.failure_reason}"
            )
        self._layouts: dict[str, GradientLayout] = {}
        self._error_feedbacks: dict[str, ErrorFeedback] = {}
        self._methods: dict[Compression, Compressor] = {}
        self._sent_bytes = self._uncompressed_bytes = 0
        self.step = 0
        """Number of completed optimizer steps."""
        self.gradient_scale = 1.0
        """Ratio of the exchanged gradients, and so of the error feedback, to gradients of the mean loss."""

    @property
    def is_active(self) -> bool:
        """True if this step's gradients are compressed."""
        return self.step >= self._plan.compression_from_step

    def register(self, layout: GradientLayout) -> None:
        self._layouts[layout.name] = layout

    def reduce(self, buckets: Iterable[NamedGradients], group: dist.ProcessGroup) -> None:
        """Sum buckets over the ranks of `group`; all of them call it with the same buckets."""
        with torch.no_grad():
            self._sent_bytes += sum(run_interleaved(self._reduce_steps(buckets, group)))

    def end_step(self, *, applied: bool, gradient_scale: float) -> None:
        """Begin the next step, after the update of a step.

        Args:
            applied: False where the update was left out. Then the error feedback is dropped, too: it contains
                what made the step wrong, and may not be finite.
            gradient_scale: ratio of the next step's gradients to gradients of the mean loss.
        """
        if not applied:
            for name, memory in self._error_feedbacks.items():
                self._reset(self._layouts[name], memory)
        self.rescale(gradient_scale)
        self.step += 1

    def rescale(self, gradient_scale: float) -> None:
        """Set the ratio of gradients to gradients of the mean loss, and rescale the error feedback to it."""
        if gradient_scale != self.gradient_scale:
            for memory in self._error_feedbacks.values():
                if memory.residual is not None:
                    memory.residual.mul_(gradient_scale / self.gradient_scale)
            self.gradient_scale = gradient_scale

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the kept tensors in place: 'error.NAME' (ranks, *shape of the parameter), and 'q.NAME'."""
        tensors: dict[str, Tensor] = {}
        for layout in self._layouts.values():
            if (
                self._compression_of(layout) not in ERROR_FEEDBACK_METHODS
                or not layout.get_parameter().requires_grad
            ):
                continue
            memory = self._get_error_feedback(layout, self._device)
            if memory.residual is not None:
                tensors[f"{ERROR_KIND}.{layout.name}"] = _error_dtensor(layout, memory.residual)
            if memory.power_sgd_q is not None:
                tensors[f"{POWER_SGD_Q_KIND}.{layout.name}"] = _q_dtensor(layout, memory.power_sgd_q)
        return tensors

    def error_norm(self) -> Tensor:
        """Return the norm () of this rank's error feedback, in units of the mean loss's gradients."""
        errors = [memory.residual for memory in self._error_feedbacks.values() if memory.residual is not None]
        if not errors:
            return torch.zeros((), device=self._device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(foreach_norm(errors))))
        return norm / self.gradient_scale

    def pop_traffic(self) -> CompressionTraffic:
        """Return the bytes exchanged since the last call."""
        traffic = CompressionTraffic(self._sent_bytes, self._uncompressed_bytes - self._sent_bytes)
        self._sent_bytes = self._uncompressed_bytes = 0
        return traffic

    # ---------------------------------------------------------------- inside

    def _reduce_steps(
        self, buckets: Iterable[NamedGradients], group: dist.ProcessGroup
    ) -> Iterator[CollectiveSteps[int]]:
        for bucket in buckets:
            tensors_by_method: defaultdict[Compression, list[BucketTensor]] = defaultdict(list)
            for name, values, result in bucket:
                layout = self._layouts[name]
                kind = self._compression_of(layout)
                memory = (
                    self._get_error_feedback(layout, values.device)
                    if kind in ERROR_FEEDBACK_METHODS
                    else None
                )
                tensors_by_method[kind].append(BucketTensor(values, result, layout.matrix_columns, memory))
            is_scattered = bucket[0][2] is not None
            for kind, pieces in tensors_by_method.items():
                method = self._method(kind)
                if is_scattered:
                    self._uncompressed_bytes += compute_uncompressed_bytes(pieces, group.size(), scatter=True)
                    yield from method.reduce_scatter(pieces, group)
                elif self._node_groups is None:
                    self._uncompressed_bytes += compute_uncompressed_bytes(
                        pieces, group.size(), scatter=False
                    )
                    yield from method.all_reduce(pieces, group)
                else:
                    compressor = HierarchicalCompressor(
                        method, self._node_groups, splits_tensors=not COMPRESSION_TRAITS[kind].is_low_rank
                    )
                    self._uncompressed_bytes += compressor.compute_uncompressed_bytes(pieces)
                    yield from compressor.all_reduce(pieces)

    def _compression_of(self, layout: GradientLayout) -> Compression:
        kind = self._plan.compression_for_parameter(layout.name)
        if COMPRESSION_TRAITS[kind].is_low_rank and not self._approximation_rank(layout):
            return "none"
        return kind

    def _approximation_rank(self, layout: GradientLayout) -> int:
        if len(layout.shape) < 2:
            return 0
        return choose_approximation_rank(
            layout.matrix_rows, layout.matrix_columns, self._plan.compression_rank
        )

    def _method(self, kind: Compression) -> Compressor:
        if kind not in self._methods:
            self._methods[kind] = make_compressor(kind, self._plan.compression_share, self._native)
        return self._methods[kind]

    def _get_error_feedback(self, layout: GradientLayout, device: torch.device) -> ErrorFeedback:
        memory = self._error_feedbacks.get(layout.name)
        if memory is None:
            error = torch.zeros(layout.shard_count, layout.elements_per_shard, device=device)
            memory = self._error_feedbacks[layout.name] = ErrorFeedback(error)
            if COMPRESSION_TRAITS[self._compression_of(layout)].is_low_rank:
                memory.power_sgd_q = torch.empty(
                    layout.matrix_columns, self._approximation_rank(layout), device=device
                )
            self._reset(layout, memory)
        return memory

    def _reset(self, layout: GradientLayout, memory: ErrorFeedback) -> None:
        if memory.residual is not None:
            memory.residual.zero_()
        if memory.power_sgd_q is not None:
            columns, rank = memory.power_sgd_q.shape
            memory.power_sgd_q.copy_(draw_initial_q(layout.name, columns, rank, self._seed))


def build_compression(parallel_mesh: ParallelMesh, seed: int) -> GradientCompression | None:
    """Create the compression that the plan asks for; None without compression. Every rank calls it."""
    methods = parallel_mesh.plan.compression_methods
    if not methods:
        return None
    has_native_codec = any(COMPRESSION_TRAITS[method].has_native_codec for method in methods)
    needs_library = has_native_codec and parallel_mesh.device.type == "cpu"
    native = find_or_build_library(int8_codec.NATIVE_SOURCE) if needs_library else None
    return GradientCompression(
        parallel_mesh.plan, seed, parallel_mesh.device, build_node_groups(parallel_mesh), native
    )


def replicated_layout(
    name: str, get_parameter: Callable[[], Tensor], shape: tuple[int, ...]
) -> GradientLayout:
    """Return the layout of a gradient that each rank of the replicas holds in full, or the same shard of.

    Args:
        name: name of the parameter in the full model.
        get_parameter: function that returns the parameter as checkpoints know it.
        shape: shape of the gradient that a rank holds.
    """
    length = math.prod(shape)
    return GradientLayout(
        name, get_parameter, 1, length, max(length // max(shape[0], 1), 1) if shape else 1, shape
    )


def _error_dtensor(layout: GradientLayout, error: Tensor) -> Tensor:
    """Return the error feedback as a DTensor (ranks, *shape); this rank's row is the memory itself."""
    state = layout.get_parameter()
    assert isinstance(state, DTensor)
    local = error.view(-1)[: math.prod(layout.shape)].view(1, *layout.shape)
    mesh, placements = state.device_mesh, state.placements
    shifted = tuple(map(_prepend_dim, placements[2:]))
    if layout.is_reduce_scattered:
        # Each rank of the shards holds a full one; only the other mesh dimensions split it.
        dtensor_placements: tuple[Placement, ...] = (Replicate(), Shard(0), *shifted)
        sizes = _global_sizes(layout.shape, mesh, placements)
        return _from_local(local, mesh, dtensor_placements, (mesh.size(1), *sizes))
    dtensor_placements = (Shard(0), _prepend_dim(placements[1]), *shifted)
    return _from_local(local, mesh, dtensor_placements, (mesh.size(0), *state.shape))


def _q_dtensor(layout: GradientLayout, q: Tensor) -> Tensor:
    """Return Q as a DTensor (sets of ranks with matrices of their own, columns, rank)."""
    state = layout.get_parameter()
    assert isinstance(state, DTensor)
    mesh = state.device_mesh
    split_axes = [dim for dim in range(mesh.ndim) if dim > 1 or (dim == 1 and not layout.is_reduce_scattered)]
    dtensor_placements = tuple(Shard(0) if axis in split_axes else Replicate() for axis in range(mesh.ndim))
    set_count = math.prod(mesh.size(axis) for axis in split_axes)
    return _from_local(q[None], mesh, dtensor_placements, (set_count, *q.shape))


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


def _prepend_dim(placement: Placement) -> Placement:
    """Return the placement for a tensor with one more dim before the others."""
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def _from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Tensor:
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
