"""Trace of a module's operators on tensors without storage: kind, unit of the module, and sizes.

One run shows how a size grows with the samples: their number is a prime that
divides no size of the model itself, so that every size it divides is proportional to the samples.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.job.forecast.operators import Attention, Matmul, OperatorKind, OperatorPhase
from wanma.models.structure.selective_recompute import SelectiveRecomputePolicy
from wanma.models.workload.kernel_calls import AttentionShape, KernelCall, list_kernel_calls
from wanma.torch_internals.autograd import current_node, next_node_number, node_number, storage_id
from wanma.torch_internals.dispatch import TorchDispatchMode


@dataclass(frozen=True)
class SampleScaling:
    """Conversion of sizes of the run to sizes of one sample."""

    prime: int
    """Prime that divides exactly those sizes that grow with the samples."""
    samples: int
    element_bytes: int
    """Bytes of an element in the precision of the model's computation."""

    @classmethod
    def choose(cls, model_sizes: Iterable[int], rows: int, element_bytes: int) -> SampleScaling:
        """Choose a prime that divides none of `model_sizes`; the trace has `rows` times as many samples."""
        used_sizes = {size for size in model_sizes if size}
        candidate = 1009
        while any(size % candidate == 0 for size in used_sizes) or not _is_prime(candidate):
            candidate += 2
        return cls(candidate, candidate * rows, element_bytes)

    def scales_with_samples(self, size: float) -> bool:
        return size == int(size) and int(size) % self.prime == 0 and size > 0

    def count_elements(self, tensor: Tensor) -> tuple[float, float]:
        """Return (elements of one sample, elements whatever the number of samples).

        Broadcast elements are in memory once.

        Raises:
            WanmaError: they grow with the square of the samples.
        """
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        batch_dims = sum(map(self.scales_with_samples, sizes))
        if batch_dims > 1:
            raise WanmaError(
                f"a tensor of shape {tuple(tensor.shape)} grows with the square of the number of samples",
                "do not compare samples with each other: the planner varies the micro-batch size",
            )
        elements = math.prod(sizes) * tensor.element_size() / self.element_bytes
        return (elements / self.samples, 0.0) if batch_dims else (0.0, elements)

    def scale_matmul(self, m: float, n: float, k: float, count: float) -> Matmul:
        sizes = {"m": m, "n": n, "k": k, "count": count}
        batch_dims = [name for name, size in sizes.items() if self.scales_with_samples(size)]
        if not batch_dims:
            return Matmul(m, n, k, count)
        sizes[batch_dims[0]] /= self.samples
        return Matmul(**sizes, batch_dimension=batch_dims[0])  # type: ignore[arg-type]  # one of its own names

    def scale_attention(self, call: AttentionShape) -> Attention:
        (batch, heads, queries, width), (_, kv_heads, keys, _) = call.query, call.key
        sequences = batch / self.samples if self.scales_with_samples(batch) else float(batch)
        return Attention(
            sequences, queries, keys, heads, kv_heads, width, float(call.value[-1]), call.is_causal
        )


@dataclass(frozen=True)
class StorageAccess:
    """Elements of one storage that a call reads or writes."""

    storage: int | None
    """Identity of the storage; None: scattered rows of a table."""
    elements_per_sample: float
    fixed_elements: float


@dataclass(frozen=True)
class OperatorCall:
    """Traced call: one `KernelCall` with its unit and phase."""

    module_path: str
    phase: OperatorPhase
    kind: OperatorKind
    kernel_count: int
    input_passes: int
    reads: tuple[StorageAccess, ...]
    writes: tuple[StorageAccess, ...]
    matmul: Matmul | None
    attention: Attention | None
    embedding_row_elements: float | None
    is_saved_by_selective_recompute: bool

    def count_elements(self) -> tuple[float, float]:
        """Return the elements read and written: (of one sample, fixed)."""
        read, written = self.reads, self.writes
        return (
            self.input_passes * sum(piece.elements_per_sample for piece in read)
            + sum(piece.elements_per_sample for piece in written),
            self.input_passes * sum(piece.fixed_elements for piece in read)
            + sum(piece.fixed_elements for piece in written),
        )


class OperatorTrace(TorchDispatchMode):
    """Dispatch mode that records every operator for the unit whose forward runs, or once ran."""

    def __init__(self, scaling: SampleScaling) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.scaling = scaling
        self.calls: list[OperatorCall] = []
        self.is_backward = False
        self._module_path = ""
        self._recompute_policy = SelectiveRecomputePolicy()
        self._referenced_storages: list[torch.UntypedStorage] = []
        """Storages kept alive, so that no storage's identity is reused.

        Not the tensors: autograd copies a gradient unless nothing else holds it.
        """
        self._start_nodes: list[int] = []
        self._module_paths: list[str] = []

    def enter_module(self, module_path: str) -> None:
        """Assign operators, and nodes of the backward, from here on to `module_path`.

        Nodes of the backward are numbered in the forward's order.
        """
        self._module_path = module_path
        self._recompute_policy = SelectiveRecomputePolicy()
        self._start_nodes.append(next_node_number())
        self._module_paths.append(module_path)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        is_kept = not self.is_backward and self._recompute_policy.must_save(func)
        for work in list_kernel_calls(func, args, kwargs or {}, result):
            self._referenced_storages += [tensor.untyped_storage() for tensor in (*work.reads, *work.writes)]
            self.calls.append(self._record_call(work, is_kept))
        return result

    def _record_call(self, kernel_call: KernelCall, is_saved_by_selective_recompute: bool) -> OperatorCall:
        product = None if kernel_call.matmul is None else self.scaling.scale_matmul(*kernel_call.matmul)
        phase: OperatorPhase = kernel_call.phase or ("inputs" if self.is_backward else "forward")
        if (
            self.is_backward
            and kernel_call.phase is None
            and product is not None
            and product.batch_dimension == "k"
        ):
            phase = "weights"  # it sums over the samples
        reads = [self._storage_access(tensor) for tensor in kernel_call.reads]
        if kernel_call.gathered_rows is not None:
            indices, width, times = kernel_call.gathered_rows
            rows = indices.numel() * width * times
            scales = self.scaling.scales_with_samples(indices.numel())
            reads.append(
                StorageAccess(None, rows / self.scaling.samples, 0.0)
                if scales
                else StorageAccess(None, 0.0, rows)
            )
        return OperatorCall(
            module_path=self._module_of_node() if self.is_backward else self._module_path,
            phase=phase,
            kind=kernel_call.kind,
            kernel_count=kernel_call.kernel_count,
            input_passes=kernel_call.input_passes,
            reads=tuple(reads),
            writes=tuple(self._storage_access(tensor) for tensor in kernel_call.writes),
            matmul=product,
            attention=None
            if kernel_call.attention is None
            else self.scaling.scale_attention(kernel_call.attention),
            embedding_row_elements=None
            if kernel_call.gathered_rows is None
            else kernel_call.gathered_rows[1],
            is_saved_by_selective_recompute=is_saved_by_selective_recompute,
        )

    def _storage_access(self, tensor: Tensor) -> StorageAccess:
        return StorageAccess(storage_id(tensor), *self.scaling.count_elements(tensor))

    def _module_of_node(self) -> str:
        """Return the unit of the running backward node; one that adds up gradients counts for the last."""
        node = current_node()
        if node is None:
            return self._module_path
        number = node_number(node)
        if number <= self._start_nodes[-1]:
            self._module_path = self._module_paths[max(bisect.bisect_right(self._start_nodes, number) - 1, 0)]
        return self._module_path


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
