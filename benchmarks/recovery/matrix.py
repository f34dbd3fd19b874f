"""Fault matrix: runs the tests that inject faults into real runs, and tabulates the cost of each.

    python benchmarks/recovery/matrix.py --fresh --full --random 5 --write    # into recovery-faults.md
    python benchmarks/recovery/matrix.py -k "SIGKILL"                   # some of it, measured anew

A test that has asserted that a run recovered from its fault, with the weights of an untroubled one, records
the cost (tests/support/fault_table.py). The rows are kept from run to run, so that the table can be made in
pieces. Nothing is kept or written if a test fails or is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import RESULTS, ROOT, table
from benchmarks.recovery.page import PAGE, where_and_when, write

MARKER = "faults"
KEPT = RESULTS / "recovery-faults.json"
COMMAND = "python benchmarks/recovery/matrix.py --fresh --full --random 5 --write"
SAME_BITS = "same bits"

Row = Mapping[str, Any]


class Rows:
    """Plugin of pytest that collects the rows of tests."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.missing: list[str] = []
        """Tests that failed or were skipped."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.missing.append(report.nodeid)
        elif report.when == "call":
            properties: list[tuple[str, Any]] = report.user_properties
            self.rows += [value for name, value in properties if name == "fault"]


def main() -> int:
    options = parse()
    seeds = [random.SystemRandom().randrange(10_000) for _ in range(options.random)]
    if seeds:
        os.environ["WANMA_FAULT_SEEDS"] = " ".join(map(str, seeds))
    arguments = [*options.tests, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    arguments += ["--exhaustive" if options.full else "--full"]
    arguments += ["-k", options.k] if options.k else []
    os.chdir(ROOT)
    found = Rows()
    code = int(pytest.main(arguments, plugins=[found]))
    if code or found.missing:
        why = ", ".join(found.missing) or f"pytest ended with code {code}"
        print(f"{matrix(found.rows)}\nnothing is kept: {why}", file=sys.stderr)
        return code or 1
    kept = [] if options.fresh or not KEPT.exists() else json.loads(KEPT.read_text())
    rows = merged(kept, found.rows)
    KEPT.write_text("".join(("[\n", ",\n".join(json.dumps(row) for row in rows), "\n]\n")))
    text = f"{matrix(rows)}\n{len(rows)} runs; {where_and_when()}:\n\n    {COMMAND}\n"
    print(f"\n{text}")
    if options.write:
        write(text, MARKER)
    return 0


def merged(kept: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Merge rows; a repeated fault has its newest row, in its old place."""
    rows = {(row["fault"], row["plan"]): row for row in (*kept, *new)}
    return list(rows.values())


def matrix(rows: Sequence[Row]) -> str:
    """Return a table with a line per fault and a column per plan, both in the order of the tests."""
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    cells = {(row["fault"], row["plan"]): cell(row) for row in rows}
    lines = [[fault, *(cells.get((fault, plan), "") for plan in plans)] for fault in faults]
    return table(["fault", *plans], lines)


def cell(row: Row) -> str:
    """Return the cost of one fault under one plan."""
    if row["seconds"] is None and row["restored"]:
        text = f"run ends; {row['repeated_steps']}, {row['restored']}"
    elif row["seconds"] is None:
        text = "no recovery needed"
    else:
        text = f"{row['seconds']:.2f} s, {row['repeated_steps']}, {row['restored']}"
    return text if row["weights"] == SAME_BITS else f"{text}; {row['weights']}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=["tests/faults"], help="default: tests/faults")
    parser.add_argument("--fresh", action="store_true", help="forget the rows of earlier runs")
    parser.add_argument("--full", action="store_true", help="also the plans that take four ranks")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N runs with faults drawn anew")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("-k", metavar="WORDS", help="only tests with these words, as pytest has it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
