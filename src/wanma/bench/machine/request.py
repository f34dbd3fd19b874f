"""Request of one execution of a machine benchmark, from the command that starts its ranks to each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wanma.bench.machine.collective_selection import CollectiveSelection
from wanma.bench.machine_figures.case_names import Part
from wanma.job.plan.plan import Plan

SETUP_TIMEOUT_SECONDS = 300.0
"""Timeout in seconds beyond the measurement: processes start, kernels are built, collectives connect."""
RESULT_FILE = "measured.json"
"""Name of the file that rank 0 writes into the run directory of the launch, a JSON object."""
ROUND_EVENT = "round"
"""Kind of the event that announces a round of measurements."""


@dataclass(frozen=True)
class MachineRequest:
    """Parameters of one execution, for its ranks."""

    plan: Plan
    """Plan of replicas, with all ranks of all nodes."""
    seconds: float
    """Approximate duration of the rounds."""
    threads_per_core: float
    """Threads of all ranks per core of a CPU, at least 1."""
    folder: Path
    """Folder of the file system to measure."""
    parts: tuple[Part, ...]
    node_count: int
    """Number of nodes, with as many ranks on each."""
    selection: CollectiveSelection
