"""Machine benchmark as a result: its name, the ranks of its contenders, and whether a result is one."""

from __future__ import annotations

from wanma.bench.results.result import BenchmarkResult, ContenderRecord

SUITE = "machine"
"""Name of the suite; that of a smoke test has a suffix."""
RANKS, NODES = "ranks", "nodes"
"""Settings of a contender: ranks of all nodes, and nodes."""
SELECTION = "selection"
"""Setting of a contender whose collectives are selected: the options."""
PROGRAM = "wanma.bench.machine.execution"
"""Module that each execution runs."""


def is_machine_result(result: BenchmarkResult) -> bool:
    """Return True if a result is of a machine's limits."""
    return any(PROGRAM in one.command and RANKS in one.settings for one in result.contenders)


def rank_count(contender: ContenderRecord) -> int:
    """Return the number of ranks of all nodes."""
    return int(contender.settings[RANKS])


def node_count(contender: ContenderRecord) -> int:
    """Return the number of nodes."""
    return int(contender.settings[NODES])
