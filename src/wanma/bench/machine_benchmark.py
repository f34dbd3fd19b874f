"""Benchmark of the limits of this machine, or of several nodes, from its options to its result.

Each number of ranks is a contender. Each execution starts its processes anew: intervals are over executions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from wanma.bench.machine.calibration import calibrations_of
from wanma.bench.machine.collective_selection import ALL_COLLECTIVES, CollectiveSelection, check_names
from wanma.bench.machine.execution import (
    execution_command,
    file_system,
    measured_node,
    parse_benchmark_cluster,
    run_execution,
    storage_folder,
)
from wanma.bench.machine.machine_result import NODES, PROGRAM, RANKS, SELECTION, SUITE
from wanma.bench.machine_figures.case_names import PARTS, Part
from wanma.bench.programs.contender import Contender
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import Rule
from wanma.bench.suites.suite_file import Suite, SuiteFile
from wanma.engines.launchers.job_placement import place_cluster
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.measurement.run_times import CPU_COPY_BYTES
from wanma.job.cluster import NodeGroup
from wanma.job.errors import JobError
from wanma.job.run.resource_limits import usable_memory_bytes
from wanma.observe.units import bytes_text
from wanma.planner.calibration.host_benchmarks import STREAMED_BYTES
from wanma.planner.calibration.local_node import rank_counts
from wanma.planner.hardware_model.calibration import load_calibration, save_calibration

DEFAULT_SECONDS = 20.0
DEFAULT_ROUNDS = 5
SMOKE_SECONDS = 1.0
RANK_BYTES = STREAMED_BYTES + 2 * CPU_COPY_BYTES
"""Memory of a rank's largest buffers in bytes."""
MAX_BUFFERS = 3
"""Maximum buffers of the largest message that a rank holds at once."""


def machine_suite(
    *,
    ranks: Sequence[int] = (),
    seconds: float = DEFAULT_SECONDS,
    parts: Sequence[str] = (),
    folder: Path | None = None,
    overrides: Sequence[str] = (),
    rounds: int = DEFAULT_ROUNDS,
    calibrates: bool = False,
    selection: CollectiveSelection = ALL_COLLECTIVES,
) -> tuple[Suite, Rule]:
    """Return suite and rule of the machine benchmark.

    Args:
        ranks: numbers of ranks on each node; default: one, and one for each GPU, or core of a CPU.
        seconds: approximate duration of one execution.
        parts: parts of the machine; default: all, or collectives if some are selected.
        folder: folder of the file system to measure; default: that of run directories.
        overrides: keys of `[cluster]`, such as 'cluster.nodes=2'.
        rounds: executions of each number of ranks.
        calibrates: True: ranks are by default 1, 2, 4 ... to all, between which forecasts choose.

    Raises:
        WanmaError: an argument is wrong, or the ranks do not fit into memory.
    """
    if seconds <= 0:
        raise JobError(f"--seconds {seconds:g}: must be above 0", "give at least 1")
    chosen = _select_parts(parts or (["collectives"] if selection.words else []))
    section = parse_benchmark_cluster(overrides)
    check_interface(section.network_interface)
    node = measured_node(section)
    if selection.words:
        from wanma.bench.machine.cases import known_algorithms  # imports torch

        selection.algorithms_of(known_algorithms("cuda" if node.devices else "cpu"))
    counts = _rank_counts(node, ranks, section.nodes, chosen, calibrates)
    rank_bytes = RANK_BYTES if {*chosen} & {"memory", "storage"} else 0
    _check_memory(max(counts), max(rank_bytes, MAX_BUFFERS * max(selection.sizes, default=0)))
    place = storage_folder(folder)
    system = file_system(place)
    contenders = tuple(
        Contender(
            _name(count * section.nodes, section.nodes),
            "command",
            settings={
                RANKS: str(count * section.nodes),
                NODES: str(section.nodes),
                "device": "GPU" if node.devices else "CPU",
                "seconds": f"{seconds:g}",
                "parts": ",".join(chosen),
                "storage": f"{place} ({system})" if system else str(place),
                **({SELECTION: " ".join(selection.words)} if selection.words else {}),
            },
            command=execution_command(count, seconds, chosen, place, overrides, selection),
        )
        for count in counts
    )
    content = json.dumps([contender.to_json() for contender in contenders], sort_keys=True)
    suite = Suite(
        SUITE,
        SuiteFile(
            title="Limits of the machine" if section.nodes == 1 else f"Limits of {section.nodes} nodes"
        ),
        contenders,
        hashlib.sha256(content.encode()).hexdigest(),
    )
    return suite, Rule(rounds=rounds, min_rounds=rounds)


