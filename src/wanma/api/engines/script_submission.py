"""Submission of a user's own script to an engine (`wanma launch --engine`)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.api.engines.placing import (
    environment_interpreter,
    make_environment,
    place_run,
    refuse_active_run,
    run_secret,
    snapshot_code,
    usable_engine,
)
from wanma.api.engines.submission import render_submission, take_nodes
from wanma.engines.engine import Engine, EngineCluster, Submission
from wanma.engines.engine_record import EngineRecord
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection
from wanma.observe.units import count_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def submit_script(
    name: str,
    words: Sequence[str],
    ranks: int,
    section: ClusterSection,
    run_directory: Path | None,
    *,
    engine: Engine | None = None,
    is_held: bool = False,
) -> tuple[RunDirectory, EngineRecord]:
    """Submit a script to its engine and return at once; unless it is held, it goes on without this process.

    Args:
        name: name of the script, and of the run.
        words: arguments of `wanma launch` on each node, without nodes and run directory.
        ranks: processes on each node.
        section: settings of the cluster.
        run_directory: default: runs / `name`.
        engine: the engine, which holds the run; default: a new one.
        is_held: True if the run is to end with `engine`, where that `ends_with_caller`.

    Raises:
        WanmaError: the run is in progress, or the engine refuses it; nothing was started.
    """
    run = _resolve(name, run_directory)
    try:
        engine = usable_engine(section, engine)
        refuse_active_run(run)
        submission, _ = _make_submission(run, words, ranks, section, engine)
        code, notes = snapshot_code(run, section)
        interpreter = make_environment(run, section)
    except WanmaError as error:
        error.exit_code = EXIT_USAGE  # nothing was started
        raise
    for note in notes:
        print(note, file=sys.stderr)
    is_held = is_held and engine.ends_with_caller
    submission = replace(submission, code=code, interpreter=interpreter, is_held=is_held)
    return run, place_run(run, engine, submission, {})


def dry_script_submission(
    name: str, words: Sequence[str], ranks: int, section: ClusterSection, run_directory: Path | None
) -> RenderableType:
    """Describe what `submit_script` would submit; start nothing.

    Raises:
        WanmaError: as of `submit_script`.
    """
    from rich.console import Group

    run = _resolve(name, run_directory)
    run.check_writable()
    engine = usable_engine(section)
    submission, nodes = _make_submission(run, words, ranks, section, engine)
    submission = replace(submission, interpreter=environment_interpreter(section))
    return Group(
        _render_cost(section, nodes, ranks, submission.gpus_per_node),
        render_submission(engine, engine.render(submission), nodes),
    )


def dry_script_run(
    name: str, command: Sequence[str], ranks: int, section: ClusterSection, run_directory: Path | None
) -> RenderableType:
    """Describe the start of a script in the foreground; start nothing.

    Args:
        name: name of the script, and of the run.
        command: command of each rank.
        ranks: processes on each node.
        section: settings of the cluster.
        run_directory: default: runs / `name`.

    Raises:
        WanmaError: the run directory cannot be written to, or the cluster file is wrong.
    """
    from rich.console import Group
    from rich.text import Text

    run = _resolve(name, run_directory)
    run.check_writable()
    here = discover_node().nodes[0]
    gpus = min(ranks, len(here.devices)) if section.device != "cpu" else 0
    places = "this node" if section.nodes == 1 else f"each of {section.nodes} nodes"
    return Group(
        _render_cost(section, None, ranks, gpus),
        Text(f"\nStart of {count_text(ranks, 'rank')} on {places}", style="bold"),
        Text(shlex.join(command), no_wrap=True, overflow="ignore"),  # it can be copied
        Text(f"· run directory {run.path}", style="dim"),
    )


def _render_cost(
    section: ClusterSection, nodes: EngineCluster | None, ranks: int, gpus: int
) -> RenderableType:
    """Render devices, time and price; a cluster file, which has prices, counts before what was found."""
    from wanma.planner.presentation.script_cost import render_script_cost

    if section.file is not None:
        cluster = read_cluster(section.file)
    else:
        cluster = nodes.cluster if nodes is not None else discover_node()
    limit = nodes.time_limit_seconds if nodes is not None else None
    return render_script_cost(take_nodes(cluster, section.nodes).nodes, ranks, gpus, limit)


def _resolve(name: str, run_directory: Path | None) -> RunDirectory:
    return RunDirectory((run_directory or Path("runs") / name).absolute())


def _make_submission(
    run: RunDirectory, words: Sequence[str], ranks: int, section: ClusterSection, engine: Engine
) -> tuple[Submission, EngineCluster | None]:
    nodes = engine.discover(section)
    if nodes is not None and section.nodes > nodes.max_nodes:
        raise JobError(
            f"cluster.nodes = {section.nodes}, and a run may have {nodes.max_nodes} nodes there",
            f"lower it to {nodes.max_nodes}, or choose another partition or constraint",
        )
    group = nodes.cluster.nodes[0] if nodes is not None else None
    has_gpus = group is not None and bool(group.devices) and section.device != "cpu"
    submission = Submission(
        name=run.name,
        run_directory=run.path,
        folder=Path.cwd(),
        command=("launch", "--run-dir", str(run.path), *words),
        nodes=section.nodes,
        min_nodes=section.nodes,
        ranks_per_node=ranks,
        gpus_per_node=ranks if has_gpus else 0,
        cores_per_node=ranks * section.threads_per_rank if section.threads_per_rank else _cores(nodes),
        settings=section,
        secret=run_secret(run),
        hosts=tuple(host for group in nodes.cluster.nodes for host in group.hosts) if nodes else (),
    )
    return submission, nodes


def _cores(nodes: EngineCluster | None) -> int:
    return nodes.cluster.nodes[0].cores if nodes is not None else os.cpu_count() or 1
