"""Terminal tables of results, comparisons and reproductions, 80 columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from wanma.bench.comparisons.comparison import ResultComparison
from wanma.bench.comparisons.reproduction import ReproducedFigure, Reproduction
from wanma.bench.figures.breakdown import (
    BREAKDOWN_NOTE,
    StepBreakdown,
    part_names,
    step_breakdowns,
    time_texts,
)
from wanma.bench.figures.metrics import find_metric
from wanma.bench.figures.texts import (
    definition_text,
    detectable_text,
    estimate_text,
    metric_note,
    outcome_text,
    ratio_name,
    ratio_text,
)
from wanma.bench.place import PACKAGES
from wanma.bench.presentation.result_tables import sections, summary_metrics
from wanma.bench.results.hardware_identity import hardware_identity
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.verdicts import Outcome, Verdict
from wanma.observe.units import MISSING_TEXT, count_text, duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

OUTCOME_STYLES = {Outcome.FASTER: "green", Outcome.SLOWER: "red", Outcome.CANNOT_TELL: "dim"}
UNBROKEN = (
    "median (95 %)",
    "speed ratio",
    "ratio",
    "verdict",
    "detects",
    "speedup (95 %)",
    "commit",
    "decision",
)
"""Columns that keep their width; the others are folded where the terminal is too narrow."""
MAX_SIDE_BY_SIDE = 3
"""Contenders side by side in the table of the parts of a step."""
REPRODUCTION_STYLES = {
    Reproduction.WITHIN: "green",
    Reproduction.OUTSIDE: "red",
    Reproduction.UNDECIDED: "dim",
}


def result_tables(result: BenchmarkResult, metrics: Sequence[str] = ()) -> RenderableType:
    """Return a table for each metric, and one of the measurements.

    Args:
        result: a result with summaries.
        metrics: names of the metrics; empty: all but the phases of a step.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.title, style="bold")]
    parts += [Text(line) for line in description_lines(result)]
    parts += [Text(line, style="dim") for line in place_lines(result)]
    for name in (metrics or summary_metrics(result)) if result.contenders else ():
        parts += [Text(f"\n{find_metric(name).title}", style="bold"), _metric_table(result, name)]
        parts.append(Text(definition_text(result, name), style="dim"))
        if note := metric_note(result, name):
            parts.append(Text(note, style="yellow"))
    if breakdowns := step_breakdowns(result):
        parts += [Text("\nBreakdown of a step: mean, and forecast in parentheses", style="bold")]
        parts += [*_breakdown_tables(breakdowns), Text(BREAKDOWN_NOTE, style="dim")]
    for title, notes, columns, rows in sections(result):
        table = empty_table(columns, 1)
        for row in rows:
            table.add_row(*row)
        parts += [Text(f"\n{title}", style="bold"), table, *(Text(note, style="dim") for note in notes)]
    parts += [Text("\nMeasurements", style="bold"), measurement_table(result)] if result.contenders else []
    if sentence := turns_sentence(result):
        parts.append(Text(sentence, style="dim"))
    if sentence := unwatched_sentence(result):
        parts.append(Text(sentence, style="yellow"))
    if not result.ended:
        parts.append(Text("The benchmark has not ended: figures are of the measurements so far."))
    return Group(*parts)


def comparison_tables(comparison: ResultComparison) -> RenderableType:
    """Return the differences of the conditions, and a table for each metric."""
    from rich.console import Group
    from rich.text import Text

    before, after = comparison.before.id, comparison.after.id
    parts: list[RenderableType] = [Text(f"{before} → {after}", style="bold")]
    for difference in comparison.differences:
        parts.append(Text(str(difference), style="yellow" if difference.is_obstacle else "dim"))
    for name in dict.fromkeys(row.metric for row in comparison.rows):
        table = empty_table(("contender", "before", "after", ratio_name(name), "verdict"), 1)
        for row in comparison.rows:
            if row.metric == name:
                estimates = [estimate_text(name, estimate) for estimate in (row.before, row.after)]
                table.add_row(row.contender, *estimates, *_verdict_cells(name, row.verdict))
        parts += [Text(f"\n{find_metric(name).title}", style="bold"), table]
    return Group(*parts)


