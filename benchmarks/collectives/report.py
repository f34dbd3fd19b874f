"""Report on collectives: seconds over Gloo, speed-up over shared memory, and a plain copy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import describe_environments, table, undisturbed
from wanma.bench.statistics.estimates import Estimate, estimate

HEADER = (
    *("collective", "ranks", "MiB", "Gloo, ms", "staged, ms", "in place, ms"),
    *("Gloo / staged", "Gloo / in place", "one copy, ms"),
)


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the results of undisturbed rounds as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    rows = [row for piece in measured for row in _rows(piece)]
    return "\n".join(
        [
            "# Collectives between the processes of one machine\n",
            "fp32; medians of undisturbed rounds, and ratios within a round with their 95 % intervals. "
            "MiB: of one rank's buffer; of all_gather and reduce_scatter the whole, of which each rank has a "
            "part. One copy: of as many bytes, by each rank at the same time.\n",
            table(HEADER, rows),
            describe_environments(measured),
        ]
    )


def _rows(piece: dict[str, Any]) -> list[tuple[str, ...]]:
    settings, rounds = piece["settings"], [taken["measured"]["seconds"] for taken in undisturbed(piece)]
    rows = []
    for size in settings["mebibytes"]:
        samples = [each[f"{size:g}"] for each in rounds]
        rows.append(
            (
                settings["collective"],
                str(settings["ranks"]),
                f"{size:g}",
                *(_milliseconds(samples, name) for name in ("gloo", "staged", "in_place")),
                *(_ratio(samples, name) for name in ("staged", "in_place")),
                _milliseconds(samples, "copy"),
            )
        )
    return rows


def _milliseconds(samples: Sequence[dict[str, float]], name: str) -> str:
    return f"{1e3 * median(sample[name] for sample in samples):.3g}" if name in samples[0] else "–"


def _ratio(samples: Sequence[dict[str, float]], name: str) -> str:
    if name not in samples[0]:
        return "–"
    found: Estimate = estimate([sample["gloo"] / sample[name] for sample in samples])
    return str(found)
