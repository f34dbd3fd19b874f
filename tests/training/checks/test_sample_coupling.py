"""Samples that depend on their micro-batch: refused before the first step where the batch is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.coupled import (
    Drawing,
    OfTwelve,
    Standardising,
    Stateful,
    centred_layers,
    cross_entropies,
    divided_by_rows,
    in_batch_negatives,
    plain_layers,
    repelled_by_its_copies,
    tied_to_the_next_but_one,
    weighted_by_the_batch,
    with_an_average,
)
from support.own import Normalized, Numbers, Plain, Tagger, seeded
from support.own_loop import started_by_launch
from support.ranks import Outcome, run_here, run_job, run_ranks
from wanma.data.batch import Batch
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.user_frames import user_frame_text
from wanma.models.layers.batch_norm import convert_batch_norm
from wanma.training.checks.state_restoration import preserve_state
from wanma.training.step.forward_backward import ForwardBackward


def job(global_batch: int = 12, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"factory": "support.own:Plain"},
        "data": {"validation_fraction": 0.0},
        "train": {"precision": "fp64", "steps": 2, "global_batch": global_batch, "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 0},
        "observe": {"console": "quiet"},
        **sections,
    }


def train(
    folder: Path, plan: Plan, *, model: nn.Module, data: Any = None, global_batch: int = 12, **more: Any
) -> Outcome:
    objects = {"model": model, "data": Numbers() if data is None else data, **more}
    run = run_here if plan.world_size == 1 else run_job
    return run(folder, job(global_batch), plan.with_changes(precision="fp64"), objects=objects)


ALONE = Plan(micro_batch=12)
ACCUMULATING = Plan(micro_batch=1)
FOURS = Plan(micro_batch=4)
REPLICAS = Plan(dp_replicate=2, micro_batch=6)
ZERO = Plan(dp_shard=2, shard="parameters", micro_batch=3)

REFUSED: dict[str, tuple[Plan, Any, Any, str]] = {
    "in-batch negatives": (ZERO, Plain, in_batch_negatives, "which other samples share its micro-batch"),
    "negatives of one row": (ACCUMULATING, Plain, in_batch_negatives, "one rank in 12 micro-batches"),
    "weights without a gradient": (REPLICAS, Plain, weighted_by_the_batch, "which other samples"),
    "a centred batch": (REPLICAS, Standardising, cross_entropies, r"wanma\.global_batch"),
    "losses over the rows": (ACCUMULATING, Plain, divided_by_rows, "how many samples share"),
    "every second row": (FOURS, Plain, tied_to_the_next_but_one, "which other samples"),
    "samples that are alike": (FOURS, Plain, repelled_by_its_copies, "which other samples"),
}


@pytest.mark.parametrize(("plan", "model", "loss", "told"), REFUSED.values(), ids=REFUSED)
def test_what_depends_on_the_micro_batch_is_refused_before_the_first_step(
    plan: Plan, model: Any, loss: Any, told: str, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, wanma.JobError), match=told):
        train(tmp_path, plan, model=seeded(model), loss=loss)
    assert not (tmp_path / "metrics.jsonl").exists() or Outcome(tmp_path).steps == []


def test_a_model_is_checked_under_the_default_loss_too(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, wanma.JobError), match="which other samples"):
        train(tmp_path, ACCUMULATING, model=seeded(Standardising))


def test_layers_of_a_pipeline_are_checked(tmp_path: Path) -> None:
    plan = Plan(pp=2, micro_batch=3)
    alone = train(tmp_path / "1", ALONE, model=seeded(plain_layers))
    same_numbers(alone, train(tmp_path / "2", plan, model=seeded(plain_layers)), 1e-10)
    with pytest.raises((AssertionError, wanma.JobError), match="which other samples"):
        train(tmp_path / "3", plan, model=seeded(centred_layers))


def test_one_rank_with_the_global_batch_at_once_computes_any_loss(tmp_path: Path) -> None:
    assert len(train(tmp_path, ALONE, model=seeded(Standardising), loss=in_batch_negatives).steps) == 2


class Tokens(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.randint(16, (64, 6), generator=torch.Generator().manual_seed(1))
        self.targets = self.inputs.flip(1)


HARMLESS: dict[str, tuple[Any, Any]] = {
    "dropout": (lambda: Tagger(dropout=0.5), Tokens),
    "grouped batch normalization": (lambda: convert_batch_norm(Normalized(), 6), Numbers),
}


@pytest.mark.parametrize(("model", "data"), HARMLESS.values(), ids=HARMLESS)
def test_what_does_not_couple_trains_as_before(model: Any, data: Any, tmp_path: Path) -> None:
    alone = train(tmp_path / "1", ALONE, model=seeded(model), data=data())
    cut = train(tmp_path / "2", Plan(micro_batch=6), model=seeded(model), data=data())
    same_numbers(alone, cut, 1e-10)


@pytest.mark.parametrize(
    ("model", "data", "passes"),
    [(Plain, Numbers, [4, 4, 2, 2]), (lambda: Tagger(dropout=0.5), Tokens, [4, 4, 2, 2, 2])],
    ids=["plain", "dropout"],
)
def test_few_passes_show_that_samples_are_apart(
    model: Any, data: Any, passes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch, one of copies, and the halves of the first; of draws also those of the second."""
    losses, rows = ForwardBackward.losses, []

    def recorded(self: ForwardBackward, batch: Batch) -> tuple[Tensor, Tensor]:
        rows.append(batch.rows)
        return losses(self, batch)

    monkeypatch.setattr(ForwardBackward, "losses", recorded)
    train(tmp_path, FOURS, model=seeded(model), data=data())
    assert rows == passes