def smoke_suite() -> tuple[Suite, Rule]:
    """Return the machine benchmark in small: every case, on two ranks, or on all GPUs."""
    node = measured_node(parse_benchmark_cluster([]))
    return machine_suite(ranks=[len(node.devices) or 2], seconds=SMOKE_SECONDS, rounds=1)


def save_machine_calibration(result: BenchmarkResult, overrides: Sequence[str]) -> Path:
    """Save the calibration that a result of this node gives, in place of earlier ones of as many ranks.

    Returns:
        the calibration file.

    Raises:
        WanmaError: a number of ranks has no execution that counts, or the file cannot be written.
    """
    node = measured_node(parse_benchmark_cluster(overrides))
    return save_calibration(load_calibration().with_devices(*calibrations_of(result, node)))


def launched_overrides(overrides: Sequence[str], placement: LauncherPlacement) -> list[str]:
    """Return the overrides with the nodes, rendezvous and node rank of a launcher, such as srun.

    Raises:
        JobError: the overrides need other nodes than the launcher has started.
    """
    section = place_cluster(parse_benchmark_cluster(overrides), placement)
    node_rank = placement.supervisor_node_rank if section.node_rank is None else section.node_rank
    placed = {
        "cluster.nodes": section.nodes,
        "cluster.rendezvous": section.rendezvous,
        "cluster.node_rank": node_rank if section.nodes > 1 else None,
    }
    return [*overrides, *(f"{key}={value}" for key, value in placed.items() if value is not None)]


def node_role(overrides: Sequence[str]) -> Literal["single", "leader", "follower"]:
    """Return the role of this node: the leader of several nodes has rank 0, and keeps the result.

    Raises:
        JobError: of several nodes it is not known which one this is.
    """
    section = parse_benchmark_cluster(overrides)
    if section.nodes == 1:
        return "single"
    if section.node_rank is None:
        raise JobError(
            f"--nodes {section.nodes} without --node-rank: the node of rank 0 keeps the result",
            "give each node its rank from 0, such as --node-rank 0",
        )
    return "leader" if section.node_rank == 0 else "follower"


def follow_executions(suite: Suite, rule: Rule, progress: Callable[[str], None]) -> None:
    """Take part in all executions as a node without rank 0, which keeps no result.

    Raises:
        WanmaError: an execution failed, or the nodes did not meet.
    """
    (contender,) = suite.contenders
    arguments = contender.command[contender.command.index(PROGRAM) + 1 :]
    for number in range(rule.rounds):
        progress(f"execution {number + 1} of {rule.rounds}")
        run_execution(arguments)


def _name(ranks: int, nodes: int) -> str:
    return f"ranks={ranks}" if nodes == 1 else f"nodes={nodes} ranks={ranks}"


def _select_parts(names: Sequence[str]) -> tuple[Part, ...]:
    check_names("--parts", names, PARTS)
    return tuple(part for part in PARTS if not names or part in names)


def _rank_counts(
    node: NodeGroup, ranks: Sequence[int], nodes: int, parts: Sequence[Part], calibrates: bool
) -> list[int]:
    if nodes > 1 and len(ranks) > 1:
        raise JobError(
            f"--ranks {','.join(map(str, ranks))} on {nodes} nodes: several nodes measure one number",
            "give one number, the same on every node",
        )
    counts = rank_counts(node, ranks)
    all_ranks = len(node.devices) or node.cores
    if not ranks and nodes > 1:
        counts = [all_ranks]
    elif not ranks and not calibrates:
        counts = sorted({1, all_ranks})
    if nodes == 1 and not set(parts) - {"links", "collectives"}:
        counts = [count for count in counts if count > 1]
        if not counts:
            raise JobError(
                f"--parts {','.join(parts)}: one rank has no links",
                "give --ranks 2 or more, or other --parts",
            )
    return counts


def _check_memory(ranks: int, rank_bytes: int) -> None:
    if ranks * rank_bytes > usable_memory_bytes():
        raise JobError(
            f"{ranks} ranks with buffers of {bytes_text(rank_bytes)} need {bytes_text(ranks * rank_bytes)}, "
            f"and this node has {bytes_text(usable_memory_bytes())}",
            "give fewer --ranks, or smaller --sizes",
        )
