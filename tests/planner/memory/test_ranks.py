"""The memory forecast against what ranks really hold.

Every day: each plan once in bf16, which has more kinds of state, and the two that differ most in fp32; of
tensor-parallel activations, every pair of a kind of model, a mode of recomputation and a sequence setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.measure import kept_activations, kept_by_rank, measure_rank
from support.ranks import run_ranks
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.plan.plan import OPTIMIZER_CHUNK_PARAMETERS, Plan
from wanma.job.sections.model import ModelSection
from wanma.job.sections.parallel import Recompute, Schedule, Shard
from wanma.job.sections.train import ParameterGroupSection, Precision
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.memory_table import build_memory_table, memory_table_key
from wanma.planner.memory.peak import RankMemory, forecast_memory, fragmentation_shares, pipeline_rank_memory
from wanma.planner.pipeline.schedules import DEFAULT_VIRTUAL_STAGES

MODEL = {"family": "decoder", "layers": 4, "hidden": 64, "heads": 4, "vocabulary": 320}
SEQUENCE = 32


def workload(groups: Sequence[ParameterGroupSection] = (), **more: Any) -> Workload:
    found = build_section_workload(
        ModelSection(**{**MODEL, **more}),
        parameter_groups=groups,
        vocabulary_size=None,
        sequence_length=SEQUENCE,
        image_shape=None,
        classes=None,
    )
    assert found is not None
    return found


def dimensions_of(**more: Any) -> DecoderConfig:
    found = resolve_section_decoder_config(ModelSection(**{**MODEL, **more}), None)
    assert found is not None
    return found


def rank(plan: Plan, micro_batches: int = 2, **model: Any) -> RankMemory:
    """Return the memory of the decoder's first pipeline rank."""
    return pipeline_rank_memory(
        workload(**model), plan, "adamw", micro_batches=micro_batches, dimensions=dimensions_of(**model)
    )[0]


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


IN_ONE_PRECISION = [
    Plan(micro_batch=4),
    Plan(dp_replicate=2, micro_batch=2),
    Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    Plan(dp_shard=2, shard="gradients", micro_batch=2),
]
IN_BOTH = [Plan(dp_shard=2, shard="parameters", micro_batch=2), Plan(tp=2, micro_batch=4)]


@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        *((plan, "bf16") for plan in (*IN_ONE_PRECISION, *IN_BOTH)),
        *((plan, "fp32") for plan in IN_BOTH),
        *(pytest.param(plan, "fp32", marks=pytest.mark.full) for plan in IN_ONE_PRECISION),
    ],
    ids=str,
)
def test_forecast_state_is_what_a_rank_holds(plan: Plan, precision: Precision, tmp_path: Path) -> None:
    plan = replace(plan, precision=precision)
    measured = run_ranks(measure_rank, plan.world_size, (job(tmp_path, precision), plan), is_reused=True)[0]
    model = workload()
    state = rank(plan).model_states
    assert state.parameters == pytest.approx(measured["parameters"], rel=0.02)
    assert state.optimizer == pytest.approx(measured["optimizer"], rel=0.02)
    # Pages, of which each tensor there has its own.
    assert state.buffers <= measured["buffers"] <= state.buffers + 4096 * 40
    # Buffers that live only while one unit is reduced are forecast but not seen between operators.
    units = [layer.parameters for layer in model.layers]
    by_block = plan.shard in ("gradients", "parameters")
    unit = max(units[0] + units[2], units[1]) if by_block else model.parameters
    largest = unit * 8 // plan.tp
    assert measured["gradients"] <= (state.all_gradients + state.buffers) * 1.02
    assert state.all_gradients - largest <= measured["gradients"]


ADAPTERS = {"lora_rank": 4, "lora_targets": ["*.attention.*"]}


