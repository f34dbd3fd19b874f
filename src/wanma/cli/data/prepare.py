"""Action `wanma data prepare`: the data of a job, made ready before a run, by one node or several."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from wanma.cli.arguments import add_job_arguments, parse_count
from wanma.job.errors import JobError

_EXAMPLES = """\
examples:
  wanma data prepare job.toml data.cache=/shared/cache
  wanma data prepare job.toml data.cache=/shared/cache --nodes 2 --node 0    # and --node 1
  srun -N 4 --ntasks-per-node 1 wanma data prepare job.toml data.cache=/shared/cache
  wanma launch --engine ssh --nodes 4 --ranks 1 -m wanma data prepare job.toml data.cache=/shared/cache

Nodes with a common data.cache share the work: each part is done by one of them. After a kill of a node, the
others do its parts; the same command on it goes on. The result is the same on any number of nodes.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare", help="make the data of a job ready, as the start of a run does", epilog=_EXAMPLES
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=parse_count,
        help="nodes that share the work; run the same command on each; default: those of srun, mpirun, ...",
    )
    parser.add_argument(
        "--node", metavar="I", type=int, help="number of this node, from 0; default: that of the launcher"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import time

    from wanma.cli.data.arguments import shown_progress
    from wanma.data.index.records import cache_folder
    from wanma.data.opening import prepare_job_data
    from wanma.job.file.loading import load_job
    from wanma.observe.units import duration_text

    nodes, node = _place(arguments.nodes, arguments.node)
    job = load_job(arguments.job, arguments.overrides)
    if job.data.has_factory:
        print(f"nothing to prepare: {job.data.factory_text} is a program that each rank runs")
        return 0
    start = time.monotonic()
    with shown_progress("preparing", is_quiet=node > 0) as progress:  # one line for all nodes
        if nodes == 1:
            prepare_job_data(job.data, progress)
        else:
            from wanma.data.shared_preparation import prepare_on_nodes

            prepare_on_nodes(job.data, nodes, node, progress, lambda missing: _show_wait(node, missing))
    place = f" on {nodes} nodes (this is node {node})" if nodes > 1 else ""
    seconds = duration_text(time.monotonic() - start)
    print(f"ready in {seconds}{place}; cache: {cache_folder(job.data.cache)}")
    return 0


def _place(nodes: int | None, node: int | None) -> tuple[int, int]:
    """Return the number of nodes, and that of this one, by options or by the launcher of this process.

    Raises:
        JobError: one of them is unknown, or they do not fit.
    """
    if nodes is None or node is None:
        from wanma.engines.engine import PLACED_BY_VARIABLE
        from wanma.engines.launchers.placement import read_placement

        # A process of `wanma launch` has its place by the variables of torchrun, whatever engine runs it.
        environment = {key: value for key, value in os.environ.items() if key != PLACED_BY_VARIABLE}
        placement = read_placement(environment)
        if placement is not None and nodes in (None, placement.world_size):
            nodes = placement.world_size
            node = placement.rank if node is None else node
    nodes = nodes or 1
    if node is None and nodes > 1:
        raise JobError(
            f"--nodes {nodes}: the number of this node is unknown", f"give it as --node, 0 to {nodes - 1}"
        )
    node = node or 0
    if not 0 <= node < nodes:
        raise JobError(
            f"--node {node} of {nodes} node{'s' * (nodes > 1)}",
            "give the number of nodes as --nodes, and --node from 0 on",
        )
    return nodes, node


def _show_wait(node: int, missing: Sequence[int]) -> None:
    if node == min({0, 1} - set(missing), default=node):
        print(f"node {node} waits for node {', '.join(map(str, missing))}", file=sys.stderr, flush=True)
