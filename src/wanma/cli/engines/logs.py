"""Command `wanma logs RUN`: output of a run, or of single ranks."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import add_run_arguments, parse_integers, resolve_run
from wanma.job.errors import JobError, WanmaError
from wanma.report.log_position import LogPosition

if TYPE_CHECKING:
    from wanma.report.log_times import LogPiece

POLL_SECONDS = 0.5
"""Interval, in seconds, at which followed files are read."""
LAST_FETCHES = 5
"""Times that the last lines of a run that is over are asked for."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "logs",
        help="print the output of a run, or of single ranks",
        epilog="examples:\n  wanma logs gpt -f\n  wanma logs gpt --rank 0,3 --since 10m --grep nan",
    )
    add_run_arguments(parser)
    parser.add_argument("--rank", metavar="RANKS", type=parse_integers, help="ranks, e.g. 0,3")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run is over")
    parser.add_argument(
        "--grep", metavar="PATTERN", help="only lines in which this regular expression is found"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only lines since then: 30s, 10m, 2h ago, or 2026-11-28T18:00; with --rank",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import is_going_on, run_log_files, run_statuses
    from wanma.cli.engines.records import warn_about_records
    from wanma.report.log_times import LogPiece, log_pieces

    run = resolve_run(arguments, allow_scripts=True)
    pattern, since = _options(arguments)
    printer = _LinePrinter(pattern, is_named=arguments.rank is not None and len(arguments.rank) > 1)
    known_problems: list[str] = []
    problem, no_output, state, fetches = "", "", None, 0
    while True:
        is_over = True
        was_lost = state == "unknown" and not problem  # the hosts answered, and the run was not there
        if arguments.follow:
            statuses, problems = run_statuses([run])
            state = statuses[run.path].state if run.path in statuses else None
            # What does not answer is asked again: the engine, or below the hosts of the run.
            is_over = not problems and not is_going_on(run, state)
            if problems and problems != known_problems:
                print(*problems, sep="\n", file=sys.stderr)
            known_problems = problems
        problem = warn_about_records(run, problem)
        if is_over and state == "unknown":  # a host that was silent may answer by now
            is_over = was_lost and not problem
        elif is_over and problem:  # the last lines are elsewhere
            fetches += 1
            is_over = not arguments.follow or fetches == LAST_FETCHES
        try:
            files = run_log_files(run, arguments.rank)
        except WanmaError as error:
            if is_over:
                raise
            if error.message != no_output:
                print(f"{error.message}; waiting", file=sys.stderr)
            files, no_output = [], error.message
        pieces = [LogPiece(path, 0, None) for path in files]
        if files and not printer.positions and arguments.rank is not None:
            pieces = log_pieces(run, arguments.rank, since)
        for piece in pieces:
            printer.print_piece(piece, is_last=is_over)
        if is_over:
            return 0
        time.sleep(POLL_SECONDS)


def _options(arguments: argparse.Namespace) -> tuple[re.Pattern[str] | None, float]:
    """Return the pattern of the lines, and the unix time from which they are wanted.

    Raises:
        JobError: the pattern or the time cannot be read, or lines of the console are to be chosen by time.
    """
    from wanma.report.log_times import parse_since

    try:
        pattern = re.compile(arguments.grep) if arguments.grep else None
    except re.error as error:
        raise JobError(f"--grep {arguments.grep}: {error}", "give a regular expression of Python") from None
    if arguments.since and arguments.rank is None:
        raise JobError("--since: only lines of ranks have times", "give --rank, for example --rank 0")
    return pattern, parse_since(arguments.since) if arguments.since else 0.0


class _LinePrinter:
    """Printer of lines.

    Args:
        pattern: regular expression that a line must contain; None: any.
        is_named: True if each line begins with the name of its log.
    """

    def __init__(self, pattern: re.Pattern[str] | None, *, is_named: bool) -> None:
        self._pattern, self._is_named = pattern, is_named
        self._prints_parts = pattern is None and not is_named
        self.positions: dict[Path, LogPosition] = {}
        """Position in each log of the first byte that was not printed."""

    def print_piece(self, piece: LogPiece, *, is_last: bool) -> None:
        """Print the lines that begin in a piece of a log, and were not printed.

        Args:
            is_last: True if nothing is printed later: then also a line that has no end.
        """
        with piece.path.open("rb") as file:
            if (printed := self.positions.get(piece.path)) is not None:
                printed.seek(file)
            elif piece.begin:  # which may be in the middle of a line
                file.seek(piece.begin - 1)
                file.readline()
            offset = file.tell()
            while (piece.end is None or offset < piece.end) and (line := file.readline()):
                is_whole = line.endswith(b"\n")
                if not (is_whole or self._prints_parts or is_last):
                    break
                self._print(piece.path.stem, line.decode(errors="replace"), is_whole=is_whole)
                offset = file.tell()
            self.positions[piece.path] = LogPosition.at(file, offset)
        sys.stdout.flush()

    def _print(self, name: str, line: str, *, is_whole: bool) -> None:
        if self._pattern is None or self._pattern.search(line):
            prefix, suffix = (f"{name}: ", "" if is_whole else "\n") if self._is_named else ("", "")
            sys.stdout.write(prefix + line + suffix)
