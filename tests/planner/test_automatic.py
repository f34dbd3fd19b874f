"""`parallel = "auto"`: the fastest plan that wanma runs, by forecast, with what the job says kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import (
    USABLE_DEVICE_MEMORY_SHARE,
    PlanningInputs,
    build_problem,
    homogeneous_cluster,
)
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import Calibration, DeviceCalibration
from wanma.planner.job_planner import PlanResult, build_layout, complete_plan, plan_for_job, search_job_plan
from wanma.planner.plan_search import (
    merge_results,
    run_world_sizes,
    search_plans,
    time_search_unavailable_reason,
)
from wanma.planner.rules.capabilities import unsupported_reason
from wanma.planner.search import space
from wanma.planner.search.branch_and_bound import search
from wanma.planner.search.space import SearchSpace

H100 = parse_shorthand("8 H100")
SMALL = DecoderConfig(4, 512, 8, 8, 2048, 8192)
LARGE = DecoderConfig(8, 8192, 64, 8, 28672, 32000)
"""8 billion parameters, whose state of 128 GB no device holds."""
SEQUENCE = 1024
FEW = {"schedule": "1f1b", "recompute": "none", "virtual_stages": 1, "cp": 1}
"""So that a search is a matter of milliseconds."""
EPYC = "EPYC 7742"


def job(parallel: dict[str, Any] | str = "auto", **sections: Any) -> Job:
    given = {"auto": True, **FEW} if parallel == "auto" else parallel
    train = {"global_batch": 16, "precision": "bf16", **sections.pop("train", {})}
    return Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": train,
            "parallel": given,
            **sections,
        }
    )


def planned(
    of: Job, on: Cluster = H100, model: DecoderConfig = SMALL, calibration: Calibration | None = None
) -> PlanResult:
    workload = compute_decoder_workload(model, SEQUENCE)
    return plan_for_job(PlanningInputs(of, on, workload, model, calibration))


# ------------------------------------------------------------------ the choice


def test_the_plan_is_the_fastest_that_a_search_of_the_job_finds() -> None:
    asked = job()
    result = planned(asked)
    problem = build_problem(asked, H100, compute_decoder_workload(SMALL, SEQUENCE), SMALL)
    worlds = run_world_sizes(asked, H100)
    best = search(problem, SearchSpace.from_job(asked, H100, SMALL, world_sizes=worlds)).best
    assert replace(result.plan, threads_per_rank=1) == best.plan
    assert result.forecast.step == forecast_plan(problem, best.plan).step
    assert result.search_result.plan_count > 100


def test_it_says_why_and_what_was_next() -> None:
    forecast = planned(job()).forecast
    told = "\n".join(forecast.reasons)
    assert "the fastest of " in told
    assert " plans, by forecast: " in told
    assert "next: " in told
    assert "step time: compute " in told


def test_state_that_no_device_holds_is_shared() -> None:
    plan = planned(job(), model=LARGE).plan
    assert plan.world_size == 8
    assert plan.tp * plan.pp * plan.shard_group_size > 1
    assert planned(job({"auto": True, **FEW, "tp": 8}), model=LARGE).plan.tp == 8


def test_what_the_job_says_is_kept() -> None:
    said = {"tp": 2, "shard": "optimizer", "micro_batch": 2, "sequence_parallel": False, "recompute": "full"}
    plan = planned(job({"auto": True, **FEW, **said})).plan
    for key, value in said.items():
        assert getattr(plan, key) == value


def test_what_a_job_says_survives_overrides() -> None:
    again = to_job(job({"auto": True, "tp": 2}), ["train.steps=7"])
    assert again.parallel.model_fields_set == {"auto", "tp"}
    assert again.train.steps == 7


def test_ranks_of_a_machine_share_its_cores() -> None:
    plan = planned(job()).plan
    assert plan.threads_per_rank == H100.nodes[0].cores // plan.world_size
    assert planned(job(cluster={"threads_per_rank": 3})).plan.threads_per_rank == 3


def test_a_run_has_as_many_ranks_on_each_of_its_machines() -> None:
    two = parse_shorthand("2x8 H100, 8x400G")
    here = Cluster((replace(two.nodes[0], count=1),))  # a machine that has discovered itself
    asked = job(cluster={"nodes": 2, "rendezvous": "a:1"}, train={"global_batch": 64})
    assert run_world_sizes(asked, here) == (2, 4, 8, 16)
    assert planned(asked, here).plan == planned(asked, two).plan
    assert planned(asked, two).plan.world_size in (2, 4, 8, 16)


def test_unlike_machines_are_planned_for_as_the_slowest_and_smallest() -> None:
    mixed = parse_shorthand("1x8 H100 + 1x4 A100 40GB, 4x100G")
    asked = job(cluster={"nodes": 2, "rendezvous": "a:1"})
    (node,) = homogeneous_cluster(asked, mixed).nodes
    assert (node.count, len(node.devices), node.devices[0].name) == (2, 4, "A100 SXM 40 GB")
    assert node.devices[0].memory_bytes == 40 * 10**9
    problem = build_problem(asked, mixed, compute_decoder_workload(SMALL, SEQUENCE), SMALL)
    assert problem.memory_limit_bytes == 40 * 10**9 * USABLE_DEVICE_MEMORY_SHARE
    assert problem.hardware.device_count == 8


# ------------------------------------------------------------------ what may be chosen


def test_fp8_is_chosen_only_where_the_job_allows_it_by_name() -> None:
    plain, allowed = job(), job({"auto": True, "allow": ["fp8"], **FEW})
    assert not planned(plain, model=LARGE).plan.fp8
    plan = planned(allowed, model=LARGE).plan
    assert plan.fp8
    assert plan.approximate == ("fp8",)
    assert not planned(allowed, parse_shorthand("8 A100"), LARGE).plan.fp8


def test_bf16_is_chosen_for_a_job_in_fp32_only_where_it_allows_it_by_name() -> None:
    fp32 = {"train": {"precision": "fp32"}}
    exact = planned(job(**fp32))
    assert exact.plan.precision == "fp32"
    allowed = job({"auto": True, "allow": ["bf16"], **FEW}, **fp32)
    half = planned(allowed)
    assert (half.plan.precision, half.plan.approximate) == ("bf16", ("bf16",))
    assert half.forecast.step.seconds < exact.forecast.step.seconds
    same_plan = replace(half.plan, approximate=())
    in_bf16 = build_problem(job(), H100, compute_decoder_workload(SMALL, SEQUENCE), SMALL)
    assert half.forecast.step == forecast_plan(in_bf16, same_plan).step
    # A V100 does not compute in it, and a job in fp16 asked for what it has.
    assert planned(allowed, parse_shorthand("8 V100")).plan.precision == "fp32"
    fp16 = job({"auto": True, "allow": ["bf16"], **FEW}, train={"precision": "fp16"})
    assert planned(fp16).plan.precision == "fp16"


def test_a_job_in_fp32_that_allows_both_gets_fp8_between_products_in_bf16() -> None:
    both = job({"auto": True, "allow": ["bf16", "fp8"], **FEW}, train={"precision": "fp32"})
    plan = planned(both, model=LARGE).plan
    assert (plan.precision, plan.fp8, plan.approximate) == ("bf16", True, ("bf16", "fp8"))


def test_compressed_gradients_are_chosen_on_slow_links_where_the_job_allows_them() -> None:
    slow, workload = parse_shorthand("8x1 H100, 1x10G"), compute_decoder_workload(SMALL, SEQUENCE)
    many = {"global_batch": 256}
    exact = search_plans(PlanningInputs(job(train=many), slow, workload, SMALL))
    allows = job({"auto": True, "allow": ["compression"], **FEW}, train=many)
    allowed = search_plans(PlanningInputs(allows, slow, workload, SMALL))
    assert all(one.plan.compression == "none" for one in exact.candidates)
    assert allowed.best.plan.compression == "int8"
    assert allowed.best.plan.approximate == ("compression",)
    assert allowed.best.seconds < exact.best.seconds


def test_where_nothing_is_exchanged_a_plan_that_would_compress_it_is_not_chosen() -> None:
    allows = job({"auto": True, "allow": ["compression"], **FEW}, train={"global_batch": 1})
    assert planned(allows, parse_shorthand("1 H100")).plan.approximate == ()


def test_what_a_job_says_of_compression_is_kept() -> None:
    asked = job({"auto": True, "compression": "powersgd", "compression_rank": 2, **FEW})
    plan = planned(asked).plan
    assert (plan.compression, plan.compression_rank, plan.approximate) == ("powersgd", 2, ("compression",))


def test_the_plan_that_runs_is_kept_however_many_forecasts_are_faster() -> None:
    found = search_plans(
        PlanningInputs(job(), H100, compute_decoder_workload(SMALL, SEQUENCE), SMALL), keep=3
    )
    slowest = found.candidates[-1]
    faster = [replace(one, unsupported_reason="not run") for one in found.candidates[:-1]]
    both = merge_results(
        [replace(found, candidates=tuple(faster)), replace(found, candidates=(slowest,))], keep=1
    )
    assert both.candidates == (slowest,)
    assert both.best == slowest


def test_only_what_runs_is_chosen_and_the_rest_is_shown_as_a_forecast() -> None:
    on = parse_shorthand("4 TPU v4")
    found = search_plans(PlanningInputs(job(), on, compute_decoder_workload(SMALL, SEQUENCE), SMALL))
    assert found.best is None
    assert {one.unsupported_reason for one in found.candidates} == {"wanma does not support TPU v4"}
    with pytest.raises(JobError, match="does not support TPU v4"):
        planned(job(), on)
    shown = search_job_plan(
        PlanningInputs(job(), on, compute_decoder_workload(SMALL, SEQUENCE), SMALL), allow_unsupported=True
    )
    assert shown.plan == found.candidates[0].plan


def test_no_plan_of_a_space_is_one_that_torch_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job({"auto": True, "compile": True, "schedule": "1f1b", "tp": 2})
    wanted = SearchSpace.from_job(asked, H100, SMALL, world_sizes=[8])
    split = Plan(tp=2, dp_replicate=4, compile=True, device="cuda", precision="bf16")
    for version, kinds in (((2, 13), {"none", "selective"}), ((2, 11), {"none", "selective", "full"})):
        monkeypatch.setattr(space, "installed_torch_version", lambda version=version: version)
        assert {kind for kind, _ in space.recompute_options(wanted, split)} == kinds
    full = replace(split, recompute="full")
    assert unsupported_reason(asked, full, H100, (2, 13)) is not None


# ------------------------------------------------------------------ where nothing is known


def test_without_rates_the_rule_plans_and_says_what_is_missing() -> None:
    unknown = Cluster((NodeGroup("box", 64, 512 << 30, (Device("cuda", "Mystery", 80 << 30, {}),) * 8),))
    workload = compute_decoder_workload(SMALL, SEQUENCE)
    assert "Mystery" in (
        time_search_unavailable_reason(PlanningInputs(job(), unknown, workload, SMALL)) or ""
    )
    result = planned(job(), unknown)
    assert (result.plan.dp_shard, result.plan.shard) == (8, "parameters")
    assert result.forecast.step is None
    small = Cluster((replace(unknown.nodes[0], devices=(Device("cuda", "Mystery", 1 << 30, {}),) * 8),))
    with pytest.raises(JobError, match="default plan: step time unknown"):
        planned(job(), small)


def test_a_processor_that_was_never_measured_is_planned_for_by_rule() -> None:
    on = parse_shorthand(f"1x8 cores {EPYC}")
    asked = job(train={"precision": "fp32"})
    reason = time_search_unavailable_reason(
        PlanningInputs(asked, on, compute_decoder_workload(SMALL, SEQUENCE), SMALL)
    )
    assert (
        reason == "this CPU is not calibrated; run `wanma bench machine --save` to search plans by forecast"
    )
    result = planned(asked, on)
    assert (result.plan.world_size, result.plan.threads_per_rank) == (1, 8)
    assert any("one process" in told for told in result.forecast.reasons)


def test_on_measured_processors_each_number_of_ranks_is_looked_at() -> None:
    on = parse_shorthand(f"1x8 cores {EPYC}")
    name = on.nodes[0].cpu
    assert name is not None
    measured = tuple(
        DeviceCalibration(name.name, ranks, 8 // ranks, build_hardware_model(on, ranks=ranks))
        for ranks in (1, 2, 4, 8)
    )
    asked = job(train={"precision": "fp32"})
    result = planned(asked, on, calibration=Calibration(measured))
    worlds = {one.plan.world_size for one in result.search_result.candidates}
    assert worlds == {1, 2, 4, 8}
    assert all(
        one.plan.threads_per_rank == 8 // one.plan.world_size for one in result.search_result.candidates
    )
    assert result.search_result.best.seconds == min(one.seconds for one in result.search_result.candidates)


def test_a_rank_of_fewer_threads_is_forecast_as_slower() -> None:
    on = parse_shorthand(f"1x8 cores {EPYC}")
    seconds = []
    for threads in (8, 2):
        asked = job(train={"precision": "fp32"}, cluster={"threads_per_rank": threads})
        result = planned(asked, on)
        assert result.plan.threads_per_rank == threads
        seconds.append(result.forecast.step.compute)
    assert seconds[1] == pytest.approx(4 * seconds[0], rel=0.2)


# ------------------------------------------------------------------ a layout that the job gives


def test_micro_batch_and_recompute_are_those_of_the_fastest_plan_of_the_layout() -> None:
    asked = job({"dp_shard": 8, "recompute": "auto"}, train={"global_batch": 64})
    result = complete_plan(
        asked, build_layout(asked, H100), H100, compute_decoder_workload(LARGE, SEQUENCE), LARGE
    )
    problem = build_problem(asked, H100, compute_decoder_workload(LARGE, SEQUENCE), LARGE)
    assert result.forecast.step is not None
    for micro_batch in (1, 2, 4, 8):
        for recompute in ("none", "selective", "full"):
            other = replace(result.plan, micro_batch=micro_batch, recompute=recompute, recompute_share=1.0)
            expected = forecast_plan(problem, other)
            assert expected.step is not None
            fits = expected.memory_bytes <= problem.memory_limit_bytes
            assert not fits or expected.step.seconds >= result.forecast.step.seconds * (1 - 1e-9)


def test_every_planned_job_has_a_forecast_of_time_where_rates_are_known() -> None:
    for parallel in ({"dp_replicate": 8}, {"tp": 4, "micro_batch": 2}, {"pp": 2, "dp_shard": 2}):
        forecast = planned(job(parallel)).forecast
        assert forecast.step is not None
        assert 0 < forecast.model_flops_utilisation < 1


# ------------------------------------------------------------------ unlike devices


MIXED = parse_shorthand("1x8 H100 + 1x8 A100, 8x200G")


def on_unlike_devices(parallel: dict[str, Any] | None = None, **sections: Any) -> PlanningInputs:
    asked = job({"auto": True, **(parallel or {})}, **sections)
    few = replace(SMALL, layers=2)
    return PlanningInputs(asked, MIXED, compute_decoder_workload(few, SEQUENCE), few)


BOTH = {"cluster": {"nodes": 2, "rendezvous": "a:1"}, "train": {"global_batch": 512}}


def test_on_unlike_devices_equal_ranks_with_unlike_shares_run_and_placed_plans_are_shown() -> None:
    found = search_plans(on_unlike_devices(**BOTH), world_sizes=(16,))
    placed = [one for one in found.candidates if one.plan.placement]
    assert placed
    assert all("are not supported yet" in (one.unsupported_reason or "") for one in placed)
    best = found.best.plan
    assert best.placement == ()
    assert best.world_size == 16
    first = best.batch_shares[: best.data_parallel_size // 2]
    last = best.batch_shares[best.data_parallel_size // 2 :]
    assert min(first) > max(last), "the H100s are the first machine"
    kept = search_plans(on_unlike_devices(FEW), world_sizes=(16,))
    assert not any(one.plan.placement for one in kept.candidates)


# ------------------------------------------------------------------ statistics over groups of samples


def test_a_module_that_normalizes_over_groups_of_samples_gets_micro_batches_of_whole_ones() -> None:
    asked = job({"auto": True}, train={"global_batch": 24}, model={"factory": "a:b", "batch_norm_group": 4})

    def whole(together: int) -> list[bool]:
        module = replace(compute_decoder_workload(SMALL, SEQUENCE), coupled_samples=together)
        plans = [one.plan for one in search_plans(PlanningInputs(asked, H100, module)).candidates]
        runs = [
            [run for rank in range(p.data_parallel_size) for run in p.micro_batches(24, rank)] for p in plans
        ]
        return [all(len(run) % 4 == 0 and run for run in of_plan) for of_plan in runs]

    assert whole(4)
    assert all(whole(4))
    assert not all(whole(1))  # of a module whose samples do not see each other


def test_a_batch_of_no_whole_group_is_refused_by_its_name() -> None:
    asked = job({"auto": True}, train={"global_batch": 18}, model={"factory": "a:b", "batch_norm_group": 4})
    module = replace(compute_decoder_workload(SMALL, SEQUENCE), coupled_samples=4)
    with pytest.raises(JobError, match=r"model\.batch_norm_group = 4 samples") as refusal:
        search_job_plan(PlanningInputs(asked, H100, module))
    assert "train.global_batch to a multiple of 4" in refusal.value.hint


def test_model_flops_utilization_counts_each_device_of_unlike_machines_by_its_own_peak() -> None:
    inputs = on_unlike_devices(**BOTH)
    found = search_plans(inputs, world_sizes=(16,))
    precision = inputs.job.train.precision
    peaks = [node.devices[0].peak_flops_per_second[precision] for node in MIXED.nodes]
    flops = inputs.workload.flops_per_sample * 512
    shares = [one.forecast for one in found.supported[:3]]
    even = Plan(dp_replicate=16, micro_batch=4, precision=precision, device="cuda")
    alike = forecast_plan(build_problem(inputs.job, MIXED, inputs.workload, inputs.dimensions), even)
    for one in (*shares, alike):
        assert one.model_flops_utilisation == pytest.approx(flops / one.step.seconds / (8 * sum(peaks)))


def test_plans_that_run_come_first_each_the_fastest_first_and_the_one_taken_is_among_them() -> None:
    result = search_job_plan(on_unlike_devices(**BOTH), world_sizes=(16,))
    found = result.search_result
    assert found.candidates == (*found.supported, *found.unsupported)
    for part in (found.supported, found.unsupported):
        assert [one.seconds for one in part] == sorted(one.seconds for one in part)
    assert found.supported[0].plan == result.plan
    assert not any(one.plan.all_reduce == "hierarchical" for one in found.supported), (
        "on GPUs nothing is summed so"
    )
    assert all(one.unsupported_reason is None for one in found.pareto_front)
