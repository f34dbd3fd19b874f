"""Key figures and sentences of a report that page and terminal share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from wanma.job.file.serialization import value_text
from wanma.job.run.worker import Event
from wanma.observe.console.progress import (
    checkpoint_text,
    finish_text,
    recovery_text,
    resize_event_text,
    validation_text,
)
from wanma.observe.sinks.jsonl import START_FAILED
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text
from wanma.report.components.html_elements import KeyFigure
from wanma.report.forecast_comparison import rank_0_memory_forecast
from wanma.report.run_report import Report

FAILED_START_TEXT = "a later start failed before its first step and left the run unchanged"

PHASE_COLOURS = dict(
    zip(
        ("forward_backward", "optimizer", "communication", "data", "checkpoint", "validation", "host"),
        range(1, 8),
        strict=True,
    )
)
"""Colours of the phases, in the order of stacking from the bottom."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase over the whole run."""

    name: str
    colour: int
    seconds: float


def state_sentence(report: Report) -> str:
    """Describe the state of the run in one sentence."""
    steps = f"{report.last_step:,} of {count_text(report.total_steps, 'step')}" if report.total_steps else ""
    quiet = duration_text(time.time() - report.last_activity) if report.last_activity else ""
    resume = "resume from the last checkpoint" if report.checkpoints else "start again"
    sentences = {
        "new": "Not started: nothing is recorded yet.",
        "running": f"Running: {steps} done, last activity {quiet} ago." if quiet else "Running.",
        "finished": f"Finished: {steps}.",
        "interrupted": f"Stopped on request after {steps}. Run the same command to resume.",
        "aborted": f"Aborted after {steps}. Run the same command to {resume}.",
        "failed": f"Failed after {steps}. Run the same command to {resume}.",
        "crashed": f"Crashed after {steps}. Run the same command to {resume}.",
    }
    return sentences[report.state]


def parameter_count_text(report: Report) -> str:
    """Return the model size as text: '10.2M parameters'; empty when unknown."""
    count = report.parameters
    if count is None:
        return ""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            return f"{count / unit:.3g}{letter} parameters"
    return count_text(count, "parameter")


def key_figures(report: Report) -> list[KeyFigure]:
    """Return the key figures of a run: loss, validation, throughput, MFU, memory, time."""
    loss = report.last("loss")
    tiles = [KeyFigure("loss", number_text(loss), f"step {report.last_step:,}" if loss is not None else "")]
    best = report.best_validation
    if best is not None:
        extra = []
        if best.get("perplexity") is not None:
            extra.append(f"perplexity {number_text(best['perplexity'])}")
        if best.get("accuracy") is not None:
            extra.append(f"accuracy {percent_text(best['accuracy'])}")
        extra += [f"{name} {number_text(value)}" for name, value in best.get("metrics", {}).items()]
        by = f", by {report.best_metric}" if report.best_metric != "loss" else ""
        extra.append(f"step {best['step']:,}{by}")
        tiles.append(KeyFigure("best validation", number_text(best["loss"]), ", ".join(extra)))
    tiles.append(KeyFigure(report.throughput_unit, number_text(report.median("tokens_per_second")), "median"))
    tiles.append(KeyFigure("seconds per step", number_text(report.median("step_seconds")), "median"))
    mfu = report.median("mfu")
    tiles.append(
        KeyFigure("MFU", percent_text(mfu), "median" if mfu is not None else "peak or model FLOPs unknown")
    )
    memory, forecast = report.highest("memory_bytes"), rank_0_memory_forecast(report)
    tiles.append(
        KeyFigure(
            "peak memory", bytes_text(memory), f"forecast {bytes_text(forecast)}" if forecast else "rank 0"
        )
    )
    pauses = f"in {count_text(len(report.starts), 'start')}" if len(report.starts) > 1 else "wall clock"
    tiles.append(
        KeyFigure(
            "time", duration_text(report.seconds) if report.starts else "–", pauses if report.starts else ""
        )
    )
    return tiles


def phase_times(report: Report) -> list[PhaseTime]:
    """Return the seconds by phase over all recorded steps, without phases that took none."""
    shares = []
    for name, colour in PHASE_COLOURS.items():
        seconds = sum(value for value in report.steps.get(f"phases.{name}", []) if value > 0)
        if seconds > 0:
            shares.append(PhaseTime(name.replace("_", " and "), colour, seconds))
    return shares


