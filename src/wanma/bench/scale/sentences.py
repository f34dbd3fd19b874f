"""Sentences about a curve of a scaling: its end, its knee, and the cause of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from wanma.bench.results.stored_study import CurvePoint, Interval, PartGrowth, StoredKnee
from wanma.observe.units import count_text, percent_text

MIN_SHARE = 0.15
"""Share of the added time from which on a part is named beside the largest."""


def curve_sentences(
    points: Sequence[CurvePoint], knee: StoredKnee | None, unit: str, limit: float, network: str
) -> list[str]:
    """Return the sentences about one curve.

    Args:
        network: network cards of a node in words; empty: unknown, or the curve stays within a node.
    """
    known = [point for point in points if point.speedup is not None]
    if not known:
        reasons = list(dict.fromkeys(point.reason for point in points if point.reason))
        return [f"No forecast: {reasons[0]}." if reasons else "No forecast."]
    sentences = []
    first, last = known[0], known[-1]
    if last is not first and last.speedup is not None and last.efficiency is not None:
        sentences.append(
            f"From {first.ranks:,} to {last.ranks:,} {unit}: speedup {interval_text(last.speedup)}, ideal "
            f"{number_of_digits(last.ideal, 4)}; efficiency {percent_text(last.efficiency.value)}."
        )
    if knee is None:
        if len(known) > 1:
            sentences.append(f"Efficiency stays at or above {_percent(limit)} up to {last.ranks:,} {unit}.")
        return sentences
    return [*sentences, *_knee_sentences(knee, unit, limit, network)]


def measured_sentences(
    points: Sequence[CurvePoint], parts: Mapping[int, Mapping[str, float]], unit: str, limit: float
) -> list[str]:
    """Return the sentence on the measured knee, and the part of the step that grows; empty: there is none.

    Args:
        parts: measured seconds of a step by ranks and part.
    """
    measured = [point for point in points if point.measured is not None and point.efficiency is not None]
    below = next((one for one in measured if one.efficiency and one.efficiency.value < limit), None)
    if below is None or below.efficiency is None:
        return []
    first = measured[0]
    text = f"Measured: on {below.ranks:,} {unit} efficiency is {_percent(below.efficiency.value)}"
    if first.forecast and below.forecast:
        text += f", by the forecasts {_percent(below.forecast / first.forecast / below.ideal)}"
    before, after = (
        {part: seconds * one.ranks / one.global_batch for part, seconds in parts.get(one.ranks, {}).items()}
        for one in (first, below)
    )
    if before and after:
        added = {part: after[part] - before.get(part, 0.0) for part in after}
        part = max(added, key=lambda name: added[name])
        shares = [_share(one.get(part, 0.0) / sum(one.values())) for one in (before, after)]
        text += (
            f"; {part} adds most: {shares[0]} of a step on {first.ranks:,}, {shares[1]} on {below.ranks:,}"
        )
    return [f"{text}."]


def _knee_sentences(knee: StoredKnee, unit: str, limit: float, network: str) -> Iterator[str]:
    if knee.efficiency is None:
        yield f"From {knee.ranks:,} {unit} on this layout has no plan: {knee.reason.rstrip('.')}."
        return
    yield (
        f"Knee: from {knee.ranks:,} {unit} on, efficiency is below {_percent(limit)}: throughput per "
        f"{unit.rstrip('s')} is {_percent(knee.efficiency)} of that on {knee.reference_ranks:,}."
    )
    yield from _causes(knee, network)


def _causes(knee: StoredKnee, network: str) -> Iterator[str]:
    """Yield sentences on the parts that add most, and on smaller micro-batches if compute is one of them."""
    total = sum(max(growth.added, 0.0) for growth in knee.growths)
    first, *others = knee.growths
    others = [growth for growth in others if growth.added >= MIN_SHARE * total]
    is_exchange = first.part.startswith("exposed") and "(" in first.part
    over = f", over a network of {network} per node" if network and is_exchange else ""
    text = (
        f"Cause: {first.part} {_growth(first)}{over}, which is {_percent(first.added / total)} of the time "
        "that is added per sample"
    )
    for growth in others:
        text += (
            f"; {growth.part} from {_share(growth.before)} to {_share(growth.after)} "
            f"({_percent(growth.added / total)})"
        )
    yield text + "."
    before, after = knee.micro_batches or (0, 0)
    if after < before and "compute" in {growth.part for growth in (first, *others)}:
        yield (
            f"Compute grows because micro-batches have {count_text(after, 'sample')} instead of {before}: "
            "smaller products use a device less."
        )


def _growth(growth: PartGrowth) -> str:
    """Return how a part takes more time per sample; if others grow more, its share of a step falls."""
    before, after = _share(growth.before), _share(growth.after)
    if growth.after < growth.before:
        return f"takes longer per sample, although it falls from {before} to {after} of a step"
    return f"grows from {before} to {after} of a step"


def _share(share: float) -> str:
    return percent_text(share) if share < 0.1 else _percent(share)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def number_of_digits(value: float, digits: int) -> str:
    """Return a positive number with so many significant digits, and never with an exponent."""
    decimals = max(0, digits - 1 - math.floor(math.log10(value))) if value > 0 else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def interval_text(interval: Interval) -> str:
    """Return a value with the ends of its interval; alone if it has none."""
    if interval.low == interval.high:
        return number_of_digits(interval.value, 4)
    low, high = (number_of_digits(end, 3) for end in (interval.low, interval.high))
    return f"{number_of_digits(interval.value, 4)} ({low}–{high})"
