"""Results of a collective benchmark as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wanma.bench.programs.command_program import FIGURE_MARK
from wanma.collectives.measurement.bandwidth import CollectiveTiming


@dataclass(frozen=True)
class CollectiveResults:
    """Measurements of all collectives with one number of ranks."""

    ranks: int
    nodes: int
    backend: str
    """Backend that carried the messages: 'gloo', 'nccl'."""
    limit: str
    """Reference of the bandwidths, as text."""
    machine: str
    """Description of the node, with versions."""
    timings: tuple[CollectiveTiming, ...]
    disturbed: int
    """Number of measurements (timings and limits) during which other programs were busy throughout."""

    @property
    def title(self) -> str:
        """Title such as '4 ranks on 2 nodes, gloo'."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} ranks{nodes}, {self.backend}"


def figure_lines(sweeps: Sequence[CollectiveResults]) -> Iterator[str]:
    """Yield a line for each time that `wanma bench run` reads, such as 'wanma figure NAME 0.0012'.

    A name has only the parts that differ, so that two measurements of one algorithm each can be compared.
    """
    timings = [timing for sweep in sweeps for timing in sweep.timings]
    for timing in timings:
        parts = [timing.collective]
        for name in ("algorithm", "dtype"):
            if len({getattr(one, name) for one in timings}) > 1:
                parts.append(getattr(timing, name))
        if len(sweeps) > 1:
            parts.append(f"of_{timing.ranks}")
        yield f"{FIGURE_MARK} {'_'.join(parts)}_{timing.size_bytes}_bytes_seconds {timing.seconds:.9f}"
