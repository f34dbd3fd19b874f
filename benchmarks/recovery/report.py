"""Report on failures as Markdown: cost of a rank's death, and of in-memory checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, sample_values, table, undisturbed
from benchmarks.recovery.contenders import PARTS
from wanma.bench.statistics.estimates import Estimate, estimate

GOAL_SECONDS, GOAL_RATIO, GOAL_OVERHEAD, GOAL_SUPERVISOR = 1.0, 0.5, 0.01, 0.005
OURS = "wanma-1"

Piece = dict[str, Any]


def report(pieces: Sequence[Piece]) -> str:
    """Return all results, without the pieces that have no undisturbed round yet."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    killed = [piece for piece in measured if piece["settings"]["kill_after"]]
    copied = [piece for piece in measured if piece["settings"]["part"] == "in-memory"]
    watched = [piece for piece in measured if piece["settings"]["part"] == "supervisor"]
    parts = ["# Cost of a failure\n"]
    if killed:
        parts.append(_PREFACE)
    for piece in sorted(killed, key=lambda piece: (piece["settings"]["ranks"], piece["settings"]["part"])):
        parts += [f"## One of {piece['settings']['ranks']} ranks is killed{_beside(piece)}\n", _costs(piece)]
        if piece["settings"]["part"] == "torchft":
            parts.append(_losses(piece))
    if copied:
        parts += ["## Cost of in-memory checkpoints\n", _OVERHEAD, *(_overhead(piece) for piece in copied)]
    if watched:
        parts += [
            "## CPU time of the supervisor\n",
            _SUPERVISION,
            *(_supervision(piece) for piece in watched),
        ]
    commands = dict.fromkeys(line for piece in measured for line in piece["commands"].values())
    return "\n".join(
        [
            *parts,
            "## Commands\n",
            "".join(f"    {line}\n" for line in commands),
            f"A `job.toml`:\n\n```toml\n{measured[0]['job']}```\n",
            "## Hardware and date\n",
            describe_environments(measured),
        ]
    )


_PREFACE = f"""\
SIGKILL to the process of the last rank, half a step after a fixed one. New step: seconds from the signal to
the end of the first optimizer step that had not been finished before. Any step: seconds to the end of the
first one after the failure, a repeated one where steps are repeated. Medians of the rounds, new step with its
95 % bootstrap interval, repeated steps with their range. Ratio: seconds to a new step of wanma with an
in-memory checkpoint every step over the contender's, within a round. Same weights: whether weights and
optimizer state at the end are, bit for bit, those of the same contender's run without a kill. Step: the
median before the kill.

Goals for wanma with an in-memory checkpoint every step: {GOAL_SECONDS:g} s or less to a new step, no step
repeated, and {GOAL_RATIO:g} or less of torchrun's seconds.
"""
_OVERHEAD = f"""\
No rank is killed. Seconds per step over the same steps of each run, all that happens in them included. Cost
of one: additional time of a step with an in-memory checkpoint over its two neighbors without, the median of
all; the overhead is that cost over the interval. Complete runs: the run with in-memory checkpoints beside the
one without of the same round, minutes apart. With "auto" the run selects the interval, such that in-memory
checkpoints take {GOAL_OVERHEAD:.0%} of the time or less by its own clocks.
"""

_SUPERVISION = f"""\
No rank is killed. CPU time of the processes beside the ranks over the measured steps, as a share of one
core during that time. Goal: {GOAL_SUPERVISOR:.1%} or less of both.
"""


def _beside(piece: Piece) -> str:
    return ", beside torchft" if piece["settings"]["part"] == "torchft" else ""


def _costs(piece: Piece) -> str:
    part = piece["settings"]["part"]
    ours = sample_values(piece, OURS, "new_step_seconds")
    rows = []
    for name, contender in PARTS[part].items():
        seconds = sample_values(piece, name, "new_step_seconds")
        ratio = [mine / theirs for mine, theirs in zip(ours, seconds, strict=True)]
        rows.append(
            [
                contender.title,
                str(estimate(seconds)),
                f"{_middle(piece, name, 'first_step_seconds'):.2f}",
                _count(sample_values(piece, name, "repeated_steps")),
                "" if name == OURS else str(estimate(ratio)),
                _same(piece, name),
                f"{1000 * _middle(piece, name, 'step_seconds'):.0f}",
            ]
        )
    header = [
        *("contender", "new step, s (95 %)", "any step, s", "steps repeated", "ratio (95 %)"),
        *("same weights", "step, ms"),
    ]
    return f"{_describe(piece)}\n\n{table(header, rows)}"


