"""Report on installations: seconds of each part, for the wheel and for a clone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import describe_environments, table, undisturbed

HEAD = """\
# Installation: from nothing to the first steps

**Wheel**: a new virtual environment, `pip install` of the wheel, `wanma init gpt`, `wanma train gpt.toml`; no
compiler, git or make is on the path. **Clone**: `git clone` and `make train` with the same job, which sets up
the environment of developers, with the packages of the tests. Both have an empty home folder, and pip finds
what it has downloaded before in its cache. Seconds, medians of the rounds.
"""
CONTENDERS = {"wheel": "wheel", "clone": "clone, `make train`"}
PARTS = ("install_seconds", "first_step_seconds", "all_seconds")


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    return "\n".join([HEAD, *map(_piece, measured), describe_environments(measured)])


def _piece(piece: dict[str, Any]) -> str:
    rounds = undisturbed(piece)
    rows = []
    for name, title in CONTENDERS.items():
        samples = [taken[name] for taken in rounds]
        seconds = (f"{median(sample[part] for sample in samples):.1f}" for part in PARTS)
        rows.append([title, *seconds, f"{samples[-1]['environment_bytes'] / 2**20:,.0f}"])
    header = ["from", "installed after", "end of step 1 after", "end of the command", "environment, MiB"]
    wheel, settings = piece["wheel"], piece["settings"]
    sizes = [wheel[f"{name}_bytes"] / 2**20 for name in ("wheel", "package", "library")]
    return (
        table(header, rows)
        + f"\n{len(rounds)} rounds of {settings['steps']} steps, in which other programs used at most "
        f"{settings['foreign_limit']:g} CPUs. The wheel of {wheel['commit']} has {sizes[0]:.1f} MiB, and "
        f"{sizes[1]:.1f} MiB when installed, of which {sizes[2]:.1f} MiB are {wheel['libraries']} compiled "
        f"libraries ({', '.join(wheel['levels'])}).\n"
    )
