"""Links and devices that are slower than the others of their kind, with the evidence.

A part is compared with the median of the others of its kind, execution by execution, so that what slows all
down cancels out. It is named if the interval of the ratio lies below 1, and the ratio below 1 by
`MIN_EFFECT`. Each of all comparisons of a result gets its part of the error rate (Bonferroni), so that a
result in which nothing is slow names anything in at most 5 % of all cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from wanma.bench.machine.machine_result import node_count, rank_count
from wanma.bench.machine_figures.definitions import RANK_FIGURE, machine_definition
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.bench.statistics.ratios import ERROR_RATE, estimate_paired_ratio
from wanma.observe.units import percent_text

MIN_PARTS = 4
"""Least number of parts of a kind: of three, two slow ones would make the third one look fast."""
MIN_EFFECT = 0.1
"""Difference from the median of the others below which nothing is named."""
MANY_SHARE = 0.25
"""Share of a kind's links from which slow ones are more likely another kind than faults."""

_PAIR = re.compile(r"pair\.(\d+)-(\d+)(\.latency_seconds|_bytes_per_second)")

Rounds = Mapping[int, float]
"""Value of a part by execution."""


@dataclass(frozen=True)
class PartKind:
    """Parts of one kind, of which all should be equally fast."""

    name: str
    """Name in the plural, such as 'bandwidths of links within a node'."""
    higher_is_better: bool
    parts: Mapping[tuple[int, ...], Rounds]
    """Values by rank, or by pair of ranks."""
    is_link: bool
    ranks_per_node: int
    nodes: int

    def rank_text(self, rank: int) -> str:
        """Return the name of a rank, with its node if there are several."""
        return f"rank {rank}" + (f" (node {rank // self.ranks_per_node})" if self.nodes > 1 else "")


Ratios = Mapping[tuple[int, ...], Estimate]
"""Speed over the median speed of the others, by rank or pair; an interval has the part of the error rate that
one comparison gets."""


@dataclass(frozen=True)
class Finding:
    """Link or device that is slower than the others of its kind, or slow links with one cause."""

    kind: PartKind
    ratios: Ratios
    rank: int | None = None
    """Rank whose links all are slow; None: several links are so many that they are another kind of link."""

    @property
    def text(self) -> str:
        """Return a sentence that names it."""
        kind, count = self.kind, len(self.ratios)
        if count == 1:
            ((ranks, ratio),) = self.ratios.items()
            names = (" to " if kind.higher_is_better else " and ").join(map(kind.rank_text, ranks))
            return f"{names}: {_ratio_text(ratio)} of the median of the other {kind.name}"
        middle = percent_text(median(ratio.median for ratio in self.ratios.values()))
        if self.rank is not None:
            return (
                f"all {count} links of {kind.rank_text(self.rank)}: {middle} of the median of the other "
                f"{kind.name}"
            )
        pairs = ", ".join("-".join(map(str, ranks)) for ranks in self.ratios)
        return (
            f"{count} of {len(kind.parts)} {kind.name} reach {middle} of the median of the others; so many "
            f"are rather another path, such as through another socket or switch, than faults. Ranks: {pairs}"
        )


@dataclass(frozen=True)
class SlowPartReport:
    """Comparison of all parts of one contender with the others of their kind."""

    contender: str
    compared: int
    """Number of parts that were compared; 0: there are too few of each kind, or too few executions."""
    findings: tuple[Finding, ...]
    smallest_difference: float
    """Median over the parts of the smallest slowdown that would be named with this noise."""

    @property
    def texts(self) -> list[str]:
        return [finding.text for finding in self.findings]


class PairFigure(NamedTuple):
    """Figure of a pair of ranks."""

    ranks: tuple[int, int]
    is_bandwidth: bool
    """True: a rate in bytes/s; False: a latency in seconds."""


def parse_pair(name: str) -> PairFigure | None:
    """Return the pair of ranks of a figure's name; None: it is of no pair."""
    match = _PAIR.fullmatch(name)
    if match is None:
        return None
    return PairFigure((int(match[1]), int(match[2])), match[3].startswith("_bytes"))


