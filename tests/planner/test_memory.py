"""The memory forecast against what ranks really hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.measure import kept_activations, measure_rank
from support.ranks import run_ranks
from wanma.job.forecast import Layer, Workload
from wanma.job.plan import UPDATED_TOGETHER, Plan
from wanma.job.sections import ModelSection, Precision, Recompute, Shard
from wanma.models.workload import section_workload
from wanma.planner.memory import forecast_memory

MODEL = {"family": "decoder", "layers": 4, "hidden": 64, "heads": 4, "vocabulary": 320}
SEQUENCE = 32


def workload(**more: Any) -> Workload:
    found = section_workload(
        ModelSection(**{**MODEL, **more}),
        vocabulary=None,
        sequence_length=SEQUENCE,
        image_shape=None,
        classes=None,
    )
    assert found is not None
    return found


def job(folder: Path, precision: str, **model: Any) -> dict[str, Any]:
    return {
        "model": {**MODEL, **model},
        "data": {
            "text": [str(Path(__file__).parent)],
            "sequence_length": SEQUENCE,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": 2, "global_batch": 8, "precision": precision},
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=4),
        Plan(dp_replicate=2, micro_batch=2),
        Plan(dp_shard=2, shard="optimizer", micro_batch=2),
        Plan(dp_shard=2, shard="gradients", micro_batch=2),
        Plan(dp_shard=2, shard="parameters", micro_batch=2),
        Plan(tp=2, micro_batch=4),
    ],
    ids=str,
)
def test_forecast_state_is_what_a_rank_holds(plan: Plan, precision: Precision, tmp_path: Path) -> None:
    plan = replace(plan, precision=precision)
    measured = run_ranks(measure_rank, plan.world_size, (job(tmp_path, precision), plan))[0]
    model = workload()
    forecast = forecast_memory(model, plan, "adamw", micro_batches=2)
    assert forecast.parameters_bytes == pytest.approx(measured["parameters"], rel=0.02)
    assert forecast.optimizer_bytes == pytest.approx(measured["optimizer"], rel=0.02)
    # Buffers that live only while one unit is reduced are forecast but not seen between operators.
    units = [layer.parameters for layer in model.layers]
    by_block = plan.shard in ("gradients", "parameters")
    unit = max(units[0] + units[2], units[1]) if by_block else model.parameters
    largest = unit * 8 // plan.tp
    assert measured["gradients"] <= forecast.gradients_bytes * 1.02
    assert forecast.gradients_bytes - largest <= measured["gradients"]


EXPERTS = {"experts": 4, "shared_experts": 1, "expert_feed_forward": 96, "dense_layers": 1}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, ep=2, micro_batch=2),
        Plan(dp_shard=2, ep=2, shard="gradients", micro_batch=2),
        Plan(dp_shard=2, ep=2, shard="parameters", micro_batch=2),
        Plan(dp_shard=2, shard="parameters", micro_batch=2),
    ],
    ids=str,
)
def test_forecast_state_of_experts_is_what_a_rank_of_ep_holds(plan: Plan, tmp_path: Path) -> None:
    measured = run_ranks(measure_rank, 2, (job(tmp_path, "fp32", **EXPERTS), plan))[0]
    forecast = forecast_memory(workload(**EXPERTS), plan, "adamw", micro_batches=2)
    assert forecast.parameters_bytes == pytest.approx(measured["parameters"], rel=0.02)
    assert forecast.optimizer_bytes == pytest.approx(measured["optimizer"], rel=0.02)
    assert measured["gradients"] <= forecast.gradients_bytes * 1.02


def test_deepseek_v3_on_2048_gpus_holds_a_64th_of_its_experts_by_hand() -> None:
    section = ModelSection(preset="deepseek-v3")
    model = section_workload(section, vocabulary=None, sequence_length=4096, image_shape=None, classes=None)
    assert model is not None
    dense, sparse = model.layers[1:3]
    assert (dense.count, sparse.count) == (3, 58)
    assert sparse.expert_parameters == 256 * 3 * 7168 * 2048
    plan = Plan(dp_shard=128, ep=64, pp=16, shard="optimizer", precision="bf16", device="cuda")
    forecast = forecast_memory(model, plan, "adamw", micro_batches=16)
    experts = 58 * sparse.expert_parameters / 16
    others = (58 * (sparse.parameters - sparse.expert_parameters) + 3 * dense.parameters) / 16
    others += 129280 * 7168 + 7168  # the head, in the last stage
    shard = others / 128 + experts / 64 / 2
    assert forecast.optimizer_bytes == pytest.approx(shard * 8, rel=1e-6)
    assert forecast.parameters_bytes == pytest.approx(shard * 4 + (others + experts / 64) * 2, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [{}, {"kv_heads": 2}], ids=["heads", "grouped heads"])
def test_forecast_activations_are_what_autograd_keeps(
    heads: dict[str, int], precision: Precision, tmp_path: Path
) -> None:
    plan = Plan(micro_batch=3, precision=precision)
    kept = kept_activations(job(tmp_path, precision, **heads), plan)
    forecast = forecast_memory(workload(**heads), plan, "adamw")
    # Of the logits' forecast half is their gradient, which backward makes.
    assert forecast.activations_bytes + forecast.logits_bytes / 2 == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputing_keeps_what_it_must_and_one_block(mode: Recompute, share: float, tmp_path: Path) -> None:
    plan = Plan(micro_batch=3, recompute=mode, recompute_share=share)
    kept = kept_activations(job(tmp_path, "fp32"), plan)
    model = workload()
    forecast = forecast_memory(model, plan, "adamw")
    block = model.layers[1].activation_elements_per_sample * 3 * 4  # while backward runs it again
    assert forecast.activations_bytes - block + forecast.logits_bytes / 2 == pytest.approx(kept, rel=0.05)


def test_layers_that_nobody_counted_recompute_as_a_decoder_of_their_size_would() -> None:
    known = replace(
        BILLION.layers[1], input_elements_per_sample=62_500.0, costly_elements_per_sample=375_000.0
    )
    counted = replace(BILLION, layers=(BILLION.layers[0], known, BILLION.layers[2]))
    for mode in ("full", "selective"):
        plan = Plan(recompute=mode)
        assert forecast_memory(BILLION, plan, "adamw") == forecast_memory(counted, plan, "adamw")


BILLION = Workload(
    (
        Layer("embedding", 1, 100_000_000, 0.0, 0.0),
        Layer("layers", 20, 50_000_000, 1.0, 1_000_000.0),
        Layer("head", 1, 100_000_000, 1.0, 3_000_000.0),
    ),
    1024,
)


def test_a_billion_parameters_in_bf16_on_eight_gpus_by_hand() -> None:
    plan = Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda", micro_batch=2)
    forecast = forecast_memory(BILLION, plan, "adamw")
    shard = 1_200_000_000 // 8
    # Master shard; embedding and head gathered, and two blocks of 50 M (one computes, one arrives).
    assert forecast.parameters_bytes == shard * 4 + (200_000_000 + 2 * 50_000_000) * 2
    assert forecast.optimizer_bytes == 2 * shard * 4
    # The largest unit is embedding and head together: as computed, and as copied to be reduced.
    assert forecast.gradients_bytes == shard * 4 + 200_000_000 * (2 + 4)
    assert forecast.activations_bytes == 20 * 1_000_000 * 2 * 2
    assert forecast.logits_bytes == 2 * 3_000_000 * 2 * 2


@pytest.mark.parametrize(
    ("optimizer", "elements"),
    [("adamw", 2.4e9), ("sgd", 1.2e9), ("muon", 1.0e9 + 2 * 0.2e9), ("adafactor", 0.0)],
)
def test_optimizer_state_follows_the_update_rule(optimizer: str, elements: float) -> None:
    assert forecast_memory(BILLION, Plan(), optimizer).optimizer_bytes == 4 * elements
    averaged = forecast_memory(BILLION, Plan(), optimizer, weight_average=True)
    assert averaged.optimizer_bytes == 4 * (elements + 1.2e9)


def test_what_is_not_trained_has_neither_gradients_nor_state() -> None:
    frozen = Workload(
        tuple(replace(layer, trained_parameters=layer.parameters // 100) for layer in BILLION.layers), 1024
    )
    forecast, whole = forecast_memory(frozen, Plan(), "adamw"), forecast_memory(BILLION, Plan(), "adamw")
    assert forecast.parameters_bytes == whole.parameters_bytes
    assert forecast.gradients_bytes == whole.gradients_bytes // 100
    assert forecast.optimizer_bytes == whole.optimizer_bytes // 100


def test_what_waits_elsewhere_by_hand() -> None:
    plan = Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda", micro_batch=2)
    here = forecast_memory(BILLION, plan, "adamw")
    shard = 1_200_000_000 // 8
    parameters = forecast_memory(BILLION, replace(plan, offload_parameters="host"), "adamw")
    # On the host are the shards, their gradients and their state, for the update runs there.
    assert parameters.host_bytes == shard * 4 * (1 + 1 + 2)
    assert here.memory_bytes - parameters.memory_bytes == parameters.host_bytes
    optimizer = forecast_memory(BILLION, replace(plan, offload_optimizer="host"), "adamw")
    assert optimizer.host_bytes == 2 * shard * 4
    assert optimizer.optimizer_bytes == 2 * 4 * UPDATED_TOGETHER  # is here at a time
    activations = forecast_memory(BILLION, replace(plan, offload_activations="disk"), "adamw")
    assert activations.disk_bytes == here.activations_bytes
    assert activations.activations_bytes == 2 * 1_000_000 * 2 * 2  # of two blocks: one computes, one comes
    alone = forecast_memory(BILLION, Plan(offload_parameters="disk"), "sgd")
    assert alone.disk_bytes == 1_200_000_000 * 4
    assert alone.parameters_bytes == (200_000_000 + 50_000_000) * 4  # gathered block by block


def test_a_pipelines_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    def activations(schedule: str, micro_batches: int) -> float:
        plan = Plan(pp=4, micro_batch=1, schedule=schedule)
        return forecast_memory(BILLION, plan, "adamw", micro_batches=micro_batches).activations_bytes / 4

    a_stage = 20 * 1_000_000 / 4
    assert activations("1f1b", 16) == 4 * a_stage
    assert activations("gpipe", 16) == 16 * a_stage
    assert activations("gpipe", 2) == activations("1f1b", 2) == 2 * a_stage


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_a_pipeline_holds_whole_gradients_and_blocks_whatever_is_sharded(shard: Shard) -> None:
    plan = Plan(pp=4, dp_shard=8, shard=shard, device="cuda")
    forecast = forecast_memory(BILLION, plan, "adamw", micro_batches=8)
    of_optimizer = forecast_memory(BILLION, replace(plan, shard="optimizer"), "adamw", micro_batches=8)
    assert forecast == of_optimizer


@given(shards=st.sampled_from([2, 4, 8, 64]), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]))
def test_sharding_more_never_needs_more(shards: int, tp: int, pp: int) -> None:
    stages = ("optimizer", "gradients", "parameters")
    totals = [
        forecast_memory(BILLION, Plan(pp=pp, tp=tp, dp_shard=shards, shard=stage), "adamw").memory_bytes
        for stage in stages
    ]
    assert totals == sorted(totals, reverse=True)
    alone = forecast_memory(BILLION, Plan(pp=pp, tp=tp), "adamw")
    assert totals[0] < alone.memory_bytes
