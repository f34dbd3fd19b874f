"""From a job and the machines to a plan: what is chosen, and what is refused with the keys to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.batch_size_schedule import global_batch_size
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.resolution import resolve_decoder_config
from wanma.planner.forecast.problem import USABLE_HOST_MEMORY_SHARE, select_device_type
from wanma.planner.job_planner import PlanResult, build_layout, complete_plan

GIB = 1 << 30
GPU = Device("cuda", "H100", 80 * GIB, {"bf16": 989e12})
LAPTOP = Cluster((NodeGroup("laptop", 8, 16 * GIB, ()),))
BOX = Cluster((NodeGroup("box", 64, 512 * GIB, (GPU,) * 8),))
TWO = Cluster((NodeGroup("a", 16, 64 * GIB, ()), NodeGroup("b", 16, 64 * GIB, ())))

SMALL = Workload(
    (
        LayerWorkload("embedding", 1, 100_000, 0.0, 0.0),
        LayerWorkload("layers", 4, 200_000, 1e6, 50_000.0),
        LayerWorkload("head", 1, 100_000, 1e5, 100_000.0),
    ),
    tokens_per_sample=256,
)


def job(model: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **sections: Any) -> Job:
    return Job.model_validate({"model": model or {"preset": "gpt-1m"}, "cluster": cluster or {}, **sections})


def planned(on: Cluster = LAPTOP, workload: Workload | None = SMALL, **sections: Any) -> PlanResult:
    asked = job(**sections)
    return complete_plan(asked, build_layout(asked, on), on, workload)


# ------------------------------------------------------------------ devices and axes


def test_a_gpu_is_taken_where_there_is_one_and_the_cpu_where_the_job_says_so() -> None:
    assert select_device_type(job(), BOX) == "cuda"
    assert select_device_type(job(), LAPTOP) == "cpu"
    assert select_device_type(job(cluster={"device": "cpu"}), BOX) == "cpu"


def test_auto_on_cpus_is_one_process_with_all_cores_and_says_why() -> None:
    result = planned(parallel="auto")
    assert (result.plan.world_size, result.plan.threads_per_rank) == (1, 8)
    assert any("one process" in reason and "all its cores" in reason for reason in result.forecast.reasons)


def test_auto_on_two_cpu_machines_is_one_process_on_each() -> None:
    plan = build_layout(job(parallel="auto", cluster={"nodes": 2, "rendezvous": "a:29500"}), TWO)
    assert (plan.world_size, plan.dp_shard, plan.threads_per_rank) == (2, 2, 16)


def test_auto_on_gpus_shards_parameters_over_all_of_them() -> None:
    plan = build_layout(job(parallel="auto"), BOX)
    assert (plan.dp_shard, plan.shard, plan.device) == (8, "parameters", "cuda")


def test_auto_counts_the_gpus_of_machines_that_are_not_here() -> None:
    plan = build_layout(job(parallel="auto", cluster={"nodes": 2, "rendezvous": "a:29500"}), BOX)
    assert (plan.dp_shard, plan.world_size) == (16, 16)


def test_auto_keeps_the_sizes_that_the_job_gives() -> None:
    plan = build_layout(job(parallel={"auto": True, "tp": 2}), BOX)
    assert (plan.tp, plan.dp_shard, plan.world_size) == (2, 4, 8)
    plan = build_layout(job(parallel={"auto": True, "dp_shard": 2}), BOX)
    assert (plan.dp_shard, plan.world_size) == (2, 2)


def test_ranks_of_a_machine_share_its_cores() -> None:
    assert build_layout(job(parallel={"dp_replicate": 4}), LAPTOP).threads_per_rank == 2
    assert build_layout(job(parallel={"dp_replicate": 16}), LAPTOP).threads_per_rank == 1
    asked = job(parallel={"dp_replicate": 4}, cluster={"threads_per_rank": 3})
    assert build_layout(asked, LAPTOP).threads_per_rank == 3


def test_dp_shard_shards_parameters_unless_the_job_says_less() -> None:
    assert build_layout(job(parallel={"dp_shard": 2}), LAPTOP).shard == "parameters"
    assert build_layout(job(parallel={"dp_shard": 2, "shard": "optimizer"}), LAPTOP).shard == "optimizer"
    assert build_layout(job(parallel={"dp_replicate": 2}), LAPTOP).shard == "none"


REFUSED: dict[str, tuple[dict[str, Any], Cluster, str]] = {
    "a GPU that is not here": ({"cluster": {"device": "cuda"}}, LAPTOP, r"cluster\.device = 'cuda'"),
    "more ranks than GPUs": ({"parallel": {"dp_shard": 16}}, BOX, r"needs 16 GPUs on box; it has 8"),
    "ranks that nodes do not divide": (
        {"parallel": {"dp_shard": 3}, "cluster": {"nodes": 2, "rendezvous": "a:29500"}},
        TWO,
        r"3 ranks, which is not a multiple of cluster\.nodes = 2",
    ),
    "sharing with nobody": (
        {"parallel": {"dp_replicate": 2, "shard": "optimizer"}},
        LAPTOP,
        r"parallel\.shard = 'optimizer' .*parallel\.dp_shard = 1",
    ),
    "shards of nothing": (
        {"parallel": {"dp_shard": 2, "shard": "none"}},
        LAPTOP,
        r"parallel\.shard = 'none' with parallel\.dp_shard = 2",
    ),
    "fewer samples than ranks": (
        {"parallel": {"dp_replicate": 4}, "train": {"global_batch": 3}},
        LAPTOP,
        r"train\.global_batch = 3 gives 4 data ranks",
    ),
    "a ramp that begins too small": (
        {"parallel": {"dp_replicate": 4}, "train": {"global_batch": 2, "batch_ramp": [[10, 8]]}},
        LAPTOP,
        r"train\.global_batch = 2 gives 4 data ranks",
    ),
    "a pipeline with a loss of one's own": (
        {"model": {"preset": "gpt-1m", "loss": "a:b"}, "parallel": {"pp": 2}},
        LAPTOP,
        r"model\.loss = 'a:b' with parallel\.pp = 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    sections, cluster, message = REFUSED[name]
    with pytest.raises(JobError, match=message) as refusal:
        build_layout(job(**sections), cluster)
    assert refusal.value.exit_code == 2


def test_a_batch_size_that_no_step_has_is_no_reason_to_refuse() -> None:
    train = {"global_batch": 1, "batch_ramp": [[0, 8], [500, 2]], "steps": 100}
    assert build_layout(job(parallel={"dp_replicate": 4}, train=train), LAPTOP).data_parallel_size == 4


# ------------------------------------------------------------------ the micro-batch


def test_the_micro_batch_is_all_of_a_ranks_samples_where_they_fit() -> None:
    assert planned(train={"global_batch": 12}, parallel={"dp_replicate": 2}).plan.micro_batch == 6


def test_on_a_cpu_a_micro_batch_stays_near_the_caches() -> None:
    assert planned(train={"global_batch": 64}).plan.micro_batch == 16  # × 256 tokens = 4096
    assert planned(BOX, train={"global_batch": 64}).plan.micro_batch == 64


def test_the_micro_batch_is_halved_until_it_fits() -> None:
    tight = Cluster((NodeGroup("tight", 8, 425 << 20, ()),))
    result = planned(tight, train={"global_batch": 16})
    assert 1 <= result.plan.micro_batch < 16
    assert result.forecast.memory_bytes <= (425 << 20) * USABLE_HOST_MEMORY_SHARE
    assert f"micro_batch {result.plan.micro_batch}: the largest that fits" in result.forecast.reasons[1]


def test_what_cannot_fit_is_refused_with_the_sizes() -> None:
    tiny = Cluster((NodeGroup("tiny", 8, 300 << 20, ()),))
    with pytest.raises(JobError, match=r"\d+ MiB, .* 255 MiB: .*parameters"):
        planned(tiny)


def test_the_jobs_own_micro_batch_is_kept() -> None:
    assert planned(parallel={"micro_batch": 5}).plan.micro_batch == 5
    assert planned(workload=None, parallel={"micro_batch": 5}).plan.micro_batch == 5


def test_the_smallest_batch_of_a_ramp_bounds_the_micro_batch() -> None:
    train = {"global_batch": 4, "batch_ramp": [[10, 8], [20, 16]]}
    assert planned(train=train).plan.micro_batch == 4


# ------------------------------------------------------------------ statistics over groups of samples


def test_batch_normalization_gets_whole_groups() -> None:
    model = {"preset": "resnet-18", "batch_norm_group": 4}
    plan = planned(BOX, model=model, train={"global_batch": 24}, parallel={"dp_replicate": 2}).plan
    assert all(len(run) % 4 == 0 for rank in (0, 1) for run in plan.micro_batches(24, rank))
    with pytest.raises(JobError, match=r"model\.batch_norm_group = 4") as refusal:
        planned(BOX, model=model, train={"global_batch": 12}, parallel={"dp_replicate": 2})
    assert "multiple of 8" in refusal.value.hint


def test_experts_balanced_over_several_samples_get_whole_groups() -> None:
    model = {"preset": "gpt-moe-3m", "balance": "loss", "balance_group": 4}

    def plan(batch: int, **parallel: int) -> Plan:
        asked = job(model=model, train={"global_batch": batch}, parallel=parallel)
        dimensions = resolve_decoder_config(asked.model, 257)
        return complete_plan(asked, build_layout(asked, BOX), BOX, SMALL, dimensions).plan

    for found in (plan(24, dp_replicate=2), plan(24, pp=2)):
        ranks = range(found.data_parallel_size)
        assert all(len(run) in (4, 8, 12) for rank in ranks for run in found.micro_batches(24, rank))
    with pytest.raises(JobError, match=r"model\.balance_group = 4 samples"):
        plan(12, dp_replicate=2)
    with pytest.raises(JobError, match=r"model\.balance_group = 4"):
        plan(24, dp_replicate=2, micro_batch=3)


def test_a_factory_trains_a_ranks_samples_in_one_micro_batch_so_that_groups_stay_whole() -> None:
    plan = planned(
        workload=None,
        model={"factory": "a:b", "batch_norm_group": 4},
        train={"global_batch": 24},
        parallel={"dp_replicate": 2},
    ).plan
    assert plan.micro_batch == 12
    assert plan.gradient_accumulation_steps(24) == 1


# ------------------------------------------------------------------ pipelines


def test_a_pipeline_gets_twice_as_many_micro_batches_as_stages_where_there_are_samples() -> None:
    plan = planned(train={"global_batch": 32}, parallel={"pp": 2}).plan
    assert plan.gradient_accumulation_steps(32) == 4


@pytest.mark.parametrize(
    ("train", "parallel", "cause", "way_out"),
    [
        ({"global_batch": 6}, {"dp_replicate": 2}, "pp = 4.*global_batch = 6 .* 3 samples", "at least 7"),
        ({"global_batch": 2, "batch_ramp": [[5, 32]]}, {}, "train.global_batch = 2 gives", ""),
        ({"global_batch": 8}, {"micro_batch": 4}, "pp = 4.*micro_batch = 4", "parallel.micro_batch = 2,"),
    ],
)
def test_a_batch_too_small_for_the_stages_is_refused(
    train: dict[str, Any], parallel: dict[str, int], cause: str, way_out: str
) -> None:
    with pytest.raises(JobError, match=cause) as refusal:
        planned(train=train, parallel={"pp": 4, **parallel})
    assert way_out in refusal.value.hint


def test_the_way_out_of_a_batch_too_small_is_accepted() -> None:
    assert planned(train={"global_batch": 7}, parallel={"pp": 4, "dp_replicate": 2}).plan.micro_batch == 1
    plan = planned(train={"global_batch": 8}, parallel={"pp": 4, "micro_batch": 2}).plan
    assert plan.gradient_accumulation_steps(8) == 4


def test_gpipe_runs_with_fewer_micro_batches_than_stages() -> None:
    parallel = {"pp": 4, "micro_batch": 4, "schedule": "gpipe"}
    assert planned(train={"global_batch": 8}, parallel=parallel).plan.gradient_accumulation_steps(8) == 2


@given(
    batch=st.integers(1, 64),
    later=st.integers(1, 64),
    ranks=st.integers(1, 4),
    stages=st.integers(1, 4),
    micro_batch=st.none() | st.integers(1, 16),
    known=st.booleans(),
)
def test_every_accepted_pipeline_has_a_micro_batch_for_each_stage(
    batch: int, later: int, ranks: int, stages: int, micro_batch: int | None, known: bool
) -> None:
    asked = job(
        train={"global_batch": batch, "batch_ramp": [[5, later]]},
        parallel={"pp": stages, "dp_replicate": ranks, "micro_batch": micro_batch},
    )
    possible = min(batch, later) > (stages - 1) * ranks and min(batch, later) >= ranks
    try:
        plan: Plan = complete_plan(asked, build_layout(asked, LAPTOP), LAPTOP, SMALL if known else None).plan
    except JobError:
        assert not possible or micro_batch is not None
        return
    for step in (0, 5):
        assert plan.gradient_accumulation_steps(global_batch_size(asked.train, step)) >= stages
