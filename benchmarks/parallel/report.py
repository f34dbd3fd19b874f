"""Report of the comparison by mesh dimensions, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.common import (
    Piece,
    describe_environments,
    ratios,
    rounds_text,
    sample_values,
    table,
    undisturbed,
    verdict,
)
from benchmarks.parallel.axes import AXES
from benchmarks.parallel.contenders import COMPARED_STEPS, Setting
from benchmarks.parallel.context import Traffic
from wanma.bench.statistics.estimates import estimate

GOAL = 0.97
"""Goal for the interval of the ratio."""
LOSS_LIMITS = {"fp32": 1e-3, "bf16": 5e-2}
"""Maximum relative difference of a step's loss that still counts as the same training."""


def report(pieces: Sequence[Piece]) -> str:
    """Return all results, without the pieces that have no undisturbed pair yet."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    bubbles = [piece for piece in measured if "bubble" in piece["settings"]]
    axes = [piece for piece in measured if "axis" in piece["settings"]]
    context = [piece for piece in axes if AXES[piece["settings"]["axis"]].context]
    beside = [piece for piece in axes if piece not in context]
    parts = ["# Parallel plans beside their recipes in plain torch\n"]
    if axes:
        parts.append(_PREFACE)
    parts += [_ratios(group) for group in _groups(beside)]
    if context:
        parts.append(_CONTEXT)
        parts += [_context(group) for group in _groups(context)]
    if bubbles:
        parts += [_BUBBLES, _bubbles(bubbles)]
    if beside:
        parts += ["## Losses of the first pair\n", _losses(beside), "## Whose recipes\n", _sources(beside)]
    parts += ["## Commands\n", _commands(measured), "## Where and when\n", describe_environments(measured)]
    return "\n".join(parts)


_PREFACE = f"""\
Ratio: wanma's tokens per second over the other's, median of the pairs with its 95 % bootstrap interval; the
goal is an interval not below {GOAL}. Verdict: that of `wanma bench` on the pairs, with an error rate of 5 %.
Tokens per second: medians. Loss difference: the largest relative one of any step; in turns, of the first
{COMPARED_STEPS}. In turns: both contenders live at once, and each is stopped while the other runs; a pair is
one execution of both (of before 2026-11-27: 10 s of both).
"""
_CONTEXT = """\
## Context parallel beside the unsharded step

wanma on several ranks beside wanma in one process with the same cores. Evenly split work would take as long,
plus the communication that is not hidden: the theory lies between 1, and the unsharded step's time over the
same plus all messages one after the other, each timed alone on this machine.
"""
_BUBBLES = """\
## Bubbles of wanma's pipelines

Share of a step, between the first forward and the last backward, in which ranks wait. Theory: even stages,
backward twice the forward, free messages (`bubble_fraction` of `benchmarks.parallel.bubble_runs`). Replayed:
what the ranks did, in their order, for the CPU seconds that it took, had each a core and were messages free:
it differs from the theory by uneven stages and a backward that is not twice the forward. Measured: by the
clock; – where there were more ranks than cores, for they then take each other's. Unevenness: CPU seconds of
the busiest rank over the mean.
"""


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces that share a table: same ranks, precision and other sizes."""
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        settings = piece["settings"]
        own = ("axis", "preset", "heads", "micro_batches", "cuts")
        groups.setdefault(tuple(v for k, v in settings.items() if k not in own), []).append(piece)
    return [
        sorted(group, key=lambda piece: list(AXES).index(piece["settings"]["axis"]))
        for group in groups.values()
    ]


def _ratios(pieces: Sequence[Piece]) -> str:
    rows = [
        [_title(piece), _model(piece), *_speeds(piece), *_ratio(piece), _stated_difference(piece)]
        for piece in pieces
    ]
    header = [
        "axis",
        "model",
        "wanma, tokens/s",
        "plain torch, tokens/s",
        "ratio (95 %)",
        "verdict",
        f"≥ {GOAL}",
        "pairs",
        "loss difference",
    ]
    return f"## {_describe(pieces[0])}\n\n{table(header, rows)}"


