"""A run starts from another's tables and optimizer state: it trains on, and new ids get rows of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from support.compare import same_numbers
from support.ranks import Outcome, run_here, run_job
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.models.recommender.build import build_recommender
from wanma.models.recommender.config import RecommenderConfig
from wanma.training.loop.preflight import _check_start

ITEM, NEW_ROWS = "model.embeddings.tables.of_item.weight", 4
ONE = Plan(micro_batch=9, precision="fp64")
DAY = [(n * 5 % 13, n * 3 % 7, n % 2) for n in range(18)]
"""Rows of a day: two global batches."""


def job(folder: Path, table_optimizer: str | None, days: int = 1, **sections: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [",".join(map(str, row)) for row in DAY * days]
    (folder / "log.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    keys = {"target": "click", "positive_from": 1, "split": "time"}
    return {
        "model": {
            "family": "recommender",
            "kind": "matrix_factorization",
            "recommender": {"embedding": 6, **sections.pop("recommender", {})},
        },
        "data": {
            "kind": "interactions",
            "path": str(folder / "log.csv"),
            "cache": str(folder / "cache"),
            "shuffle": "none",
            "validation_fraction": 0,
            "columns": {"time": ""},
            "interactions": keys,
        },
        "train": {
            "precision": "fp64",
            "steps": 2 * days,
            "global_batch": 9,
            "learning_rate": 0.05,
            "schedule": "constant",
            "embedding_optimizer": table_optimizer,
            **sections.pop("train", {}),
        },
        "checkpoint": sections.pop("checkpoint", {}),
        "observe": {"console": "quiet"},
    }


def placed(table_optimizer: str | None, layout: Plan = ONE, embedding: Any = "row_wise") -> Plan:
    return layout.with_changes(embedding="dense" if table_optimizer is None else embedding)


def first_day(folder: Path, table_optimizer: str | None) -> dict[str, Any]:
    """`[checkpoint]` of a run that starts from the end of the first day."""
    run_here(folder, job(folder, table_optimizer), placed(table_optimizer))
    return {"start_from": str(folder / "checkpoints" / "step-00000002"), "start_optimizer": True}


@pytest.mark.parametrize("table_optimizer", [None, "adagrad", "adam"])
def test_the_next_day_is_trained_as_if_the_run_had_gone_on(
    table_optimizer: str | None, tmp_path: Path
) -> None:
    both = run_here(
        tmp_path / "both", job(tmp_path / "both", table_optimizer, days=2), placed(table_optimizer)
    )
    start = first_day(tmp_path / "first", table_optimizer)
    folder = tmp_path / "second"
    second = run_here(folder, job(folder, table_optimizer, checkpoint=start), placed(table_optimizer))
    assert second.losses == both.losses[2:]
    expected, found = both.tensors(), second.tensors()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_without_the_optimizer_s_state_the_next_day_is_another(tmp_path: Path) -> None:
    start = first_day(tmp_path / "first", "adagrad")
    runs = []
    for name, keeps in (("with", True), ("without", False)):
        text = job(tmp_path / name, "adagrad", checkpoint={**start, "start_optimizer": keeps})
        runs.append(run_here(tmp_path / name, text, placed("adagrad")))
    assert runs[0].losses[0] == runs[1].losses[0]
    assert runs[0].losses[1] != runs[1].losses[1]


def with_new_rows(folder: Path, table_optimizer: str | None, **checkpoint: Any) -> dict[str, Any]:
    tables = {"tables": {"item": 7 + NEW_ROWS}}
    return job(folder, table_optimizer, recommender=tables, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("table_optimizer", "layout", "embedding"),
    [
        ("adagrad", Plan(dp_replicate=3, micro_batch=3, precision="fp64"), "row_wise"),
        ("rowwise_adagrad", Plan(dp_replicate=2, micro_batch=5, precision="fp64"), "table_wise"),
        (None, Plan(dp_shard=2, shard="parameters", micro_batch=5, precision="fp64"), "dense"),
    ],
)
def test_new_rows_are_appended_on_any_layout(
    table_optimizer: str | None, layout: Plan, embedding: str, tmp_path: Path
) -> None:
    start = first_day(tmp_path / "first", table_optimizer)
    before = Outcome(tmp_path / "first").tensors()
    runs = [
        run(folder, with_new_rows(folder, table_optimizer, **start), placed(table_optimizer, plan, embedding))
        for run, folder, plan in (
            (run_here, tmp_path / "one", ONE),
            (run_job, tmp_path / "other", layout),
        )
    ]
    same_numbers(*runs, 1e-9)
    after = runs[1].tensors()
    assert len(after[ITEM]) == len(before[ITEM]) + NEW_ROWS
    fresh = tmp_path / "fresh"
    initial = run_here(fresh, with_new_rows(fresh, table_optimizer), placed(table_optimizer)).tensors()
    if table_optimizer is not None:  # AdamW's weight decay reaches rows that no step uses
        assert torch.equal(after[ITEM][-NEW_ROWS:], initial[ITEM][-NEW_ROWS:])
    for name, tensor in after.items():
        if name.startswith(f"optimizer.{ITEM.removeprefix('model.')}.") and tensor.ndim:
            assert tensor.shape[0] == len(after[ITEM])
            assert not tensor[-NEW_ROWS:].any()
            assert tensor[:-NEW_ROWS].any()


def test_a_smaller_table_is_refused_before_and_at_the_start(tmp_path: Path) -> None:
    start = first_day(tmp_path / "first", "adagrad")
    rows = [row for row in DAY if row[1] < 4]
    folder = tmp_path / "second"
    text = job(folder, "adagrad", checkpoint=start)
    (folder / "log.csv").write_text(
        "\n".join(["user,item,rating", *(",".join(map(str, row)) for row in rows)]) + "\n"
    )
    text["model"]["recommender"]["tables"] = {"user": 13}
    with pytest.raises(WanmaError) as refusal:
        run_here(folder, text, placed("adagrad"))
    section = CheckpointSection.model_validate(start)
    for items, is_refused in ((5, True), (7, False), (9, False)):
        config = RecommenderConfig("matrix_factorization", 6, {"user": 13, "item": items})
        with torch.device("meta"):
            model = build_recommender(config)
        if not is_refused:
            _check_start(model, Path(start["start_from"]), section)
            continue
        with pytest.raises(JobError) as early:
            _check_start(model, Path(start["start_from"]), section)
        for error in (refusal.value, early.value):
            assert error.exit_code == EXIT_USAGE
            assert "'item'" in error.message
            assert "model.recommender.tables.item to 7" in error.hint


@pytest.mark.parametrize("now", ["adam", "rowwise_adagrad", "sgd"])
def test_the_state_of_another_optimizer_is_refused(now: str, tmp_path: Path) -> None:
    start = first_day(tmp_path / "first", "adagrad")
    with pytest.raises(WanmaError, match="optimizer"):
        run_here(tmp_path / "now", job(tmp_path / "now", now, checkpoint=start), placed(now))


def test_optimizer_state_needs_a_run_to_start_from() -> None:
    with pytest.raises(ValidationError, match="start_from"):
        CheckpointSection(start_optimizer=True)
