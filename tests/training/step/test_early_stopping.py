"""Runs that end when validation no longer improves, and gradient norms by layer."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from support.ranks import Outcome, run_here, run_job
from wanma.checkpoint.inspection.inventory import list_in_folder
from wanma.data.batch import IGNORE_INDEX
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection
from wanma.training.step.early_stopping import EarlyStopping
from wanma.training.step.layer_gradient_norms import layer_of

PLAN = Plan(micro_batch=7, precision="fp64")


def steady(output: Tensor, targets: Tensor) -> tuple[float, int]:
    """Never improves."""
    return 2.0 * len(targets), len(targets)


def job(**train: Any) -> dict[str, Any]:
    stops = {"steps": 40, "validate_every_steps": 2, "stop_patience": 3, "stop_metric": "steady", **train}
    return session_job(
        train=stops, data={"validation_fraction": 0.25}, checkpoint={"every_steps": 2, "keep": 50}
    )


def objects() -> dict[str, Any]:
    return {"model": seeded(Plain), "data": Numbers(), "metrics": {"steady": steady}}


def events(run: Path) -> str:
    return (run / "events.jsonl").read_text()


def test_a_run_ends_after_the_patience_and_goes_on_from_a_checkpoint_as_if_never_stopped(
    tmp_path: Path,
) -> None:
    whole = run_here(tmp_path / "whole", job(), PLAN, objects())
    assert [step["step"] for step in whole.steps] == list(range(1, 9))  # the first, and three more
    assert "has not improved in 3 validations" in events(whole.directory)
    assert '"outcome": "finished"' in events(whole.directory) or '"outcome":"finished"' in events(
        whole.directory
    )
    shutil.copytree(whole.directory, tmp_path / "again")
    for step in (6, 8):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{step:08d}")
    again = run_here(tmp_path / "again", job(), PLAN, objects())
    assert [step["step"] for step in again.steps] == list(range(1, 9))
    same_numbers(whole, again, tolerance=0.0)
    ended = run_here(tmp_path / "again", job(), PLAN, objects())
    assert len(ended.steps) == 8
    longer = run_here(tmp_path / "again", job(stop_patience=5), PLAN, objects())
    assert len(longer.steps) == 12


def test_two_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    run = run_job(tmp_path, job(), Plan(dp_replicate=2, micro_batch=4, precision="fp64"), objects())
    assert len(run.steps) == 8


def test_a_loop_of_ones_own_ends_too(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with wanma.session(job(stop_metric="loss", stop_min_delta=100.0), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))

        def losses(batch: wanma.Batch) -> Any:
            return session.losses(model(*batch.inputs), batch)

        for batch in session.batches(Numbers(), validate=losses):
            session.step(losses(batch))
    torch.set_num_threads(threads)
    assert len(Outcome(tmp_path).steps) == 8
    assert "finished" in events(tmp_path)


def error(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="none")


def test_the_best_checkpoint_is_that_of_the_named_metric_in_its_direction(tmp_path: Path) -> None:
    asked = job(steps=10, stop_patience=0)
    given = {**objects(), "metrics": {"error": error}}
    kept = {"every_steps": 2, "keep": 1, "best_metric": "error"}
    for mode, best in (("min", min), ("max", max)):
        chosen = {**asked, "checkpoint": {**kept, "best_mode": mode}}
        run = run_here(tmp_path / mode, chosen, PLAN, given)
        errors = {event["step"]: event["metrics"]["error"] for event in run.validations}
        expected = best(errors, key=errors.__getitem__)
        found = list_in_folder(run.directory / "checkpoints")
        assert {entry.step for entry in found} == {expected, 10}
        assert [entry.step for entry in found if entry.is_best] == [expected]
    # Values of one metric are not compared with those of another.
    other = {**asked, "train": {**asked["train"], "steps": 12}, "checkpoint": {**kept, "best_metric": "loss"}}
    run = run_here(tmp_path / "max", other, PLAN, given)
    assert [entry.step for entry in list_in_folder(run.directory / "checkpoints")] == [12]


def test_a_metric_that_chooses_no_checkpoint_is_refused(tmp_path: Path) -> None:
    asked = {**job(stop_patience=0), "checkpoint": {"best_metric": "eror"}}
    given = {**objects(), "metrics": {"error": error}}
    with pytest.raises(JobError, match=r"best_metric = 'eror': .*'error'") as refused:
        run_here(tmp_path / "a", asked, PLAN, given)
    assert "use one of loss, accuracy, error" in str(refused.value)
    with pytest.raises(JobError, match=r"best_metric = 'eror', .* validation"):
        run_here(tmp_path / "b", {**asked, "data": {"validation_fraction": 0}}, PLAN, given)


def test_what_counts_as_better() -> None:
    lower = TrainSection(stop_patience=2, validate_every_steps=1, stop_min_delta=0.1)
    stopping = EarlyStopping()
    told = [
        stopping.record_validation(n, {"loss": loss}, lower)
        for n, loss in enumerate((1.0, 0.95, 0.85, math.nan, 0.8))
    ]
    assert told[:4] == ["", "", "", ""]
    assert told[4].endswith("(train.stop_patience = 2); best 0.85 at step 2")
    higher = lower.model_copy(update={"stop_mode": "max"})
    stopping = EarlyStopping()
    assert [stopping.record_validation(n, {"loss": v}, higher) for n, v in enumerate((0.5, 0.7, 0.9))] == [
        "",
        "",
        "",
    ]
    assert (stopping.best, stopping.waited) == (0.9, 0)


def test_a_validation_without_a_value_changes_nothing() -> None:
    train = TrainSection(stop_patience=1, validate_every_steps=1)
    stopping = EarlyStopping(best=0.5, best_step=2)
    assert stopping.record_validation(3, {"loss": None}, train) == ""
    assert stopping == EarlyStopping(best=0.5, best_step=2)


class Unlabelled(Numbers):
    """No sample has a target."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], IGNORE_INDEX


