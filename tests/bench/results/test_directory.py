"""Folder of a result: what is written is read again, a killed benchmark goes on, damage has one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.benchmark_results import benchmark_result, measurement
from wanma.bench.results.directory import (
    ResultDirectory,
    create_result_directory,
    list_result_directories,
)
from wanma.job.errors import WanmaError

PACES = {"plain": [1.0, 1.1, 0.9, 1.0], "new": [0.5, 0.6, 0.4]}


def written(folder: Path) -> ResultDirectory:
    directory = ResultDirectory(folder / "20261122-101530-gpt")
    result = benchmark_result(PACES)
    directory.write_result(result)
    for one in result.measurements:
        directory.add_measurement(one)
    return directory


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert written(tmp_path).read() == benchmark_result(PACES)


def test_the_measurements_have_files_of_their_own(tmp_path: Path) -> None:
    directory = written(tmp_path)
    assert [path.name for path in sorted(directory.measurements.iterdir())] == [
        f"{number:04d}.json" for number in range(7)
    ]
    content = json.loads(directory.result.read_text())
    assert "measurements" not in content
    assert content["schema"] == 1
    assert directory.read(with_measurements=False).measurements == ()


def test_a_benchmark_that_was_killed_goes_on_with_the_next_measurement(tmp_path: Path) -> None:
    directory = written(tmp_path)
    (directory.measurements / ".0007.json.123").write_text('{"contender": "half')
    reopened = ResultDirectory(directory.path)
    assert len(reopened.read_measurements()) == 7
    assert reopened.add_measurement(measurement("new", 3, 0.5)).name == "0007.json"
    assert reopened.read_measurements()[-1] == measurement("new", 3, 0.5)


def test_a_newer_schema_is_refused_in_one_sentence(tmp_path: Path) -> None:
    directory = written(tmp_path)
    directory.result.write_text(json.dumps({**json.loads(directory.result.read_text()), "schema": 2}))
    with pytest.raises(WanmaError, match=r"schema 2; .* up to 1") as raised:
        directory.read()
    assert str(directory.result) in raised.value.message
    assert raised.value.hint == "read it with a newer version: pip install --upgrade wanma"


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    directory = written(tmp_path)
    content = json.loads(directory.result.read_text())
    content["colour"] = "red"
    content["contenders"][0]["colour"] = content["suite"]["colour"] = "red"
    directory.result.write_text(json.dumps(content))
    assert directory.read() == benchmark_result(PACES)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1}', '{"schema": "one"}'])
def test_a_damaged_result_is_named(text: str, tmp_path: Path) -> None:
    directory = written(tmp_path)
    directory.result.write_text(text)
    with pytest.raises(WanmaError, match=r"result\.json is damaged"):
        directory.read()


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    directory = written(tmp_path)
    (directory.measurements / "0002.json").write_text("{}")
    with pytest.raises(WanmaError, match=r"0002\.json is damaged") as raised:
        directory.read()
    assert raised.value.hint == "remove the file"


def test_a_folder_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"has no result\.json"):
        ResultDirectory(tmp_path).read()


def test_folders_are_named_by_time_and_name_and_never_shared(tmp_path: Path) -> None:
    created = "2026-11-22T10:15:30+00:00"
    names = [create_result_directory(tmp_path / "results", "GPT / small", created).id for _ in range(3)]
    base = "20261122-101530-gpt-small"
    assert names == [base, f"{base}-2", f"{base}-3"]
    assert list(list_result_directories(tmp_path / "results")) == []  # nothing is written yet


def test_a_root_that_is_a_file_cannot_hold_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WanmaError, match="cannot write to"):
        create_result_directory(tmp_path / "file", "gpt", "2026-11-22T10:15:30+00:00")


def test_the_page_stands_beside_the_result(tmp_path: Path) -> None:
    directory = written(tmp_path)
    assert directory.write_page("<html>") == directory.path / "page.html"
    assert directory.page.read_text() == "<html>"
