"""Command `wanma runs`: list of the runs in a folder."""

from __future__ import annotations

import argparse
import json

from wanma.cli.arguments import add_json_option, add_runs_folder_option


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "runs", help="list the runs, newest first", epilog="example:\n  wanma runs --runs /data/runs"
    )
    add_runs_folder_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
