"""Method of gradient reduction: chosen from the links between nodes, refused where it makes no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.machines import CHIP
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import DEFAULT_BUCKET_BYTES, MIN_BUCKET_BYTES, Plan
from wanma.job.sections.job import Job
from wanma.planner.all_reduce_choice import all_reduce_reasons, all_reduce_unavailable_reason
from wanma.planner.cost.data_parallel import DataParallelCost, overlaps_gradient_reduction
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.gradient_reduction import check_buckets, saturating_bucket_bytes, with_gradient_reduction
from wanma.planner.hardware_model.collective_time import RankGroup, all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel
from wanma.planner.job_planner import build_layout, complete_plan

FOUR = Plan(dp_replicate=4)
HIERARCHICAL = replace(FOUR, all_reduce="hierarchical")


def job(nodes: int = 2, **parallel: Any) -> Job:
    cluster = {"nodes": nodes, "rendezvous": "10.0.0.1:29500"} if nodes > 1 else {}
    return Job.model_validate({"model": {"preset": "gpt-1m"}, "cluster": cluster, "parallel": parallel})


def machines(
    latency: float = 1e-3, bytes_per_second: float = 12.5e6, nodes: int = 2, ranks: int = 2
) -> HardwareModel:
    """Nodes of so many ranks each, with a slow network between them."""
    links = (LinkLevel(ranks, 1e-4, 2e9), LinkLevel(nodes * ranks, latency, bytes_per_second))
    return HardwareModel(CHIP, links, start_seconds=0.0)


def test_replicas_on_several_machines_sum_within_each_first() -> None:
    assert with_gradient_reduction(job(), FOUR, machines()).all_reduce == "hierarchical"
    assert (
        with_gradient_reduction(job(), FOUR, None).all_reduce == "hierarchical"
    )  # nobody knows the links: less leaves the machines
    assert with_gradient_reduction(job(all_reduce="backend"), FOUR, machines()).all_reduce != "hierarchical"


def test_why_is_told_in_a_sentence() -> None:
    (told,) = all_reduce_reasons(HIERARCHICAL, machines(), 2, DEFAULT_BUCKET_BYTES)
    # Twice: half of it within a machine; then half of a half, over a rank's half of 12.5 MB/s.
    assert told == "hierarchical all-reduce: 25.0 MiB in 1.06 s, against 1.58 s as one ring"
    assert all_reduce_reasons(FOUR, machines(), 2, DEFAULT_BUCKET_BYTES) == []


def test_it_is_not_chosen_where_it_would_take_longer() -> None:
    # A network as fast as memory, of which each rank has its half: levels add up, a ring uses both at once.
    fast = replace(machines(), links=(LinkLevel(2, 0.0, 2e9), LinkLevel(4, 0.0, 1e9)))
    assert all_reduce_seconds(fast, RankGroup(4), 1e8, "ring") < all_reduce_seconds(
        fast, RankGroup(4), 1e8, "hierarchical"
    )
    assert with_gradient_reduction(job(), FOUR, fast).all_reduce != "hierarchical"
    assert with_gradient_reduction(job(all_reduce="hierarchical"), FOUR, fast).all_reduce == "hierarchical"


@pytest.mark.parametrize(
    ("plan", "nodes", "reason"),
    [
        (FOUR, 1, "all ranks are on one node"),
        (Plan(dp_replicate=2), 2, "each node has one of the replicas"),
        (Plan(dp_replicate=2, tp=2), 2, "each node has one of the replicas"),
        (Plan(pp=2, dp_replicate=2), 2, "each model part are on one node"),
        (Plan(tp=4), 2, "no replicas to reduce gradients over"),
        (Plan(dp_replicate=4, precision="bf16"), 2, "FSDP2 reduces sharded"),
        (Plan(dp_replicate=4, device="cuda"), 2, "NCCL chooses the levels"),
    ],
    ids=["one node", "one each", "one each, tensor", "stages", "no replicas", "cast", "GPUs"],
)
def test_what_makes_no_sense_is_refused_with_the_reason(plan: Plan, nodes: int, reason: str) -> None:
    assert reason in (all_reduce_unavailable_reason(plan, "hierarchical", nodes) or "")
    assert with_gradient_reduction(job(nodes), plan, None).all_reduce != "hierarchical"
    with pytest.raises(JobError, match=reason) as refused:
        with_gradient_reduction(job(nodes, all_reduce="hierarchical"), plan, None)
    assert "parallel.all_reduce = 'hierarchical'" in refused.value.message


def test_ranks_of_cp_are_replicas_too_and_tensor_ranks_are_not() -> None:
    assert all_reduce_unavailable_reason(Plan(dp_replicate=2, cp=2), "hierarchical", 2) is None
    assert all_reduce_unavailable_reason(Plan(dp_replicate=4, tp=2), "hierarchical", 2) is None


def test_nodes_may_have_unequal_numbers_of_ranks_unless_gradients_are_compressed() -> None:
    three = Plan(dp_replicate=3)
    assert all_reduce_unavailable_reason(three, "hierarchical", 2) is None
    compressed = replace(three, compression="int8", approximate=("compression",))
    reason = all_reduce_unavailable_reason(compressed, "hierarchical", 2)
    assert "equally many replicas on each node" in reason


def test_compressed_sums_go_by_machines_where_these_have_as_many_replicas() -> None:
    smaller = replace(FOUR, compression="int8")
    slow = machines(bytes_per_second=1e7)
    assert with_gradient_reduction(job(), smaller, slow).all_reduce == "hierarchical"
    grouped = replace(smaller, all_reduce="hierarchical")
    (told,) = all_reduce_reasons(grouped, slow, 2, DEFAULT_BUCKET_BYTES)
    assert ", against " in told
    assert "in one step over all replicas" in told
    # Three pairs of tensor ranks on two machines of three: one has two of the first ranks, and one the other.
    across = Plan(dp_replicate=3, tp=2)
    assert all_reduce_unavailable_reason(across, "hierarchical", 2) is None
    assert "equally many replicas" in (
        all_reduce_unavailable_reason(replace(across, compression="int8"), "hierarchical", 2) or ""
    )


def test_buckets_are_as_small_as_fill_the_network() -> None:
    near, far = machines(latency=1e-5), machines(latency=5e-2, bytes_per_second=1e9)
    assert saturating_bucket_bytes(FOUR, near) == MIN_BUCKET_BYTES
    assert saturating_bucket_bytes(FOUR, far) == DEFAULT_BUCKET_BYTES
    middle = saturating_bucket_bytes(FOUR, machines(latency=5e-3, bytes_per_second=1e9))
    assert MIN_BUCKET_BYTES < middle <= DEFAULT_BUCKET_BYTES
    assert with_gradient_reduction(job(), FOUR, near).bucket_bytes == MIN_BUCKET_BYTES
    assert with_gradient_reduction(job(), FOUR, None).bucket_bytes == DEFAULT_BUCKET_BYTES


def test_the_jobs_buckets_are_kept_and_refused_where_there_are_none() -> None:
    asked = job(bucket_bytes=5000)
    plan = replace(FOUR, bucket_bytes=5000)
    assert with_gradient_reduction(asked, plan, machines()).bucket_bytes == 5000
    check_buckets(asked, plan)
    with pytest.raises(JobError, match=r"parallel\.bucket_bytes = 5000"):
        check_buckets(asked, Plan(dp_shard=4, shard="parameters"))


def test_the_whole_plan_says_it() -> None:
    two = Cluster((NodeGroup("a", 2, 8 << 30, (), count=2),))
    asked = job(dp_replicate=4, overlap=False)
    plan = complete_plan(asked, build_layout(asked, two), two, None).plan
    assert (plan.all_reduce, plan.overlap, plan.bucket_bytes) == ("hierarchical", False, DEFAULT_BUCKET_BYTES)


def test_what_is_forecast_is_what_runs() -> None:
    parameters, group = 25e6, RankGroup(4)
    for plan, algorithm in ((HIERARCHICAL, "message_hierarchical"), (FOUR, "gloo_ring")):
        found = DataParallelCost(plan, machines(), FrameworkTraits()).reduce_gather_per_step(parameters)[0]
        assert found == all_reduce_seconds(machines(), group, 4 * parameters, algorithm)  # type: ignore[arg-type]


def test_sums_hide_behind_backward_where_a_network_moves_them() -> None:
    assert overlaps_gradient_reduction(FOUR, machines())
    assert not overlaps_gradient_reduction(replace(FOUR, overlap=False), machines())
    assert not overlaps_gradient_reduction(
        Plan(dp_replicate=2), machines()
    )  # on one node the cores move them
    assert not overlaps_gradient_reduction(Plan(pp=2, dp_replicate=2), machines())
    assert not overlaps_gradient_reduction(Plan(dp_shard=4, shard="parameters"), machines())
    assert overlaps_gradient_reduction(Plan(dp_replicate=2, device="cuda"), machines())