@pytest.mark.parametrize(
    ("plan", "collectives"),
    [
        (Plan(micro_batch=4), "auto"),
        pytest.param(Plan(dp_replicate=2, micro_batch=2), "auto", marks=pytest.mark.exhaustive),
        (Plan(dp_shard=2, shard="optimizer", micro_batch=2), "gloo"),
        pytest.param(
            Plan(dp_shard=2, shard="gradients", micro_batch=2), "auto", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            Plan(dp_shard=2, shard="gradients", micro_batch=2), "gloo", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            Plan(dp_shard=2, shard="parameters", micro_batch=2), "auto", marks=pytest.mark.exhaustive
        ),
        pytest.param(Plan(dp_shard=2, shard="parameters", micro_batch=2), "gloo", marks=pytest.mark.full),
        pytest.param(Plan(tp=2, micro_batch=4), "auto", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_frozen_weights_are_held_once_in_the_precision_that_computes(
    plan: Plan, collectives: str, tmp_path: Path
) -> None:
    plan = replace(plan, precision="bf16")
    text = {**job(tmp_path, "bf16", **ADAPTERS), "parallel": {"collectives": collectives}}
    measured = run_ranks(measure_rank, plan.world_size, (text, plan), is_reused=True)[0]
    model = workload(**ADAPTERS)
    software = FrameworkTraits(shared_memory_nodes=0 if collectives == "gloo" else 1)
    dimensions = dimensions_of(**ADAPTERS)
    state = pipeline_rank_memory(model, plan, "adamw", dimensions=dimensions, framework=software)[
        0
    ].model_states
    # One side of an adapter is whole on every rank of `tp`: here adapters are 4 % of the model.
    rel = 0.02 if plan.tp == 1 else 0.05
    assert state.parameters == pytest.approx(measured["parameters"], rel=rel)
    if plan.tp == 1:
        assert state.optimizer == pytest.approx(measured["optimizer"], rel=rel)
    assert state.buffers <= measured["buffers"] <= state.buffers + 4096 * 100
    if plan.tp == 1 and plan.shard != "parameters":
        shares = plan.shard_group_size if collectives == "auto" else 1
        trained = model.parameters * model.trainable_share
        frozen = 2 * (model.parameters - trained) / shares
        assert frozen <= measured["parameters"] <= frozen + 6.5 * trained


FROZEN = [
    ParameterGroupSection(match=name, frozen=True) for name in ("embedding.*", "layers.[01].*", "head.*")
]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=4, precision="bf16"),
        Plan(dp_shard=2, shard="optimizer", micro_batch=2),
        pytest.param(Plan(dp_shard=2, shard="parameters", micro_batch=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_parameters_that_groups_freeze_have_no_gradients_and_no_optimizer_state(
    plan: Plan, tmp_path: Path
) -> None:
    text = job(tmp_path, plan.precision)
    text["train"]["parameter_groups"] = [group.model_dump() for group in FROZEN]
    measured = run_ranks(measure_rank, plan.world_size, (text, plan), is_reused=True)[0]
    model = workload(FROZEN)
    blocks = next(layer for layer in model.layers if layer.is_block)
    assert (blocks.trainable_parameters, blocks.layers_without_backward) == (blocks.parameters / 2, 2)
    state = pipeline_rank_memory(model, plan, "adamw", dimensions=dimensions_of())[0].model_states
    assert state.parameters == pytest.approx(measured["parameters"], rel=0.02)
    assert state.optimizer == pytest.approx(measured["optimizer"], rel=0.02)
    assert measured["gradients"] <= (state.all_gradients + state.buffers) * 1.02
    assert state.optimizer < 0.5 * rank(plan).model_states.optimizer


def test_adapters_of_llama_3_8b_fit_beside_its_weights_in_bf16_by_hand() -> None:
    section = ModelSection(preset="llama-3-8b", lora_rank=16)
    model = build_section_workload(
        section, vocabulary_size=None, sequence_length=2048, image_shape=None, classes=None
    )
    # Of queries and outputs 4096 × 4096, of keys and values 4096 × 1024.
    trained = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    frozen = 8_030_261_248
    assert model.parameters == frozen + trained
    dimensions = resolve_section_decoder_config(section, None)
    plan = Plan(precision="bf16", device="cuda")
    for more in ({}, {"dp_replicate": 8}, {"dp_shard": 8, "shard": "optimizer"}):
        found = forecast_memory(model, plan.with_changes(**more), "adamw", dimensions=dimensions)
        shards = more.get("dp_shard", 1)
        assert found.parameters_bytes == pytest.approx(2 * frozen + (2 + 4 / shards) * trained, rel=1e-6)
    assert found.parameters_bytes < 15.1 * (1 << 30)


EXPERTS = {"experts": 4, "shared_experts": 1, "expert_feed_forward": 96, "dense_layers": 1}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, ep=2, micro_batch=2),
        pytest.param(Plan(dp_shard=2, ep=2, shard="gradients", micro_batch=2), marks=pytest.mark.full),
        Plan(dp_shard=2, ep=2, shard="parameters", micro_batch=2),
        pytest.param(Plan(dp_shard=2, shard="parameters", micro_batch=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_forecast_state_of_experts_is_what_a_rank_of_ep_holds(plan: Plan, tmp_path: Path) -> None:
    measured = run_ranks(measure_rank, 2, (job(tmp_path, "fp32", **EXPERTS), plan), is_reused=True)[0]
    state = rank(plan, **EXPERTS).model_states
    assert state.parameters == pytest.approx(measured["parameters"], rel=0.02)
    assert state.optimizer == pytest.approx(measured["optimizer"], rel=0.02)
    assert measured["gradients"] <= (state.all_gradients + state.buffers) * 1.02


def test_deepseek_v3_on_2048_gpus_holds_a_64th_of_its_experts_by_hand() -> None:
    section = ModelSection(preset="deepseek-v3")
    model = build_section_workload(
        section, vocabulary_size=None, sequence_length=4096, image_shape=None, classes=None
    )
    dense, sparse = model.layers[1:3]
    assert (dense.count, sparse.count) == (3, 58)
    assert sparse.expert_parameters == 256 * 3 * 7168 * 2048
    plan = Plan(dp_shard=128, ep=64, pp=16, shard="optimizer", precision="bf16", device="cuda")
    forecast = forecast_memory(model, plan, "adamw", micro_batches=16)
    # Of 61 blocks the ranks in the middle have four; the three dense ones are in the first stage.
    experts = 4 * sparse.expert_parameters
    others = 4 * (sparse.parameters - sparse.expert_parameters)
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
    at_loss = rank(plan, **heads).moments[0]
    # Of the logits' forecast half is their gradient, which backward makes.
    assert at_loss.activations + at_loss.logits / 2 == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputing_keeps_what_it_must_and_one_block(mode: Recompute, share: float, tmp_path: Path) -> None:
    plan = Plan(micro_batch=3, recompute=mode, recompute_share=share)
    kept = kept_activations(job(tmp_path, "fp32"), plan)
    here = rank(plan)
    at_loss, _, in_block, *_ = here.moments
    assert at_loss.activations + at_loss.logits / 2 == pytest.approx(kept, rel=0.05)
    block = workload().layers[1].activation_elements_per_sample * 3 * 4  # while backward runs it again
    assert here.backward_workspace > block
    assert in_block.activations == here.saved_activations + here.backward_workspace


def activations_of_tp() -> Iterator[Any]:
    """Kinds of models × modes of recomputation, each every day with the sequence split or whole."""
    for (one, kind), (other, mode), sequence in product(
        enumerate(("dense", "grouped heads", "experts")),
        enumerate(("none", "selective", "full")),
        (False, True),
    ):
        is_daily = sequence == bool((one + other) % 2)
        name = f"{kind}-{mode}-{'sequence' if sequence else 'whole'}"
        yield pytest.param(kind, mode, sequence, id=name, marks=[] if is_daily else [pytest.mark.full])


@pytest.mark.parametrize(("kind", "mode", "sequence"), activations_of_tp())
def test_a_rank_of_tp_keeps_what_the_forecast_says(
    kind: str, mode: Recompute, sequence: bool, tmp_path: Path
) -> None:
    model = {"dense": {}, "grouped heads": {"kv_heads": 2}, "experts": EXPERTS}[kind]
    plan = Plan(tp=2, sequence_parallel=sequence, micro_batch=4, recompute=mode)
    kept = run_ranks(kept_by_rank, 2, (job(tmp_path, "fp32", **model), plan), is_reused=True)[0]
    at_loss = rank(plan, **model).moments[0]
    assert at_loss.activations + at_loss.logits / 2 == pytest.approx(kept, rel=0.08)


def test_layers_that_nobody_counted_recompute_as_a_decoder_of_their_size_would() -> None:
    known = replace(
        BILLION.layers[1],
        full_recompute_elements_per_sample=62_500.0,
        selective_recompute_elements_per_sample=375_000.0,
    )
    counted = replace(BILLION, layers=(BILLION.layers[0], known, BILLION.layers[2]))
    for mode in ("full", "selective"):
        plan = Plan(recompute=mode)
        assert forecast_memory(BILLION, plan, "adamw") == forecast_memory(counted, plan, "adamw")


BILLION = Workload(
    (
        LayerWorkload("embedding", 1, 100_000_000, 0.0, 0.0),
        LayerWorkload("layers", 20, 50_000_000, 1.0, 1_000_000.0),
        LayerWorkload("head", 1, 100_000_000, 1.0, 3_000_000.0),
    ),
    1024,
)


def test_a_billion_parameters_in_bf16_on_eight_gpus_by_hand() -> None:
    plan = Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda", micro_batch=2)
    forecast = forecast_memory(BILLION, plan, "adamw")
    here = pipeline_rank_memory(BILLION, plan, "adamw")[0]
    shard = 1_200_000_000 // 8
    assert forecast.optimizer_bytes == 2 * shard * 4
    # Master shard; embedding and head gathered, and two blocks of 50 M (one computes, one arrives).
    gathered = (200_000_000 + 2 * 50_000_000) * 2
    assert here.model_states.parameters == shard * 4 + gathered
    # The largest unit is embedding and head together: as computed, and as copied to be reduced.
    # Its sum for this rank is added to that of the micro-batch before.
    assert here.model_states.all_gradients == shard * 4 + 200_000_000 * (2 + 4) + 200_000_000 * 4 / 8
    assert here.saved_activations == 20 * 1_000_000 * 2 * 2
    at_loss, at_head, in_block, in_last, _, at_end = here.moments
    assert at_loss == (shard * 4, here.saved_activations, 2 * 3_000_000 * 2 * 2, 0, 0)
    assert at_head == (shard * 4 + 100_000_000 * 2, here.saved_activations, 3_000_000 * 2 * 2, 0, 0)
    # One block's input and output have gradients; the logits are gone. The head's gradient waits for that of
    # the embedding, the block's own is reduced; all beside the shards of the micro-batch before.
    reducing = 100_000_000 * 2 + 50_000_000 * (2 + 4)
    working = 2 * 62_500 * 2 * 2
    assert in_block == (shard * 4 + reducing, here.saved_activations + working, 0, 0, 0)
    assert in_last == (shard * 4 + reducing, here.saved_activations / 20 + working, 0, 0, 0)
    assert at_end == (here.model_states.all_gradients, 0, 0, 0, -gathered)
    # Fullest as backward ends, when what was gathered is gone. What is gathered, comes and goes has an
    # allowance, CUDA and NCCL their own.
    assert forecast.parameters_bytes == shard * 4
    assert forecast.gradients_bytes == here.model_states.all_gradients
    assert forecast.fragmentation_bytes == int(0.12 * (gathered + sum(at_end)))
    assert forecast.runtime_bytes == (600 + 256) << 20
    assert forecast.tensor_bytes == here.model_states.parameters + here.model_states.optimizer + sum(at_end)
    assert forecast.to_json()["tensor_bytes"] == forecast.tensor_bytes


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
        tuple(replace(layer, trainable_parameters=layer.parameters // 100) for layer in BILLION.layers), 1024
    )
    here, whole = (
        pipeline_rank_memory(model, Plan(), "adamw")[0].model_states for model in (frozen, BILLION)
    )
    assert here.parameters == whole.parameters
    assert here.all_gradients == pytest.approx(whole.all_gradients / 100)
    assert here.optimizer == pytest.approx(whole.optimizer / 100)


def test_what_waits_elsewhere_by_hand() -> None:
    plan = Plan(dp_shard=8, shard="parameters", precision="bf16", device="cuda", micro_batch=2)

    def of(model: Workload, plan: Plan, optimizer: str = "adamw") -> RankMemory:
        return pipeline_rank_memory(model, plan, optimizer)[0]

    here = of(BILLION, plan)
    shard = 1_200_000_000 // 8
    parameters = of(BILLION, replace(plan, offload_parameters="host"))
    # On the host are the shards, their gradients and their state, for the update runs there.
    assert parameters.forecast.host_bytes == shard * 4 * (1 + 1 + 2)
    assert here.model_states.parameters - parameters.model_states.parameters == shard * 4
    assert here.model_states.all_gradients - parameters.model_states.all_gradients == shard * 4
    assert parameters.model_states.optimizer == 0
    optimizer = of(BILLION, replace(plan, offload_optimizer="host")).forecast
    assert optimizer.host_bytes == 2 * shard * 4
    assert optimizer.optimizer_bytes == 2 * 4 * OPTIMIZER_CHUNK_PARAMETERS  # is here at a time
    activations = of(BILLION, replace(plan, offload_activations="disk"))
    assert activations.forecast.disk_bytes == here.saved_activations
    assert activations.saved_activations == 0
    assert (
        activations.backward_workspace - here.backward_workspace == 2 * 1_000_000 * 2 * 2
    )  # two blocks: one computes, one comes
    alone = of(BILLION, Plan(offload_parameters="disk"), "sgd").forecast
    assert alone.disk_bytes == 1_200_000_000 * 4
    assert alone.parameters_bytes == (200_000_000 + 50_000_000) * 4  # gathered block by block


def test_what_a_heap_holds_beyond_tensors_by_hand() -> None:
    def holes(plan: Plan, micro_batches: int = 2) -> float:
        """Bytes that the allocator holds beyond its share of what comes and goes."""
        here = pipeline_rank_memory(BILLION, plan, "adamw", micro_batches=micro_batches)[0]
        return here.forecast.fragmentation_bytes - fragmentation_shares(plan, here.framework).transient * sum(
            here.peak
        )

    assert holes(Plan(micro_batch=2)) == pytest.approx(0, abs=2)
    assert holes(Plan(micro_batch=2, tp=2)) == pytest.approx(0, abs=2)
    # Its gradients are whole, in bf16 between the activations; the unit's buffer in fp32 has no room there.
    in_16_bits = Plan(micro_batch=2, precision="bf16")
    here = pipeline_rank_memory(BILLION, in_16_bits, "adamw", micro_batches=1)[0]
    buffer = 1_200_000_000 * 4
    grown = max(map(sum, here.moments[:4])) + buffer - sum(here.peak)
    assert holes(in_16_bits, micro_batches=1) == pytest.approx(grown, abs=2)
    on_gpu = Plan(micro_batch=2, device="cuda")
    gathered = pipeline_rank_memory(BILLION, on_gpu, "adamw")[0].model_states.gathered_parameters
    assert holes(on_gpu) == pytest.approx(0.12 * gathered, abs=2)


def test_an_embeddings_gradient_goes_on_top_where_nothing_as_large_was_freed() -> None:
    embedding = 4096 * dimensions_of().hidden * 4
    alone = rank(Plan(micro_batch=1), micro_batches=1, vocabulary=4096)  # logits are half of its size
    assert alone.last_gradient_overhead == max(map(sum, alone.moments[:4])) + embedding - sum(alone.peak) > 0
    assert (
        rank(Plan(micro_batch=2), micro_batches=1, vocabulary=4096).last_gradient_overhead == 0
    )  # they are as large
    # From the second micro-batch on the head's gradient is added to that of the first, and its place is free.
    assert rank(Plan(micro_batch=1), micro_batches=2, vocabulary=4096).last_gradient_overhead == 0
    # A pipeline's first rank has neither.
    first = rank(Plan(pp=2, micro_batch=1), micro_batches=2, vocabulary=4096)
    assert first.last_gradient_overhead == max(map(sum, first.moments[:4])) + embedding - sum(first.peak) > 0
    on_gpu = Plan(micro_batch=1, device="cuda")
    assert fragmentation_shares(on_gpu, alone.framework).last_gradient == 0


def test_a_pipeline_holds_the_logits_of_a_micro_batch_through_its_backward() -> None:
    logits = 3_000_000 * 2 * 4
    alone = pipeline_rank_memory(BILLION, Plan(micro_batch=2), "adamw")[0]
    last = pipeline_rank_memory(BILLION, Plan(micro_batch=2, pp=2), "adamw")[1]
    assert [moment.logits for moment in alone.moments] == [2 * logits, logits, 0, 0, 0, 0]
    assert [moment.logits for moment in last.moments] == [2 * logits, logits, logits, logits, 0, 0]


def test_an_embeddings_gradient_is_made_beside_the_sum_of_those_before_it() -> None:
    embedding = BILLION.layers[0].parameters * 4
    once, often = (
        pipeline_rank_memory(BILLION, Plan(micro_batch=2), "adamw", micro_batches=n)[0] for n in (1, 2)
    )
    assert once.model_states.unaccumulated_gradients == 0
    assert often.moments[4] == (often.model_states.all_gradients + embedding, 0, 0, 0, 0)
    first = pipeline_rank_memory(BILLION, Plan(micro_batch=1, pp=4), "adamw", micro_batches=16)[0]
    # When backward comes to it, three of the four micro-batches in flight are still to go.
    assert first.moments[4].gradients == first.model_states.accumulated_gradients + embedding
    assert first.moments[4].activations == pytest.approx(0.75 * first.saved_activations)
    later = pipeline_rank_memory(BILLION, Plan(micro_batch=1, pp=4), "adamw", micro_batches=16)[1]
    assert later.model_states.unaccumulated_gradients == 0


def test_backward_comes_to_its_last_block_beside_the_gradients_of_all_others() -> None:
    here = pipeline_rank_memory(BILLION, Plan(micro_batch=2, recompute="full"), "adamw", micro_batches=1)[0]
    block, inputs = 1_000_000 * 2 * 4, 62_500 * 2 * 4
    others = (19 * 50_000_000 + 100_000_000) * 4
    # Its input, what runs again, and the gradients of what it is given and gives.
    assert here.moments[3] == (others, inputs + block + 2 * inputs, 0, 0, 0)
    # The head's gradient is there since backward began.
    assert [moment.gradients for moment in here.moments[:3]] == [0, 400_000_000, 400_000_000]
    # Where sums of earlier micro-batches are there, gradients are added to them.
    often = pipeline_rank_memory(BILLION, Plan(micro_batch=2), "adamw", micro_batches=2)[0]
    assert often.moments[3].gradients == often.model_states.accumulated_gradients == 1_200_000_000 * 4
    assert often.moments[1].gradients == often.model_states.accumulated_gradients + 400_000_000
    # Each of two shards: as often, but for what of it this rank does not hold.
    shared = pipeline_rank_memory(BILLION, Plan(dp_shard=2, shard="parameters"), "adamw", micro_batches=1)[0]
    assert shared.moments[3].gradients == others / 2 + 100_000_000 * 4 + 50_000_000 * 4
    over_gloo = pipeline_rank_memory(
        BILLION,
        Plan(dp_shard=2, shard="parameters"),
        "adamw",
        micro_batches=1,
        framework=FrameworkTraits(shared_memory_nodes=0),
    )[0]
    assert over_gloo.moments[3].gradients - shared.moments[3].gradients == 50_000_000 * 4


def test_a_pipelines_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    def kept(schedule: Schedule, micro_batches: int) -> list[float]:
        plan = Plan(pp=4, micro_batch=1, schedule=schedule)
        ranks = pipeline_rank_memory(BILLION, plan, "adamw", micro_batches=micro_batches)
        return [rank.saved_activations / (4 * 20 * 1_000_000 / 4) for rank in ranks]

    assert kept("1f1b", 16) == [4, 3, 2, 1]
    assert kept("gpipe", 16) == [16] * 4
    assert kept("gpipe", 2) == [2] * 4
    assert kept("1f1b", 2) == [2, 2, 2, 1]


def test_stages_have_a_place_for_every_micro_batch_that_comes_and_returns() -> None:
    plan = Plan(pp=3, micro_batch=2)
    inputs = replace(BILLION.layers[1], full_recompute_elements_per_sample=10.0)
    model = replace(BILLION, layers=(BILLION.layers[0], inputs, BILLION.layers[2]))
    buffers = [
        rank.moments[0].buffers for rank in pipeline_rank_memory(model, plan, "adamw", micro_batches=8)
    ]
    # A micro-batch's 2 · 10 elements, its gradient, and what comes back for what was handed on.
    assert buffers == [8 * 20 * 4 * 1, 8 * 20 * 4 * 3, 8 * 20 * 4 * 2]


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]),
    pp=st.sampled_from([1, 2, 3, 5, 8]),
    count=st.integers(1, 24),
    blocks=st.integers(16, 40),
    tp=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    ends=st.sampled_from([1000, 100_000_000]),
)
@example(schedule="zbv", pp=8, count=3, blocks=32, tp=1, recompute="none", ends=1000)
def test_the_forecast_is_that_of_the_fullest_of_all_ranks(
    schedule: Schedule, pp: int, count: int, blocks: int, tp: int, recompute: Recompute, ends: int
) -> None:
    virtual = DEFAULT_VIRTUAL_STAGES[schedule]
    plan = Plan(pp=pp, tp=tp, schedule=schedule, virtual_stages=virtual, recompute=recompute)
    first, block, last = (replace(layer, parameters=ends) for layer in BILLION.layers)
    last = replace(last, activation_elements_per_sample=float(ends))
    model = replace(BILLION, layers=(first, replace(block, count=blocks, parameters=1000), last))
    ranks = pipeline_rank_memory(model, plan, "adamw", micro_batches=count)
    forecast = forecast_memory(model, plan, "adamw", micro_batches=count)
    assert forecast == max(ranks, key=lambda rank: rank.total).forecast


def test_a_table_serves_all_plans_of_its_key() -> None:
    plan = Plan(
        pp=4, tp=2, dp_shard=4, shard="optimizer", sequence_parallel=True, micro_batch=2, device="cuda"
    )
    tables = {}
    for changes in ({"recompute": "full"}, {"dp_shard": 8}, {"schedule": "gpipe"}, {"micro_batch": 4}):
        other = replace(plan, **changes)
        key = memory_table_key(other)
        tables.setdefault(key, build_memory_table(workload(), other, dimensions_of()))
        arguments: dict[str, Any] = {"micro_batches": 8, "dimensions": dimensions_of()}
        plain = forecast_memory(workload(), other, "adamw", **arguments)
        assert forecast_memory(workload(), other, "adamw", **arguments, table=tables[key]) == plain
    assert len(tables) == 2


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_a_pipeline_holds_whole_gradients_and_blocks_whatever_is_sharded(shard: Shard) -> None:
    plan = Plan(pp=4, dp_shard=8, shard=shard, device="cuda")
    forecast = forecast_memory(BILLION, plan, "adamw", micro_batches=8)
    of_optimizer = forecast_memory(BILLION, replace(plan, shard="optimizer"), "adamw", micro_batches=8)
    assert forecast == of_optimizer


@given(shards=st.sampled_from([2, 4, 8, 64]), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]))
def test_sharding_more_never_needs_more(shards: int, tp: int, pp: int) -> None:
    stages = ("optimizer", "gradients", "parameters")
    plan = Plan(pp=pp, tp=tp, device="cuda")  # on CPUs what is sharded is computed with in a copy
    totals = [
        forecast_memory(BILLION, replace(plan, dp_shard=shards, shard=stage), "adamw").memory_bytes
        for stage in stages
    ]
    assert totals == sorted(totals, reverse=True)
    alone = forecast_memory(BILLION, plan, "adamw")
    assert totals[0] < alone.memory_bytes
