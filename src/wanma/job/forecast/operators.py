"""Operators of a layer with their sizes, as pure data: the basis of time forecasts.

Sizes that grow with the samples of a micro-batch are given for one sample. Elements are counted in those of
the model's compute precision, so that an element of twice the size counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

OperatorKind = Literal[
    "product", "convolution", "attention", "normalisation", "reduction", "elementwise", "gather", "lookup"
]
"""Kind of operator: the first three compute and carry their sizes; the others only stream through memory.

A 'lookup' reads and writes rows of a table; a 'gather' moves single elements."""

OperatorPhase = Literal["forward", "inputs", "weights"]
"""Pass in which an operator runs; backward is split into gradients of inputs and of weights."""

ExecutionMode = Literal["always", "eager", "compiled"]
"""Execution mode in which an operator runs; a compiler fuses streaming operators, so they come twice."""


@dataclass(frozen=True)
class Matmul:
    """Batched matrix product (m, k) × (k, n), `count` at once.

    A convolution is the product as which it is computed.
    """

    m: float
    n: float
    k: float
    count: float = 1.0
    batch_dimension: Literal["m", "n", "k", "count", "nothing"] = "nothing"
    """Size that is given for one sample, and that grows in proportion to the samples."""

    def for_micro_batch(self, samples: float) -> Matmul:
        """Return the product for a micro-batch of `samples`."""
        sizes = {name: getattr(self, name) for name in ("m", "n", "k", "count")}
        if self.batch_dimension != "nothing":
            sizes[self.batch_dimension] *= samples
        return Matmul(**sizes)

    @property
    def flops(self) -> float:
        """FLOPs (multiply-adds × 2), for one sample if a size grows."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Attention:
    """Sizes of fused attention over one sample's sequences."""

    sequences: float
    queries: float
    keys: float
    heads: float
    kv_heads: float
    head_dim: float
    value_head_dim: float
    is_causal: bool

    @property
    def flops(self) -> float:
        """FLOPs of the forward for one sample; a causal model needs half of the scores."""
        pairs = self.sequences * self.heads * self.queries * self.keys * (0.5 if self.is_causal else 1.0)
        return 2.0 * pairs * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True)
class Operator:
    """Kernels of one kind and size that a layer runs for one micro-batch."""

    kind: OperatorKind
    phase: OperatorPhase
    kernel_count: int = 1
    elements_per_sample: float = 0.0
    """Elements that all kernels together read and write, for one sample."""
    fixed_elements: float = 0.0
    """Elements that do not depend on the samples: weights, and gradients of weights."""
    matmul: Matmul | None = None
    """Matrix product of one kernel."""
    attention: Attention | None = None
    embedding_row_elements: float | None = None
    """Elements of one row of a lookup, contiguous in memory."""
    is_saved_by_selective_recompute: bool = False
    """True if selective recompute saves the result (`selective_recompute`)."""
    execution_mode: ExecutionMode = "always"

    @property
    def flops_per_sample(self) -> float:
        """FLOPs for one sample; backward's attention has five products, forward's two.

        Source: Dao et al. 2022, section 3.1.
        """
        if self.matmul is not None:
            return 0.0 if self.matmul.batch_dimension == "nothing" else self.kernel_count * self.matmul.flops
        if self.attention is not None:
            return self.kernel_count * self.attention.flops * (1.0 if self.phase == "forward" else 2.5)
        return 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Operator:
        values = dict(value)
        if values.get("matmul") is not None:
            values["matmul"] = Matmul(**values["matmul"])
        if values.get("attention") is not None:
            values["attention"] = Attention(**values["attention"])
        return cls(**values)