def reproduction_table(figures: Sequence[ReproducedFigure]) -> RenderableType:
    """Return a row for each stored figure with its decision, and the counts of the decisions."""
    from rich.console import Group
    from rich.text import Text

    table = empty_table(("contender", "metric", "stored", "new", "decision"), 2)
    for figure in figures:
        title = find_metric(figure.metric).title
        if figure.is_ratio:
            title = f"{title}, {ratio_name(figure.metric)}"
        stored, new = (
            str(one) if figure.is_ratio and one is not None else _estimate_cell(figure.metric, one)
            for one in (figure.stored, figure.new)
        )
        decision = Text(figure.decision.value, style=REPRODUCTION_STYLES[figure.decision])
        table.add_row(figure.contender, title, stored, new, decision)
    counts = [
        f"{sum(figure.decision is decision for figure in figures)} {decision.value}"
        for decision in Reproduction
    ]
    undecided = Counter(figure.reason for figure in figures if figure.decision is Reproduction.UNDECIDED)
    reasons = [
        Text(f"cannot tell: {reason} ({count_text(count, 'figure')})", style="dim")
        for reason, count in undecided.items()
    ]
    return Group(table, Text(f"\n{', '.join(counts)}", style="bold"), *reasons)


def result_list(results: Iterable[BenchmarkResult]) -> RenderableType:
    """Return a row for each result."""
    table = empty_table(("id", "title", "suite", "commit", "state"), 5)
    for result in results:
        state = "" if result.ended else "not ended"
        commit = str(result.code.get("commit") or "")[:10]
        table.add_row(result.id, result.title, result.suite.name, commit, state)
    return table


def place_lines(result: BenchmarkResult) -> list[str]:
    """Return the place and time of a result as lines of text."""
    versions = ", ".join(f"{name} {version}" for name, version in result.environment.items())
    code = str(result.code.get("commit") or "")[:10] + (
        " with changes" if result.code.get("is_dirty") else ""
    )
    facts = [f"suite {result.suite.name}" if result.suite.name else "", result.created, code]
    lines = (
        ", ".join(hardware_identity(result.hardware).values()),
        versions,
        *package_lines(result),
        " · ".join(filter(None, facts)),
    )
    return [line for line in lines if line]


def package_lines(result: BenchmarkResult) -> list[str]:
    """Return the versions of Python environments of contenders, those with equal packages in one line."""
    owners: dict[str, list[str]] = {}
    for contender in result.contenders:
        if contender.packages:
            names = [name for name in ("python", *PACKAGES) if name in contender.packages]
            shown = [f"{name} {contender.packages[name]}" for name in names]
            owners.setdefault(", ".join(shown), []).append(contender.name)
    return [f"{', '.join(names)}: {versions}" for versions, names in owners.items()]


def exclusion_reasons(result: BenchmarkResult, contender: str) -> list[str]:
    """Return the reasons of a contender's measurements that do not count, each with its number."""
    reasons: dict[str, int] = {}
    for measurement in result.measurements_of(contender, counted_only=False):
        if not measurement.counts:
            texts = [measurement.error] if measurement.error else [*measurement.disturbances]
            for text in texts or [f"exit code {measurement.exit_code}"]:
                reasons[text] = reasons.get(text, 0) + 1
    return [f"{text} ({number} ×)" if number > 1 else text for text, number in reasons.items()]


def description_lines(result: BenchmarkResult) -> list[str]:
    """Return the description of the suite, and that of each contender that has one."""
    own = [f"{one.name}: {one.description}" for one in result.contenders if one.description]
    return [line for line in (result.description, *own) if line]


def unwatched_sentence(result: BenchmarkResult) -> str:
    """Name the hosts on which nobody watched foreign load; empty if all runs were on this machine."""
    hosts = dict.fromkeys(host for one in result.measurements for host in one.unwatched_hosts)
    if not hosts:
        return ""
    return f"Foreign load was watched on this machine, but not on: {', '.join(hosts)}."


