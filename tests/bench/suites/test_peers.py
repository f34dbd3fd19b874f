"""Suites of other frameworks: pinned environments, and the same training by every contender."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.install_locked import LOCK, read_lock
from support.peer_environments import PLACES, link_environments
from wanma.bench.benchmark import new_directory, run_benchmark
from wanma.bench.meter.disturbance import NO_LIMITS
from wanma.bench.programs.python_environment import read_pins
from wanma.bench.suites.suite_file import SHIPPED, find_suite, read_suite_file
from wanma.bench.suites.suite_of_job import read_suite_or_job

NAMES = [path.stem for path in sorted(SHIPPED.glob("*-peers.toml"))]
FILES = sorted((SHIPPED / "environments").glob("*.txt"))


def test_suites_of_one_training_name_each_other_and_differ_in_the_layout_alone() -> None:
    files = {name: read_suite_file(find_suite(name)) for name in NAMES}
    first, *others = [
        {key: table for key, table in file.job.items() if key != "parallel"}
        for file in files.values()
        if isinstance(file.job, dict)
    ]
    assert others == [first] * (len(NAMES) - 1)
    for name, file in files.items():
        assert {other for other in NAMES if other in file.description} == {*NAMES} - {name}


def test_every_shipped_environment_belongs_to_a_suite_and_to_the_tests() -> None:
    suites = [read_suite_or_job(find_suite(name))[0] for name in NAMES]
    named = {
        one.python_environment.name for suite in suites for one in suite.contenders if one.python_environment
    }
    assert {path.stem for path in FILES} == named == PLACES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_pins_of_an_environment_are_those_that_the_tests_passed_with(path: Path) -> None:
    lock = read_lock(LOCK.read_text())
    pins = read_pins(path)
    assert {name: lock[name].version for name in pins} == pins


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_of_a_suite_have_the_same_threads_and_allocator(name: str) -> None:
    suite, _ = read_suite_or_job(find_suite(name), overrides=["cluster.threads_per_rank=3"])
    commands = [one for one in suite.contenders if one.kind == "command"]
    assert {one.environment["OMP_NUM_THREADS"] for one in commands} == {"3"}
    assert len({one.environment["GLIBC_TUNABLES"] for one in commands}) == 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)  # DeepSpeed compiles a kernel at its first use on a machine
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
def test_every_contender_trains_the_same(name: str, precision: str, tmp_path: Path) -> None:
    environments = link_environments(tmp_path / "environments")
    suite, rule = read_suite_or_job(
        find_suite(name),
        overrides=[f"train.precision={precision}", "cluster.threads_per_rank=1"],
        is_smoke=True,
        environments=environments,
    )
    if any(not one.python.exists() for one in suite.python_environments):
        pytest.skip("needs environments: make peers frameworks")
    result = run_benchmark(
        suite, rule, new_directory(tmp_path, suite), limits=NO_LIMITS, progress=lambda _: None
    )
    found = {one.contender: one for one in result.measurements}
    assert [one.error for one in found.values()] == [""] * len(suite.contenders)
    expected = found[result.baseline].steps
    assert len(expected) == 4
    for contender, measurement in found.items():
        losses = [step.loss for step in measurement.steps]
        tolerance = 1e-5 if precision == "fp32" else 5e-3
        assert losses == pytest.approx([step.loss for step in expected], rel=tolerance), contender
        assert [step.samples for step in measurement.steps] == [step.samples for step in expected]
        assert [step.targets for step in measurement.steps] == pytest.approx([4 * 32] * 4), contender
        record = result.contender(contender)
        if record.kind == "command":
            assert measurement.figures["threads_per_rank"] == 1
            assert record.settings["OMP_NUM_THREADS"] == "1"
            assert record.packages["numpy"]
        else:
            assert record.plan is not None
            assert record.plan["plan"]["threads_per_rank"] == 1
