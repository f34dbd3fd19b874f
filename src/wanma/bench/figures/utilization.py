"""Utilization of machine and peak by each contender: tables, and MFU by conventions of published tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from wanma.bench.figures.metrics import CONVENTION_METRICS, UTILIZATION, find_metric
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.bench.statistics.estimates import Estimate
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.models.workload.flop_conventions import OWN, training_flops
from wanma.observe.units import MISSING_TEXT, percent_text
from wanma.planner.preparation.job_planning import job_dimensions

UTILIZATION_NOTE = (
    "Medians over the measurements, each from the end of the first step to that of the last; memory is the "
    "largest of the whole execution. GPUs, network and disk are those of this machine, with all its programs."
)
"""Definitions that stand below the table."""
CONVENTIONS_NOTE = (
    "The same steps, counted as published tables count: share of the dense peak, and in parentheses TFLOP/s "
    "of a device. Compare only figures of one column (docs/reference/mfu.md)."
)
"""Definition that stands below the table."""

_HEADS = {
    "mfu": "MFU",
    "mfu_full_attention": "full attention",
    "mfu_palm": "PaLM",
    "mfu_6nd": "6 N D",
    "hfu": "HFU",
}
"""Column heads by metric."""


def utilization_table(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of texts: what can be read on this machine, for each contender.

    Both are empty if there is nothing but memory.
    """
    names = [name for name in UTILIZATION if any(name in metrics for metrics in result.summaries.values())]
    if names in ([], ["peak_memory_bytes"]):
        return [], []
    rows = []
    for contender in result.contender_names:
        metrics = result.summaries.get(contender, {})
        cells = [find_metric(name).text(metrics[name].median if name in metrics else None) for name in names]
        rows.append([contender, *cells])
    return ["contender", *(find_metric(name).title for name in names)], rows


def convention_ratios(record: ContenderRecord) -> dict[str, float]:
    """Return the FLOPs of a contender's steps by convention, over those of its own MFU.

    Returns:
        ratios by metric, without `mfu`; empty for a command, and for models whose FLOPs are not those of a
        decoder that trains all of its parameters.
    """
    if not record.job or not record.plan:
        return {}
    try:
        plan = Plan.from_json(dict(record.plan["plan"]))
        job = to_job(tomllib.loads(record.job))
        config = job_dimensions(job)
        own = float(record.plan["flops_per_sample"])
    except (WanmaError, KeyError, TypeError, ValueError):
        return {}
    if config is None:
        return {}
    flops = training_flops(config, job.data.sequence_length, plan.recompute, plan.recompute_share)
    if abs(own / flops[OWN] - 1) > 1e-6:  # frozen parameters or adapters: no table counts them
        return {}
    return {name: value / flops[OWN] for name, value in flops.items() if name != OWN}


def with_conventions(metrics: Mapping[str, Estimate], ratios: Mapping[str, float]) -> dict[str, Estimate]:
    """Return estimates of the metrics of `ratios`, from that of the own MFU; empty without one."""
    own = metrics.get(OWN)
    if own is None:
        return {}
    return {
        name: Estimate(own.median * ratio, own.low * ratio, own.high * ratio, own.count)
        for name, ratio in ratios.items()
    }


def conventions_table(result: BenchmarkResult) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of texts: each contender's MFU by convention; both empty without any."""
    names = (OWN, *CONVENTION_METRICS)
    rows = []
    for record in result.contenders:
        metrics = result.summaries.get(record.name, {})
        if not any(name in metrics for name in CONVENTION_METRICS):
            continue
        peak = (record.plan or {}).get("peak_flops_per_second")
        cells = [_cell(metrics.get(name), peak) for name in names]
        rows.append([record.name, *cells])
    return (["contender", *(_HEADS[name] for name in names)], rows) if rows else ([], [])


def _cell(estimate: Estimate | None, peak: float | None) -> str:
    if estimate is None:
        return MISSING_TEXT
    rate = "" if not peak else f" ({estimate.median * peak / 1e12:.3g})"
    return f"{percent_text(estimate.median)}{rate}"
