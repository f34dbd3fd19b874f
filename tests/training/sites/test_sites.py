"""Sites that hear of each other seldom do what the papers say, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import same_curve
from support.ranks import Outcome, run_job
from support.sites import FRAGMENTS, STREAMING, Reference, delayed, job, local, model
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization

TWO = Plan(dp_replicate=2, micro_batch=3, precision="fp64")


def run(folder: Path, text: dict[str, Any], seldom: Synchronization, plan: Plan = TWO) -> Outcome:
    return run_job(folder, text, replace(plan, synchronization=seldom), objects={"model": model()})


def follows(outcome: Outcome, reference: Reference) -> None:
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-9)
    got = outcome.tensors()
    for name, expected in reference.weights.items():
        assert (got[name] - expected).norm() <= 1e-9 * expected.norm(), name


# ------------------------------------------------------------------ an identity


def decoder(folder: Path, **train: Any) -> dict[str, Any]:
    """7 samples per step, which no world divides."""
    keys = {"steps": 5, "global_batch": 7, "precision": "fp64", "optimizer": "sgd", "momentum": 0.0}
    keys |= {"gradient_clip": 0.0, "learning_rate": 0.1, "validation_samples": 5, **train}
    return text_job(folder, {**DECODER, "kv_heads": 2}, sequence_length=32, **keys)


LAYOUTS = {
    "2 sites": Plan(dp_replicate=2, micro_batch=4),
    "2 sites × 2 replicas": Plan(dp_replicate=4, micro_batch=2),
    "2 sites × ZeRO 1": Plan(dp_replicate=2, dp_shard=2, shard="optimizer", micro_batch=2),
    "2 sites × ZeRO 3": Plan(dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=2),
    "2 sites × tensor": Plan(dp_replicate=2, tp=2, sequence_parallel=True, micro_batch=4),
    "2 sites × pipeline": Plan(dp_replicate=2, pp=2, micro_batch=1),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("one")
    return run_job(folder / "run", decoder(folder), Plan(micro_batch=7, precision="fp64"))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.daily("2 sites", "2 sites × ZeRO 3", "2 sites × pipeline")
def test_the_mean_of_the_weights_after_every_plain_step_is_data_parallel(
    name: str, tmp_path: Path, one_process: Outcome
) -> None:
    """With SGD that keeps nothing, the mean of what sites come to is where the mean gradient leads."""
    seldom = Synchronization("local_sgd", sites=2, every=1)
    plan = replace(LAYOUTS[name], precision="fp64", synchronization=seldom)
    outcome = run_job(tmp_path / "run", decoder(tmp_path), plan)
    assert outcome.losses == pytest.approx(one_process.losses, rel=1e-10)
    got = outcome.tensors()
    for tensor_name, expected in one_process.tensors().items():
        assert (got[tensor_name] - expected).norm() <= 1e-9 * expected.norm(), tensor_name


def near(outcome: Outcome, one: Outcome) -> None:
    """Every tensor of one process, to rounding; a run of sites has more."""
    got = outcome.tensors()
    for name, expected in one.tensors().items():
        assert (got[name] - expected).norm() <= 1e-9 * max(float(expected.norm()), 1e-3), name


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        (LAYOUTS["2 sites × pipeline"], {"tie_embeddings": True}),
        (
            Plan(dp_replicate=2, dp_shard=2, ep=2, shard="parameters", micro_batch=2),
            {"experts": 4, "expert_feed_forward": 32},
        ),
    ],
    ids=["tied stages", "experts"],
)
@pytest.mark.daily("tied stages")
def test_so_it_is_for_tensors_on_two_stages_and_for_experts(
    plan: Plan, more: dict[str, Any], tmp_path: Path
) -> None:
    text = decoder(tmp_path)
    text["model"] |= more
    one = run_job(tmp_path / "one", text, Plan(micro_batch=7, precision="fp64"))
    seldom = Synchronization("local_sgd", sites=2, every=1)
    outcome = run_job(tmp_path / "run", text, replace(plan, precision="fp64", synchronization=seldom))
    assert outcome.losses == pytest.approx(one.losses, rel=1e-10)
    near(outcome, one)


@pytest.mark.parametrize("name", ["2 sites", "2 sites × ZeRO 3", "2 sites × pipeline"])
@pytest.mark.daily("2 sites × ZeRO 3")
def test_a_staleness_of_zero_is_data_parallel_on_every_layout(name: str, tmp_path: Path) -> None:
    text = decoder(tmp_path, optimizer="adamw", gradient_clip=0.5, learning_rate=1e-2)
    if "pipeline" in name:
        text["model"]["tie_embeddings"] = True
    one = run_job(tmp_path / "one", text, Plan(micro_batch=7, precision="fp64"))
    plan = replace(LAYOUTS[name], precision="fp64", synchronization=Synchronization("delayed", sites=2))
    outcome = run_job(tmp_path / "run", text, plan)
    same_curve(one, outcome, 1e-10)
    near(outcome, one)


def test_a_staleness_of_zero_is_data_parallel_bit_for_bit(tmp_path: Path) -> None:
    text = decoder(tmp_path, precision="fp32", optimizer="adamw", gradient_clip=0.5, learning_rate=1e-2)
    plan = Plan(dp_replicate=2, micro_batch=4)
    together = run_job(tmp_path / "together", text, plan)
    sites = replace(plan, synchronization=Synchronization("delayed", sites=2, staleness=0))
    outcome = run_job(tmp_path / "sites", text, sites)
    assert outcome.losses == together.losses
    got = outcome.tensors()
    for name, expected in together.tensors().items():
        assert torch.equal(got[name], expected), name


# ------------------------------------------------------------------ the papers


def test_local_sgd_takes_the_mean_of_the_weights(tmp_path: Path) -> None:
    text = job(steps=7, batch=7, optimizer="sgd")
    follows(run(tmp_path, text, Synchronization("local_sgd", 2, 3)), local(text, every=3))


def test_diloco_makes_an_outer_update_of_what_the_sites_have_moved(tmp_path: Path) -> None:
    text = job(steps=8)
    seldom = Synchronization("diloco", 2, 3, outer_learning_rate=0.7, momentum=0.9)
    outcome = run(tmp_path, text, seldom)
    follows(outcome, local(text, every=3, rate=0.7, momentum=0.9))
    came = [step["step"] for step in outcome.steps if "pseudo_gradient_norm" in step]
    assert came == [3, 6, 8]  # and after the last step, where nothing is left under way


def test_first_steps_that_sites_take_together_are_data_parallel(tmp_path: Path) -> None:
    text = job(steps=8)
    seldom = Synchronization("diloco", 2, 2, synchronous_steps=3, outer_learning_rate=0.7, momentum=0.9)
    follows(run(tmp_path, text, seldom), local(text, every=2, rate=0.7, momentum=0.9, together=3))


def test_fragments_are_exchanged_in_turn(tmp_path: Path) -> None:
    text = job(steps=9)
    seldom = Synchronization("diloco", 2, 4, outer_learning_rate=0.7, momentum=0.9, fragments=2)
    outcome = run(tmp_path, text, seldom)
    offsets = {FRAGMENTS[0]: 0, FRAGMENTS[1]: 2}
    follows(outcome, local(text, every=4, rate=0.7, momentum=0.9, offsets=offsets))
    assert [step["step"] for step in outcome.steps if "pseudo_gradient_norm" in step] == [2, 4, 6, 8, 9]


def test_fragments_come_back_beside_the_next_steps_and_are_mixed_in(tmp_path: Path) -> None:
    text = job(steps=10)
    outcome = run(tmp_path, text, STREAMING)
    offsets = {FRAGMENTS[0]: 0, FRAGMENTS[1]: 2}
    expected = local(text, every=4, rate=0.7, momentum=0.9, offsets=offsets, late=3, mix=0.25)
    follows(outcome, expected)
    assert [step["step"] for step in outcome.steps if "pseudo_gradient_norm" in step] == [5, 7, 9, 10]


@pytest.mark.parametrize("staleness", [1, 2])
def test_late_gradients_are_those_of_the_step_so_many_before(staleness: int, tmp_path: Path) -> None:
    text = job(steps=7)
    outcome = run(tmp_path, text, Synchronization("delayed", 2, staleness=staleness))
    follows(outcome, delayed(text, staleness=staleness))


def test_four_ranks_of_two_sites_follow_the_paper_too(tmp_path: Path) -> None:
    text = job(steps=8, batch=8)
    seldom = Synchronization(
        "diloco",
        2,
        3,
        outer_learning_rate=0.7,
        momentum=0.9,
        fragments=3,
        overlap_steps=1,
        overlap_mixing_factor=0.5,
    )
    plan = Plan(dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=2, precision="fp64")
    units = {("embedding.", "head."): 0, ("blocks.0.",): 1, ("blocks.1.",): 2}
    expected = local(text, every=3, rate=0.7, momentum=0.9, offsets=units, late=1, mix=0.5)
    follows(run(tmp_path, text, seldom, plan), expected)


@pytest.mark.parametrize(("compression", "tolerance"), [("bf16", 4e-3), ("int8", 1e-2)])
def test_what_is_exchanged_may_be_rounded(compression: Any, tolerance: float, tmp_path: Path) -> None:
    text = job(steps=2)
    seldom = Synchronization("diloco", 2, 2, outer_learning_rate=0.7, momentum=0.9, compression=compression)
    got, expected = run(tmp_path, text, seldom).tensors(), local(text, every=2, rate=0.7, momentum=0.9)
    start = model().double().state_dict()
    moved, wrong = 0.0, 0.0
    for name, tensor in expected.weights.items():
        moved += float((tensor - start[name.removeprefix("model.")]).norm() ** 2)
        wrong += float((got[name] - tensor).norm() ** 2)
    assert 0 < wrong**0.5 <= tolerance * moved**0.5
