"""Collectives of a machine result in the form of `wanma bench collectives`, for its tables and charts."""

from __future__ import annotations

from wanma.bench.collectives.results import CollectiveResults
from wanma.bench.machine.machine_result import node_count, rank_count
from wanma.bench.machine_figures.case_names import is_case_figure, parse_case
from wanma.bench.presentation.terminal import place_lines
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.collectives.measurement.bandwidth import BUS_FACTORS, CollectiveTiming

LIMIT = "a stream from one rank to another, nothing else sent"


def collective_results(result: BenchmarkResult, contender: ContenderRecord) -> CollectiveResults | None:
    """Return the median times of a contender's collectives; None: they or their limit were not measured."""
    summaries = result.summaries.get(contender.name, {})
    limit = summaries.get("link_bytes_per_second")
    ranks, nodes = rank_count(contender), node_count(contender)
    timings = [
        CollectiveTiming(
            parts.kind,
            parts.algorithm,
            parts.precision,
            ranks,
            nodes,
            parts.sizes[0],
            estimate.median,
            limit.median if limit is not None else float("nan"),
        )
        for name, estimate in summaries.items()
        if is_case_figure(name) and (parts := parse_case(name)) is not None and parts.kind in BUS_FACTORS
    ]
    if not timings:
        return None
    backend = next((name.removeprefix("backend.") for name in summaries if name.startswith("backend.")), "")
    return CollectiveResults(
        ranks=ranks,
        nodes=nodes,
        backend=backend,
        limit=LIMIT,
        machine=place_lines(result)[0],
        timings=tuple(timings),
        disturbed=0,
    )
