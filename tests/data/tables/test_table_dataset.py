"""Rows of tables as samples: values and types by format, in every order, mixtures, and what is refused."""

from __future__ import annotations

import pickle
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.grids import rotated
from support.killed_runs import SHUFFLES, TRAIN, expected_rows, order_keys, read_with_kills
from support.ranks import run_here
from support.table_files import write_table
from wanma.data.data_kinds import with_data_kinds
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.tables.table_dataset import open_tables
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import load_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection

EXAMPLES = Path(__file__).parents[3] / "examples"
SAVED = Path(__file__).parents[1] / "formats" / "library_files" / "datasets" / "saved"
"""Data set on disk that the library `datasets` has written."""
ROWS = [
    {"id": n, "x1": n / 4, "x2": -n, "species": ("owl", "ant", "elk")[n % 3], "mass": n + 0.5}
    for n in range(30)
]


FILES = {
    **{suffix: f"table.{suffix}" for suffix in ("csv", "tsv", "jsonl", "parquet", "arrow", "npz")},
    "huggingface": "saved",
}


def write(name: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a table in a format; arrays have numbers in the place of names, in the order of the names."""
    if name == "npz":
        names = ("ant", "elk", "owl")
        rows = [{**row, "species": names.index(row["species"])} for row in rows]
    return write_table(folder / FILES[name], rows)


def section_of(tmp_path: Path, path: Path, **keys: Any) -> DataSection:
    columns = {"features": ["x1", "x2"], "target": "species"}
    plain = {
        "path": str(path),
        "columns": columns,
        "cache": str(tmp_path / "cache"),
        "validation_fraction": 0,
    }
    return DataSection.model_validate({**plain, **keys})


@pytest.mark.parametrize("name", FILES)
def test_features_are_float32_and_names_of_classes_count_in_their_order(name: str, tmp_path: Path) -> None:
    section = section_of(tmp_path, write(name, tmp_path, ROWS), shuffle="none")
    prepare_job_data(section)
    batch = open_dataset(section, TRAIN).batch([0, 1, 2, 5])
    assert batch.inputs[0].dtype == torch.float32
    assert batch.inputs[0].tolist() == [[0, 0], [0.25, -1], [0.5, -2], [1.25, -5]]
    assert batch.targets.dtype == torch.int64
    assert batch.targets.tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize(("name", "shuffle"), rotated(FILES, SHUFFLES))
def test_rows_of_each_format_are_read_in_the_order_of_the_reference(
    name: str, shuffle: str, tmp_path: Path
) -> None:
    columns = {"features": ["x1"], "target": "id"}
    path = write(name, tmp_path, ROWS)
    section = section_of(tmp_path, path, columns=columns, **order_keys(shuffle))
    found = read_with_kills(lambda: open_dataset(section, TRAIN))
    assert found == list(enumerate(expected_rows(30, shuffle)))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("target", "target_type", "dtype", "first"),
    [
        ("mass", None, torch.float32, [0.5, 1.5]),
        ("id", None, torch.int64, [0, 1]),
        ("id", "number", torch.float32, [0.0, 1.0]),
    ],
)
def test_a_fraction_is_a_number_and_an_integer_a_class_unless_the_job_says_otherwise(
    name: str, target: str, target_type: str | None, dtype: torch.dtype, first: list[float], tmp_path: Path
) -> None:
    columns = {"features": ["x2"], "target": target, "target_type": target_type}
    section = section_of(tmp_path, write(name, tmp_path, ROWS), columns=columns, shuffle="none")
    batch = open_dataset(section, TRAIN).batch([0, 1])
    assert batch.targets.dtype == dtype
    assert batch.targets.tolist() == first


def test_a_data_set_that_hugging_face_has_saved_is_a_table(tmp_path: Path) -> None:
    section = section_of(tmp_path, SAVED, columns={"features": ["id"], "target": "id"}, shuffle="none")
    batch = open_dataset(section, TRAIN).batch(range(20))
    assert batch.inputs[0].flatten().tolist() == batch.targets.tolist() == list(range(20))


def test_patterns_name_columns_in_their_order_and_arrays_are_several_features(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(20.0).reshape(4, 5), y=np.arange(4))
    section = section_of(
        tmp_path, tmp_path / "a.npz", columns={"features": ["*"], "target": "y"}, shuffle="none"
    )
    assert open_dataset(section, TRAIN).batch([1]).inputs[0].tolist() == [[5, 6, 7, 8, 9]]
    section = section_of(
        tmp_path, write("csv", tmp_path, ROWS), columns={"features": ["x*"], "target": "id"}, shuffle="none"
    )
    assert open_dataset(section, TRAIN).batch([3]).inputs[0].tolist() == [[0.75, -3]]


def test_a_copy_in_another_process_reads_the_same_rows(tmp_path: Path) -> None:
    dataset = open_tables(section_of(tmp_path, write("parquet", tmp_path, ROWS)))[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == 30
    assert copy[7][0].equal(dataset[7][0])
    assert copy[7][1] == dataset[7][1] == 0


def test_tables_of_a_mixture_have_their_classes_in_common(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    few = [{**row, "species": "yak" if row["id"] % 2 else "owl"} for row in ROWS[:10]]
    columns = {"features": ["x1", "x2"], "target": "species"}
    sources = [
        {"name": "a", "path": str(write("csv", tmp_path, ROWS)), "columns": columns},
        {"name": "b", "path": str(write("parquet", tmp_path / "b", few)), "columns": columns},
        {"name": "own", "factory": f"{__name__}:own_rows"},
    ]
    section = DataSection.model_validate(
        {"sources": sources, "cache": str(tmp_path / "cache"), "validation_fraction": 0, "shuffle": "none"}
    )
    data = open_dataset(section, TRAIN)
    places = data.order.locate(np.arange(30))
    targets = data.batch(range(30)).targets.tolist()
    names = ("ant", "elk", "owl", "yak")
    for source, row, target in zip(*(part.tolist() for part in places), targets, strict=True):
        expected = 9 if source == 2 else names.index((ROWS, few)[source][row]["species"])
        assert target == expected


def own_rows() -> list[tuple[torch.Tensor, int]]:
    return [(torch.zeros(2), 9)] * 5


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"features": ["x1", "x9"], "target": "species"}, "data.columns.features"),
        ({"features": ["z*"], "target": "species"}, "data.columns.features"),
        ({"features": ["x1"], "target": "kind"}, "data.columns.target"),
    ],
)
def test_a_column_that_does_not_exist_is_one_message_with_those_that_do(
    columns: dict[str, Any], key: str, tmp_path: Path
) -> None:
    for name in ("csv", "parquet"):
        with pytest.raises(JobError) as caught:
            prepare_job_data(section_of(tmp_path, write(name, tmp_path, ROWS), columns=columns))
        assert key in str(caught.value)
        assert "id, x1, x2, species, mass" in str(caught.value)


@pytest.mark.parametrize("value", ["", "many", "nan", None])
def test_a_missing_or_wrong_value_names_file_row_and_field(value: str | None, tmp_path: Path) -> None:
    rows = [*ROWS[:5], {**ROWS[5], "x2": value}]
    section = section_of(tmp_path, write("jsonl", tmp_path, rows), shuffle="none")
    with pytest.raises(WanmaError) as caught:
        open_dataset(section, TRAIN).batch([4, 5])
    assert "table.jsonl" in str(caught.value)
    assert "row 5" in str(caught.value)
    assert "'x2'" in str(caught.value)


@pytest.mark.parametrize("values", [(100, 250, 400), (-3, 0, 2), (1, 2, 3)])
def test_whole_numbers_of_a_csv_are_refused_unless_they_count_from_0_or_the_job_says_what_they_are(
    values: tuple[int, ...], tmp_path: Path
) -> None:
    columns = {"features": ["x"], "target": "price"}
    path = write("csv", tmp_path, [{"x": n, "price": values[n % 3]} for n in range(30)])
    with pytest.raises(JobError, match=r"data\.columns\.target") as caught:
        open_dataset(section_of(tmp_path, path, columns=columns), TRAIN)
    assert "target_type" in caught.value.hint
    for target_type, targets in (("number", list(values)), ("class", [0, 1, 2])):
        section = section_of(tmp_path, path, columns={**columns, "target_type": target_type}, shuffle="none")
        assert open_dataset(section, TRAIN).batch([0, 1, 2]).targets.tolist() == targets


def test_a_class_with_a_fraction_names_the_way_out(tmp_path: Path) -> None:
    columns = {"features": ["x1"], "target": "mass", "target_type": "class"}
    with pytest.raises(JobError, match=r"data\.columns\.target") as caught:
        prepare_job_data(section_of(tmp_path, write("parquet", tmp_path, ROWS), columns=columns))
    assert "target_type" in caught.value.hint


def test_the_example_trains_on_the_table_that_its_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "make_table.py"), run_name="__main__")
    job = with_data_kinds(
        load_job(EXAMPLES / "table.toml", ["train.steps=60", f"data.cache={tmp_path}/cache"])
    )
    outcome = run_here(tmp_path / "run", job.model_dump(exclude_unset=True), Plan(micro_batch=32))
    assert outcome.losses[-1] < 0.7 * outcome.losses[0]
