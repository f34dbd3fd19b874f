"""One execution of a machine benchmark as a command: starts the ranks, prints their figures.

python -m wanma.bench.machine.execution --ranks 2 --seconds 20 --folder runs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from wanma.bench.machine.calibration import threads_per_core
from wanma.bench.machine.collective_selection import CollectiveSelection
from wanma.bench.machine.figures import execution_figures
from wanma.bench.machine.machine_result import PROGRAM
from wanma.bench.machine.request import RESULT_FILE, ROUND_EVENT, SETUP_TIMEOUT_SECONDS, MachineRequest
from wanma.bench.machine_figures.case_names import PARTS, Part
from wanma.bench.programs.command_program import FIGURE_MARK
from wanma.bench.programs.places import PYTHON, word
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.workers.environment import make_worker_environment
from wanma.engines.local.foreground import run_local
from wanma.hardware.discovery.node import discover_node
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.cluster import NodeGroup
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.sections.cluster import BudgetSection, ClusterSection
from wanma.observe.units import count_text
from wanma.planner.calibration.local_node import baseline_plan

ENTRY = "wanma.bench.machine.worker:measure_machine_worker"
PRELOAD = ("torch", "wanma.bench.machine.worker")
FIGURES_PER_LINE = 20
RUNS = Path("runs")
"""Folder of run directories, whose file system is measured unless another folder is given."""


def measured_node(section: ClusterSection) -> NodeGroup:
    """Return this node, without its GPUs if the cluster section leaves them out."""
    (node,) = discover_node().nodes
    return replace(node, devices=()) if section.device == "cpu" else node


def parse_benchmark_cluster(overrides: Sequence[str]) -> ClusterSection:
    """Return the `[cluster]` section of `overrides`.

    Raises:
        JobError: a key of another section, a wrong value, a range of nodes, or a budget.
    """
    section = parse_cluster_section(
        overrides, "wanma bench", "give keys of [cluster] only, e.g. cluster.network_interface=eth1"
    )
    if section.budget != BudgetSection():
        raise JobError("wanma bench: cluster.budget limits runs alone", "leave it out, and give --seconds")
    return section


def run_execution(arguments: Sequence[str]) -> dict[str, float] | None:
    """Measure once with the ranks of this node, and return the figures by name.

    Args:
        arguments: words after the program of `execution_command`.

    Returns:
        None on a node without rank 0.

    Raises:
        WanmaError: a rank failed, or the nodes did not meet.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--parts", type=_words, default=PARTS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--sizes")
    parser.add_argument("--collectives", type=_words, default=[])
    parser.add_argument("--algorithms", type=_words, default=[])
    given = parser.parse_args(arguments)
    section = parse_benchmark_cluster(given.set)
    node = measured_node(section)
    plan = baseline_plan(node, given.ranks, section.nodes)
    request = MachineRequest(
        plan,
        given.seconds,
        threads_per_core(node, plan),
        storage_folder(given.folder),
        tuple(part for part in PARTS if part in given.parts),
        section.nodes,
        CollectiveSelection.parse(given.sizes, given.collectives, given.algorithms),
    )
    shared = (given.ranks, given.seconds, request.parts, section.nodes, section.device, request.selection)
    fingerprint = hashlib.sha256(repr(shared).encode()).hexdigest()[:16]
    return _measure_on_ranks(request, section, fingerprint)


def _measure_on_ranks(
    request: MachineRequest, section: ClusterSection, fingerprint: str
) -> dict[str, float] | None:
    """Start the ranks of this node, wait for their end, and return the figures of what rank 0 wrote."""
    plan, seconds = request.plan, request.seconds

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == ROUND_EVENT:
            text = f"{count_text(plan.world_size, 'rank')}: round {event['number']}"
            print(text, file=sys.stderr, flush=True)
        elif event["kind"] in ("message", "joined"):
            print(event["text"], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        outcome = run_local(
            LaunchConfig(
                run_directory=Path(folder),
                entry=ENTRY,
                payload=pickle.dumps(request),
                preload_modules=PRELOAD,
                ranks_per_node=plan.world_size // section.nodes,
                threads_per_rank=plan.threads_per_rank,
                nodes=section.nodes,
                node_rank=section.node_rank,
                rendezvous=section.rendezvous,
                network_interface=section.network_interface,
                topology_address=resolve_topology_address(section, os.environ).path,
                worker_environment=make_worker_environment(section, plan),
                start_timeout_seconds=section.start_timeout_seconds + 3 * seconds,
                hang_timeout_seconds=3 * seconds + SETUP_TIMEOUT_SECONDS,
                job_hash=fingerprint,
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
        return execution_figures(json.loads(written.read_text()), plan.world_size)


def storage_folder(given: Path | None) -> Path:
    """Return the folder in which storage is measured: `given`, that of run directories, or the current one.

    Raises:
        WanmaError: it does not exist, or cannot be written to.
    """
    folder = given or (RUNS if RUNS.is_dir() else Path())
    if not folder.is_dir():
        raise WanmaError(f"--folder {folder} is no folder", "give a folder that exists", EXIT_USAGE)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WanmaError(
            f"{folder.absolute()} cannot be written to, so that its storage cannot be measured",
            "give another folder with --folder DIR, or leave storage out with --parts",
            EXIT_USAGE,
        )
    return folder.absolute()


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, such as 'ext4', 'nfs4', 'tmpfs'; empty if unknown."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    # Of mounts on one another the last one counts.
    longest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return "" if longest is None else str(longest.fstype)


def _words(text: str) -> list[str]:
    return text.split(",")


def print_figures(figures: Mapping[str, float]) -> None:
    """Print figures as `wanma bench` reads them from the output of a command."""
    words = [f"{name} {value!r}" for name, value in figures.items()]
    for start in range(0, len(words), FIGURES_PER_LINE):
        print(FIGURE_MARK, *words[start : start + FIGURES_PER_LINE], flush=True)


def execution_command(
    ranks: int,
    seconds: float,
    parts: Sequence[Part],
    folder: Path,
    overrides: Sequence[str],
    selection: CollectiveSelection,
) -> tuple[str, ...]:
    """Return the command line of an execution, by this interpreter."""
    settings = [word for text in overrides for word in ("--set", text)]
    return (
        *(word(PYTHON), "-m", PROGRAM, "--ranks", str(ranks), "--seconds", f"{seconds:g}"),
        *("--parts", ",".join(parts), "--folder", str(folder), *settings, *selection.words),
    )


def main() -> int:
    """Run the command and return its exit code."""
    try:
        figures = run_execution(sys.argv[1:])
    except WanmaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if figures is not None:
        print_figures(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
