"""Command `wanma shell RUN`: a shell on a node of a submitted run."""

from __future__ import annotations

import argparse
import os

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "shell",
        help="open a shell on a node of a submitted run",
        epilog="example:\n  wanma shell gpt --node g7",
    )
    add_run_arguments(parser)
    parser.add_argument("--node", metavar="HOST", help="node; default: the first one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import find_submitted

    engine, record = find_submitted(resolve_run(arguments, allow_scripts=True))
    command = engine.shell_command(record.handle, arguments.node)
    os.execvp(command[0], command)
