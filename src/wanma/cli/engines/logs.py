"""Command `wanma logs RUN`: output of a run, or of single ranks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from wanma.cli.arguments import add_run_arguments, parse_integers, resolve_run

POLL_SECONDS = 0.5
"""Interval, in seconds, at which followed files are read."""
LAST_FETCHES = 5
"""Times that the last lines of a run that is over are asked for."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "logs",
        help="print the output of a run, or of single ranks",
        epilog="examples:\n  wanma logs gpt -f\n  wanma logs gpt --rank 0,3",
    )
    add_run_arguments(parser)
    parser.add_argument("--rank", metavar="RANKS", type=parse_integers, help="ranks, e.g. 0,3")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import run_log_files, run_statuses
    from wanma.cli.engines.records import warn_about_records

    run = resolve_run(arguments, allow_scripts=True)
    offsets: dict[Path, int] = {}
    prefixes = arguments.rank is not None and len(arguments.rank) > 1
    known_problems: list[str] = []
    problem, state, fetches = "", None, 0
    while True:
        is_over = True
        was_lost = state == "unknown" and not problem  # the hosts answered, and the run was not there
        if arguments.follow:
            statuses, problems = run_statuses([run])
            state = statuses[run.path].state if run.path in statuses else None
            # What does not answer is asked again: the engine, or below the hosts of the run.
            is_over = not problems and state not in ("pending", "running")
            if problems and problems != known_problems:
                print(*problems, sep="\n", file=sys.stderr)
            known_problems = problems
        problem = warn_about_records(run, problem)
        if is_over and state == "unknown":  # a host that was silent may answer by now
            is_over = was_lost and not problem
        elif is_over and problem:  # the last lines are elsewhere
            fetches += 1
            is_over = not arguments.follow or fetches == LAST_FETCHES
        for path in run_log_files(run, arguments.rank):
            offsets[path] = _print_new(path, offsets.get(path, 0), f"{path.stem}: " if prefixes else "")
        if is_over:
            return 0
        time.sleep(POLL_SECONDS)


def _print_new(path: Path, offset: int, prefix: str) -> int:
    """Print the lines after `offset`; return the offset of the next one."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            sys.stdout.write(prefix + line.decode(errors="replace"))
        sys.stdout.flush()
        return file.tell()
