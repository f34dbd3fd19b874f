"""Validation in one's own loop: the job's, by the user's forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wanma
from support.own import Numbers, Plain, seeded
from support.own_loop import loop, loop_in_rank, per_sample, session_job
from support.ranks import Outcome, run_job, run_ranks
from wanma.checkpoint.store.checkpoint_folder import list_committed, read_manifest
from wanma.job.plan.plan import Plan

STEPS = 6


def job(**sections: Any) -> dict[str, Any]:
    """Validates every second step on averaged weights. It learns so fast that the best comes early."""
    train = {
        "steps": STEPS,
        "validate_every_steps": 2,
        "validation_samples": 10,
        "weight_average": 0.5,
        "learning_rate": 0.5,
        **sections.pop("train", {}),
    }
    defaults = {"data": {"validation_fraction": 0.25}, "checkpoint": {"every_steps": 1, "keep": 1}}
    return session_job(train=train, **{**defaults, **sections})


def validations(run: Path) -> list[tuple[int, float, int]]:
    return [(event["step"], event["loss"], event["targets"]) for event in Outcome(run).validations]


def best_loss(run: Path) -> float:
    last = Outcome(run).events[-1]
    assert last["kind"] == "finish"
    return float(last["best_loss"])


def kept(run: Path) -> dict[int, float | None]:
    """Metric of each checkpoint by its step."""
    return {step: read_manifest(path).metric for step, path in list_committed(run / "checkpoints")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same job as `wanma.train` runs it in a rank."""
    objects = {"model": seeded(Plain), "data": Numbers()}
    plan = Plan(micro_batch=7, precision="fp64")
    return run_job(tmp_path_factory.mktemp("trained"), job(), plan, objects=objects)


def same_validation(trained: Outcome, run: Path) -> None:
    expected, got = validations(trained.directory), validations(run)
    assert [(step, targets) for step, _, targets in got] == [(2, 10), (4, 10), (6, 10)]
    assert [loss for _, loss, _ in got] == pytest.approx([loss for _, loss, _ in expected], rel=1e-10)
    assert best_loss(run) == pytest.approx(min(loss for _, loss, _ in expected), rel=1e-10)
    assert kept(run) == {
        step: metric if metric is None else pytest.approx(metric, rel=1e-10)
        for step, metric in kept(trained.directory).items()
    }


def test_the_best_checkpoint_of_this_job_is_not_its_last(trained: Outcome) -> None:
    """Else the tests below could not tell whether the best is kept."""
    assert len(kept(trained.directory)) == 2


def test_a_session_alone_validates_as_a_whole_job(trained: Outcome, tmp_path: Path) -> None:
    loop(job(), tmp_path, validates=True)
    same_validation(trained, tmp_path)


@pytest.mark.parametrize(
    "parallel",
    [{"dp_replicate": 2}, {"dp_shard": 2, "micro_batch": 1}],
    ids=["2 replicas", "ZeRO 3, accumulating"],
)
def test_two_ranks_validate_as_a_whole_job(
    parallel: dict[str, Any], trained: Outcome, tmp_path: Path
) -> None:
    run_ranks(loop_in_rank, 2, (job(parallel=parallel), tmp_path, True), is_reused=True)
    same_validation(trained, tmp_path)


def test_validation_is_on_the_averaged_weights(tmp_path: Path) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with wanma.session(job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))

        def losses(batch: wanma.Batch) -> torch.Tensor:
            seen.append((batch.inputs[0].double(), batch.targets))
            return per_sample(model, batch)

        for batch in session.batches(Numbers(), validate=losses):
            session.step(per_sample(model, batch))
    averaged = seeded(Plain).double()
    saved = Outcome(tmp_path).tensors()
    averaged.load_state_dict({name: saved[f"average.{name}"] for name in averaged.state_dict()})
    inputs, targets = (torch.cat(parts) for parts in zip(*seen[-2:], strict=True))
    assert len(targets) == 10, "all of the last validation, in two micro-batches"
    (_, loss, _) = validations(tmp_path)[-1]
    assert loss == pytest.approx(F.cross_entropy(averaged(inputs), targets).item(), rel=1e-10)


def test_without_a_schedule_a_session_validates_at_its_end(tmp_path: Path) -> None:
    loop(job(train={"validate_every_steps": 0}), tmp_path, validates=True)
    assert [step for step, _, _ in validations(tmp_path)] == [STEPS]


def test_an_interrupted_loop_is_not_validated_at_its_end(tmp_path: Path) -> None:
    with wanma.session(job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers(), validate=lambda batch: per_sample(model, batch)):
            session.step(per_sample(model, batch))
            break
    assert validations(tmp_path) == []
    assert list(kept(tmp_path)) == [1]


class PartlyFrozen(Plain):
    """A user keeps one part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Identity()
        self.still.eval()


def test_validation_is_without_gradients_and_leaves_every_modules_mode_as_it_was(tmp_path: Path) -> None:
    modes: list[tuple[bool, bool, bool]] = []
    with wanma.session(job(train={"steps": 2}), run_directory=tmp_path) as session:
        model = session.prepare(seeded(PartlyFrozen))

        def losses(batch: wanma.Batch) -> torch.Tensor:
            modes.append((model.training, model.still.training, torch.is_grad_enabled()))
            return per_sample(model, batch)

        for batch in session.batches(Numbers(), validate=losses):
            session.step(losses(batch))
    assert modes[:3] == [(True, False, True), (True, False, True), (False, False, False)]
    assert (model.training, model.still.training) == (True, False)


def test_a_pair_of_datasets_is_for_training_and_validation(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    other = Numbers(size=3, seed=9)
    with wanma.session(job(train={"steps": 1}), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))

        def losses(batch: wanma.Batch) -> torch.Tensor:
            seen.extend(batch.inputs[0])
            return per_sample(model, batch)

        for batch in session.batches((Numbers(), other), validate=losses):
            session.step(per_sample(model, batch))
    assert sorted(row[0].item() for row in seen) == sorted(other.inputs[:, 0].tolist())


def test_a_job_that_validates_needs_the_users_forward_pass(tmp_path: Path) -> None:
    with wanma.session(job(), run_directory=tmp_path) as session:
        session.prepare(seeded(Plain))
        with pytest.raises(wanma.JobError, match=r"train\.validate_every_steps = 2"):
            session.batches(Numbers())


def test_a_mean_from_validation_is_refused(tmp_path: Path) -> None:
    with wanma.session(job(train={"steps": 1}), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        batches = session.batches(Numbers(), validate=lambda batch: per_sample(model, batch).mean())
        with pytest.raises(wanma.WanmaError, match="reduction='none'"):
            session.step(per_sample(model, next(batches)))
