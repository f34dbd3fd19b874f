"""List of results: ids are found by prefix, and damaged results are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.benchmark_results import HARDWARE, benchmark_result
from wanma.bench.place import hardware_identity
from wanma.bench.results.directory import ResultDirectory, find_result, read_results
from wanma.job.errors import EXIT_USAGE, WanmaError

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
    assert tuple(result.id for _, result in read_results(root)) == NAMES


@pytest.mark.parametrize("text", [NAMES[2], "20261122-10", "20261121"])
def test_an_id_is_found_by_a_prefix_that_only_it_has(text: str, root: Path) -> None:
    assert find_result(root, text).id.startswith(text)


def test_a_result_is_found_by_its_folder(root: Path) -> None:
    assert find_result(root, str(root / NAMES[1])).path == root / NAMES[1]


@pytest.mark.parametrize("text", ["20261122", "1999"])
def test_a_prefix_of_none_or_several_is_an_error(text: str, root: Path) -> None:
    with pytest.raises(WanmaError) as raised:
        find_result(root, text)
    assert raised.value.exit_code == EXIT_USAGE


def test_a_result_that_cannot_be_read_is_a_problem_and_no_error(root: Path) -> None:
    for name, text in zip(NAMES, ("{", '{"schema": 2}'), strict=False):
        (root / name / "result.json").write_text(text)
    problems: list[str] = []
    assert [result.id for _, result in read_results(root, problems)] == [NAMES[2]]
    assert [name in problem for name, problem in zip(NAMES, problems, strict=False)] == [True, True]
    assert [result.id for _, result in read_results(root)] == [NAMES[2]]


def test_a_root_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert list(read_results(tmp_path / "missing")) == []
    assert not (tmp_path / "missing").exists()


def test_the_identity_of_hardware_leaves_out_the_kernel() -> None:
    assert hardware_identity(HARDWARE) == {
        "cluster": "1 × (2 × chip)",
        "processor": "a processor",
        "cores": "8 cores",
        "memory": "64 GiB",
    }
    newer = {**HARDWARE, "kernel": "6.2", "memory_bytes": (64 << 30) + 4096}
    assert hardware_identity(newer) == hardware_identity(HARDWARE)
