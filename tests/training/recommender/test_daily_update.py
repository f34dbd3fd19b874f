"""A run starts from another's tables and optimizer state: it trains on, and new ids get rows of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from support.compare import same_numbers
from support.ranks import Outcome, run_here, run_job
from wanma.checkpoint.load.reader import CheckpointReader
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.models.recommender.build import build_recommender
from wanma.models.recommender.config import RecommenderConfig
from wanma.models.structure.parameter_initialization import draw_initial_shard
from wanma.parallel.parameters import initialization
from wanma.training.loop.preflight import _check_start

ITEM, NEW_ROWS = "model.embeddings.tables.of_item.weight", 4
ONE = Plan(micro_batch=9, precision="fp64")
DAY = [(n * 5 % 13, n * 3 % 7, n % 2) for n in range(18)]
"""Rows of a day: two global batches."""


def job(folder: Path, table_optimizer: str | None, days: int = 1, **sections: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [",".join(map(str, row)) for row in sections.pop("rows", DAY * days)]
    (folder / "log.csv").write_text("\n".join(["user,item,rating", *rows]) + "\n")
    keys = {"target": "click", "positive_from": 1, "split": "time", **sections.pop("interactions", {})}
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


def test_initial_values_are_drawn_only_where_the_start_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = first_day(tmp_path / "first", "adagrad")
    drawn: list[str] = []

    def draw(model: Any, name: str, *others: Any) -> torch.Tensor:
        drawn.append(f"model.{name}")
        return draw_initial_shard(model, name, *others)

    monkeypatch.setattr(initialization, "draw_initial_shard", draw)
    same, more = tmp_path / "same", tmp_path / "more"
    run_here(same, job(same, "adagrad", checkpoint=start), placed("adagrad"))
    assert drawn == []
    run_here(more, with_new_rows(more, "adagrad", **start), placed("adagrad"))
    assert drawn == [ITEM, "model.biases.tables.of_item.weight"]


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


# ------------------------------------------------------------------ ids of any number

IDS = "ids.item"
NEXT_DAY = [(user, item + 3, click) for user, item, click in DAY]
"""Rows of the next day: items 0, 1 and 2 are gone, 7, 8 and 9 are new."""
BY_COUNT = [0, 3, 6, 2, 5, 1, 4]
"""Items of a day by their counts, and then by their first rows."""


def raw_id(item: int) -> int:
    return (item + 1) * 0x9E3779B97F4A7C15 % (1 << 63)


def admitting(folder: Path, rows: list[tuple[int, int, int]], max_rows: int = 50, **sections: Any) -> Any:
    """Job of rows whose items have large ids."""
    keys = {"admit_rows": {"item": max_rows}, "shared_rows": 3, **sections.pop("interactions", {})}
    raw = [(user, raw_id(item), click) for user, item, click in rows]
    return job(folder, "adagrad", rows=raw, interactions=keys, **sections)


def first_day_of_ids(folder: Path) -> dict[str, Any]:
    run_here(folder, admitting(folder, DAY), placed("adagrad"))
    return {"start_from": str(folder / "checkpoints" / "step-00000002"), "start_optimizer": True}


def test_admitted_ids_train_as_rows_that_are_given_by_hand(tmp_path: Path) -> None:
    one = run_here(tmp_path / "ids", admitting(tmp_path / "ids", DAY), placed("adagrad"))
    by_hand = [(user, 3 + BY_COUNT.index(item), click) for user, item, click in DAY]
    other = run_here(tmp_path / "rows", job(tmp_path / "rows", "adagrad", rows=by_hand), placed("adagrad"))
    assert one.losses == other.losses
    found, expected = one.tensors(), other.tensors()
    ids = found.pop(IDS)
    assert ids[:, 0].tolist() == [-1, -1, -1, *map(raw_id, BY_COUNT)]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("layout", "embedding", "memory"),
    [
        (Plan(dp_replicate=3, micro_batch=3, precision="fp64"), "row_wise", None),
        (ONE, "row_wise", 3_200),  # 19 of 26 rows
    ],
    ids=["three ranks", "on disk"],
)
def test_new_ids_are_admitted_alike_on_any_layout(
    layout: Plan, embedding: str, memory: int | None, tmp_path: Path
) -> None:
    start = first_day_of_ids(tmp_path / "first")
    before = Outcome(tmp_path / "first").tensors()[IDS]
    folders = [tmp_path / "one", tmp_path / "other"]
    texts = [admitting(folder, NEXT_DAY, checkpoint=start) for folder in folders]
    other = placed("adagrad", layout, embedding).with_changes(embedding_memory_bytes=memory)
    one = run_here(folders[0], texts[0], placed("adagrad"))
    same_numbers(one, (run_job if layout.world_size > 1 else run_here)(folders[1], texts[1], other), 1e-9)
    ids = Outcome(folders[1]).tensors()[IDS]
    assert ids[:10, 0].tolist() == before[:, 0].tolist()
    assert ids[10:, 0].tolist() == [raw_id(item) for item in (9, 8, 7)]
    assert [row for row, unused in enumerate(ids[:, 1].tolist()) if unused] == [3, 6, 8]  # items 0, 2 and 1


@pytest.mark.parametrize(
    "layout",
    [ONE, Plan(dp_replicate=2, micro_batch=5, precision="fp64")],
    ids=["one rank", "two ranks"],
)
def test_a_row_that_goes_to_another_id_begins_anew(layout: Plan, tmp_path: Path) -> None:
    start = first_day_of_ids(tmp_path / "first")
    keys: dict[str, Any] = {"max_rows": 10, "interactions": {"evict_after_runs": 1}}
    keys["train"] = {"learning_rate": 1e-30}
    found = [Outcome(tmp_path / "first").tensors()]
    for name, checkpoint in (
        ("fresh", {}),
        ("without state", {**start, "start_optimizer": False}),
        ("with state", start),
    ):
        text = admitting(tmp_path / name, NEXT_DAY, checkpoint=checkpoint, **keys)
        run = run_job if checkpoint is start and layout.world_size > 1 else run_here
        plan = placed("adagrad", layout if run is run_job else ONE)
        found.append(run(tmp_path / name, text, plan).tensors())
    before, initial, plain, after = found
    changed = (after[IDS][:, 0] != before[IDS][:, 0]).nonzero()[:, 0]
    assert changed.tolist() == [3, 6, 8]
    assert after[IDS][changed, 0].tolist() == [raw_id(item) for item in (9, 8, 7)]
    for table in ("embeddings", "biases"):
        name = f"{table}.tables.of_item.weight"
        expected = before[f"model.{name}"].clone()
        expected[changed] = initial[f"model.{name}"][changed]
        torch.testing.assert_close(after[f"model.{name}"], expected, rtol=0, atol=1e-20)
        state = f"optimizer.{name}.sum"
        expected = before[state] + plain[state]
        expected[changed] = plain[state][changed]
        assert plain[state][changed].any()
        torch.testing.assert_close(after[state], expected, rtol=1e-9, atol=0)


def test_a_run_with_admitted_ids_resumes_also_from_an_increment(tmp_path: Path) -> None:
    start = first_day_of_ids(tmp_path / "first")
    rows = NEXT_DAY * 2
    texts = {}
    for name, steps in (("whole", 4), ("part", 3)):
        keys = {"checkpoint": {**start, "every_steps": 1, "full_every": 9}, "train": {"steps": steps}}
        texts[name] = admitting(tmp_path / name, rows, **keys)
    whole = run_here(tmp_path / "whole", texts["whole"], placed("adagrad"))
    run_here(tmp_path / "part", texts["part"], placed("adagrad"))
    increment = tmp_path / "part" / "checkpoints" / "step-00000003"
    assert CheckpointReader(increment).tensors[IDS].shards[0].file.startswith("base-")
    texts["part"]["train"]["steps"] = 4
    part = run_here(tmp_path / "part", texts["part"], placed("adagrad"))
    assert part.losses == whole.losses
    found, expected = part.tensors(), whole.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    other_ids = [(user, item + 20 if item > 6 else item, click) for user, item, click in rows]
    text = admitting(tmp_path / "part", other_ids, checkpoint={"resume": "changed", **start})
    text["train"]["steps"] = 5
    text["data"]["cache"] = str(tmp_path / "other cache")
    with pytest.raises(WanmaError, match=r"step-00000004.*'item'"):
        run_here(tmp_path / "part", text, placed("adagrad"))


def test_a_start_whose_rows_belong_to_other_ids_is_refused(tmp_path: Path) -> None:
    of_ids, of_rows = first_day_of_ids(tmp_path / "ids"), first_day(tmp_path / "rows", "adagrad")
    for name, text in (
        ("a", job(tmp_path / "a", "adagrad", checkpoint=of_ids)),
        ("b", admitting(tmp_path / "b", DAY, checkpoint=of_rows)),
        ("c", admitting(tmp_path / "c", DAY, checkpoint={"start_from": str(tmp_path / "gone")})),
        ("d", admitting(tmp_path / "d", DAY, recommender={"tables": {"item": 20}})),
    ):
        with pytest.raises(JobError, match="'item'") as refusal:
            run_here(tmp_path / name, text, placed("adagrad"))
        assert refusal.value.exit_code == EXIT_USAGE
        assert "admit_rows" in refusal.value.message + refusal.value.hint
