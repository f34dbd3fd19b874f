"""Commands for recorded runs: `wanma runs`, `show` and `report`."""

from __future__ import annotations

import argparse
import json

from wanma.cli.arguments import add_json_option, add_run_arguments, add_runs_folder_option, resolve_run


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    runs = commands.add_parser(
        "runs", help="list the runs, newest first", epilog="example:\n  wanma runs --runs /data/runs"
    )
    add_runs_folder_option(runs)
    add_json_option(runs)
    runs.set_defaults(run=_runs)
    show = commands.add_parser(
        "show", help="show the results of a run beside its forecast", epilog="example:\n  wanma show gpt"
    )
    add_run_arguments(show)
    add_json_option(show)
    show.set_defaults(run=_show)
    report = commands.add_parser(
        "report",
        help="write report.html of a run, one page that works offline",
        epilog="example:\n  wanma report gpt",
    )
    add_run_arguments(report)
    report.set_defaults(run=_report)


def _runs(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import run_placements
    from wanma.cli.output import print_content, print_warning
    from wanma.job.run.run_directory import list_runs
    from wanma.report.terminal import run_json, runs_table

    runs = list_runs(arguments.runs)
    if not runs and not arguments.json:
        print(f"no runs in {arguments.runs.absolute()} yet; `wanma train JOB` makes one")
        return 0
    placements, problems = run_placements(runs)
    for problem in problems:
        print_warning(problem)
    if arguments.json:
        print(json.dumps([run_json(run, placements.get(run.path), tail_only=True) for run in runs], indent=2))
    else:
        print_content(runs_table(runs, placements))
    return 0


def _show(arguments: argparse.Namespace) -> int:
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


def _report(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.report.report_page import write_report

    print(write_report(chosen))
    return 0
