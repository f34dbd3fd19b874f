"""What a layer computes, operator by operator, as pure data: forecasts of time are made of it.

Extents that grow with the samples of a micro-batch are given for one sample; elements are counted in those
of the precision that the model computes in, so that one of twice the size counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "product", "convolution", "attention", "normalisation", "reduction", "elementwise", "gather", "lookup"
]
"""The first three compute, and say of which sizes; the others only stream through memory. 'lookup' reads and
writes rows of a table; 'gather' moves single elements about."""

Phase = Literal["forward", "inputs", "weights"]
"""Of the backward, what gives the gradients of a layer's inputs and of its weights."""

When = Literal["always", "eager", "compiled"]
"""A compiler fuses what streams: such operators come twice, each for one way to run them."""


@dataclass(frozen=True)
class Product:
    """(m, k) × (k, n), `count` of them at once. A convolution is the product that it is computed as."""

    m: float
    n: float
    k: float
    count: float = 1.0
    grows: Literal["m", "n", "k", "count", "nothing"] = "nothing"
    """The size that is a sample's share, and as often as large as there are samples."""

    def sized(self, samples: float) -> Product:
        """Of a micro-batch of `samples`."""
        sizes = {name: getattr(self, name) for name in ("m", "n", "k", "count")}
        if self.grows != "nothing":
            sizes[self.grows] *= samples
        return Product(**sizes)

    @property
    def flops(self) -> float:
        """Multiply-adds × 2; of one sample, where something grows."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Attention:
    """Fused attention of one sample's sequences."""

    sequences: float
    queries: float
    keys: float
    heads: float
    kv_heads: float
    head_width: float
    value_width: float
    causal: bool

    @property
    def flops(self) -> float:
        """Of the forward, for one sample; a causal model needs half of the scores."""
        pairs = self.sequences * self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return 2.0 * pairs * (self.head_width + self.value_width)


@dataclass(frozen=True)
class Operator:
    """Kernels of one kind and size that a layer runs for one micro-batch."""

    kind: Kind
    phase: Phase
    kernels: int = 1
    elements_per_sample: float = 0.0
    """That all of them together read and write, for one sample."""
    elements_fixed: float = 0.0
    """And however many samples there are: weights, and gradients of weights."""
    product: Product | None = None
    """Of one kernel."""
    attention: Attention | None = None
    row_elements: float | None = None
    """Of a lookup: elements that lie together."""
    is_kept: bool = False
    """Selective recompute keeps the result (`models.costly`)."""
    when: When = "always"

    @property
    def flops_per_sample(self) -> float:
        """Backward's attention has five products, forward's two (Dao et al. 2022, section 3.1)."""
        if self.product is not None:
            return 0.0 if self.product.grows == "nothing" else self.kernels * self.product.flops
        if self.attention is not None:
            return self.kernels * self.attention.flops * (1.0 if self.phase == "forward" else 2.5)
        return 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Operator:
        given = dict(value)
        if given.get("product") is not None:
            given["product"] = Product(**given["product"])
        if given.get("attention") is not None:
            given["attention"] = Attention(**given["attention"])
        return cls(**given)
