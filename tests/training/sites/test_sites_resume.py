"""A run with sites that stops anywhere carries on bit for bit; with other sites, from what all share."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import equal
from support.images import Held
from support.ranks import Outcome, run_job
from support.recovering import fail, messages, recover
from support.recovering import job as recovering_job
from support.sites import STREAMING, job, model
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization

TWO = Plan(dp_replicate=2, micro_batch=3, precision="fp64")
LATE = Synchronization("delayed", 2, staleness=2)


def interrupted(folder: Path, text: dict[str, Any], plan: Plan) -> None:
    """A run that fails in step 4, and has a checkpoint of step 3."""
    with pytest.raises(AssertionError, match="failed"):
        run_job(folder, text, plan, objects={"model": model()}, patch="support.faults:rank_0_fails_in_step_4")


def run(folder: Path, text: dict[str, Any], plan: Plan) -> Outcome:
    return run_job(folder, text, plan, objects={"model": model()})


def text(steps: int = 8) -> dict[str, Any]:
    return {**job(steps=steps), "checkpoint": {"every_steps": 3}}


@pytest.mark.parametrize(
    "plan",
    [
        replace(TWO, synchronization=STREAMING),
        replace(TWO, synchronization=LATE),
        Plan(
            dp_replicate=2,
            dp_shard=2,
            shard="parameters",
            micro_batch=2,
            precision="fp64",
            synchronization=STREAMING,
        ),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_replicate 2), fp64, cpu, diloco between 2 sites every 4 steps in 2 fragments, "
    "overlapped with 3 steps",
    "2 ranks (dp_replicate 2), fp64, cpu, gradients of 2 sites delayed by 2 steps",
)
def test_carrying_on_between_two_exchanges_is_bitwise_as_never_having_stopped(
    plan: Plan, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", text(), plan)
    interrupted(tmp_path / "parts", text(), plan)
    parts = run(tmp_path / "parts", text(), plan)
    assert '"step": 3, "steps"' in messages(parts)
    assert parts.losses == whole.losses
    equal(whole, parts)


@pytest.mark.parametrize("seldom", [STREAMING, LATE], ids=str)
@pytest.mark.daily("diloco between 2 sites every 4 steps in 2 fragments, overlapped with 3 steps")
def test_a_failure_goes_on_from_memory_bitwise(seldom: Synchronization, tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3, synchronization=seldom)
    whole = run_job(tmp_path / "whole", recovering_job(tmp_path, "off", weight_average=0.0), plan)
    held = Held(2)
    again = recovering_job(tmp_path, weight_average=0.0)
    fail(tmp_path / "run", again, plan, held, "rank_1_fails_in_step_4")
    outcome, _ = recover(tmp_path / "run", again, plan, held, 3)
    assert '"source": "memory", "step": 3,' in messages(outcome)
    assert outcome.losses == whole.losses
    equal(whole, outcome)


def test_another_number_of_sites_begins_at_the_weights_that_all_share(tmp_path: Path) -> None:
    """Compare the next batch's loss with that of the outer weights of step 3, with no or three steps done."""
    plan = replace(TWO, synchronization=STREAMING)
    losses = []
    interrupted(tmp_path / "first", text(), plan)
    for name, other in {
        "none": Plan(micro_batch=6, precision="fp64"),
        "one": Plan(micro_batch=6, precision="fp64", synchronization=replace(STREAMING, sites=1)),
        "three": Plan(
            dp_replicate=3,
            micro_batch=2,
            precision="fp64",
            synchronization=replace(STREAMING, sites=3, momentum=0.0),
        ),
    }.items():
        shutil.copytree(tmp_path / "first", tmp_path / name)
        outcome = run(tmp_path / name, text(), other)
        assert "saved by 2 sites: all ranks" in messages(outcome)
        assert [step["step"] for step in outcome.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
        losses.append(outcome.losses[3])
    assert losses[1:] == pytest.approx([losses[0], losses[0]], rel=1e-12)
    kept = torch.tensor(losses[0])
    assert torch.isfinite(kept)


def test_a_run_without_sites_can_go_on_with_them(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", text(), TWO)
    outcome = run(tmp_path / "run", text(), replace(TWO, synchronization=STREAMING))
    assert "saved without sites: all 2 sites" in messages(outcome)
    together = run(tmp_path / "together", text(), TWO)
    assert outcome.losses[:4] == pytest.approx(together.losses[:4], rel=1e-12)
    assert outcome.losses[5] != pytest.approx(together.losses[5], rel=1e-9)


def test_late_gradients_go_on_under_any_layout(tmp_path: Path) -> None:
    plan = replace(TWO, synchronization=LATE)
    whole = run(tmp_path / "whole", text(), plan)
    interrupted(tmp_path / "parts", text(), plan)
    one = Plan(micro_batch=6, precision="fp64", synchronization=replace(LATE, sites=1))
    parts = run(tmp_path / "parts", text(), one)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-10)
    expected, got = whole.tensors(), parts.tensors()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert (got[name] - tensor).norm() <= 1e-9 * max(tensor.norm(), 1e-3), name


def test_what_is_saved_and_evaluated_are_the_weights_that_all_share(tmp_path: Path) -> None:
    """Between exchanges sites differ; a checkpoint's `model.` and the validation loss are of none of them."""
    seldom = Synchronization("diloco", 2, 4, outer_learning_rate=0.7, momentum=0.9)
    every = {**job(steps=8, validate_every_steps=2), "checkpoint": {"every_steps": 2, "keep": 8}}
    outcome = run(tmp_path / "run", every, replace(TWO, synchronization=seldom))
    at_4, at_6 = outcome.tensors(4), outcome.tensors(6)
    for name in (name for name in at_4 if name.startswith("model.")):
        assert torch.equal(at_4[name], at_6[name]), name
        assert torch.equal(at_4[f"site.0.{name}"], at_4[name]), name
        assert torch.equal(at_4[f"site.1.{name}"], at_4[name]), name
        assert not torch.equal(at_6[f"site.0.{name}"], at_6[f"site.1.{name}"]), name
    events = [json.loads(line) for line in messages(outcome).splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["kind"] == "validation"}
    assert losses[4] == losses[6]
    assert losses[4] != losses[8]
