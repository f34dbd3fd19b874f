"""Command `wanma attach RUN`: console of a submitted run."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "attach",
        help="show a submitted run as if it were in the foreground; Ctrl-C leaves it running",
        epilog="example:\n  wanma attach gpt",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.attachment import attach
    from wanma.api.engines.control import find_submitted

    run = resolve_run(arguments, allow_scripts=True)
    _, record = find_submitted(run)
    return attach(run, record)
