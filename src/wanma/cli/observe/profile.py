"""Command `wanma profile RUN`: traces of some steps of a run that goes on."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import add_run_arguments, parse_amount, parse_count, parse_integers, resolve_run

if TYPE_CHECKING:
    from wanma.job.run.run_directory import RunDirectory

POLL_SECONDS, STATE_SECONDS = 0.2, 1.0
"""Intervals, in seconds, at which the traces and the state of the run are looked at."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="profile some steps of a run that goes on",
        epilog="example:\n  wanma profile gpt --steps 3 --ranks 0,1     # open the files in ui.perfetto.dev",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--steps", metavar="N", type=_parse_steps, default=3, help="steps, 100 at most; default: %(default)s"
    )
    parser.add_argument(
        "--ranks", metavar="RANKS", type=parse_integers, default=[0], help="ranks, e.g. 0,3; default: 0"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parse_amount,
        default=300.0,
        help="longest wait; default: %(default)g",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.job.errors import EXIT_USAGE, WanmaError
    from wanma.job.run.profile_request import request_profile, trace_file
    from wanma.report.run_report import read_report

    chosen = resolve_run(arguments)
    report = read_report(chosen, tail_only=True)
    if report.state != "running":
        raise WanmaError(
            f"the run '{chosen.name}' is {report.state}", "profile a run that trains", EXIT_USAGE
        )
    world_size = report.starts[-1].get("world_size", 1) if report.starts else 1
    if unknown := [rank for rank in arguments.ranks if not 0 <= rank < world_size]:
        raise WanmaError(
            f"the run '{chosen.name}' has no rank {unknown[0]}",
            f"ranks are 0 to {world_size - 1}",
            EXIT_USAGE,
        )
    try:
        request = request_profile(chosen, arguments.steps, arguments.ranks)
    except OSError as error:
        raise WanmaError(
            f"{error.filename or chosen.path}: {error.strerror or error}",
            "profile it as a user who can write into the run directory",
            EXIT_USAGE,
        ) from error
    files = [trace_file(chosen, request.number, rank) for rank in request.ranks]
    print(f"profiling {request.steps} steps …", file=sys.stderr)
    _wait(chosen, files, arguments.timeout)
    for file in files:
        print(file)
    return 0


def _parse_steps(text: str) -> int:
    from wanma.job.run.profile_request import MAX_STEPS

    if (steps := parse_count(text)) > MAX_STEPS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {MAX_STEPS}")
    return steps


def _wait(run: RunDirectory, files: list[Path], seconds: float) -> None:
    """Wait for traces.

    Raises:
        WanmaError: the run has ended before, or the time is over.
    """
    from wanma.job.errors import WanmaError
    from wanma.report.run_report import read_report

    deadline = time.monotonic() + seconds
    next_look, state = 0.0, "running"
    while missing := [file.name for file in files if not file.exists()]:
        if state != "running":
            raise WanmaError(
                f"the run '{run.name}' is {state}, and {missing[0]} is missing", "profile a run that trains"
            )
        if time.monotonic() > deadline:
            raise WanmaError(
                f"no trace after {seconds:g} s: {missing[0]} is missing",
                "give the run directory that the nodes share; raise --timeout for long steps; the logs of "
                "ranks say whether a profile failed",
            )
        if time.monotonic() > next_look:
            state, next_look = read_report(run, tail_only=True).state, time.monotonic() + STATE_SECONDS
            continue  # the last trace may have come before the end
        time.sleep(POLL_SECONDS)