def never(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A metric that no sample counts for."""
    return output.sum(1), torch.zeros(len(output), dtype=torch.bool)


@pytest.mark.parametrize("metric", ["loss", "never"])
def test_a_run_goes_on_where_validation_has_no_value(metric: str, tmp_path: Path) -> None:
    asked = job(steps=4, stop_patience=1, stop_metric=metric)
    asked["checkpoint"]["best_metric"] = metric
    data = (Numbers(), Unlabelled()) if metric == "loss" else Numbers()
    run = run_here(tmp_path, asked, PLAN, {**objects(), "data": data, "metrics": {"never": never}})
    validations = run.validations
    assert len(run.steps) == 4
    assert [(event["loss"] is None, "metrics" in event) for event in validations] == [
        (metric == "loss", False)
    ] * 2
    warnings = [event["text"] for event in run.events if event.get("level") == "warning"]
    assert [metric in text and "train.stop_metric" in text for text in warnings] == [True, True]
    assert not any(entry.is_best for entry in list_in_folder(tmp_path / "checkpoints"))


def test_what_can_never_end_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"stop_metric = 'stead': .*'steady'"):
        run_here(tmp_path / "a", job(stop_metric="stead"), PLAN, objects())
    no_validation = {**job(), "data": {"validation_fraction": 0}}
    with pytest.raises(JobError, match=r"stop_patience = 3, .* no validation"):
        run_here(tmp_path / "b", no_validation, PLAN, objects())
    with pytest.raises(WanmaError, match="stop_patience = 3 needs validations"):
        wanma.train(job(validate_every_steps=0), model=Plain(), data=Numbers())


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_norms_of_layers_are_those_of_one_process(tmp_path: Path) -> None:
    asked = {**session_job(), "observe": {"gradient_norms_every_steps": 2}}
    given = {"model": seeded(sequential), "data": Numbers()}
    one = run_here(tmp_path / "one", asked, PLAN, given)
    assert ["layer_grad_norms" in step for step in one.steps] == [False, True, False, True]
    for step in one.steps[1::2]:
        assert list(step["layer_grad_norms"]) == ["0", "2"]
        total = math.hypot(*step["layer_grad_norms"].values())
        assert total == pytest.approx(step["grad_norm"], rel=1e-12)
    for number, sizes in enumerate(({"dp_shard": 2, "shard": "parameters"}, {"pp": 2})):
        plan = Plan(**sizes, micro_batch=2, precision="fp64")
        other = run_job(tmp_path / str(number), asked, plan, given)
        for mine, theirs in zip(one.steps[1::2], other.steps[1::2], strict=True):
            assert theirs["layer_grad_norms"] == pytest.approx(mine["layer_grad_norms"], rel=1e-9)


def test_layers_are_paths_down_to_the_first_number() -> None:
    names = {
        "model.layers.3.mlp.up.weight": "model.layers.3",
        "embedding.weight": "embedding",
        "encoder.norm.weight": "encoder.norm",
        "scale": "scale",
    }
    assert {name: layer_of(name) for name in names} == names
