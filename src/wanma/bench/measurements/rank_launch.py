"""Launch of ranks that measure together, on this node or with others, as the ranks of a run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.workers.environment import make_worker_environment
from wanma.engines.local.foreground import run_local as run_local
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.cluster import ClusterSection
from wanma.observe.units import count_text

SETUP_TIMEOUT_SECONDS = 300.0
"""Timeout in seconds beyond the measurement: processes start, kernels are built, collectives connect."""
RESULT_FILE = "measured.json"
"""Name of the file that rank 0 writes into the run directory of the launch, a JSON object."""
ROUND_EVENT = "round"
"""Kind of the event that announces a round of measurements."""


@dataclass(frozen=True)
class RankLaunch:
    """Launch of the ranks of one measurement."""

    entry: str
    """Entry function of a rank, as in `LaunchConfig`; rank 0 writes `RESULT_FILE`."""
    preload_modules: tuple[str, ...]
    payload: bytes
    plan: Plan
    """Plan of replicas, with all ranks of all nodes."""
    seconds: float
    """Approximate duration of the measurement."""
    cluster_section: ClusterSection = field(default_factory=ClusterSection)
    fingerprint: str = ""
    """Hash that all nodes of one measurement share."""


def measure_on_ranks(
    launch: RankLaunch, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any] | None:
    """Start the ranks of this node, wait for their end, and return what rank 0 wrote.

    Args:
        launch: ranks and their entry function.
        progress: receives a text for each round, message and node that joins.

    Returns:
        the content of `RESULT_FILE`; None on a node without rank 0.

    Raises:
        WanmaError: a rank failed, or the nodes did not meet.
    """
    plan, section = launch.plan, launch.cluster_section

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == ROUND_EVENT:
            progress(f"{count_text(plan.world_size, 'rank')}: round {event['number']}")
        elif event["kind"] in ("message", "joined"):
            progress(event["text"])

    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        outcome = run_local(
            LaunchConfig(
                run_directory=Path(folder),
                entry=launch.entry,
                payload=launch.payload,
                preload_modules=launch.preload_modules,
                ranks_per_node=plan.world_size // section.nodes,
                threads_per_rank=plan.threads_per_rank,
                nodes=section.nodes,
                node_rank=section.node_rank,
                rendezvous=section.rendezvous,
                network_interface=section.network_interface,
                topology_address=resolve_topology_address(section, os.environ).path,
                worker_environment=make_worker_environment(section, plan),
                start_timeout_seconds=section.start_timeout_seconds + 3 * launch.seconds,
                hang_timeout_seconds=3 * launch.seconds + SETUP_TIMEOUT_SECONDS,
                job_hash=launch.fingerprint,
            ),
            on_event,
        )
        if outcome.exit_code != 0:
            failure = outcome.failure_text or f"was stopped (exit code {outcome.exit_code})"
            raise WanmaError(
                f"measuring {count_text(plan.world_size, 'rank')}: {failure}", exit_code=outcome.exit_code
            )
        written = Path(folder) / RESULT_FILE
        if not written.exists():
            return None
        content: dict[str, Any] = json.loads(written.read_text())
        return content