def turns_sentence(result: BenchmarkResult) -> str:
    """Name the turns of contenders that lived at once, and their stopped steps; empty if each ran alone."""
    counted = [one for one in result.measurements if one.turns is not None and one.counts]
    turns = [one.turns for one in counted if one.turns is not None]
    if not turns:
        return ""
    steps, shared = sum(len(one.steps) for one in counted), sum(one.shared_steps for one in turns)
    text = f"Contenders lived at once, in turns of {duration_text(turns[0].turn_seconds)}."
    foreign = [one.machine.foreign_cpu for one in counted if one.machine.foreign_cpu is not None]
    if foreign:
        text += f" Other programs used {median(foreign):.2f} CPUs."
    if steps:
        stopped = sum(one.stopped_steps for one in turns)
        text += (
            f" {stopped} of {steps} steps had a stop inside: its time is left out of theirs, and they have "
            f"no parts. {steps - shared} steps after the end of the first contender do not count."
        )
    return text


def _metric_table(result: BenchmarkResult, name: str) -> Table:
    if len(result.contender_names) == 1:
        table = empty_table(("contender", "median (95 %)"), 1)
        (contender,) = result.contender_names
        table.add_row(contender, _estimate_cell(name, result.summaries.get(contender, {}).get(name)))
        return table
    table = empty_table(("contender", "median (95 %)", ratio_name(name), "verdict", "detects"), 1)
    for contender in result.contender_names:
        estimate = result.summaries.get(contender, {}).get(name)
        verdict = result.verdicts.get(contender, {}).get(name)
        cells = _verdict_cells(name, verdict)
        if contender == result.baseline:
            cells = ["1", "baseline"]
        table.add_row(
            contender,
            _estimate_cell(name, estimate),
            *cells,
            "" if verdict is None else detectable_text(verdict),
        )
    return table


def _breakdown_tables(breakdowns: Sequence[StepBreakdown]) -> Iterator[Table]:
    """Yield tables of as many contenders as fit side by side, a row for each part."""
    names, text = part_names(breakdowns), time_texts(breakdowns)
    for first in range(0, len(breakdowns), MAX_SIDE_BY_SIDE):
        shown = breakdowns[first : first + MAX_SIDE_BY_SIDE]
        table = empty_table(("part", *(one.contender for one in shown)), 1)
        rows = {
            name: [(one.parts.get(key), one.forecast.get(key)) for one in shown]
            for key, name in names.items()
        }
        rows["step"] = [(one.seconds, one.forecast_seconds) for one in shown]
        for name, cells in rows.items():
            texts = [
                text(own) + ("" if forecast is None else f" ({text(forecast)})") for own, forecast in cells
            ]
            table.add_row(name, *texts)
        yield table


def measurement_table(result: BenchmarkResult) -> Table:
    """Return the numbers of measurements that count and do not, with the reasons."""
    table = empty_table(("contender", "counted", "excluded", "reasons"), 4)
    for contender in result.contender_names:
        counted = len(result.measurements_of(contender))
        total = len(result.measurements_of(contender, counted_only=False))
        reasons = "; ".join(exclusion_reasons(result, contender))
        table.add_row(contender, str(counted), str(total - counted), reasons)
    return table


def _estimate_cell(name: str, estimate: Estimate | None) -> str:
    return MISSING_TEXT if estimate is None else estimate_text(name, estimate)


def _verdict_cells(name: str, verdict: Verdict | None) -> list[RenderableType]:
    from rich.text import Text

    if verdict is None:
        return ["", ""]
    return [ratio_text(verdict), Text(outcome_text(name, verdict), style=OUTCOME_STYLES[verdict.outcome])]


def empty_table(columns: Sequence[str], left_count: int) -> Table:
    """Return an empty table whose columns after the first `left_count` are right-aligned."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(
            name,
            justify="left" if number < left_count else "right",
            overflow="fold",
            no_wrap=name in UNBROKEN,
        )
    return table
