"""Report on carried libraries: speed of each level relative to a library compiled for this processor."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import describe_environments, table, undisturbed
from wanma.bench.statistics.estimates import estimate

HEAD = """\
# Compiled libraries of the wheel

Collectives of two ranks over shared memory, and the int8 codec: with the libraries that the wheel carries for
each instruction set, and with those compiled on this node (`-march=native`). Milliseconds: medians of rounds,
natively compiled. Ratios: speed of the carried library relative to that, within a round; medians with their
95 % intervals.

A node uses the best level that it has, here the first column. The others are for older processors, on which a
compiler has no better instructions either.
"""
COMMAND = "make wheel && python benchmarks/libraries/run.py"


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the results of undisturbed rounds as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    limit = max((piece["settings"]["foreign_limit"] for piece in measured), default=0)
    return "\n".join(
        [
            HEAD,
            *(line for piece in measured for line in _piece(piece)),
            f"- command: `{COMMAND} --foreign-limit {limit:g}`: rounds in which other programs used at most "
            "that many CPUs; the libraries take turns of 0.05 s",
            describe_environments(measured),
        ]
    )


def _piece(piece: dict[str, Any]) -> list[str]:
    rounds = [taken["measured"]["seconds"] for taken in undisturbed(piece)]
    levels = [name for name in next(iter(rounds[0].values())) if name != "native"]
    rows, ratios = [], dict[str, list[float]]()
    for case in rounds[0]:
        samples = [taken[case] for taken in rounds]
        row = [*case.split("|"), f"{1e3 * median(sample['native'] for sample in samples):.3g}"]
        for level in levels:
            values = [sample["native"] / sample[level] for sample in samples]
            ratios.setdefault(level, []).append(median(values))
            row.append(str(estimate(values)))
        rows.append(row)
    summary = ", ".join(f"{level} {median(ratios[level]):.2f}" for level in levels)
    return [
        f"Median ratio of all cases: {summary}; {len(rounds)} rounds.\n",
        table(["operation", "elements", "MiB", "native, ms", *levels], rows),
    ]
