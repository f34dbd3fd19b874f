"""A run directory and step records to write into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanma.job.run.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "gpt")
    directory.create()
    return directory


@pytest.fixture
def step_record() -> Callable[..., dict[str, Any]]:
    def make(step: int, **changes: Any) -> dict[str, Any]:
        return {
            "step": step,
            "loss": 5.0 / step,
            "tokens_per_second": 1000.0,
            "step_seconds": 0.5,
            "grad_norm": 1.0,
            "samples": 32 * step,
            "learning_rate": 1e-3,
            "phases": {"data": 0.1, "forward_backward": 0.4},
            "memory_bytes": 1 << 30,
            "mfu": None,
            **changes,
        }

    return make
