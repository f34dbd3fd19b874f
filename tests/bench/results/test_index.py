"""Index of results: it follows the folders, finds ids by prefix, and is built again where it is damaged."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from support.benchmark_results import HARDWARE, benchmark_result
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.hardware_identity import hardware_identity, hardware_key
from wanma.bench.results.index import INDEX_NAME, ResultIndex
from wanma.job.errors import WanmaError

NAMES = ("20261121-090000-gpt", "20261122-090000-gpt", "20261122-100000-vit")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        write(tmp_path, name, 1.0 + number)
    return tmp_path


def write(root: Path, name: str, pace: float) -> None:
    result = benchmark_result({"plain": [pace] * 4}, name, created=f"{name[:4]}-{name[4:6]}-{name[6:8]}")
    ResultDirectory(root / name).write_result(result)


def test_results_are_listed_oldest_first(root: Path) -> None:
    with ResultIndex(root) as index:
        assert tuple(result.id for result in index.results()) == NAMES
        assert index.results()[0].suite_hash == "a1b2"
        assert index.contenders() == ["plain"]


def test_figures_have_their_estimates(root: Path) -> None:
    with ResultIndex(root) as index:
        figures = index.figures("plain", "total_seconds")
        medians = [figure.estimate.median for figure in index.figures("plain", "step_seconds")]
    assert [figure.estimate.count for figure in figures] == [4, 4, 4]
    assert medians == pytest.approx([1.001, 2.002, 3.003])


def test_an_interval_that_does_not_exist_stays_infinite(tmp_path: Path) -> None:
    ResultDirectory(tmp_path / NAMES[0]).write_result(benchmark_result({"plain": [1.0]}, NAMES[0]))
    with ResultIndex(tmp_path) as index:
        assert not index.figures("plain", "step_seconds")[0].estimate.has_interval


def test_figures_are_of_one_hardware(root: Path) -> None:
    name = "20261123-090000-gpt"
    other = benchmark_result({"plain": [9.0] * 4}, name, hardware={**HARDWARE, "processor": "another"})
    ResultDirectory(root / name).write_result(other)
    with ResultIndex(root) as index:
        assert len(index.figures("plain", "step_seconds")) == 4
        assert len(index.figures("plain", "step_seconds", hardware_key(HARDWARE))) == 3
        assert index.figures("plain", "step_seconds", suite="another") == []


@pytest.mark.parametrize("text", [NAMES[2], "20261122-10", "20261121"])
def test_an_id_is_found_by_a_prefix_that_only_it_has(text: str, root: Path) -> None:
    with ResultIndex(root) as index:
        assert index.find(text).id.startswith(text)


def test_a_result_is_found_by_its_folder(root: Path) -> None:
    with ResultIndex(root) as index:
        assert index.find(str(root / NAMES[1])).path == root / NAMES[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20261122", "'20261122' begins the ids of 2 results: 20261122-090000-gpt, 20261122-100000-vit"),
        ("1999", "there is no result '1999'"),
    ],
)
def test_a_prefix_of_none_or_several_is_an_error(text: str, message: str, root: Path) -> None:
    with ResultIndex(root) as index, pytest.raises(WanmaError, match=message):
        index.find(text)


def test_the_index_follows_folders_that_come_change_and_go(root: Path) -> None:
    with ResultIndex(root) as index:
        shutil.rmtree(root / NAMES[0])
        write(root, NAMES[1], 7.0)
        write(root, "20261124-090000-gpt", 8.0)
        index.update()
        medians = [figure.estimate.median for figure in index.figures("plain", "step_seconds")]
        assert medians == pytest.approx([7.007, 3.003, 8.008])
        index.rebuild()
        assert len(index.results()) == 3


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"x" * 4000])
def test_a_damaged_index_is_built_again(content: bytes, root: Path) -> None:
    (root / INDEX_NAME).write_bytes(content)
    with ResultIndex(root) as index:
        assert len(index.results()) == 3
    assert (root / INDEX_NAME).read_bytes().startswith(b"SQLite format 3\0")


def test_an_index_of_another_version_is_built_again(root: Path) -> None:
    database = sqlite3.connect(root / INDEX_NAME)
    database.executescript("CREATE TABLE results (colour TEXT); PRAGMA user_version = 99;")
    database.close()
    with ResultIndex(root) as index:
        assert len(index.results()) == 3


def test_damage_inside_the_file_is_no_error(root: Path) -> None:
    ResultIndex(root).close()
    content = bytearray((root / INDEX_NAME).read_bytes())
    content[200:] = b"\xff" * len(content[200:])
    (root / INDEX_NAME).write_bytes(content)
    with ResultIndex(root) as index:
        assert len(index.results()) == 3


def test_a_result_that_cannot_be_read_is_a_problem_and_no_error(root: Path) -> None:
    (root / NAMES[0] / "result.json").write_text("{")
    with ResultIndex(root) as index:
        assert [result.id for result in index.results()] == list(NAMES[1:])
        (problem,) = index.problems()
    assert f"{NAMES[0]}/result.json is damaged" in problem


def test_a_root_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    with ResultIndex(tmp_path / "missing") as index:
        assert index.results() == []
    assert not (tmp_path / "missing").exists()


def test_the_identity_of_hardware_leaves_out_the_kernel() -> None:
    assert hardware_identity(HARDWARE) == {
        "cluster": "1 × (2 × chip)",
        "processor": "a processor",
        "cores": "8 cores",
        "memory": "64 GiB",
    }
    newer = {**HARDWARE, "kernel": "6.2", "memory_bytes": (64 << 30) + 4096}
    assert hardware_key(newer) == hardware_key(HARDWARE)
