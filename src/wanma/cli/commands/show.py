"""`wanma show RUN`: how a run went, in the terminal."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run, chosen_run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("show", help="how a run went, beside its forecast")
    add_run(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = chosen_run(arguments)
    from wanma.cli.show import show
    from wanma.report.read import read_report
    from wanma.report.text import summary

    show(summary(read_report(chosen)))
    return 0
