"""Algorithm and bus bandwidth of a timed collective, by the definitions of nccl-tests.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: algorithm bandwidth is the size over the
time; bus bandwidth multiplies it by the share of the size that each rank has to send or receive at least, so
that it compares with the speed of the link, whatever the number of ranks. Pure functions, without torch.
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
"""Bus bandwidth over algorithm bandwidth, dimensionless, as a function of the number of ranks."""


@dataclass(frozen=True)
class CollectiveTiming:
    """Measured time of one collective, by one algorithm, of one size."""

    collective: str
    """Name of the collective: a key of `BUS_FACTORS`."""
    algorithm: str
    """Name of the algorithm: 'backend', a key in `ALGORITHMS`, or 'direct'."""
    ranks: int
    size_bytes: int
    """Size of one rank's buffer, or, for all_gather and reduce_scatter, of all ranks' parts together."""
    seconds: float
    """Time of one run on the slowest rank."""
    link_bytes_per_second: float
    """Bandwidth of the link in one direction, measured in the same run with messages of this size."""

    @property
    def bus_bandwidth(self) -> float:
        """Size over time, times the bus factor, in bytes per second; comparable with a link's."""
        return self.size_bytes / self.seconds * BUS_FACTORS[self.collective](self.ranks)

    @property
    def link_utilization(self) -> float:
        """Bus bandwidth over the link's bandwidth, from 0 to about 1."""
        return self.bus_bandwidth / self.link_bytes_per_second
