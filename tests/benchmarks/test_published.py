"""Published rows are forecast as well as recorded, and pages of results are what the code gives."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from wanma.planner.rules import capabilities
from wanma.planner.search import space

PAGE_TORCH_VERSION = (2, 13)
"""Version of torch with which the page of searches was written."""
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.planner.{name}")


def test_no_source_is_forecast_worse_than_recorded() -> None:
    guard = benchmark("guard")
    assert guard.grown(guard.recorded(), guard.mean_errors()) == []


def test_a_mean_error_that_grows_by_more_than_a_point_is_named() -> None:
    guard = benchmark("guard")
    before = {("time", "vTrain"): 0.077, ("time", "NeMo"): 0.05, ("memory", "old"): 0.01}
    now = {("time", "vTrain"): 0.0865, ("time", "NeMo"): 0.061, ("memory", "new"): 0.01}
    assert guard.grown(before, now) == [
        "memory of new: forecast, and not recorded",
        "memory of old: recorded, and forecast no more",
        "time of NeMo: mean error 6.1%, recorded 5.0%",
    ]


def test_the_page_of_step_times_is_what_the_code_gives() -> None:
    """Else: python -m benchmarks.planner.run --write"""
    run = benchmark("run")
    cases, refused = benchmark("rows").read_cases(benchmark("rows").TABLES / "published.csv")
    text = run.report(cases, [run.forecast(case) for case in cases], refused)
    assert (RESULTS / "planner.md").read_text() == text


def test_the_page_of_memory_is_what_the_code_gives() -> None:
    """Else: python -m benchmarks.planner.memory --write"""
    memory = benchmark("memory")
    text = memory.report(*memory.read(benchmark("rows").TABLES / "published.csv"))
    page = (RESULTS / "planner-memory.md").read_text()
    assert page.partition(memory.RUNS_HEADING)[0].rstrip() == text.rstrip()


@pytest.mark.exhaustive
def test_the_page_of_other_models_is_what_the_code_gives() -> None:
    """Else: python -m benchmarks.planner.modules --write"""
    assert (RESULTS / "planner-modules.md").read_text() == benchmark("modules").report()


@pytest.mark.parametrize("devices", [64, 256, pytest.param(1024, marks=pytest.mark.exhaustive)])
def test_the_page_of_searches_has_the_plans_that_the_code_finds(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else: OMP_NUM_THREADS=1 python -m benchmarks.planner.speed --write"""
    speed = benchmark("speed")
    # Versions of torch differ in the plans that they can run: with 2.11, some are found beyond the page's.
    for reader in (capabilities, space):
        monkeypatch.setattr(reader, "installed_torch_version", lambda: PAGE_TORCH_VERSION)

    def without_times(line: str) -> list[str]:
        cells = line.split("|")
        return [*cells[:4], *cells[6:]]

    found = without_times(speed.measured(devices, 1))
    assert found == without_times(speed.written(speed.TABLE)[devices])
    assert speed.gpt_3(devices).workload.parameters == pytest.approx(174.6e9, rel=1e-3)


def test_the_page_of_unlike_machines_has_the_plans_that_the_code_finds() -> None:
    """Else: python -m benchmarks.planner.mixed --part gain --model opt-350m"""
    mixed = benchmark("mixed")
    kept = json.loads((RESULTS / "planner-mixed.json").read_text())
    found = mixed.gain(mixed.MODELS["opt-350m"])["rows"]
    assert json.loads(json.dumps(found)) == kept["gain"]["opt-350m"]["rows"]