def find_slow_parts(result: BenchmarkResult) -> list[SlowPartReport]:
    """Return a report for each contender of a machine result."""
    kinds = {record.name: list(_kinds(record, result)) for record in result.contenders}
    comparisons = sum(len(kind.parts) for own in kinds.values() for kind in own)
    # One side alone is of interest, so the two-sided interval may miss on the other side as well.
    error_rate = 2 * ERROR_RATE / max(comparisons, 1)
    return [_report(record, kinds[record.name], min(error_rate, ERROR_RATE)) for record in result.contenders]


def _report(record: ContenderRecord, kinds: Sequence[PartKind], error_rate: float) -> SlowPartReport:
    findings: list[Finding] = []
    compared, differences = 0, []
    for kind in kinds:
        ratios = compare_with_others(kind, error_rate)
        compared += len(ratios)
        differences += [max(1 - ratio.low / ratio.median, MIN_EFFECT) for ratio in ratios.values()]
        slow = {
            ranks: ratio
            for ranks, ratio in ratios.items()
            if ratio.high < 1 and ratio.median < 1 - MIN_EFFECT
        }
        findings += _causes(kind, slow)
    return SlowPartReport(
        record.name,
        compared,
        tuple(findings),
        median(differences) if differences else 0.0,
    )


def compare_with_others(kind: PartKind, error_rate: float) -> dict[tuple[int, ...], Estimate]:
    """Return the speed of each part over the median of the others; empty where there are too few for it.

    Args:
        error_rate: share of intervals that may miss the ratio.
    """
    rounds = sorted(set.intersection(*(set(values) for values in kind.parts.values()))) if kind.parts else []
    if len(kind.parts) < MIN_PARTS or not rounds:
        return {}
    speeds = {
        ranks: [values[number] if kind.higher_is_better else 1 / values[number] for number in rounds]
        for ranks, values in kind.parts.items()
    }
    ratios = {}
    for ranks, own in speeds.items():
        others = [series for other, series in speeds.items() if other != ranks]
        reference = [median(row) for row in zip(*others, strict=True)]
        ratio = estimate_paired_ratio(own, reference, error_rate)
        if ratio.has_interval:
            ratios[ranks] = ratio
    return ratios


def _causes(kind: PartKind, slow: Ratios) -> Iterator[Finding]:
    """Yield ranks of which all links are slow, then the slow links that remain, or their group."""
    left = dict(slow)
    if kind.is_link:
        for rank in sorted({rank for ranks in kind.parts for rank in ranks}):
            own = [ranks for ranks in kind.parts if rank in ranks]
            found = {ranks: ratio for ranks, ratio in slow.items() if rank in ranks}
            if len(found) == len(own) > 1 and 2 * len(own) <= len(kind.parts):
                yield Finding(kind, found, rank)
                left = {ranks: ratio for ranks, ratio in left.items() if rank not in ranks}
        if len(left) > max(MANY_SHARE * len(kind.parts), 1):
            yield Finding(kind, left)
            return
    yield from (Finding(kind, {ranks: ratio}) for ranks, ratio in left.items())


def _kinds(record: ContenderRecord, result: BenchmarkResult) -> Iterator[PartKind]:
    """Yield the kinds of links and devices of a contender."""
    nodes = node_count(record)
    node_size = rank_count(record) // nodes
    links: dict[tuple[bool, bool], dict[tuple[int, ...], Rounds]] = {}
    devices: dict[str, dict[tuple[int, ...], Rounds]] = {}
    for name, values in result.values.get(record.name, {}).items():
        if (pair := parse_pair(name)) is not None:
            first, second = pair.ranks
            key = pair.is_bandwidth, first // node_size == second // node_size
            links.setdefault(key, {})[first, second] = values
        elif match := RANK_FIGURE.fullmatch(name):
            devices.setdefault(match[2], {})[(int(match[1]),)] = values
    for (is_bandwidth, is_within), parts in links.items():
        where = "within a node" if is_within else "between nodes"
        quantity = "bandwidths" if is_bandwidth else "latencies"
        yield PartKind(f"{quantity} of links {where}", is_bandwidth, parts, True, node_size, nodes)
    for metric, parts in devices.items():
        title, _ = machine_definition(metric) or (metric, "")
        yield PartKind(f"devices in '{title}'", True, parts, False, node_size, nodes)


def _ratio_text(ratio: Estimate) -> str:
    return f"{percent_text(ratio.median)} ({percent_text(ratio.low)}–{percent_text(ratio.high)})"
