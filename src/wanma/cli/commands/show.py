"""Command `wanma show RUN`: summary of a run in the terminal."""

from __future__ import annotations

import argparse
import json

from wanma.cli.arguments import add_json_option, add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "show", help="show the results of a run beside its forecast", epilog="example:\n  wanma show gpt"
    )
    add_run_arguments(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments, allow_scripts=True)
    from wanma.cli.engines.records import warn_about_records
    from wanma.cli.output import print_content
    from wanma.report.run_report import read_report
    from wanma.report.script_run import read_script_run, script_summary
    from wanma.report.terminal import run_json, run_summary

    warn_about_records(chosen)
    if arguments.json:
        print(json.dumps(run_json(chosen), indent=2))
        return 0
    script = read_script_run(chosen)
    print_content(script_summary(script) if script is not None else run_summary(read_report(chosen)))
    return 0
