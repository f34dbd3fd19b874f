"""Law 1 for images, batch statistics and dropout: the job fixes what couples samples, not the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import one_process, same_numbers, spread_over
from support.own import Noisy, Normalized, Numbers, Poisoned, Tagger, save_images, seeded
from support.own_loop import session_job
from support.ranks import Outcome
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan

STEPS = 3
GROUP = 2


def vision_job(folder: Path, model: dict[str, Any], size: int, **train: Any) -> dict[str, Any]:
    save_images(folder / "images.npz", size)
    return {
        "model": model,
        "data": {"images": str(folder / "images.npz"), "validation_fraction": 0.1},
        "train": {
            "precision": "fp64",
            "steps": STEPS,
            "global_batch": 8,
            "learning_rate": 1e-3,
            "validation_samples": 3,
            **train,
        },
        "checkpoint": {"every_steps": 0},
    }


def numbers_job(**train: Any) -> dict[str, Any]:
    """For modules of one's own, given as objects."""
    model = {"factory": "support.own:Plain", "batch_norm_group": GROUP}
    train = {"steps": STEPS, "global_batch": 8, **train}
    return session_job(model=model, data={"factory": "support.own:Numbers"}, train=train)


VISION_PLANS = [
    Plan(micro_batch=2),
    Plan(dp_replicate=2, micro_batch=2),
    Plan(dp_shard=2, shard="parameters", micro_batch=4),
    Plan(dp_replicate=4, micro_batch=2),
    Plan(dp_shard=4, shard="parameters", micro_batch=2),
]


@pytest.fixture(scope="module")
def convolutional(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Outcome]:
    folder = tmp_path_factory.mktemp("convnet")
    job = vision_job(folder, {"preset": "cifar-convnet"}, 12, global_batch=7)
    return job, one_process(folder / "one", job, 7)


@pytest.mark.parametrize("plan", VISION_PLANS, ids=str)
@pytest.mark.daily(
    "2 ranks (dp_replicate 2), fp32, cpu", "2 ranks (dp_shard 2), parameters sharded, fp32, cpu"
)
def test_the_convolutional_network_gives_the_numbers_of_one_process(
    plan: Plan, convolutional: tuple[dict[str, Any], Outcome], tmp_path: Path
) -> None:
    job, one = convolutional
    other = spread_over(tmp_path / "run", job, plan)
    same_numbers(one, other)
    assert other.validations[-1]["accuracy"] == one.validations[-1]["accuracy"]
    assert other.validation_losses[-1] == pytest.approx(one.validation_losses[-1], rel=1e-10)


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("resnet")
    model = {"preset": "resnet-18", "batch_norm_group": GROUP}
    job = vision_job(folder, model, 8, steps=2, optimizer="sgd")
    return job, one_process(folder / "one", job, 8)


@pytest.mark.parametrize("plan", VISION_PLANS, ids=str)
@pytest.mark.daily("2 ranks (dp_replicate 2), fp32, cpu")
def test_resnet_and_its_running_statistics_are_those_of_one_process(
    plan: Plan, residual: Any, tmp_path: Path
) -> None:
    job, one = residual
    other = spread_over(tmp_path / "run", job, plan)
    same_numbers(one, other, 1e-9)
    tensors = one.tensors()
    running = [name for name in tensors if name.endswith(("running_mean", "running_var"))]
    assert len(running) == 2 * 20
    assert not torch.equal(tensors["model.bn1.running_mean"], torch.zeros(64))
    assert tensors["model.bn1.num_batches_tracked"] == 2
    assert other.validation_losses[-1] == pytest.approx(one.validation_losses[-1], rel=1e-9)


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Outcome]:
    objects = {"model": seeded(Normalized), "data": Numbers()}
    return objects, one_process(tmp_path_factory.mktemp("one"), numbers_job(), 8, objects=objects)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, micro_batch=2),
        Plan(dp_shard=2, shard="parameters", micro_batch=4, recompute="full"),
    ],
    ids=str,
)
def test_batch_normalization_of_ones_own_module_becomes_grouped(
    plan: Plan, normalized: tuple[dict[str, Any], Outcome], tmp_path: Path
) -> None:
    objects, one = normalized
    other = spread_over(tmp_path / "run", numbers_job(), plan, objects=objects)
    same_numbers(one, other)
    assert one.tensors()["model.norm.num_batches_tracked"] == STEPS
    # Its names are torch's, so that the user's own module takes them.
    Normalized().double().load_state_dict(
        {name.removeprefix("model."): t for name, t in one.tensors().items() if name.startswith("model.")}
    )


