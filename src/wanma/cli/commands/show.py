"""Command `wanma show RUN`: summary of a run in the terminal."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run, chosen_run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("show", help="how a run went, beside its forecast")
    add_run(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = chosen_run(arguments, scripts=True)
    from wanma.cli.output import show
    from wanma.report.run_report import read_report
    from wanma.report.script_run import read_script, script_summary
    from wanma.report.terminal import summary

    script = read_script(chosen)
    show(script_summary(script) if script is not None else summary(read_report(chosen)))
    return 0
