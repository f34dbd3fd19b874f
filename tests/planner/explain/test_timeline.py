"""The picture of one step: it takes as long as forecast, and shows what each rank does when."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.machines import machine
from support.problems import SMALL
from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder import decoder_step_components
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.step import StepComponents, assemble_step_time
from wanma.planner.explain.timeline import Timeline, build_timeline, chrome_trace

PLAN = Plan(pp=4, dp_replicate=2, precision="bf16", device="cuda")

plans = st.builds(
    lambda layout, tp, dp, shard: replace(
        PLAN,
        pp=layout[0],
        schedule=layout[1],
        virtual_stages=layout[2],
        tp=tp,
        sequence_parallel=tp > 1,
        dp_replicate=1 if shard != "none" else dp,
        dp_shard=dp if shard != "none" else 1,
        shard=shard if dp > 1 else "none",
    ),
    st.sampled_from(
        [(1, "1f1b", 1), (4, "gpipe", 1), (4, "1f1b", 1), (2, "interleaved_1f1b", 2), (2, "zbv", 2)]
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "optimizer", "parameters"]),
)


def anatomy(plan: Plan = PLAN, batch: int = 32, software: FrameworkTraits | None = None) -> StepComponents:
    return decoder_step_components(SMALL, 512, plan, batch, machine(32), software)


@given(plans, st.sampled_from([32, 48]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_step_takes_as_long_as_forecast_and_every_rank_is_accounted_for(
    plan: Plan, batch: int, overlap: bool
) -> None:
    parts = anatomy(plan, batch, FrameworkTraits(data_overlap=overlap))
    steps = build_timeline(parts, checkpoint_seconds=0.001, loading_seconds=0.002)
    assert steps.seconds == pytest.approx(assemble_step_time(parts).seconds + 0.003, rel=0.02)
    for rank in range(plan.pp):
        computing = [span for span in steps.spans if span.rank == rank and span.track == "compute"]
        assert (computing[0].kind, computing[0].start, computing[0].seconds) == ("data loading", 0.0, 0.002)
        assert computing[-1].end == pytest.approx(steps.seconds)
        for before, after in pairwise(computing):
            assert after.start == pytest.approx(before.end)
        for span in computing:
            assert sum(span.parts.values()) == pytest.approx(span.seconds if span.parts else 0.0)
    assert all(span.start >= 0 and span.end <= steps.seconds * (1 + 1e-9) for span in steps.spans)


def test_what_is_exchanged_apart_from_computing_comes_before_and_after_it() -> None:
    parts = replace(anatomy(), gather_seconds=0.25, reduce_seconds=0.5, is_overlapped=False)
    steps = build_timeline(parts)
    assert steps.seconds == pytest.approx(assemble_step_time(parts).seconds, rel=1e-6)
    first = min(span.start for span in steps.spans if span.kind == "forward")
    last = max(span.end for span in steps.spans if span.kind == "backward")
    assert first == pytest.approx(0.25)
    assert [span.start for span in steps.spans if span.kind == "reduce"] == pytest.approx([last] * 4)
    assert min(span.start for span in steps.spans if span.kind == "optimizer") == pytest.approx(last + 0.5)


@pytest.mark.parametrize("shared", [2, 4])
def test_ranks_that_share_cores_are_drawn_as_fast_as_they_are_forecast(shared: int) -> None:
    parts = replace(anatomy(), threads_per_core=shared)
    steps = build_timeline(parts)
    assert steps.seconds == pytest.approx(assemble_step_time(parts).seconds)
    assert steps.seconds < build_timeline(anatomy()).seconds
    for span in steps.spans:
        assert sum(span.parts.values()) == pytest.approx(span.seconds if span.parts else 0.0)


def test_the_gaps_of_the_busiest_rank_are_the_forecast_bubble() -> None:
    parts = anatomy(replace(PLAN, dp_replicate=1))
    forecast = assemble_step_time(parts)
    steps = build_timeline(parts)
    waits = [
        sum(span.seconds for span in steps.spans if span.rank == rank and span.kind == "idle")
        for rank in range(4)
    ]
    assert forecast.bubble > 0
    assert min(waits) == pytest.approx(forecast.bubble)


def test_the_optimizer_starts_on_all_ranks_at_once_when_all_gradients_are_reduced() -> None:
    parts = anatomy()
    steps = build_timeline(parts)
    assert parts.reduce_seconds > 0
    starts = {span.start for span in steps.spans if span.kind == "optimizer"}
    assert len(starts) == 1
    reduced = [span.end for span in steps.spans if span.kind == "reduce"]
    assert len(reduced) == 4
    assert max(reduced) <= min(starts) * (1 + 1e-9)


def test_a_stages_output_travels_to_the_next_rank_only() -> None:
    parts = anatomy()
    steps = build_timeline(parts)
    sends = [span for span in steps.spans if span.kind == "send"]
    # Four stages have three borders, which each of 16 micro-batches crosses both ways.
    assert len(sends) == 2 * 3 * 16
    assert {span.seconds for span in sends} == {parts.stage_send_seconds}
    first = next(s for s in steps.spans if s.kind == "forward" and (s.rank, s.micro_batch) == (0, 0))
    received = next(s for s in steps.spans if s.kind == "forward" and (s.rank, s.micro_batch) == (1, 0))
    assert received.start == pytest.approx(first.end + parts.stage_send_seconds)


def trace_of(steps: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(steps)))
    assert trace["otherData"]["step_seconds"] == steps.seconds
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, pp=2, dp_replicate=1, dp_shard=2, tp=2, sequence_parallel=True, shard="optimizer"),
        replace(PLAN, pp=2, schedule="zbv", virtual_stages=2),
        Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda"),
    ],
)
def test_the_trace_is_what_viewers_read(plan: Plan) -> None:
    steps = build_timeline(anatomy(plan))
    events = trace_of(steps)
    named = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"}
    assert [pid for pid, _ in sorted(named)] == list(range(plan.pp))
    complete = [event for event in events if event["ph"] == "X"]
    assert all({"pid", "tid", "ts", "dur", "name", "cat", "args"} <= set(event) for event in complete)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(1e6 * steps.seconds)
    complete.sort(key=lambda event: (event["pid"], event["tid"], event["ts"], -event["dur"]))
    for _, thread in groupby(complete, key=lambda event: (event["pid"], event["tid"])):
        open_ends: list[float] = []
        for event in thread:
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
                open_ends.pop()
            # On one thread an event lies wholly inside another or beside it.
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_the_trace_names_stages_ranks_and_what_forwards_wait_for() -> None:
    plan = replace(PLAN, pp=2, tp=2, sequence_parallel=True, dp_replicate=4)
    parts = anatomy(plan)
    events = trace_of(build_timeline(parts))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["stage 0 on ranks 0–7", "stage 1 on ranks 8–15"]
    forward = next(event for event in events if event["name"] == "forward 0")
    tensor = next(event for event in events if event["name"] == "tensor")
    assert forward["args"] == {"stage": 0, "micro_batch": 0}
    assert tensor["dur"] == pytest.approx(1e6 * parts.forward[0]["tensor"])
    assert forward["ts"] <= tensor["ts"] <= forward["ts"] + forward["dur"]