def test_an_average_that_is_added_to_each_loss_adds_up(tmp_path: Path) -> None:
    alone = train(tmp_path / "1", ALONE, model=seeded(Plain), loss=with_an_average)
    uneven = Plan(dp_replicate=2, micro_batch=8, batch_shares=(4, 8))
    same_numbers(alone, train(tmp_path / "2", uneven, model=seeded(Plain), loss=with_an_average), 1e-10)
    in_a_session(tmp_path / "3", job(parallel={"micro_batch": 6}), Plain, with_an_average, False)


def test_a_model_that_takes_one_number_of_rows_is_checked_with_that_number(tmp_path: Path) -> None:
    plan = Plan(micro_batch=12)
    assert len(train(tmp_path / "1", plan, model=seeded(OfTwelve), global_batch=24).steps) == 2
    with pytest.raises((AssertionError, wanma.JobError), match="which other samples"):
        train(tmp_path / "2", plan, model=seeded(OfTwelve), loss=in_batch_negatives, global_batch=24)


def test_noise_is_no_coupling(tmp_path: Path) -> None:
    assert len(train(tmp_path, Plan(micro_batch=6), model=seeded(Drawing)).steps) == 2


class Rounding(nn.Module):
    """Model whose outputs cancel but for their rounding, which is another in batches of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.large = nn.Linear(8, 4), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        offset = 10_000.1 * len(x)
        values = self.layer(x)
        output: Tensor = self.large(torch.cat([values, -values / 2, -values / 2], -1) + offset) - offset
        return output


def sum_of_outputs(output: Tensor, targets: Tensor) -> Tensor:
    del targets
    return output.sum(-1)


def test_rounding_is_no_coupling(tmp_path: Path) -> None:
    plan, text = Plan(micro_batch=6, precision="fp32"), job()
    text["train"]["precision"] = "fp32"
    objects = {"model": seeded(Rounding), "data": Numbers(), "loss": sum_of_outputs}
    assert len(run_here(tmp_path / "1", text, plan, objects=objects).steps) == 2
    with pytest.raises(wanma.JobError, match="how many samples"):
        run_here(tmp_path / "2", text, plan, objects={**objects, "loss": divided_by_rows})


def test_the_check_leaves_no_trace(tmp_path: Path) -> None:
    """Buffers, counters, lists and tensors of the module are as if it had not been run before."""
    outcome = train(tmp_path, REPLICAS, model=seeded(Stateful))
    tensors = outcome.tensors()
    assert tensors["model.count"] == 2
    alone = train(tmp_path / "1", ALONE, model=seeded(Stateful))
    same_numbers(alone, outcome, 1e-10)


def in_a_session(folder: Path, text: dict[str, Any], model: Any, loss: Any, validates: bool) -> Outcome:
    with wanma.session(text, run_directory=folder) as session:
        prepared = session.prepare(seeded(model))

        def losses(batch: wanma.Batch) -> Tensor:
            losses: Tensor = loss(prepared(*batch.inputs), batch.targets)
            return losses

        for batch in session.batches(Numbers(), validate=losses if validates else None):
            session.step(losses(batch))
    return Outcome(folder)


IN_A_LOOP: dict[str, tuple[Any, Any, bool]] = {
    "by the gradient of the first losses": (Plain, in_batch_negatives, False),
    "by the function that validates": (Standardising, cross_entropies, True),
}


@pytest.mark.parametrize(("model", "loss", "validates"), IN_A_LOOP.values(), ids=IN_A_LOOP)
def test_a_loop_of_ones_own_is_checked(model: Any, loss: Any, validates: bool, tmp_path: Path) -> None:
    cut, whole = ({"micro_batch": rows} for rows in (6, 12))
    with pytest.raises(wanma.JobError, match="share its micro-batch"):
        in_a_session(tmp_path / "cut", job(parallel=cut), model, loss, validates)
    assert len(in_a_session(tmp_path / "whole", job(parallel=whole), model, loss, validates).steps) == 2
    plain = in_a_session(tmp_path / "plain", job(parallel=whole), Stateful, cross_entropies, False)
    assert len(plain.steps) == 2


def session_in_rank(worker: WorkerContext, folder: Path) -> str:
    with started_by_launch(worker, folder), pytest.raises(wanma.JobError) as error:
        in_a_session(folder, job(parallel={"dp_shard": 2}), Plain, in_batch_negatives, False)
    return str(error.value)


def test_all_ranks_of_a_loop_tell_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(session_in_rank, 2, (tmp_path,))
    assert first == second
    assert "2 data ranks would train another model" in first


def test_undisturbed_puts_everything_back() -> None:
    model = Stateful()
    model.register_buffer("extra", torch.arange(3.0))
    loss = type("Loss", (), {})()
    loss.history, loss.scale = [1], np.ones(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    extra = model.extra
    drawn = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    with preserve_state([model], [loss]), torch.no_grad():
        model(torch.randn(2, 8))
        model.eval()
        model.extra = torch.zeros(3)
        model.first.weight.mul_(2)
        model.cache = torch.ones(1)
        loss.history.append(2)
        loss.scale *= 3
        np.random.rand()
        random.random()
    assert drawn
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.extra is extra
    assert (model.training, model.calls, model.seen, model.latest, model.total.item()) == (
        True,
        0,
        [],
        None,
        0,
    )
    assert not hasattr(model, "cache")
    assert (loss.history, loss.scale.tolist()) == ([1], [1.0, 1.0])
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def picky(output: Tensor, targets: Tensor) -> Tensor:
    """Takes no sample twice."""
    if len(output.unique(dim=0)) < len(output):
        raise ValueError("a sample came twice")
    return nn.functional.cross_entropy(output, targets, reduction="none")


def logarithms_of_distances(output: Tensor, targets: Tensor) -> Tensor:
    """Couples samples; of a sample beside itself it is infinite."""
    return -(output - output.flip(0)).square().sum(-1).log()


def test_what_cannot_be_checked_is_told(tmp_path: Path) -> None:
    run = train(tmp_path, ACCUMULATING.with_changes(micro_batch=4), model=seeded(Plain), loss=picky)
    told = (run.directory / "events.jsonl").read_text()
    assert told.count("could not check") == 1
    assert "ValueError: a sample came twice" in told
    sound = train(
        tmp_path / "sound",
        ACCUMULATING.with_changes(micro_batch=4),
        model=seeded(Plain),
        loss=cross_entropies,
    )
    assert "could not check" not in (sound.directory / "events.jsonl").read_text()


def test_losses_that_only_copies_make_infinite_are_coupled(tmp_path: Path) -> None:
    with pytest.raises(wanma.WanmaError, match="share its micro-batch"):
        train(
            tmp_path,
            ACCUMULATING.with_changes(micro_batch=4),
            model=seeded(Plain),
            loss=logarithms_of_distances,
        )


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def bug_of_wanma(*_: Any) -> None:
    user_frame_text(None)  # type: ignore[arg-type]  # fails inside wanma


@pytest.mark.parametrize("fails", [out_of_memory, bug_of_wanma])
def test_a_check_that_fails_by_itself_names_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    """Neither a bug nor lack of memory counts as a model that takes other samples only."""
    monkeypatch.setattr("wanma.training.step.forward_backward.ForwardBackward.losses", fails)
    with pytest.raises(wanma.WanmaError, match="over micro-batches failed on 4"):
        train(tmp_path, ACCUMULATING.with_changes(micro_batch=4), model=seeded(Plain), loss=cross_entropies)
