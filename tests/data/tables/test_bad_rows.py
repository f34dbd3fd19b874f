"""Rows of tables that cannot be read: refused with their place, or skipped, counted and listed."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.ranks import run_here, run_job
from support.table_files import write_table
from wanma.data.batch import IGNORE_INDEX
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.step_loader import StepLoader
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=4, global_batch=10, seed=5)
ROWS: list[dict[str, Any]] = [{"x": n / 4, "z": -n, "kind": n % 3, "mass": n + 0.5} for n in range(40)]


def write_text(folder: Path, name: str, delimiter: str) -> tuple[Path, list[int]]:
    """Write a table with a missing field, an empty cell, NaN, and a text in the place of a number."""
    lines = [list(map(str, row.values())) for row in ROWS]
    del lines[3][3]
    lines[11][0], lines[17][1], lines[29][0] = "", "nan", "many"
    with (folder / name).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([list(ROWS[0]), *lines])
    return folder / name, [3, 11, 17, 29]


def write_jsonl(folder: Path) -> tuple[Path, list[int]]:
    """Write a table with a missing column, a line that is cut, null, a list, and a text for a number."""
    lines = [json.dumps(row) for row in ROWS]
    lines[0] = json.dumps({name: ROWS[0][name] for name in ("z", "kind", "mass")})
    lines[7] = lines[7][:10]
    lines[12] = json.dumps({**ROWS[12], "z": None})
    lines[20] = json.dumps({**ROWS[20], "x": [1, 2]})
    lines[33] = json.dumps({**ROWS[33], "x": "many"})
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "a.jsonl", [0, 7, 12, 20, 33]


def write_columns(folder: Path, name: str) -> tuple[Path, list[int]]:
    """Write a table with null, NaN, infinity and a class that is missing."""
    rows = [dict(row) for row in ROWS]
    rows[2]["z"], rows[9]["x"], rows[23]["x"], rows[31]["kind"] = None, float("nan"), float("inf"), None
    return write_table(folder / name, rows), [2, 9, 23, 31]


Writer = Callable[[Path], tuple[Path, list[int]]]
WRITERS: dict[str, Writer] = {
    "csv": lambda folder: write_text(folder, "a.csv", ","),
    "tsv": lambda folder: write_text(folder, "a.tsv", "\t"),
    "jsonl": write_jsonl,
    "parquet": lambda folder: write_columns(folder, "a.parquet"),
    "arrow": lambda folder: write_columns(folder, "a.arrows"),
}


def section_of(path: Path, bad_data: str | None, **keys: Any) -> DataSection:
    fields = {
        "path": str(path),
        "columns": {"features": ["x", "z"], "target": "kind"},
        "cache": str(path.parent / "cache"),
        "validation_fraction": 0,
        "shuffle": "none",
        "bad_data": bad_data,
    }
    return DataSection.model_validate({**fields, **keys})


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_row_consumes_its_position_and_counts_for_nothing_at_any_world_size(
    name: str, tmp_path: Path
) -> None:
    path, bad = WRITERS[name](tmp_path)
    section = section_of(path, "skip", workers=2)
    prepare_job_data(section)
    batch = open_dataset(section, TRAIN).batch(range(40))
    assert (~batch.real).nonzero().flatten().tolist() == bad
    assert [one.sample for one in batch.bad_samples] == bad
    assert all(path.name in one.place and str(one.sample) in one.place for one in batch.bad_samples)
    assert (batch.targets[bad] == IGNORE_INDEX).all()
    good = batch.real.nonzero().flatten().tolist()
    assert batch.samples[batch.real].tolist() == good
    expected = torch.tensor([[ROWS[row]["x"], ROWS[row]["z"]] for row in good])
    assert torch.equal(batch.inputs[0][batch.real], expected)
    for world in (1, 2, 3):
        found: dict[int, bool] = {}
        for rank in range(world):
            plan = Plan(dp_replicate=world, micro_batch=2)
            with StepLoader(open_dataset(section, TRAIN), plan, TRAIN, rank, 0, prefetch=2) as steps:
                for step in steps:
                    found |= dict.fromkeys((one.sample for one in step.bad_samples), False)
                    for one in step.micro_batches:
                        found |= dict.fromkeys(one.samples[one.real].tolist(), True)
        assert found == {row: row not in bad for row in range(40)}


@pytest.mark.parametrize("name", WRITERS)
def test_a_bad_row_is_refused_with_its_place_and_the_way_out(name: str, tmp_path: Path) -> None:
    path, bad = WRITERS[name](tmp_path)

    def read() -> None:
        section = section_of(path, None)
        prepare_job_data(section)
        open_dataset(section, TRAIN).batch(range(40))

    with pytest.raises(WanmaError) as caught:
        read()
    assert caught.value.exit_code == EXIT_USAGE
    assert any(f"{path.name}: row {row}" in caught.value.message for row in bad)
    assert "data.bad_data" in caught.value.hint


def test_a_file_that_is_cut_is_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / f"{name}.parquet")
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[: len(content) // 2])
    section = section_of(tmp_path / "*.parquet", "skip", cache=str(tmp_path / "cache"))
    dataset = open_dataset(section, TRAIN)
    assert (dataset.train_samples, dataset.bad_file_count) == (40, 1)
    assert "b.parquet" in dataset.bad_data_note
    for keys in ({"bad_data": "refuse"}, {"bad_data_limit": 0}):
        with pytest.raises(JobError, match=r"b\.parquet"):
            open_dataset(section.model_copy(update=keys), TRAIN)


def job(path: Path, target: str) -> dict[str, Any]:
    columns = {"features": ["x", "z"], "target": target}
    return {
        "model": {
            "factory": "torch.nn:Linear",
            "arguments": {"in_features": 2, "out_features": 3 if target == "kind" else 1},
        },
        "data": section_of(path, "skip", columns=columns).model_dump(exclude_unset=True),
        "train": {"steps": 4, "global_batch": 10, "seed": 5, "learning_rate": 0.01},
    }


@pytest.mark.parametrize("target", ["kind", "mass"])
def test_a_training_is_that_of_the_good_rows_and_lists_the_others(target: str, tmp_path: Path) -> None:
    path, bad = WRITERS["csv"](tmp_path)
    settings = job(path, target)
    one = run_here(tmp_path / "one", settings, Plan(micro_batch=10))
    two = run_here(tmp_path / "two", settings, Plan(micro_batch=3))
    assert one.losses == pytest.approx(two.losses, rel=1e-5)
    listed = [
        json.loads(line)["sample"]
        for file in (tmp_path / "one").glob("logs/bad-samples-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert listed == bad
    few = {**settings, "data": {**settings["data"], "bad_data_limit": 2}}
    with pytest.raises(JobError, match="bad_data_limit"):
        run_here(tmp_path / "many", few, Plan(micro_batch=10))


def test_the_limit_is_that_of_all_ranks_together(tmp_path: Path) -> None:
    path, bad = WRITERS["csv"](tmp_path)
    settings = job(path, "kind")
    few = {**settings, "data": {**settings["data"], "bad_data_limit": len(bad) - 1}}
    RunDirectory(tmp_path / "two").create()
    with pytest.raises(AssertionError, match=r"JobError: .* 4 samples .*bad_data_limit = 3"):
        run_job(tmp_path / "two", few, Plan(dp_replicate=2, micro_batch=5))
    listed = [
        len(file.read_text().splitlines()) for file in (tmp_path / "two").glob("logs/bad-samples-*.jsonl")
    ]
    assert listed == [2, 2], "each rank alone has met fewer"


def test_a_bad_row_of_validation_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = WRITERS["csv"](tmp_path)
    dataset = open_dataset(section_of(path, "skip", validation_fraction=0.9), TRAIN)
    for _ in range(2):
        batch = dataset.validation_batch(range(dataset.validation_samples))
    count = len(batch.bad_samples)
    assert 1 <= count == caplog.text.count("it is skipped")
