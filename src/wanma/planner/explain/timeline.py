"""Timeline of one step: intervals of every pipeline rank's operations.

    steps = plan_timeline(problem, plan)
    Path("step.json").write_text(json.dumps(chrome_trace(steps)))     # open in ui.perfetto.dev

Ranks that differ only in data, context, tensor or expert coordinates do the same at the same time, so that
one row stands for all of a pipeline rank. Pure functions, without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wanma.job.plan.plan import Plan
from wanma.planner.cost.step import StepComponents, assemble_step_time
from wanma.planner.forecast.plan_forecast import forecast_step_time, step_components, time_unavailable_reason
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.pipeline.simulation import Interval, simulate_pipeline_intervals

SpanKind = Literal[
    "data loading",
    "forward",
    "backward",
    "weight gradient",
    "idle",
    "send",
    "gather",
    "reduce",
    "optimizer",
    "in-memory checkpoint",
]
Track = Literal["compute", "exchange", "send"]


@dataclass(frozen=True)
class Span:
    """Interval of one operation on one pipeline rank."""

    rank: int
    """Index of the pipeline rank."""
    track: Track
    """Concurrent lane: computing, the data-parallel exchange, messages to other stages."""
    kind: SpanKind
    start: float
    """Seconds from the step's beginning."""
    seconds: float
    stage: int | None = None
    micro_batch: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of computing and of exposed communication by mesh dimension, as in `StepTime`."""

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Timeline:
    """Timeline of one step."""

    plan: Plan
    micro_batches: int
    seconds: float
    spans: tuple[Span, ...]
    """Spans by rank and track, in order of time."""


def plan_timeline(problem: PlanningProblem, plan: Plan) -> Timeline | None:
    """Return the timeline of a step of `plan`; None without a forecast of time or without a device mesh."""
    if plan.placement or time_unavailable_reason(problem, plan) is not None:
        return None
    step = forecast_step_time(problem, plan)
    assert step is not None  # the rates are known
    return build_timeline(step_components(problem, plan), step.checkpoint, step.loading)


def build_timeline(
    components: StepComponents, checkpoint_seconds: float = 0.0, loading_seconds: float = 0.0
) -> Timeline:
    """Simulate one step and return its timeline.

    Weights changed by the step before are gathered at its beginning, beside the first forward; gradients are
    reduced beside the last backward. The exposed part of both is that of the forecast. All ranks wait for the
    norm of all gradients before the optimizer runs.

    Args:
        components: components of the step's time.
        checkpoint_seconds: a step's share of saving, at its end.
        loading_seconds: wait for data, at its beginning.
    """
    plan = components.plan
    intervals = simulate_pipeline_intervals(*components.pipeline)
    if components.threads_per_core > 1:
        intervals = _on_shared_cores(intervals, components)
    by_rank: list[list[Interval]] = [[] for _ in range(plan.pp)]
    for interval in intervals:
        by_rank[interval.rank].append(interval)
    reducing, gathering = components.exposed_reduce_gather_seconds(_busiest_rank(intervals))
    computed = gathering + max(interval.start + interval.seconds for interval in intervals)
    update = computed + reducing
    end = update + components.optimizer_seconds
    spans: list[Span] = []
    for rank, rank_intervals in enumerate(by_rank):
        compute = [_compute_span(interval, components, gathering) for interval in rank_intervals]
        last = [span.start for span in compute if span.kind == "backward"][
            -len(plan.stages_of_pipeline_rank(rank)) :
        ]
        reduce_start = computed
        if components.is_overlapped:
            reduce_start = min(min(last), update - components.reduce_seconds)
        compute.append(Span(rank, "compute", "optimizer", update, components.optimizer_seconds))
        if checkpoint_seconds:
            compute.append(Span(rank, "compute", "in-memory checkpoint", end, checkpoint_seconds))
        spans += _with_idle_spans(compute, rank)
        exchange = [
            Span(rank, "exchange", "gather", 0.0, components.gather_seconds),
            Span(rank, "exchange", "reduce", reduce_start, components.reduce_seconds),
        ]
        spans += [span for span in exchange if span.seconds > 0]
        if components.stage_send_seconds > 0:
            spans += _sends(compute, plan, components.stage_send_seconds)
    if loading_seconds:
        spans = [replace(span, start=span.start + loading_seconds) for span in spans]
        loads = [Span(rank, "compute", "data loading", 0.0, loading_seconds) for rank in range(plan.pp)]
        spans = sorted([*loads, *spans], key=lambda span: span.rank)
    seconds = loading_seconds + end + checkpoint_seconds
    return Timeline(plan, components.micro_batches, seconds, tuple(spans))


def _on_shared_cores(intervals: list[Interval], components: StepComponents) -> list[Interval]:
    """Scale the intervals of ranks that share cores uniformly to the forecast of the pipeline's time."""
    step = assemble_step_time(components)
    exchanged = components.exposed_reduce_gather_seconds(_busiest_rank(intervals))
    pipelined = step.seconds - sum(exchanged) - components.optimizer_seconds
    pace = pipelined / max(interval.start + interval.seconds for interval in intervals)
    return [
        interval._replace(start=interval.start * pace, seconds=interval.seconds * pace)
        for interval in intervals
    ]


