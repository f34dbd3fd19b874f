"""Algorithm of the gradients' all-reduce: refused, chosen from latency and size, forecast as it runs."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.machines import CHIP
from wanma.collectives.all_reduce.nccl_switch import nccl_algorithm, nccl_algorithm_environment
from wanma.job.errors import JobError
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import AllReduceAlgorithm
from wanma.planner.all_reduce_choice import (
    AllReduceTimes,
    all_reduce_reasons,
    all_reduce_unavailable_reason,
    choose_all_reduce,
    nccl_switch_note,
    search_algorithm,
)
from wanma.planner.cost.data_parallel import DataParallelCost
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.gradient_reduction import with_gradient_reduction
from wanma.planner.hardware_model.collective_time import (
    Algorithm,
    RankGroup,
    all_reduce_seconds,
)
from wanma.planner.hardware_model.message_all_reduce_time import MESSAGE_STEP_SECONDS
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

FOUR = Plan(dp_replicate=4)
MESSAGES: tuple[AllReduceAlgorithm, ...] = ("ring", "tree", "halving_doubling")
MEBIBYTE = float(1 << 20)


def job(nodes: int = 4, **parallel: Any) -> Job:
    cluster = {"nodes": nodes, "rendezvous": "10.0.0.1:29500"} if nodes > 1 else {}
    return Job.model_validate({"model": {"preset": "gpt-1m"}, "cluster": cluster, "parallel": parallel})


def single_ranks(nodes: int = 4, latency: float = 5e-3, bytes_per_second: float = 125e6) -> HardwareModel:
    """Nodes of one rank each: the network is the only level of two ranks."""
    node, network = LinkLevel(1, 0.0, 1.0), LinkLevel(nodes, latency, bytes_per_second)
    return HardwareModel(CHIP, (node, network), start_seconds=0.0)


ONE_NODE = HardwareModel(
    CHIP, (LinkLevel(4, 1e-5, 1e9),), start_seconds=0.0, collective_factors={"send": (2.0, 4.0)}
)


def test_few_steps_are_chosen_where_latency_takes_the_time() -> None:
    far = single_ranks()
    assert choose_all_reduce(FOUR, far, 4, MEBIBYTE) == "halving_doubling"
    assert choose_all_reduce(FOUR, far, 4, 4096.0) == "tree"
    assert choose_all_reduce(FOUR, far, 4, DEFAULT_BUCKET_BYTES) == "backend", "bytes take the time"
    assert choose_all_reduce(FOUR, single_ranks(latency=1e-5), 4, MEBIBYTE) == "backend"
    assert choose_all_reduce(FOUR, None, 4, MEBIBYTE) == "backend", "nobody knows the links"
    assert choose_all_reduce(FOUR, ONE_NODE, 1, 1.0) == "backend", "within a node"
    assert choose_all_reduce(replace(FOUR, compression="int8"), far, 4, MEBIBYTE) == "backend"
    assert choose_all_reduce(replace(FOUR, device="cuda"), far, 4, MEBIBYTE) == "backend", "NCCL chooses"


def test_the_largest_message_is_that_of_the_jobs_buckets() -> None:
    far = single_ranks()
    assert with_gradient_reduction(job(), FOUR, far).all_reduce == "backend"
    small = with_gradient_reduction(job(bucket_bytes=1 << 20), replace(FOUR, bucket_bytes=1 << 20), far)
    assert (small.all_reduce, small.bucket_bytes) == ("halving_doubling", 1 << 20)
    asked = with_gradient_reduction(job(all_reduce="tree"), FOUR, far)
    assert asked.all_reduce == "tree"


@given(
    nodes=st.sampled_from([2, 3, 4, 6, 8]),
    ranks=st.sampled_from([1, 2, 3, 4]),
    latency=st.floats(1e-6, 0.1),
    rate=st.floats(1e6, 1e10),
    size=st.floats(1.0, 1e9),
)
def test_the_choice_is_never_slower_by_forecast_than_the_backend(
    nodes: int, ranks: int, latency: float, rate: float, size: float
) -> None:
    links = (LinkLevel(ranks, 1e-6, 1e10), LinkLevel(nodes * ranks, latency, rate))
    hardware = HardwareModel(CHIP, links)
    plan = Plan(dp_replicate=nodes * ranks)
    chosen = choose_all_reduce(plan, hardware, nodes, size)
    forecast = AllReduceTimes(plan, hardware, nodes)
    times = {name: forecast.seconds(name, size) for name in (chosen, "backend", *MESSAGES)}
    assert times[chosen] <= times["backend"]
    assert all(times[chosen] <= time or times[chosen] * 0.9 <= time for time in times.values())


@pytest.mark.parametrize("algorithm", ["tree", "halving_doubling"])
def test_below_the_crossover_an_algorithm_is_faster_and_above_it_the_ring_is(algorithm: Any) -> None:
    times = AllReduceTimes(FOUR, single_ranks(), 4)
    size = times.crossover_bytes(algorithm)
    assert 0 < size < math.inf
    seconds = times.seconds
    assert seconds(algorithm, 0.99 * size) < seconds("backend", 0.99 * size)
    assert seconds(algorithm, 1.01 * size) > seconds("backend", 1.01 * size)
    assert seconds(algorithm, size) == pytest.approx(seconds("backend", size))


def test_a_crossover_may_lie_nowhere() -> None:
    assert AllReduceTimes(FOUR, single_ranks(latency=0.0), 4).crossover_bytes("tree") == 0.0
    hierarchical = HardwareModel(CHIP, (LinkLevel(2, 1e-4, 2e9), LinkLevel(4, 1e-3, 12.5e6)))
    assert AllReduceTimes(FOUR, hierarchical, 2).crossover_bytes("hierarchical") == math.inf


def test_the_reason_has_both_times_and_the_crossover() -> None:
    (far,) = all_reduce_reasons(replace(FOUR, all_reduce="halving_doubling"), single_ranks(), 4, MEBIBYTE)
    assert far.startswith("halving-doubling all-reduce: 1.0 MiB in 53 ms, against 73 ms as one ring")
    assert ", which is faster from " in far
    (near,) = all_reduce_reasons(replace(FOUR, all_reduce="ring"), ONE_NODE, 1, MEBIBYTE)
    assert near.endswith(" by the transport's own, which is faster for every size")
    assert all_reduce_reasons(FOUR, single_ranks(), 4, MEBIBYTE) == []


@pytest.mark.parametrize(
    ("plan", "algorithm", "reason"),
    [
        (Plan(dp_shard=4, shard="parameters"), "ring", "no replicas"),
        (Plan(tp=4), "tree", "no replicas"),
        (Plan(dp_replicate=2, dp_shard=2, shard="parameters"), "ring", "neither Gloo nor shared memory"),
        (Plan(dp_replicate=4, precision="bf16"), "tree", "neither Gloo nor shared memory"),
        (Plan(dp_replicate=4, compression="int8"), "ring", "messages of their own"),
        (Plan(dp_replicate=4, device="cuda"), "halving_doubling", "only ring and tree"),
        (Plan(dp_shard=4, shard="parameters", device="cuda"), "tree", "no replicas"),
    ],
    ids=["sharded", "tensor", "HSDP", "cast", "compressed", "GPUs", "sharded on GPUs"],
)
def test_what_cannot_be_summed_so_is_refused_with_the_reason_and_the_way_out(
    plan: Plan, algorithm: AllReduceAlgorithm, reason: str
) -> None:
    assert reason in (all_reduce_unavailable_reason(plan, algorithm, 2) or "")
    with pytest.raises(JobError, match=reason) as refused:
        with_gradient_reduction(job(2, all_reduce=algorithm), plan, None)
    assert refused.value.message.startswith(f"parallel.all_reduce = '{algorithm}': ")
    assert "unset parallel.all_reduce" in str(refused.value)
    assert with_gradient_reduction(job(2, all_reduce="backend"), plan, None).all_reduce == "backend"


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2),
        Plan(dp_replicate=2, cp=2),
        Plan(pp=2, dp_replicate=2),
        Plan(tp=2, dp_replicate=2),
    ],
    ids=str,
)
def test_replicas_in_fp32_can_be_summed_so_also_on_one_node(plan: Plan) -> None:
    for algorithm in MESSAGES:
        assert with_gradient_reduction(job(1, all_reduce=algorithm), plan, None).all_reduce == algorithm


def test_a_search_starts_from_the_jobs_algorithm() -> None:
    assert search_algorithm(job(1)) == "backend"
    assert search_algorithm(job(2)) == "hierarchical"
    assert search_algorithm(job(1, all_reduce="tree")) == "tree"


def test_what_is_forecast_is_what_runs() -> None:
    parameters, group = 25e6, RankGroup(4)
    far = HardwareModel(CHIP, (LinkLevel(2, 1e-4, 2e9), LinkLevel(4, 5e-3, 125e6)), start_seconds=0.0)
    expected: dict[tuple[AllReduceAlgorithm, str], Algorithm | None] = {
        ("backend", "cpu"): "gloo_ring",
        ("ring", "cpu"): "message_ring",
        ("tree", "cpu"): "message_tree",
        ("halving_doubling", "cpu"): "message_halving_doubling",
        ("backend", "cuda"): None,
        ("ring", "cuda"): "ring",
        ("tree", "cuda"): "tree",
    }
    for (name, device), algorithm in expected.items():
        plan = replace(FOUR, all_reduce=name, device=device)
        found = DataParallelCost(plan, far, FrameworkTraits()).reduce_gather_per_step(parameters)[0]
        assert found == all_reduce_seconds(far, group, 4 * parameters, algorithm), (name, device)


@pytest.mark.parametrize(
    ("algorithm", "steps", "latencies", "buffers"),
    [
        ("message_ring", 14, 2, 14 / 8),
        ("message_tree", 6, 1, 6.0),
        ("message_halving_doubling", 6, 2, 14 / 8),
    ],
)
def test_messages_take_the_steps_and_bytes_of_their_schedules(
    algorithm: Algorithm, steps: int, latencies: int, buffers: float
) -> None:
    """Thakur et al. 2005, sections 4.4 and 4.5: latency by the steps, transfer by the buffers sent.

    A step in which ranks send and receive at once has the latency of a request and its answer.
    """
    size, latency, rate = 1e6, 2e-3, 1e8
    idle = replace(CHIP, bandwidth_bytes_per_second=1e30, launch_seconds=0.0)
    hardware = HardwareModel(idle, (LinkLevel(8, latency, rate),), start_seconds=0.0)
    found = all_reduce_seconds(hardware, RankGroup(8), size, algorithm)
    assert found == pytest.approx(
        steps * (latencies * latency + MESSAGE_STEP_SECONDS) + buffers * size / rate
    )


MEASURED_SECONDS: dict[AllReduceAlgorithm, float] = {
    "backend": 0.126,
    "ring": 0.129,
    "tree": 0.0253,
    "halving_doubling": 0.0494,
    "hierarchical": 0.0298,
}
"""Seconds of 4 KiB between two nodes of two ranks, over 100 Mbit/s and 10 ms each way (network namespaces,
two busy cores; `wanma.bench.programs.limited_link` with `wanma bench machine`)."""


def test_forecasts_are_near_what_a_long_link_took() -> None:
    links = (LinkLevel(2, 1e-4, 1e9), LinkLevel(4, 0.010, 6.25e6))
    times = AllReduceTimes(FOUR, HardwareModel(CHIP, links, start_seconds=0.0), 2)
    forecast = {name: times.seconds(name, 4096.0) for name in MEASURED_SECONDS}
    for name, seconds in MEASURED_SECONDS.items():
        assert forecast[name] == pytest.approx(seconds, rel=0.35), name
    assert max(forecast["tree"], forecast["hierarchical"]) < forecast["halving_doubling"]
    assert forecast["halving_doubling"] < min(forecast["ring"], forecast["backend"])


def test_within_a_node_messages_have_the_measured_time_of_messages() -> None:
    ring = all_reduce_seconds(ONE_NODE, RankGroup(4), MEBIBYTE, "message_ring")
    assert ring > 4 * 2 * 3 / 4 * MEBIBYTE / 1e9
    same = replace(ONE_NODE, collective_factors={})
    assert all_reduce_seconds(same, RankGroup(4), MEBIBYTE, "message_ring") < ring


def test_nccls_switch_is_set_for_all_reduces_alone_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(FOUR, device="cuda", all_reduce="tree")
    assert nccl_algorithm(plan) == "allreduce:tree"
    assert "NCCL_ALGO=allreduce:tree" in (nccl_switch_note(plan) or "")
    assert nccl_algorithm(replace(plan, all_reduce="backend")) == ""
    assert nccl_switch_note(FOUR) is None
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with nccl_algorithm_environment(nccl_algorithm(plan)):
        assert os.environ["NCCL_ALGO"] == "allreduce:tree"
    assert os.environ["NCCL_ALGO"] == "NVLS"
    with nccl_algorithm_environment(""):
        assert os.environ["NCCL_ALGO"] == "NVLS", "the user's own stays"
    monkeypatch.delenv("NCCL_ALGO")
    with nccl_algorithm_environment("allreduce:ring"):
        assert os.environ["NCCL_ALGO"] == "allreduce:ring"
    assert "NCCL_ALGO" not in os.environ


def test_a_plan_of_an_older_run_has_the_same_sums() -> None:
    assert Plan.from_json({"dp_replicate": 4, "hierarchical": True}).all_reduce == "hierarchical"
    assert Plan.from_json({"dp_replicate": 4, "hierarchical": False}).all_reduce == "backend"
    assert Plan.from_json(replace(FOUR, all_reduce="tree").to_json()).all_reduce == "tree"
