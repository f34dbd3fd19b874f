"""A recommender has the same losses, weights and metrics on any layout, and after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.compare import same_numbers
from support.own_loop import session_job
from support.ranks import Outcome, run_here, run_job
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.models.recommender.base import Recommender

CLICKS = {"target": "click", "split": "leave_last"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "factorization": ("matrix_factorization", {}),
    "factorization of clicks": ("matrix_factorization", {**CLICKS, "negatives": 3}),
    "in-batch softmax": ("two_tower", CLICKS),
    "sampled softmax": ("two_tower", {**CLICKS, "negatives": 5}),
    "dlrm": ("dlrm", {"target": "click", "positive_from": 4}),
    "dcnv2": ("dcnv2", {}),
}
LAYOUTS: dict[str, Plan] = {
    "2 replicas": Plan(dp_replicate=2, micro_batch=6),
    "4 replicas": Plan(dp_replicate=4, micro_batch=3),
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer", micro_batch=6),
    "ZeRO 2": Plan(dp_shard=2, shard="gradients", micro_batch=6),
    "ZeRO 3": Plan(dp_shard=2, shard="parameters", micro_batch=6),
}


def job(name: str, steps: int = 4) -> dict[str, Any]:
    kind, keys = KINDS[name]
    train = {"precision": "fp32", "steps": steps, "global_batch": 11, "schedule": "constant"}
    return session_job(
        model={"family": "recommender", "kind": kind, "recommender": {"embedding": 8}},
        data={"path": "synthetic:20x30x300", "interactions": keys},
        train={**train, "validation_samples": 17, "validate_every_steps": 2},
        checkpoint={"every_steps": 2},
    )


def metrics(run: Outcome) -> list[dict[str, float]]:
    return [{"loss": event["loss"], **event["metrics"]} for event in run.validations]


def alone(folder: Path, name: str) -> Outcome:
    return run_here(folder, job(name), Plan(micro_batch=11, precision="fp32"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        layout if layout in ("2 replicas", "ZeRO 3") else pytest.param(layout, marks=pytest.mark.full)
        for layout in LAYOUTS
    ],
)
def test_a_layout_has_the_numbers_of_one_process(name: str, layout: str, tmp_path: Path) -> None:
    one = alone(tmp_path / "one", name)
    other = run_job(tmp_path / "other", job(name), LAYOUTS[layout].with_changes(precision="fp32"))
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    same_numbers(one, other, 2e-5)
    first, second = metrics(one), metrics(other)
    assert len(first) == len(second) == 2
    for before, after in zip(first, second, strict=True):
        assert after == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
def test_bags_and_dense_features_have_the_numbers_of_one_process(kind: str, tmp_path: Path) -> None:
    """Some bags are empty, and some hold an id twice."""
    bags = ["|".join(str(n * k % 11) for k in range(n % 4)) for n in range(40)]
    rows = [f"{n % 5},{n % 7},{n % 2},{bag},{n / 40}" for n, bag in enumerate(bags)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,rating,tags,age", *rows]) + "\n")
    text = job("dlrm")
    text["model"] |= {"kind": kind, "recommender": {"embedding": 8, "bottom": [6, 8]}}
    text["data"] = {
        "path": str(tmp_path / "log.csv"),
        "columns": {"sparse": ["tags"], "dense": ["age"]},
        "interactions": {"target": "click", "positive_from": 1},
        "cache": str(tmp_path / "cache"),
    }
    one = run_here(tmp_path / "one", text, Plan(micro_batch=11, precision="fp32"))
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=3, precision="fp32")
    other = run_job(tmp_path / "other", text, plan)
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
    same_numbers(one, other, 2e-5)


def test_a_resume_on_another_layout_goes_on(tmp_path: Path) -> None:
    one = alone(tmp_path / "one", "sampled softmax")
    run_here(tmp_path / "two", job("sampled softmax", 2), Plan(micro_batch=11, precision="fp32"))
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=6, precision="fp32")
    again = run_job(tmp_path / "two", job("sampled softmax", 4), plan)
    assert again.losses[-2:] == pytest.approx(one.losses[-2:], abs=1e-5)


def test_accumulated_micro_batches_are_refused_where_a_loss_needs_the_global_batch(tmp_path: Path) -> None:
    with pytest.raises(WanmaError) as raised:
        run_here(tmp_path, job("in-batch softmax"), Plan(micro_batch=4, precision="fp32"))
    assert "parallel.micro_batch = 11" in raised.value.hint


@pytest.mark.parametrize("name", ["factorization", "in-batch softmax", "sampled softmax", "dlrm"])
def test_weights_that_are_no_numbers_end_the_run_with_one_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recommender, "initialize_parameter", lambda *args: args[2].fill_(math.nan))
    with pytest.raises(WanmaError, match=r"NaN|nan|finite"):
        run_here(tmp_path, job(name), Plan(micro_batch=11, precision="fp32"))
