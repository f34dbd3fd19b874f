"""Command `wanma report RUN`: the HTML report of a run."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run, chosen_run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="write report.html, one page that works offline")
    add_run(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = chosen_run(arguments)
    from wanma.report.report_page import write_report

    print(write_report(chosen))
    return 0
