"""Blocks of a comparison, of a reproduction, and of a list of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from wanma.bench.comparisons.comparison import ResultComparison
from wanma.bench.comparisons.reproduction import ReproducedFigure, Reproduction
from wanma.bench.figures.metrics import find_metric
from wanma.bench.figures.texts import (
    estimate_text,
    outcome_text,
    ratio_name,
    ratio_text,
    step_size_text,
)
from wanma.bench.presentation.blocks import Block
from wanma.bench.results.result import BenchmarkResult
from wanma.observe.units import MISSING_TEXT, count_text


def comparison_blocks(comparison: ResultComparison) -> Iterator[Block]:
    """Yield the differences of the conditions, and a table for each metric."""
    yield Block(
        f"{comparison.before.id} → {comparison.after.id}",
        notes=[str(one) for one in comparison.differences if not one.is_obstacle],
        warnings=[str(one) for one in comparison.differences if one.is_obstacle],
    )
    for name in dict.fromkeys(row.metric for row in comparison.rows):
        rows = []
        for row in comparison.rows:
            if row.metric == name:
                before = (comparison.before, row.contender)
                verdict = ["", step_size_text(comparison.after, row.contender, name, before)]
                if row.verdict is not None:
                    verdict = [ratio_text(row.verdict), outcome_text(name, row.verdict)]
                estimates = (estimate_text(name, estimate) for estimate in (row.before, row.after))
                rows.append([row.contender, *estimates, *verdict])
        columns = ("contender", "before", "after", ratio_name(name), "verdict")
        yield Block(find_metric(name).title, columns, rows)


def reproduction_blocks(figures: Sequence[ReproducedFigure]) -> Iterator[Block]:
    """Yield a row for each stored figure with its decision, and the counts of the decisions."""
    rows = []
    for figure in figures:
        title = find_metric(figure.metric).title
        if figure.is_ratio:
            title = f"{title}, {ratio_name(figure.metric)}"
        estimates = (
            MISSING_TEXT
            if one is None
            else str(one)
            if figure.is_ratio
            else estimate_text(figure.metric, one)
            for one in (figure.stored, figure.new)
        )
        rows.append([figure.contender, title, *estimates, figure.decision.value])
    yield Block("", ("contender", "metric", "stored", "new", "decision"), rows, left_count=2)
    counts = Counter(figure.decision for figure in figures)
    undecided = Counter(figure.reason for figure in figures if figure.decision is Reproduction.UNDECIDED)
    yield Block(
        ", ".join(f"{counts[decision]} {decision.value}" for decision in Reproduction),
        notes=[
            f"cannot tell: {reason} ({count_text(count, 'figure')})" for reason, count in undecided.items()
        ],
    )


def list_block(results: Iterable[BenchmarkResult]) -> Block:
    """Return a row for each result."""
    rows = [
        (
            result.id,
            result.title,
            result.suite.name,
            str(result.code.get("commit") or "")[:10],
            "" if result.ended else "not ended",
        )
        for result in results
    ]
    return Block("", ("id", "title", "suite", "commit", "state"), rows, left_count=5)
