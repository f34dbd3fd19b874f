"""Tasks cover every row once, and damaged rows are told from whole ones with few reads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data_files import CASES, list_files, write_case
from wanma.data.formats.arrow_tables import Parquet
from wanma.data.formats.format import BadDataError
from wanma.data.formats.json_records import JsonLines
from wanma.data.index.build import open_or_build_index
from wanma.data.tools.record_content import record_decoder
from wanma.data.tools.row_reading import plan_tasks, read_rows


@pytest.mark.parametrize("task_bytes", [1, 50, 1000, 1 << 30])
@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow-file", "images", "text"])
def test_tasks_read_every_row_once_in_order(name: str, task_bytes: int, tmp_path: Path) -> None:
    expected = write_case(name, tmp_path / "in", 30)
    index = open_or_build_index(list_files(tmp_path / "in"), CASES[name].data_format, tmp_path / "cache")
    tasks = plan_tasks(index, 0, task_bytes)
    found = [
        (task.group, row)
        for task in tasks
        for row, _, _ in read_rows(index, task, record_decoder(index.data_format))
    ]
    assert found == sorted(set(found))
    assert len(found) == len(expected)
    if task_bytes == 1 << 30:
        assert len(tasks) == len([start for start, end in pairwise(index.row_starts.tolist()) if end > start])


def test_row_groups_are_not_cut(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": list(range(100))}), tmp_path / "a.parquet", row_group_size=30)
    index = open_or_build_index(list_files(tmp_path), Parquet(), tmp_path / "cache")
    assert [(task.start, task.end) for task in plan_tasks(index, 0, 1)] == [
        (0, 30),
        (30, 60),
        (60, 90),
        (90, 100),
    ]


@given(st.sets(st.integers(0, 59), max_size=10))
def test_exactly_the_damaged_rows_are_found(damaged: set[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        lines = ["{" if row in damaged else f'{{"id": {row}}}' for row in range(60)]
        (folder / "in" / "a.jsonl").write_text("\n".join(lines))
        index = open_or_build_index(list_files(folder / "in"), JsonLines(), folder / "cache")
        (task,) = plan_tasks(index, 0)
        for row, rows, found in read_rows(index, task, record_decoder(index.data_format)):
            assert rows == 1
            if row in damaged:
                assert isinstance(found, BadDataError)
            else:
                assert found == {"id": row}
