"""What the time of a collective says of the links: bandwidths by the definitions of nccl-tests.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: algorithm bandwidth is the size over the
time; bus bandwidth multiplies it by what share of the size each rank has to send or receive at least, so that
it can be held against the speed of the link, whatever the number of ranks. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

BUS_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
        "all_gather": lambda ranks: (ranks - 1) / ranks,
        "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
        "all_to_all": lambda ranks: (ranks - 1) / ranks,
        "broadcast": lambda ranks: 1.0,  # noqa: ARG005
    }
)
"""Bus bandwidth over algorithm bandwidth, by the number of ranks."""


@dataclass(frozen=True)
class Timing:
    """One collective, by one algorithm, of one size."""

    collective: str
    """A key of `BUS_FACTORS`."""
    algorithm: str
    """'backend', or a name of `algorithms.ALGORITHMS`, or 'direct'."""
    dtype: str
    ranks: int
    nodes: int
    size_bytes: int
    """all_reduce, broadcast, all_to_all: of one rank's buffer; all_gather, reduce_scatter: of the whole."""
    seconds: float
    """Of one run on the slowest rank."""
    limit_bytes_per_second: float
    """Of the link in one direction, measured in the same run with messages of this size."""
    forecast_seconds: float | None = None
    """What forecasts took it to last, before this measurement; None where they do not know it."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second."""
        return self.algorithm_bandwidth * BUS_FACTORS[self.collective](self.ranks)

    @property
    def share_of_limit(self) -> float:
        """Bus bandwidth over the link's."""
        return self.bus_bandwidth / self.limit_bytes_per_second
