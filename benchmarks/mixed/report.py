"""The results of the comparison on unlike ranks as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, estimate, table, undisturbed

GOAL = 0.9
"""Of the ideal, what planned and moving shares are to reach; and when a change counts as recovered from."""
RECOVERED_STEPS = 20
MEAN_STEPS = 3
"""Over so many steps the speed is taken that says so: a quota is given out in periods, which single steps
feel."""
TITLES = {
    "even": "even shares",
    "planned": "planned shares",
    "dynamic": "moving shares",
    "changed": "moving shares, the quota set in mid-run",
}

Piece = dict[str, Any]


def report(pieces: Sequence[Piece]) -> str:
    """All that was measured."""
    measured = [piece for piece in pieces if undisturbed(piece) or piece.get("turns")]
    if not measured:
        return "Nothing has been measured yet.\n"
    parts = [
        "# Mixed hardware: two ranks, one of them with a share of a core\n",
        "Tokens per second of one training on two ranks of a thread each. The ideal is the sum of two "
        "trainings of one rank each that run side by side under the same quota and exchange nothing, in the "
        "same round. Shares are planned so that both ranks take equally long, by what a sample and a step "
        f"take each of them alone, and the ideal's samples are split so too. Goal: {GOAL} of it.\n",
    ]
    for piece in measured:
        setting = piece["settings"]
        parts.append(f"## The second rank has {setting['quota']} % of a core\n")
        if undisturbed(piece):
            parts += [_speeds(piece), _recoveries(piece)]
        if piece.get("turns"):
            parts.append(_in_turns(piece))
    parts += ["## Where and when\n", describe_environments(measured)]
    return "\n".join(parts)


def summary(piece: Piece) -> str:
    """One line of ratios to the ideal."""
    if not undisturbed(piece):
        return "  no undisturbed round yet"
    shown = [f"{name} {estimate(found)}" for name in TITLES if (found := ratios(piece, name))]
    return f"  of the ideal: {', '.join(shown)}; recovered after {recoveries(piece)} steps"


def ratios(piece: Piece, contender: str) -> list[float]:
    """Of a contender's tokens per second to the ideal's, round by round of those that had it."""
    return [
        taken[contender]["tokens_per_second"] / taken["apart"]["tokens_per_second"]
        for taken in undisturbed(piece)
        if contender in taken
    ]


def recoveries(piece: Piece) -> list[int | None]:
    """Of every round, steps from the change of the quota until the speed is `GOAL` of the ideal; None:
    never."""
    return [
        steps_to_recover(taken["changed"], GOAL * taken["apart"]["tokens_per_second"])
        for taken in undisturbed(piece)
        if "changed" in taken
    ]


def in_turns_text(piece: Piece, name: str) -> str:
    """A contender's part of the ideal, stopped in turns with it."""
    rounds = _quiet(piece, name)
    if not rounds:
        return "no undisturbed round yet"
    found = estimate([one[name]["tokens_per_second"] / one["apart"]["tokens_per_second"] for one in rounds])
    shares = sorted({str(one[name]["planned_shares"]) for one in rounds})
    planned = f", shares {' or '.join(shares)}" if name == "planned" else ""
    return f"{found} of {len(rounds)} rounds{planned}"


def _in_turns(piece: Piece) -> str:
    told = "; ".join(f"{TITLES[name]} {in_turns_text(piece, name)}" for name in piece["turns"])
    return (
        "Of the ideal, both alive at once and stopped in turns, so that what slows the machine for longer "
        f"slows both: {told}.\n"
    )


def _quiet(piece: Piece, name: str) -> list[dict[str, Any]]:
    return [
        one
        for one in piece["turns"].get(name, [])
        if not any(isinstance(sample, dict) and sample["disturbed"] for sample in one.values())
    ]


def steps_to_recover(sample: dict[str, Any], wanted: float) -> int | None:
    """Steps after the quota's change, up to the first of `MEAN_STEPS` that reach `wanted` tokens per second.

    The first of them fell under the change in its midst.
    """
    after = sample["step_seconds"][sample["changed_after"] + 1 : -1]
    for first in range(len(after) - MEAN_STEPS + 1):
        mean = sum(after[first : first + MEAN_STEPS]) / MEAN_STEPS
        if sample["step_tokens"] / mean >= wanted:
            return first + 1
    return None


def _speeds(piece: Piece) -> str:
    rounds = undisturbed(piece)
    rows = [
        ["ideal", f"{estimate([one['apart']['tokens_per_second'] for one in rounds]).median:,.0f}", "", ""]
    ]
    for name, title in TITLES.items():
        if not (own := [one[name] for one in rounds if name in one]):
            continue
        speeds = estimate([sample["tokens_per_second"] for sample in own])
        moves = "; ".join(f"{step}: {shares}" for step, shares in own[-1]["moves"])
        rows.append([title, f"{speeds.median:,.0f}", str(estimate(ratios(piece, name))), moves or "–"])
    header = ["", "tokens/s, median", "of the ideal (95 %)", "moves of the last round, after step: shares"]
    return table(header, rows)


def _recoveries(piece: Piece) -> str:
    if not (found := recoveries(piece)):
        return ""
    told = ", ".join("never" if steps is None else str(steps) for steps in found)
    return (
        f"Steps from the change of the quota in mid-run until {GOAL} of the ideal, round by round: {told} "
        f"(goal: {RECOVERED_STEPS}; means of {MEAN_STEPS} steps).\n"
    )