def test_rows_that_are_no_whole_groups_are_refused_with_the_keys_to_change(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"2 samples .* 3 rows.*\n.*norm_group"):
        spread_over(
            tmp_path / "run",
            numbers_job(global_batch=6),
            Plan(dp_replicate=2, micro_batch=3),
            objects={"model": seeded(Normalized), "data": Numbers()},
        )


def test_statistics_of_a_skipped_step_are_forgotten(tmp_path: Path) -> None:
    job = numbers_job(non_finite="skip", steps=2, precision="fp32", learning_rate=1000.0, gradient_clip=0.0)
    run = one_process(
        tmp_path / "run", job, 8, objects={"model": seeded(Normalized), "data": Poisoned(bad=range(48))}
    )
    tensors = run.tensors()
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert tensors["model.norm.num_batches_tracked"] == 0
    assert [step["samples"] for step in run.steps] == [8, 16]  # a skipped step consumes its samples


DROPPING = [
    Plan(micro_batch=2),
    Plan(micro_batch=8, recompute="full"),
    Plan(dp_replicate=2, micro_batch=1),
    Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
    Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2),
]


def dropping_job() -> dict[str, Any]:
    return {**numbers_job(global_batch=7), "data": {"factory": "support.own:PartlyLabelled"}}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Outcome]:
    """Module that drops some of its inputs, and its run in one process."""
    objects, folder = {"model": seeded(lambda: Tagger(dropout=0.3))}, tmp_path_factory.mktemp("dropping")
    one = one_process(folder / "one", dropping_job(), 7, objects=objects)
    without = one_process(folder / "without", dropping_job(), 7, objects={"model": seeded(Tagger)})
    assert without.losses[0] != pytest.approx(one.losses[0], rel=1e-3)
    return objects, one


@pytest.mark.parametrize("plan", DROPPING, ids=str)
@pytest.mark.daily(
    "1 rank (one process), fp32, cpu1",
    "2 ranks (dp_replicate 2), fp32, cpu",
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu",
)
def test_dropout_of_ones_own_module_drops_the_same_everywhere(
    plan: Plan, dropping: tuple[dict[str, Any], Outcome], tmp_path: Path
) -> None:
    objects, one = dropping
    same_numbers(one, spread_over(tmp_path / "run", dropping_job(), plan, objects=objects))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=2, micro_batch=4),
        Plan(pp=2, micro_batch=1),
        Plan(pp=2, dp_shard=2, shard="gradients", micro_batch=2, schedule="gpipe", recompute="full"),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (tp 2), fp32, cpu", "2 ranks (pp 2), fp32, cpu")
def test_dropout_of_a_decoder_drops_the_same_when_it_is_split(plan: Plan, tmp_path: Path) -> None:
    train = {"precision": "fp64", "steps": STEPS, "global_batch": 6, "validation_samples": 3}
    job = text_job(tmp_path, {**SMALL_DECODER, "dropout": 0.2}, **train)
    one = one_process(tmp_path / "one", job, 6)
    other = spread_over(tmp_path / "run", job, plan)
    same_numbers(one, other)
    assert other.validation_losses[-1] == pytest.approx(one.validation_losses[-1], rel=1e-10)


def test_a_module_that_draws_by_itself_draws_the_same_everywhere(tmp_path: Path) -> None:
    objects = {"model": seeded(Noisy), "data": Numbers()}
    one = one_process(tmp_path / "one", numbers_job(), 8, objects=objects)
    plan = Plan(dp_replicate=2, micro_batch=4)
    same_numbers(one, spread_over(tmp_path / "run", numbers_job(), plan, objects=objects))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(tp=2, micro_batch=4), "tp = 2: ConvNet has no matrix"),
        (Plan(pp=2, micro_batch=4), "pp = 2: ConvNet"),
    ],
    ids=["tp", "pp"],
)
def test_an_image_classifier_is_not_split_within(plan: Plan, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        spread_over(tmp_path / "run", vision_job(tmp_path, {"preset": "cifar-convnet"}, 8), plan)
