"""Published rows become plans by rules that hold for a whole source, and errors are counted right."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

COLUMNS = [
    "source",
    "model",
    "params_b",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "seq",
    "vocab",
    "gpu",
    "n_gpus",
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "interleave",
    "micro_batch",
    "global_batch",
    "precision",
    "recompute",
    "sequence_parallel",
    "zero_stage",
    "tflops_per_gpu",
    "mfu",
    "step_time_s",
    "memory_gib",
    "provenance",
    "notes",
]
ROW = {
    "source": "Megatron-LM SC21 Table 1",
    "model": "GPT 76.1B",
    "layers": "60",
    "hidden": "10240",
    "ffn": "40960",
    "heads": "80",
    "kv_heads": "80",
    "seq": "2048",
    "vocab": "51200",
    "gpu": "A100-SXM-80GB",
    "n_gpus": "1024",
    "dp": "32",
    "tp": "8",
    "pp": "4",
    "cp": "1",
    "ep": "1",
    "global_batch": "1792",
    "precision": "fp16",
    "recompute": "full",
    "sequence_parallel": "0",
    "zero_stage": "0",
    "step_time_s": "16.058",
    "provenance": "stored:somewhere",
    "notes": "step_time derived",
}


@pytest.fixture
def rows() -> ModuleType:
    return importlib.import_module("benchmarks.planner.rows")


@pytest.fixture
def run(rows: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.planner.run")


def table(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows([{**ROW, **change} for change in changes])
    return path


def test_what_a_table_omits_follows_the_sources_own_script(rows: ModuleType, tmp_path: Path) -> None:
    cases, refused = rows.read_cases(table(tmp_path / "rows.csv", {}))
    assert refused == []
    (case,) = cases
    assert (case.plan.micro_batch, case.plan.virtual_stages, case.plan.schedule) == (2, 3, "interleaved_1f1b")
    assert case.plan.gradient_accumulation_steps(case.global_batch) == 28
    assert case.plan.world_size == case.machine.device_count == 1024
    assert case.is_derived
    assert not case.is_recalled


def test_rows_without_a_step_time_or_of_unlike_devices_are_listed_with_the_reason(
    rows: ModuleType, tmp_path: Path
) -> None:
    unlike = {"source": "Sailor SOSP25", "gpu": "RTX-3090x8+RTX-2080x8"}
    cases, refused = rows.read_cases(
        table(tmp_path / "rows.csv", {"step_time_s": ""}, unlike, {"layers": ""})
    )
    assert cases == []
    assert [line.rpartition(": ")[2] for line in refused] == [
        "no step time, only memory",
        "different devices in one run, which this forecast does not take",
        "an architecture that is not a plain decoder's (state-space layers)",
    ]


def test_the_split_into_fitted_and_checked_rows_is_of_what_they_measured(rows: ModuleType) -> None:
    full = dict.fromkeys(COLUMNS, "") | ROW
    assert rows.is_fitted(full) == rows.is_fitted({**full, "notes": "other", "provenance": "other"})
    split = [rows.is_fitted({**full, "step_time_s": str(number)}) for number in range(400)]
    assert 150 < sum(split) < 250


def test_experts_that_need_the_ranks_of_tp_as_well_are_forecast_whole(
    rows: ModuleType, run: ModuleType, tmp_path: Path
) -> None:
    """Megatron's expert tensor parallel of 1: ep 64 × tp 2 on 64 devices."""
    qwen = {
        "source": "NVIDIA Megatron-Bridge perf summary 26.06 NeMo Container pretrain",
        "model": "Qwen3_30B_a3B",
        "layers": "48",
        "hidden": "2048",
        "ffn": "768",
        "heads": "32",
        "kv_heads": "4",
        "gpu": "GB200",
        "n_gpus": "64",
        "dp": "32",
        "tp": "2",
        "pp": "1",
        "ep": "64",
        "micro_batch": "1",
        "global_batch": "512",
        "precision": "BF16",
        "recompute": "",
        "sequence_parallel": "1",
    }
    cases, refused = rows.read_cases(table(tmp_path / "rows.csv", qwen, {**qwen, "ep": "32"}))
    assert refused == []
    assert [case.software.splits_experts for case in cases] == [False, True]
    whole, parts = (run.forecast(case) for case in cases)
    assert 0 < whole.expert < whole.seconds
    assert whole.compute == pytest.approx(parts.compute, rel=0.2)


def test_a_report_counts_errors_by_source_and_by_half(
    rows: ModuleType, run: ModuleType, tmp_path: Path
) -> None:
    changes = [{"step_time_s": str(16 + number)} for number in range(4)]
    cases, refused = rows.read_cases(table(tmp_path / "rows.csv", *changes))
    forecasts = [run.forecast(case) for case in cases]
    text = run.report(cases, forecasts, refused)
    expected = sum(abs(forecasts[0].seconds / (16 + number) - 1) for number in range(4)) / 4
    (line,) = [line for line in text.splitlines() if line.startswith("| Megatron-LM SC21 | all | 4 ")]
    assert f"| {expected:.1%} |" in line
    halves = [
        line
        for line in text.splitlines()
        if line.startswith(("| Megatron-LM SC21 | fitted", "| all | checked"))
    ]
    assert len(halves) == 2


def test_runs_of_another_processor_are_not_mixed_into_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module("benchmarks.planner.real")

    def cluster(name: str) -> dict[str, object]:
        return {"nodes": [{"cpu": {"name": name}}]}

    monkeypatch.setattr(real, "discover_node", lambda: SimpleNamespace(to_json=lambda: cluster("EPYC")))
    real.check_machine({"runs": []})
    real.check_machine({"runs": [{"cluster": cluster("EPYC")}]})
    with pytest.raises(real.BenchmarkError, match="runs on Xeon, and this is EPYC"):
        real.check_machine({"runs": [{"cluster": cluster("EPYC")}, {"cluster": cluster("Xeon")}]})
