"""Command `wanma report RUN`: the HTML report of a run."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write report.html of a run, one page that works offline",
        epilog="example:\n  wanma report gpt",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.report.report_page import write_report

    print(write_report(chosen))
    return 0