def _losses(piece: Piece) -> str:
    """Return the text on torchft's losses, which it accepts instead of repeating steps."""
    whole = [taken["torchft"]["whole_again_seconds"] for taken in undisturbed(piece)]
    back = [seconds for seconds in whole if seconds is not None]
    rejoined = f"after {statistics.median(back):.2f} s" if back else "before the end in no run"
    lost = ("discarded_steps", "lost_samples")
    discarded, samples = (_count(sample_values(piece, "torchft", key)) for key in lost)
    with_kill, without = (_middle(piece, "torchft", key) for key in ("final_loss", "final_loss_untroubled"))
    return (
        f"torchft repeats nothing: it discarded {discarded} computed steps and continued without {samples} "
        f"samples of the data; all replicas took part again {rejoined}. Loss of the last step "
        f"{with_kill:.6f}, without a kill {without:.6f}.\n"
    )


def _overhead(piece: Piece) -> str:
    rows = []
    without = sample_values(piece, "off", "step_seconds")
    for name in PARTS["in-memory"]:
        seconds = sample_values(piece, name, "step_seconds")
        whole = estimate([taken / base - 1 for taken, base in zip(seconds, without, strict=True)])
        rows.append(
            [
                _interval(piece, name),
                f"{1000 * statistics.median(seconds):.1f}",
                *_copies(piece, name),
                "" if name == "off" else _share(whole),
                _same(piece, name),
            ]
        )
    header = [
        *("interval, steps", "step, ms", "cost of one, of a step (95 %)", "overhead (95 %)"),
        *("complete runs (95 %)", "same weights"),
    ]
    return f"{_describe(piece)}\n\n{table(header, rows)}"


def _copies(piece: Piece, name: str) -> tuple[str, str]:
    """Return the cost of an in-memory checkpoint as a share of a step, and of all steps."""
    if name == "off":
        return "", ""
    copies, shares = [], []
    for taken in undisturbed(piece):
        every = taken["auto"]["every"] if name == "auto" else int(name)
        copies += taken[name]["copies"]
        shares += [copy / every for copy in taken[name]["copies"]]
    return (_share(estimate(copies)), _share(estimate(shares), 2)) if copies else ("–", "–")


def _share(found: Estimate, digits: int = 1) -> str:
    return found.text(f"+.{digits}%", " to ")


def _supervision(piece: Piece) -> str:
    (name,) = PARTS["supervisor"]
    taken = [one[name]["processor"] for one in undisturbed(piece)]
    shares = {process: [one[process] for one in taken] for process in taken[0]}
    shares["both"] = [sum(one.values()) for one in taken]
    rows = []
    for process, values in shares.items():
        rows.append([process, estimate(values).text(".2%", " to ")])
    step = f"A step takes {1000 * _middle(piece, name, 'step_seconds'):.0f} ms."
    return f"{_describe(piece)} {step}\n\n{table(['process', 'share of a core (95 %)'], rows)}"


def _interval(piece: Piece, name: str) -> str:
    if name != "auto":
        return "none in memory" if name == "off" else name
    chosen = [taken["auto"]["every"] for taken in undisturbed(piece)]
    return f"auto: {_count([float(every) for every in chosen if every is not None])}"


def _middle(piece: Piece, name: str, key: str) -> float:
    return float(statistics.median(sample_values(piece, name, key)))


def _count(values: Sequence[float]) -> str:
    """Return a median and, if the values differ, the range."""
    if not values:
        return "–"
    least, most = min(values), max(values)
    return f"{statistics.median(values):g}" + (f" ({least:g}–{most:g})" if least < most else "")


def _same(piece: Piece, name: str) -> str:
    same = [taken[name]["same_weights"] for taken in undisturbed(piece)]
    if all(same):
        return "yes"
    return f"in {sum(same)} of {len(same)}" if any(same) else "no"


def _describe(piece: Piece) -> str:
    settings = piece["settings"]
    rounds, dropped = len(undisturbed(piece)), len(piece["pairs"]) - len(undisturbed(piece))
    hidden, layers = settings["hidden"], settings["layers"]
    when = f"killed after step {settings['kill_after']} of {settings['steps']}"
    if not settings["kill_after"]:
        when = f"{settings['steps'] - settings['warmup'] - 1} steps after {settings['warmup']}"
    disturbed = f" ({dropped} disturbed)" if dropped else ""
    return (
        f"{settings['ranks']} ranks, {layers} blocks of width {hidden} in fp32, {settings['batch']} samples "
        f"of {settings['sequence']} tokens per step; {when}; {rounds} rounds{disturbed}."
    )
