"""Command `wanma diagnose RUN`: what bounds a run, or ended it."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="tell what bounds a run, or ended it, and what to change",
        epilog="example:\n  wanma diagnose gpt        # also while it trains",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.cli.engines.records import warn_about_records
    from wanma.cli.output import print_content
    from wanma.diagnosis.presentation import diagnosis_text
    from wanma.report.run_report import read_report

    warn_about_records(chosen)
    print_content(diagnosis_text(read_report(chosen)))
    return 0
