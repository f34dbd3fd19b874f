"""Numbers that change silently: each way to break them is noticed by the comparison of the parity matrix.

Every mutation runs in the ranks of a plan that exercises it, and the comparison must fail, by far. The
same plan without it passes, with the matrix's own tolerances. By default every plan is compared without its
mutations, so that a change to wanma that is one of them is noticed; and one plan of each kind with the first
of them. `--full` adds the others, which shows that each is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import mutations as broken
from support.compare import EXACT_TRAIN, one_process, same_training, spread_over
from support.ranks import Outcome
from support.text import short_texts, text_job
from wanma.job.plan.plan import Plan

SAMPLES = 7
"""Number of samples; no number of ranks divides it."""

EVERYTHING = {
    "family": "decoder",
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 24,
    "tie_embeddings": True,
    "dropout": 0.1,
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "expert_feed_forward": 8,
    "dense_layers": 1,
    "balance": "bias",
    "balance_rate": 0.01,
}
BALANCED_BY_LOSS = {**EVERYTHING, "balance": "loss", "balance_rate": 0.1, "capacity_factor": 0.9}

PLANS: dict[str, tuple[dict[str, Any], Plan]] = {
    "tensor": (EVERYTHING, Plan(tp=2, micro_batch=4)),
    "tensor of 4": (EVERYTHING, Plan(tp=4, micro_batch=7)),
    "sequence": (EVERYTHING, Plan(tp=2, sequence_parallel=True, micro_batch=4)),
    "ring": (EVERYTHING, Plan(cp=2, micro_batch=4)),
    "ring, capacity": (BALANCED_BY_LOSS, Plan(cp=2, micro_batch=4)),
    "all-to-all": (EVERYTHING, Plan(cp=2, cp_method="all_to_all", micro_batch=4)),
    "experts": (EVERYTHING, Plan(dp_replicate=2, ep=2, micro_batch=2)),
    "experts in replicas": (EVERYTHING, Plan(dp_replicate=4, ep=2, micro_batch=2)),
    "pipeline": (EVERYTHING, Plan(pp=2, micro_batch=2)),
    "replicas": (EVERYTHING, Plan(dp_replicate=2, micro_batch=2)),
    "replicas, parameters away": (EVERYTHING, Plan(dp_replicate=2, offload_parameters="disk", micro_batch=2)),
    "replicas of shards": (EVERYTHING, Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2)),
    "ZeRO 3": (EVERYTHING, Plan(dp_shard=2, shard="parameters", micro_batch=2)),
}

MUTATIONS: list[tuple[Callable[[], None], str]] = [
    (broken.products_of_rows_are_not_summed, "tensor"),
    (broken.embeddings_are_not_summed, "tensor"),
    (broken.tokens_of_other_ranks_are_not_masked, "tensor"),
    (broken.gradients_of_gathered_inputs_are_not_summed, "tensor"),
    (broken.scattered_parts_are_not_summed, "sequence"),
    (broken.sequence_is_gathered_in_another_order, "sequence"),
    (broken.gradients_of_norms_are_of_a_part_of_the_sequence, "sequence"),
    (broken.all_look_at_the_first_key_head, "tensor of 4"),
    (broken.normalizers_are_of_ones_own_classes, "tensor"),
    (broken.targets_count_on_every_rank, "tensor"),
    (broken.ones_own_block_is_not_causal, "ring"),
    (broken.documents_see_each_other_across_ranks, "ring"),
    (broken.blocks_are_merged_with_equal_weights, "ring"),
    (broken.log_sums_are_of_ones_own_block, "ring"),
    (broken.gradients_of_keys_do_not_travel, "ring"),
    (broken.gradients_of_heads_are_not_exchanged, "all-to-all"),
    (broken.positions_are_those_of_the_front, "ring"),
    (broken.dropout_does_not_know_its_positions, "ring"),
    (broken.dropout_does_not_know_its_positions, "sequence"),
    (broken.dropout_is_keyed_by_row, "replicas"),
    (broken.results_return_in_the_order_of_experts, "experts"),
    (broken.weights_stay_in_the_order_of_senders, "experts"),
    (broken.gradients_of_experts_stay_with_one_replica, "experts in replicas"),
    (broken.load_is_that_of_one_rank, "replicas"),
    (broken.balance_is_that_of_a_part_of_the_sample, "ring, capacity"),
    (broken.capacity_goes_by_the_order_held, "ring, capacity"),
    (broken.balancing_loss_has_no_factor, "ring, capacity"),
    (broken.gradients_are_divided_by_micro_batches, "pipeline"),
    (broken.tied_gradients_are_not_summed, "pipeline"),
    (broken.tied_tensors_count_twice_in_the_norm, "pipeline"),
    (broken.replicas_are_not_summed, "replicas"),
    (broken.replicas_of_shards_are_not_summed, "replicas of shards"),
    (broken.shards_keep_their_own_gradient, "ZeRO 3"),
    (broken.the_divisor_is_forgotten, "replicas, parameters away"),
    (broken.replicated_gradients_count_on_every_rank, "tensor"),
    (broken.ranks_do_not_agree_on_the_step, "ZeRO 3"),
    (broken.the_mean_is_over_all_targets_that_could_be, "ZeRO 3"),
]


DAILY = {
    "tensor": broken.products_of_rows_are_not_summed,
    "ring": broken.ones_own_block_is_not_causal,
    "experts": broken.results_return_in_the_order_of_experts,
    "pipeline": broken.gradients_are_divided_by_micro_batches,
    "ZeRO 3": broken.shards_keep_their_own_gradient,
}
"""First mutation of one plan of each kind."""


def job(folder: Path, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Many short texts: a sequence holds several documents, and not every position has a target."""
    keys = {**EXACT_TRAIN, "steps": 2, "global_batch": SAMPLES, "validation_samples": 1, **train}
    # Ranks that compare what they share would notice some mutations first, and save nothing.
    saved = {"every_steps": 0, "compare_replicas": False}
    data = {"document_masks": True}
    return text_job(folder, model, text=short_texts(folder), data=data, checkpoint=saved, **keys)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The job of a plan; and one process's runs: that ends where the other began, and the other."""
    folder = tmp_path_factory.mktemp("mutations")
    made: dict[str, tuple[Outcome, Outcome]] = {}

    def of(name: str) -> tuple[dict[str, Any], Outcome, Outcome]:
        model, _ = PLANS[name]
        text, key = job(folder, model), model["balance"]
        if key not in made:
            start = job(folder, model, steps=1, learning_rate=1e-30, weight_decay=0.0)
            made[key] = (
                one_process(folder / f"{key}-start", start, SAMPLES),
                one_process(folder / f"{key}-one", text, SAMPLES),
            )
        return text, *made[key]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_unbroken_plans_follow_one_process(name: str, tmp_path: Path, runs: Any) -> None:
    text, start, one = runs(name)
    other = spread_over(tmp_path, text, PLANS[name][1])
    same_training(one, other, curve=1e-9, weights=1e-9, start=start)


def test_every_plan_with_mutations_runs_every_day_without_them() -> None:
    compared = {mark.name: mark for mark in test_unbroken_plans_follow_one_process.pytestmark}  # type: ignore[attr-defined]
    assert "full" not in compared
    assert {name for _, name in MUTATIONS} == set(compared["parametrize"].args[1])
    assert {(mutation, name) for name, mutation in DAILY.items()} <= set(MUTATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        pytest.param(mutation, name, marks=() if DAILY.get(name) is mutation else pytest.mark.full)
        for mutation, name in MUTATIONS
    ],
    ids=[f"{mutation.__name__}: {name}" for mutation, name in MUTATIONS],
)
def test_the_comparison_notices_that(
    mutation: Callable[[], None], name: str, tmp_path: Path, runs: Any
) -> None:
    text, start, one = runs(name)
    other = spread_over(tmp_path, text, PLANS[name][1], patch=f"{mutation.__module__}:{mutation.__name__}")
    with pytest.raises(AssertionError):
        same_training(one, other, curve=1e-6, weights=1e-6, start=start)
