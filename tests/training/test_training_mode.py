"""A model is trained in training mode, as a plain loop that calls `train()` at its start would train it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import wanma
from support.own import Numbers, PartlyLabelled, Plain, Tagger, seeded
from support.own_loop import per_sample, session_job
from support.ranks import run_here
from wanma.job.plan.plan import Plan

JOB = {
    "model": {"factory": "support.own:Tagger"},
    "train": {"steps": 2, "global_batch": 8, "learning_rate": 1e-2},
    "checkpoint": {"every_steps": 0},
}


def losses_of(model: nn.Module, folder: Path) -> list[float]:
    return run_here(folder, JOB, Plan(micro_batch=8), {"model": model, "data": PartlyLabelled()}).losses


def test_dropout_of_a_model_that_comes_in_evaluation_mode_works(tmp_path: Path) -> None:
    model = seeded(lambda: Tagger(dropout=0.5))
    expected = losses_of(model, tmp_path / "training")
    assert losses_of(model.eval(), tmp_path / "evaluation") == expected
    assert losses_of(seeded(Tagger), tmp_path / "none") != pytest.approx(expected, rel=1e-3)


class PartlyFrozen(Plain):
    """A classifier one part of which is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Dropout(0.5).eval()


def test_parts_that_alone_are_in_evaluation_mode_stay_there(tmp_path: Path) -> None:
    job = session_job(train={"validate_every_steps": 1, "steps": 2})
    with wanma.session(job, run_directory=tmp_path) as session:
        model = session.prepare(seeded(PartlyFrozen))
        assert (model.training, model.get_submodule("noise").training) == (True, False)
        for batch in session.batches(Numbers(), validate=lambda batch: per_sample(model, batch)):
            session.step(per_sample(model, batch))
            assert (model.training, model.get_submodule("noise").training) == (True, False)


def test_a_session_trains_a_model_that_comes_in_evaluation_mode_and_leaves_later_modes_alone(
    tmp_path: Path,
) -> None:
    with wanma.session(session_job(train={"steps": 1}), run_directory=tmp_path) as session:
        model = session.prepare(seeded(PartlyFrozen).eval())
        assert all(module.training for module in model.modules())
        model.eval()
        for batch in session.batches(Numbers()):
            assert not model.training
            session.step(per_sample(model, batch))