def _context(pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in pieces:
        setting = Setting(**piece["settings"])
        traffic = Traffic.of(setting)
        alone = setting.batch * setting.sequence / statistics.median(sample_values(piece, "peer"))
        messages = traffic.seconds(piece["link"])
        rows.append(
            [
                _title(piece),
                _model(piece),
                *_speeds(piece),
                str(estimate(ratios(piece))),
                f"{alone / (alone + messages):.2f}–1",
                f"{traffic.bytes_in_attention / 1e6:.1f} + {traffic.reduce / 1e6:.1f}",
                rounds_text(piece),
                _stated_difference(piece),
            ]
        )
    header = [
        "axis",
        "model",
        "wanma, tokens/s",
        "unsharded, tokens/s",
        "ratio (95 %)",
        "theory",
        "MB sent per rank and step: attention + gradients",
        "pairs",
        "loss difference",
    ]
    return f"### {_describe(pieces[0])}\n\n{table(header, rows)}"


def _bubbles(pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in sorted(pieces, key=lambda piece: piece["settings"]["ranks"]):
        settings, runs = piece["settings"], [taken["wanma"] for taken in undisturbed(piece)]
        shares = [_share([run[kind] for run in runs]) for kind in ("theory", "replayed", "measured")]
        rows.append(
            [
                settings["bubble"],
                str(settings["ranks"]),
                str(settings["micro_batches"]),
                *shares,
                f"{statistics.median(run['unevenness'] for run in runs):.2f}",
                str(len(runs)),
            ]
        )
    first = pieces[0]["settings"]
    header = ["schedule", "ranks", "micro-batches", "theory", "replayed", "measured", "unevenness", "runs"]
    return (
        f"`{first['preset']}` with {first['layers']} blocks, fp32, micro-batches of one sequence of "
        f"{first['sequence']}; medians of {first['steps']} steps of each run.\n\n{table(header, rows)}"
    )


def _share(values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    return f"{statistics.median(present):.1%}" if present else "–"


def _title(piece: Piece) -> str:
    title = AXES[piece["settings"]["axis"]].title
    return title + (", same stages" if piece["settings"]["cuts"] == "same" else "")


def _model(piece: Piece) -> str:
    settings = piece["settings"]
    heads = f", {settings['heads']} heads" if settings["heads"] else ""
    several = f", {settings['micro_batches']} micro-batches" if settings["micro_batches"] > 1 else ""
    return f"`{settings['preset']}`{heads}{several}"


def _speeds(piece: Piece) -> list[str]:
    return [f"{statistics.median(sample_values(piece, who)):,.0f}" for who in ("wanma", "peer")]


def _ratio(piece: Piece) -> list[str]:
    found = estimate(ratios(piece))
    is_met = found.low >= GOAL and _is_same_training(piece)
    goal = "too few pairs" if not found.has_interval else "yes" if is_met else "no"
    return [str(found), verdict(piece).outcome, goal, rounds_text(piece)]


def _loss_difference(piece: Piece) -> float:
    """Return the largest relative difference between the contenders' losses, over all steps and pairs."""
    return max(
        abs(float(ours) - float(theirs)) / abs(float(theirs))
        for taken in piece["pairs"]
        for ours, theirs in zip(taken["wanma"]["losses"], taken["peer"]["losses"], strict=True)
    )


def _is_same_training(piece: Piece) -> bool:
    return _loss_difference(piece) <= LOSS_LIMITS[piece["settings"]["precision"]]


def _stated_difference(piece: Piece) -> str:
    return f"{_loss_difference(piece):.1e}" + ("" if _is_same_training(piece) else " NOT THE SAME TRAINING")


def _describe(piece: Piece) -> str:
    settings = piece["settings"]
    turns = f", in turns of {settings['turn_seconds']:g} s" if settings.get("turn_seconds") else ""
    return (
        f"{settings['ranks']} ranks, {settings['precision']}: {settings['batch']} × {settings['sequence']} "
        f"tokens per step, vocabulary {settings['vocabulary']:,}, {settings['steps']} steps after "
        f"{settings['warmup']}{turns}"
    )


def _losses(pieces: Sequence[Piece]) -> str:
    """Return the losses side by side, at the first, a middle and the last step."""
    rows = []
    for piece in pieces:
        for name, who in (("wanma", "wanma"), ("plain torch", "peer")):
            losses = piece["pairs"][0][who]["losses"]
            shown = [f"{losses[step]:.6f}" for step in (0, len(losses) // 2, -1)]
            rows.append([_title(piece), str(piece["settings"]["ranks"]), name, *shown])
    return table(["axis", "ranks", "", "first step", "middle", "last"], rows)


def _sources(pieces: Sequence[Piece]) -> str:
    chosen = dict.fromkeys(piece["settings"]["axis"] for piece in pieces)
    return "".join(f"- {AXES[axis].title}: {AXES[axis].source}\n" for axis in AXES if axis in chosen)


def _commands(pieces: Sequence[Piece]) -> str:
    lines: dict[str, None] = {}
    for piece in pieces:
        lines |= dict.fromkeys(piece["commands"].values())
    listed = "".join(f"    {line}\n" for line in lines)
    return f"{listed}\nA `job.toml`:\n\n```toml\n{pieces[0]['job']}```\n"
