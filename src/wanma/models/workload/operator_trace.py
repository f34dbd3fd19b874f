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
from torch.utils._python_dispatch import TorchDispatchMode

from wanma.job.errors import WanmaError
from wanma.job.forecast.operators import Attention, Kind, Phase, Product
from wanma.models.structure.selective_recompute import Costly
from wanma.models.workload.kernel_calls import AttentionCall, Work, work_of


@dataclass(frozen=True)
class Scale:
    """Conversion of sizes of the run to sizes of one sample."""

    prime: int
    """Prime that divides exactly those sizes that grow with the samples."""
    samples: int
    element_bytes: int
    """Bytes of an element in the precision of the model's computation."""

    @classmethod
    def beside(cls, sizes: Iterable[int], rows: int, element_bytes: int) -> Scale:
        """Choose a prime that divides none of `sizes`; the number of samples is `rows` times the prime."""
        taken = {size for size in sizes if size}
        candidate = 1009
        while any(size % candidate == 0 for size in taken) or not _is_prime(candidate):
            candidate += 2
        return cls(candidate, candidate * rows, element_bytes)

    def grows(self, size: float) -> bool:
        return size == int(size) and int(size) % self.prime == 0 and size > 0

    def elements(self, tensor: Tensor) -> tuple[float, float]:
        """Return (elements of one sample, elements whatever the number of samples).

        Broadcast elements are in memory once.

        Raises:
            WanmaError: they grow with the square of the samples.
        """
        sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
        growing = sum(map(self.grows, sizes))
        if growing > 1:
            raise WanmaError(
                f"a tensor of {tuple(tensor.shape)} grows with the square of the samples",
                "a plan sizes micro-batches freely, so samples must not be compared with each other",
            )
        elements = math.prod(sizes) * tensor.element_size() / self.element_bytes
        return (elements / self.samples, 0.0) if growing else (0.0, elements)

    def product(self, m: float, n: float, k: float, count: float) -> Product:
        sizes = {"m": m, "n": n, "k": k, "count": count}
        growing = [name for name, size in sizes.items() if self.grows(size)]
        if not growing:
            return Product(m, n, k, count)
        sizes[growing[0]] /= self.samples
        return Product(**sizes, grows=growing[0])  # type: ignore[arg-type]  # one of its own names

    def attention(self, call: AttentionCall) -> Attention:
        (batch, heads, queries, width), (_, kv_heads, keys, _) = call.query, call.key
        sequences = batch / self.samples if self.grows(batch) else float(batch)
        return Attention(sequences, queries, keys, heads, kv_heads, width, float(call.value[-1]), call.causal)


@dataclass(frozen=True)
class Piece:
    """Elements of one storage that a call reads or writes."""

    storage: int | None
    """Identity of the storage; None: scattered rows of a table."""
    per_sample: float
    fixed: float


@dataclass(frozen=True)
class Call:
    """Traced call: one `Work` with its unit and phase."""

    unit: str
    phase: Phase
    kind: Kind
    kernels: int
    passes: int
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    product: Product | None
    attention: Attention | None
    row_elements: float | None
    is_kept: bool

    def elements(self) -> tuple[float, float]:
        """Return the elements read and written: (of one sample, fixed)."""
        read, written = self.reads, self.writes
        return (
            self.passes * sum(piece.per_sample for piece in read)
            + sum(piece.per_sample for piece in written),
            self.passes * sum(piece.fixed for piece in read) + sum(piece.fixed for piece in written),
        )


class Trace(TorchDispatchMode):
    """Dispatch mode that records every operator for the unit whose forward runs, or once ran."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.scale = scale
        self.calls: list[Call] = []
        self.backward = False
        self._unit = ""
        self._judge = Costly()
        self._held: list[torch.UntypedStorage] = []
        """Storages kept alive, so that no storage's identity is reused.

        Not the tensors: autograd copies a gradient unless nothing else holds it.
        """
        self._starts: list[int] = []
        self._units: list[str] = []

    def turn_to(self, unit: str) -> None:
        """Assign operators, and nodes of the backward, from here on to `unit`.

        Nodes of the backward are numbered in the forward's order.
        """
        self._unit = unit
        self._judge = Costly()
        self._starts.append(_next_node())
        self._units.append(unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        is_kept = not self.backward and self._judge.keeps(func)
        for work in work_of(func, args, kwargs or {}, result):
            self._held += [tensor.untyped_storage() for tensor in (*work.reads, *work.writes)]
            self.calls.append(self._call(work, is_kept))
        return result

    def _call(self, work: Work, is_kept: bool) -> Call:
        product = None if work.product is None else self.scale.product(*work.product)
        phase: Phase = work.phase or ("inputs" if self.backward else "forward")
        if self.backward and work.phase is None and product is not None and product.grows == "k":
            phase = "weights"  # it sums over the samples
        reads = [self._piece(tensor) for tensor in work.reads]
        if work.moved_rows is not None:
            indices, width, times = work.moved_rows
            rows = indices.numel() * width * times
            growing = self.scale.grows(indices.numel())
            reads.append(Piece(None, rows / self.scale.samples, 0.0) if growing else Piece(None, 0.0, rows))
        return Call(
            unit=self._unit_of_node() if self.backward else self._unit,
            phase=phase,
            kind=work.kind,
            kernels=work.kernels,
            passes=work.passes,
            reads=tuple(reads),
            writes=tuple(self._piece(tensor) for tensor in work.writes),
            product=product,
            attention=None if work.attention is None else self.scale.attention(work.attention),
            row_elements=None if work.moved_rows is None else work.moved_rows[1],
            is_kept=is_kept,
        )

    def _piece(self, tensor: Tensor) -> Piece:
        return Piece(storage_of(tensor), *self.scale.elements(tensor))

    def _unit_of_node(self) -> str:
        """Return the unit of the running backward node; one that adds up gradients counts for the last."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._unit
        number = node._sequence_nr()
        if number <= self._starts[-1]:
            self._unit = self._units[max(bisect.bisect_right(self._starts, number) - 1, 0)]
        return self._unit


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, unique among those in use."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _next_node() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not exported
    return number


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
