"""Report on saves: stall of each contender beside a synchronous save, and its rate beside the disk's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import describe_environments, table, undisturbed
from wanma.bench.statistics.estimates import estimate

WANMA, SYNCHRONOUS, ASYNCHRONOUS, DISK = (
    "wanma",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.async_save",
    "write and fsync of the same bytes",
)
"""Contenders; the last one is the limit."""
HEAD = """\
# Checkpoints: what a save costs the training

**Stall**: time for which the slowest rank cannot go on training. **Durable**: from the call until all is on
the disk. Ratios are taken within a round, with their 95 % intervals: the stall over that of a synchronous
save, and the time of a plain write and fsync of the same bytes by each rank over the time until all is
durable.
"""


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the results of undisturbed rounds as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    command = "    python benchmarks/checkpoint/run.py\n"
    return "\n".join([HEAD, *map(_piece, measured), command, describe_environments(measured)])


def _piece(piece: dict[str, Any]) -> str:
    samples = [taken["measured"] for taken in undisturbed(piece)]
    rounds = [sample["seconds"] for sample in samples]
    rows = []
    for name in (WANMA, SYNCHRONOUS, ASYNCHRONOUS, DISK):
        stall, durable = (median(one[name][kind] for one in rounds) for kind in ("stall", "durable"))
        of_stall = estimate([one[name]["stall"] / one[SYNCHRONOUS]["stall"] for one in rounds])
        of_disk = estimate([one[DISK]["durable"] / one[name]["durable"] for one in rounds])
        is_limit = name == DISK
        rows.append(
            [
                name if name in (WANMA, DISK) else f"`{name}`",
                "–" if is_limit else f"{stall:.3f}",
                "–" if is_limit or name == SYNCHRONOUS else str(of_stall),
                f"{durable:.3f}",
                f"{samples[0]['bytes'] / durable / 1e9:.2f}",
                "–" if is_limit else str(of_disk),
            ]
        )
    settings = piece["settings"]
    header = ["", "stall, s", "of a synchronous save", "durable after, s", "GB/s", "of the disk's rate"]
    return (
        f"{samples[0]['bytes'] / 1e9:.2f} GB of state, {settings['ranks']} ranks; {len(rounds)} rounds of "
        f"new processes, in which other programs used at most {settings['foreign_limit']:g} CPUs.\n\n"
        + table(header, rows)
    )