def _busiest_rank(intervals: list[Interval]) -> int:
    """Return the rank that computes longest."""
    busy: defaultdict[int, float] = defaultdict(float)
    for interval in intervals:
        busy[interval.rank] += interval.seconds
    return min(busy, key=lambda rank: (-busy[rank], rank))


def _compute_span(interval: Interval, components: StepComponents, delay: float) -> Span:
    kind, stage, micro_batch = interval.operation
    weights = components.costs[stage].backward_weight
    if kind == "forward":
        parts = components.forward[stage]
    elif kind == "weight gradient":
        parts = {"compute": weights}
    else:
        weight_seconds = weights if components.plan.schedule in SPLIT_BACKWARD else 0.0
        parts = {
            **components.backward[stage],
            "compute": components.backward[stage]["compute"] - weight_seconds,
        }
    pace = interval.seconds / sum(parts.values()) if components.threads_per_core > 1 else 1.0
    known = {name: pace * seconds for name, seconds in parts.items() if seconds > 0}
    sent = interval.seconds - sum(known.values())
    if sent > 1e-9 * interval.seconds:  # where the framework waits for its sends
        known["send"] = sent
    return Span(
        interval.rank, "compute", kind, interval.start + delay, interval.seconds, stage, micro_batch, known
    )


def _with_idle_spans(spans: list[Span], rank: int) -> Iterable[Span]:
    """Yield `spans` in order, with the waits of the rank between them."""
    clock = 0.0
    shortest = 1e-9 * spans[-1].end
    for span in spans:
        if span.start - clock > shortest:
            yield Span(rank, "compute", "idle", clock, span.start - clock)
        yield span
        clock = span.end


def _sends(compute: list[Span], plan: Plan, seconds: float) -> Iterable[Span]:
    """Yield the messages to stages on other ranks: outputs, and gradients of inputs."""
    for span in compute:
        if span.stage is None or span.kind == "weight gradient":
            continue
        target = span.stage + (1 if span.kind == "forward" else -1)
        if 0 <= target < plan.stage_count and target not in plan.stages_of_pipeline_rank(span.rank):
            yield Span(span.rank, "send", "send", span.end, seconds, span.stage, span.micro_batch)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format, which Perfetto and chrome://tracing read.

    A process is a pipeline rank. A forward or backward contains its computing and its exposed communication,
    one after the other, though they take turns layer by layer. Times are in µs.
    """
    events: list[dict[str, Any]] = []
    per_stage = timeline.plan.ranks_per_pipeline_rank
    for rank in range(timeline.plan.pp):
        numbers = ", ".join(map(str, timeline.plan.stages_of_pipeline_rank(rank)))
        last = (rank + 1) * per_stage - 1
        ranks = f"rank {last}" if per_stage == 1 else f"ranks {rank * per_stage}–{last}"
        events.append(_metadata_event(rank, 0, "process_name", f"stage {numbers} on {ranks}"))
        events.append(
            {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        )
        rank_spans = [span for span in timeline.spans if span.rank == rank]
        thread = 0
        for track, name in (
            ("compute", "compute"),
            ("exchange", "data parallel"),
            ("send", "pipeline sends"),
        ):
            for lane in _lanes(span for span in rank_spans if span.track == track):
                events.append(_metadata_event(rank, thread, "thread_name", name))
                for span in lane:
                    events += _events(span, thread)
                thread += 1
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"plan": str(timeline.plan), "step_seconds": timeline.seconds},
    }


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Assign spans to threads without overlap, which viewers draw one below another."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start + 1e-12), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _events(span: Span, thread: int) -> list[dict[str, Any]]:
    name = span.kind if span.micro_batch is None else f"{span.kind} {span.micro_batch}"
    arguments = {
        key: value
        for key, value in (("stage", span.stage), ("micro_batch", span.micro_batch))
        if value is not None
    }
    events = [_complete_event(span.rank, thread, name, span.kind, span.start, span.seconds, arguments)]
    if len(span.parts) > 1:
        start = span.start
        for part, seconds in span.parts.items():
            duration = min(seconds, span.end - start)  # rounding must not let a part end after its span
            events.append(_complete_event(span.rank, thread, part, part, start, duration, {}))
            start += duration
    return events


def _complete_event(
    rank: int, thread: int, name: str, category: str, start: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": arguments,
    }


def _metadata_event(rank: int, thread: int, metadata_name: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": metadata_name, "args": {"name": name}}
