"""Command `wanma resize RUN --nodes N`: another number of nodes for a submitted run."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run
from wanma.observe.units import count_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "resize",
        help="bring a submitted run to another number of nodes, within the range of its job",
        epilog="example:\n  wanma resize gpt --nodes 4",
    )
    add_run_arguments(parser)
    parser.add_argument("--nodes", metavar="N", type=int, required=True, help="number of nodes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import resize_run

    run = resolve_run(arguments, allow_scripts=True)
    resize_run(run, arguments.nodes)
    nodes = count_text(arguments.nodes, "node")
    print(f"{run.name}: {nodes} requested; `wanma attach {run.name}` shows the change")
    return 0
