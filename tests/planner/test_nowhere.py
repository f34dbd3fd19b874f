"""Jobs without a plan: why there is none, by how much they fail, and what would help."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.explain.advice import fitting_changes
from wanma.planner.forecast.plan_forecast import forecast_plan_memory
from wanma.planner.forecast.problem import (
    USABLE_DEVICE_MEMORY_SHARE,
    USABLE_HOST_MEMORY_SHARE,
    PlanningInputs,
    build_problem,
)
from wanma.planner.infeasibility import (
    check_fixed_settings,
    minimum_cluster,
    minimum_memory_plan,
    node_counts,
)
from wanma.planner.job_planner import plan_for_job
from wanma.planner.plan_search import run_world_sizes

LARGE = DecoderConfig(80, 8192, 64, 8, 28672, 128256)
"""70 billion parameters."""
SMALL = DecoderConfig(4, 512, 8, 8, 2048, 8192)
BOX, HALL = parse_shorthand("8 H100"), parse_shorthand("4x8 H100, 8x400G")


def job(nodes: int = 1, *, batch: int = 32, length: int = 2048, **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": length},
            "train": {"global_batch": batch, "precision": "bf16"},
            "parallel": {"auto": True, **parallel},
            "cluster": {"nodes": nodes, "rendezvous": "a:1"},
        }
    )


def refused(asked: Job, on: Cluster, model: DecoderConfig = SMALL) -> JobError:
    with pytest.raises(JobError) as refusal:
        plan_for_job(
            PlanningInputs(asked, on, compute_decoder_workload(model, asked.data.sequence_length), model)
        )
    assert refusal.value.exit_code == 2
    return refusal.value


# ------------------------------------------------------------------ what fits nowhere


def test_a_model_that_fits_nowhere_is_told_by_how_much_and_what_would_do() -> None:
    error = refused(job(schedule="1f1b", recompute="full", cp=1, micro_batch=1), BOX, LARGE)
    told = re.search(
        r"the model does not fit on 1 node of 8 × H100 SXM.*: the plan with the lowest memory, .*, needs "
        r"([\d.]+) GiB per rank; the limit is ([\d.]+) GiB \(([\d.]+) GiB over\): ([a-z ]+) [\d.]+ GiB, ",
        error.message,
    )
    assert told is not None, error.message
    needed, there, missing = (float(told[number]) for number in (1, 2, 3))
    assert there == pytest.approx(80e9 * USABLE_DEVICE_MEMORY_SHARE / 2**30, abs=0.05)
    assert missing == pytest.approx(needed - there, abs=0.6)
    assert told[4] in ("parameters", "gradients", "optimizer state")
    assert "× H100 SXM" in error.hint


def test_the_smallest_cluster_is_the_first_on_which_the_leanest_plan_fits() -> None:
    asked, workload = job(), compute_decoder_workload(LARGE, 2048)
    enough = minimum_cluster(asked, BOX, workload, LARGE)
    (node,) = enough.nodes
    assert len(node.devices) == 8
    problem = build_problem(asked, BOX, workload, LARGE)
    plan = minimum_memory_plan(problem, enough)
    assert plan.world_size == 8 * node.count
    assert forecast_plan_memory(problem, plan).memory_bytes <= problem.memory_limit_bytes
    fewer = [count for count in node_counts(1, node.count) if count < node.count]
    for count in fewer:
        assert minimum_memory_plan(problem, parse_shorthand(f"{count}x8 H100, 8x400G")) is None
    plan_for_job(
        PlanningInputs(
            job(node.count, recompute="full", schedule="1f1b", micro_batch=1), enough, workload, LARGE
        )
    )


def test_no_number_of_machines_is_enough_for_a_rank_that_cannot_be_cut() -> None:
    one_block = DecoderConfig(1, 65536, 1, 1, 262144, 64)
    asked = job(batch=1, length=64, tp=1, shard="none")
    assert minimum_cluster(asked, BOX, compute_decoder_workload(one_block, 64), one_block) is None
    assert "devices with more memory" in refused(asked, BOX, one_block).hint


def test_counts_of_machines_are_those_that_many_sizes_divide() -> None:
    assert node_counts(3, 20) == [3, 4, 5, 6, 8, 10, 12, 16, 20]


def test_a_plan_of_ones_own_that_does_not_fit_is_told_what_would() -> None:
    own = job().model_copy(update={"parallel": type(job().parallel)(dp_shard=8, micro_batch=8)})
    medium = DecoderConfig(32, 4096, 32, 8, 14336, 128256)
    error = refused(own, BOX, medium)
    assert re.search(
        r"the plan does not fit: a rank needs about [\d.]+ GiB, the limit is 69\.3 GiB: ", error.message
    )
    assert error.hint.startswith("set parallel.")
    change = error.hint.removeprefix("set ").split("; or ")[0]
    changed = {
        key.removeprefix("parallel."): value for key, value in (one.split("=") for one in change.split())
    }
    section = type(job().parallel).model_validate({"dp_shard": 8, "micro_batch": 8, **changed})
    plan_for_job(
        PlanningInputs(
            own.model_copy(update={"parallel": section}), BOX, compute_decoder_workload(medium, 2048), medium
        )
    )


# ------------------------------------------------------------------ what contradicts itself


CONTRADICTIONS: dict[str, tuple[dict[str, Any], Cluster, str]] = {
    "heads that tp does not divide": ({"tp": 3}, BOX, r"parallel\.tp = 3 does not divide model\.heads = 8"),
    "more ranks than devices": (
        {"pp": 4, "tp": 4},
        BOX,
        r"parallel\.pp = 4 × parallel\.tp = 4 needs 16 ranks; 1 node .* has room for 8",
    ),
    "sizes that devices are no multiple of": (
        {"pp": 3},
        BOX,
        r"parallel\.pp = 3 needs a multiple of 3 ranks; no world size of .* is one: .*8",
    ),
    "more stages than blocks": (
        {"pp": 8, "tp": 1},
        BOX,
        r"the values set in \[parallel\] leave no plan .*pp = 8",
    ),
    "more data ranks than samples": (
        {"dp_shard": 8, "dp_replicate": 4},
        HALL,
        r"train\.global_batch = 16 gives 32 data ranks",
    ),
    "shards without ranks to share": (
        {"tp": 8, "shard": "parameters", "cp": 1},
        BOX,
        r"the values set in \[parallel\] leave no plan on .*: cp = 1, shard = parameters, tp = 8",
    ),
    "cuts beyond the model": (
        {"pp": 2, "stage_cuts": [40]},
        BOX,
        r"parallel\.stage_cuts = \[40\]: cuts must lie between 0 and 4, the number of blocks",
    ),
    "cuts for another number of stages": (
        {"pp": 2, "schedule": "1f1b", "stage_cuts": [1, 2]},
        BOX,
        r"parallel\.stage_cuts = \[1, 2\]: 2 stages need 1 cuts, not 2",
    ),
    "shared state of which nothing is shared": (
        {"shard": "none", "dp_shard": 4},
        BOX,
        r"parallel\.shard = 'none' with parallel\.dp_shard = 4",
    ),
    "a backward that is taken apart and recomputes": (
        {"pp": 2, "schedule": "zbv", "recompute": "full"},
        BOX,
        r"parallel\.schedule = 'zbv' with parallel\.recompute = 'full'",
    ),
    "experts that are not there": ({"ep": 2}, BOX, r"parallel\.ep = 2, but the model has no experts"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_sizes_that_contradict_each_other_are_refused_with_the_keys(name: str) -> None:
    parallel, on, message = CONTRADICTIONS[name]
    error = refused(job(on.node_count, batch=16, **parallel), on)
    assert re.search(message, error.message), error.message
    assert error.hint


def test_the_keys_without_which_there_are_plans_are_named() -> None:
    error = refused(job(tp=8, shard="parameters", cp=1), BOX)
    assert error.hint == "unset parallel.shard or parallel.tp"


def test_what_is_open_is_no_contradiction() -> None:
    for parallel in ({}, {"tp": 8}, {"pp": 2, "dp_shard": 4}):
        asked = job(**parallel)
        check_fixed_settings(asked, BOX, SMALL, run_world_sizes(asked, BOX))


# ------------------------------------------------------------------ the hosts' memory


def test_what_waits_in_the_hosts_memory_must_fit_there() -> None:
    (node,) = BOX.nodes
    small = Cluster((replace(node, memory_bytes=64 << 30),))
    asked = job(recompute="full", schedule="1f1b", micro_batch=1, offload_optimizer="host", cp=1, pp=1, tp=1)
    medium = DecoderConfig(32, 4096, 32, 8, 14336, 128256)
    workload = compute_decoder_workload(medium, 2048)
    best = plan_for_job(PlanningInputs(asked, BOX, workload, medium))
    assert best.forecast.host_bytes * 8 > (64 << 30) * USABLE_HOST_MEMORY_SHARE
    error = refused(asked, small, medium)
    assert re.search(r"of host memory on .*, which has 64\.0 GiB", error.message), error.message
    problem = build_problem(job(), small, compute_decoder_workload(LARGE, 2048), LARGE)
    leanest = Plan(dp_shard=8, shard="parameters", recompute="full", precision="bf16", device="cuda")
    assert all(
        "offload" not in str(change) or "disk" in str(change) for change in fitting_changes(problem, leanest)
    )


def test_a_plan_of_ones_own_beyond_single_changes_is_told_of_the_search() -> None:
    replicas = job().model_copy(update={"parallel": type(job().parallel)(dp_replicate=32)})
    huge = DecoderConfig(126, 16384, 128, 8, 53248, 128256)
    error = refused(replicas.model_copy(update={"cluster": job(4).cluster}), HALL, huge)
    assert error.hint.startswith("set parallel = 'auto', shard more")