def data_loading_text(report: Report) -> str:
    """Describe the part of loading that takes most of the loader threads' time; empty without waits for data.

    Example: 'waiting for data 3 %: decode dominates, 82 % of 12 s in loader threads (data.workers = 2; 3
    would keep up)'.
    """
    loaded = {
        part: sum(value for value in report.steps.get(f"load_seconds.{part}", []) if value > 0)
        for part in ("read", "decode", "transform", "dataset", "collate")
    }
    total, phases = sum(loaded.values()), phase_times(report)
    if not total or not phases:
        return ""
    waited = sum(phase.seconds for phase in phases if phase.name == "data")
    trained = sum(phase.seconds for phase in phases) - waited
    share = 100 * waited / (waited + trained)
    if share < 0.5:
        return ""
    largest = max(loaded, key=loaded.__getitem__)
    section = report.job.get("data", {})
    workers = report.loader_workers or section.get("workers", 1)
    needed = math.ceil(total / trained) if trained else 0
    is_by_threads = largest == "dataset" and not section.get("worker_processes")  # of one interpreter
    kind = " with data.worker_processes = true" if is_by_threads else ""
    is_short = isinstance(workers, int) and needed > workers  # an old run may have "auto"
    needed_text = f"; {needed:,}{kind} would keep up" if share >= 1 and is_short else ""
    return (
        f"waiting for data {share:.0f} %: {largest} dominates, {100 * loaded[largest] / total:.0f} % of "
        f"{duration_text(total)} in loader threads (data.workers = {workers}{needed_text})"
    )


def store_traffic_text(report: Report) -> str:
    """Describe the traffic of all ranks with stores and node caches; empty if all data are local.

    Example: 'stores: s3 1,204 requests, 3.2 GiB; node cache: 90 % of 4,000 blocks; on 2 nodes 600 to 604
    requests each, 1.6 GiB to 1.7 GiB'.
    """

    def total(key: str) -> float:
        return sum(value for value in report.steps.get(key, []) if value > 0)

    def names(key: str) -> list[str]:
        return sorted(name.removeprefix(f"{key}.") for name in report.steps if name.startswith(f"{key}."))

    texts = [
        f"{name} {count_text(int(total(f'store_requests.{name}')), 'request')}, "
        f"{bytes_text(total(f'store_bytes.{name}'))}"
        for name in names("store_requests")
    ]
    if blocks := total("cache_blocks.hit") + total("cache_blocks.miss"):
        hits = 100 * total("cache_blocks.hit") / blocks
        texts.append(f"node cache: {hits:.0f} % of {count_text(int(blocks), 'block')}")
    if nodes := names("node_requests"):
        requests = [total(f"node_requests.{node}") for node in nodes]
        sizes = [total(f"node_bytes.{node}") for node in nodes]
        texts.append(
            f"on {count_text(len(nodes), 'node')} {min(requests):,.0f} to {max(requests):,.0f} requests "
            f"each, {bytes_text(min(sizes))} to {bytes_text(max(sizes))}"
        )
    return f"stores: {'; '.join(texts)}" if texts else ""


def event_text(event: Event) -> str:
    """Describe an event in words."""
    kind = event["kind"]
    if kind == "validation":
        return validation_text(event)
    if kind == "checkpoint":
        stall = event.get("stall_seconds")
        return checkpoint_text(event) + (
            f"; training waited {duration_text(stall)}" if stall is not None else ""
        )
    if kind == "recovery":
        return recovery_text(event)
    if kind == "resize":
        return resize_event_text(event)
    if kind == "finish":
        return finish_text(event)
    if kind == "start":
        done = event.get("step", 0)
        source = f" ({event['source']})" if event.get("source") else ""
        plan = event.get("plan", "")
        return f"resumed from step {done:,}{source}" if done else f"start, {plan}".rstrip(", ")
    if kind in ("message", "straggler", "hang", "batch_shares", "health_check", "alert", START_FAILED):
        return str(event.get("text", ""))
    return ", ".join(
        f"{key} {value if isinstance(value, str) else value_text(value)}"
        for key, value in event.items()
        if key not in ("kind", "time")
    )
