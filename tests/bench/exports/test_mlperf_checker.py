"""MLPerf training logs, read by the checker that reads submissions: `mlperf_logging` of `make peers`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.mlperf_logs import LLAMA, PLAN, measurement, validations
from wanma.bench.exports import mlperf_log as mlperf_log_module
from wanma.bench.exports.mlperf_log import (
    OPEN_LOSS_LIMITS,
    RULESET,
    TARGETS,
    SampleCounts,
    Submission,
    mlperf_log,
)
from wanma.job.errors import WanmaError
from wanma.job.sections.job import Job

PYTHON = Path(__file__).parents[3] / ".venv-peers" / "bin" / "python"
LORA = {**LLAMA, "model": {"family": "decoder", "lora_rank": 16, "lora_alpha": 32.0}}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs MLPerf's checker: make peers"),
]


def log(benchmark: str, division: Any, target: float | None = None) -> str:
    target = TARGETS[benchmark] if target is None else target
    job = LORA if benchmark == "llama2_70b_lora" else LLAMA
    return mlperf_log(
        measurement(),
        validations(target + 1, target),
        Job.model_validate(job),
        SampleCounts(1_000_000, 1024),
        Submission("an organisation", "a node", benchmark, division),
        PLAN,
    )


def check(text: str, folder: Path) -> tuple[bool, str]:
    """Return whether the checker accepts a log, and its output; warnings count as errors."""
    path = folder / "result_0.txt"
    path.write_text(text)
    command = [PYTHON, "-m", "mlperf_logging.compliance_checker", "--ruleset", RULESET, "--werror", path]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    output = ended.stdout + ended.stderr
    assert "SUCCESS" in output or "FAILED" in output, output
    return ended.returncode == 0, output


@pytest.mark.parametrize("division", ["closed", "open"])
@pytest.mark.parametrize("benchmark", TARGETS)
def test_the_checker_accepts_the_log(benchmark: str, division: str, tmp_path: Path) -> None:
    limit = OPEN_LOSS_LIMITS.get(benchmark) if division == "open" else None
    is_accepted, output = check(log(benchmark, division, None if limit is None else limit - 0.1), tmp_path)
    assert is_accepted, output


def test_a_log_that_the_checker_cannot_accept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WanmaError, match=r"llama31_8b in the open division only with .* below 1") as refused:
        log("llama31_8b", "open")
    assert refused.value.hint == "write the log for the closed division: --division closed"
    monkeypatch.setattr(mlperf_log_module, "OPEN_LOSS_LIMITS", {})
    is_accepted, output = check(log("llama31_8b", "open"), tmp_path)
    assert not is_accepted, "the checker has a target by now: remove the limit"
    assert output.count("Failed checks for") == 1
    assert "Failed checks for eval_accuracy : v['value'] < 1.0" in output
    assert "Required" not in output


@pytest.mark.parametrize("key", ["run_stop", "eval_accuracy", "max_steps", "tensor_parallelism"])
def test_the_checker_misses_a_line_that_the_rules_demand(key: str, tmp_path: Path) -> None:
    lines = [line for line in log("llama31_8b", "closed").splitlines() if f'"key": "{key}"' not in line]
    is_accepted, output = check("\n".join(lines), tmp_path)
    assert not is_accepted
    assert f"'{key}'" in output or f"for {key}" in output


def test_the_reference_convergence_points_are_found_for_a_log(tmp_path: Path) -> None:
    for run in range(10):
        (tmp_path / f"result_{run}.txt").write_text(log("llama31_8b", "closed"))
    command = [PYTHON, "-m", "mlperf_logging.rcp_checker", "--rcp_version", RULESET, "."]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stderr
    assert "'Benchmark': 'llama31_8b', 'BS': 32" in output
    assert "Submission mean epochs: 128.0000" in output  # samples until the target
