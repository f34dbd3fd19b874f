"""Reading of interaction logs: formats, bags, and one clear error for a bad value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanma.data.interactions.log import InteractionLog, read_log
from wanma.data.interactions.synthetic import make_synthetic_log
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.recommender import InteractionsSection


def read(path: Path, text: str, **keys: Any) -> InteractionLog:
    path.write_text(text)
    section = {"interaction_log": str(path), "interactions": keys, "cache": str(path.parent / "cache")}
    return read_log(DataSection.model_validate(section))


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [("u.data", "\t", ""), ("u.tsv", "  ", ""), ("u.csv", ",", "user,item,rating,time\n")],
    ids=["tabs", "blanks", "comma and header"],
)
def test_text_files_give_the_same_log(tmp_path: Path, name: str, separator: str, header: str) -> None:
    rows = [("3", "7", "4.5", "10"), ("0", "2", "1", "9"), ("3", "0", "5", "11")]
    log = read(tmp_path / name, header + "".join(separator.join(row) + "\n" for row in rows))
    assert log.users.tolist() == [3, 0, 3]
    assert log.items.tolist() == [7, 2, 0]
    assert log.targets.tolist() == [4.5, 1, 5]
    assert log.times.tolist() == [10, 9, 11]


def test_a_file_of_blanks_whose_later_lines_have_tabs_is_read(tmp_path: Path) -> None:
    log = read(tmp_path / "u.tsv", "0   50  5 88\n0   17 5 88\n196\t242\t3\t87\n")
    assert (log.users.tolist(), log.items.tolist()) == ([0, 0, 196], [50, 17, 242])


def test_parquet_gives_lists_and_dense_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = {"user": [1, 0], "item": [5, 6], "click": [1, 0], "tags": [[3, 3], []], "age": [0.5, 2.0]}
    parquet.write_table(pyarrow.table(table), tmp_path / "log.parquet")
    keys = {"rating": "click", "target": "click", "positive_from": 1, "features": ["tags"], "dense": ["age"]}
    section = {"interaction_log": str(tmp_path / "log.parquet"), "interactions": keys, "cache": str(tmp_path)}
    log = read_log(DataSection.model_validate(section))
    assert log.targets.tolist() == [1, 0]
    assert log.dense.tolist() == [[0.5], [2.0]]
    ids, offsets = log.features["tags"].take(np.array([1, 0, 1]))
    assert (ids.tolist(), offsets.tolist()) == ([3, 3], [0, 0, 2])


def test_a_text_of_ids_is_a_bag(tmp_path: Path) -> None:
    text = 'user,item,rating,genres\n0,1,5,3|17\n1,1,4,\n2,2,3,"9"\n'
    log = read(tmp_path / "log.csv", text, features=["genres"])
    assert log.features["genres"].ids.tolist() == [3, 17, 9]
    assert log.features["genres"].starts.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize(
    ("column", "value"), [("user", "-4"), ("item", "1.5"), ("item", "x"), ("rating", "nan"), ("tags", "2|-7")]
)
def test_a_bad_value_is_named_with_its_column_and_row(tmp_path: Path, column: str, value: str) -> None:
    row = {"user": "1", "item": "2", "rating": "3", "tags": "4"}
    lines = [",".join(row), ",".join(row.values()), ",".join({**row, column: value}.values())]
    with pytest.raises(WanmaError) as raised:
        read(tmp_path / "log.csv", "\n".join(lines) + "\n", features=["tags"])
    assert raised.value.exit_code == EXIT_USAGE
    assert all(part in raised.value.message for part in ("row 1", f"column {column}", value.split("|")[-1]))


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="time"):
        read(tmp_path / "log.csv", "user,item,rating\n0,1,5\n", split="leave_last")


def test_a_synthetic_log_has_the_rows_that_it_names_each_pair_once() -> None:
    log = make_synthetic_log(50, 80, 1000, InteractionsSection())
    pairs = log["user"] * 80 + log["item"]
    assert len(pairs) == len(set(pairs.tolist())) == 1000
    assert set(log["user"].tolist()) == set(range(50))
    assert set(log["rating"].tolist()) == {1, 2, 3, 4, 5}
    counts = np.sort(np.bincount(log["item"], minlength=80))
    assert counts[-8:].sum() > 3 * counts[:8].sum()


@pytest.mark.parametrize("entry", ["synthetic:5x5x30", "synthetic:5x5", "synthetic:9x9x5"])
def test_an_impossible_synthetic_log_is_refused(entry: str) -> None:
    with pytest.raises(WanmaError, match="synthetic"):
        read_log(DataSection(interaction_log=[entry]))
