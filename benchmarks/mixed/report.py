"""Report of the comparison on unlike ranks, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, table
from wanma.bench.statistics.estimates import estimate

GOAL = 0.9
"""Share of the ideal that planned and moving shares should reach; also the end of a recovery."""
RECOVERED_STEPS = 20
MEAN_STEPS = 3
"""Steps over which the speed of a recovery is averaged, because quota periods disturb single steps."""
TITLES = {
    "even": "even shares",
    "planned": "planned shares",
    "dynamic": "moving shares",
    "changed": "moving shares, the quota set in mid-run",
}

Piece = dict[str, Any]


def report(pieces: Sequence[Piece]) -> str:
    """Return all results as Markdown."""
    measured = [piece for piece in pieces if piece.get("turns")]
    if not measured:
        return "Nothing has been measured yet.\n"
    parts = [
        "# Mixed hardware: two ranks, one of them with a share of a core\n",
        "Tokens per second of one training on two ranks of a thread each. The ideal is the sum of two "
        "trainings of one rank each that run side by side under the same quota and exchange nothing. It "
        "lives beside each contender: the one makes a step, and then the other runs for as long, so that "
        "what slows the machine for longer slows both. Shares are planned so that both ranks take equally "
        "long, by what a sample and a step take each of them alone, and the ideal's samples are split so "
        f"too. Goal: {GOAL} of it.\n",
    ]
    for piece in measured:
        parts += [
            f"## The second rank has {piece['settings']['quota']} % of a core\n",
            _speeds(piece),
            _recoveries(piece),
        ]
    parts += ["## Where and when\n", describe_environments(measured)]
    return "\n".join(parts)


def summary(piece: Piece, contender: str) -> str:
    """Return one line with a contender's share of the ideal."""
    found = ratios(piece, contender)
    told = f"{estimate(found)} of the ideal, {len(found)} rounds" if found else "no undisturbed round yet"
    if contender == "changed":
        told += f"; recovered after {_listed(recoveries(piece))} steps"
    return f"  {contender}: {told}"


def ratios(piece: Piece, contender: str) -> list[float]:
    """Return a contender's tokens per second over the ideal's, for each undisturbed round."""
    return [
        taken["tokens_per_second"] / taken["ideal"]
        for run in piece["turns"].get(contender, [])
        for taken in run["rounds"]
        if not taken["disturbed"]
    ]


def recoveries(piece: Piece) -> list[int | None]:
    """Return the steps until the speed is `GOAL` of the ideal, for each undisturbed change; None: never."""
    tokens = piece["settings"]["batch"] * piece["settings"]["sequence"]
    return [steps_to_recover(run["steps"], tokens) for run in _changes(piece)]


def _changes(piece: Piece) -> list[dict[str, Any]]:
    return [
        run
        for run in piece["turns"].get("changed", [])
        if not any(step["disturbed"] for step in run["steps"])
    ]


def steps_to_recover(steps: Sequence[dict[str, float]], tokens: int) -> int | None:
    """Return the steps from a change to the first of `MEAN_STEPS` that reach `GOAL` of the ideal.

    Args:
        steps: steps from the one that follows the change.
        tokens: tokens per step.
    """
    for first in range(len(steps) - MEAN_STEPS + 1):
        some = steps[first : first + MEAN_STEPS]
        ideal = sum(step["seconds"] * step["ideal"] for step in some)
        if tokens * MEAN_STEPS >= GOAL * ideal:
            return first + 1
    return None


def _speeds(piece: Piece) -> str:
    rows = []
    for name, title in TITLES.items():
        if not (found := ratios(piece, name)):
            continue
        runs = piece["turns"][name]
        shares = runs[-1]["planned_shares"] if name == "planned" else ""
        moves = "; ".join(f"{step}: {shares}" for step, shares in runs[-1]["moves"]) or shares
        rows.append([title, str(estimate(found)), str(len(found)), str(len(runs)), str(moves)])
    header = ["", "of the ideal (95 %)", "rounds", "of runs", "shares of the last run, after step"]
    foreign = [
        one["foreign_cpu"] for runs in piece["turns"].values() for run in runs for one in run["rounds"]
    ]
    most = max(foreign, default=0.0)
    told = f"Beside it up to {most:.2f} CPUs did something else, in the mean of a round.\n"
    return f"{table(header, rows)}\n{told}"


def _recoveries(piece: Piece) -> str:
    if not (found := recoveries(piece)):
        return ""
    places = ", ".join(str(run["changed_after"]) for run in _changes(piece))
    return (
        f"Steps from the change of the quota, after {places} steps, until {GOAL} of the ideal, run by run: "
        f"{_listed(found)} (goal: {RECOVERED_STEPS}; the first of {MEAN_STEPS} that together reach it).\n"
    )


def _listed(found: Sequence[int | None]) -> str:
    return ", ".join("never" if steps is None else str(steps) for steps in found)
