"""What waits on disk changes where numbers are kept, and not one bit of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, same_bits, spread_over
from wanma.job.plan import Plan

DECODER: dict[str, Any] = {
    "model": {"family": "decoder", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
    "data": {"text": [__file__], "sequence_length": 32},
    "train": {
        "steps": 4,
        "global_batch": 6,
        "learning_rate": 1e-2,
        "deterministic": True,
        "validation_samples": 2,
    },
    "checkpoint": {"every_steps": 2},
}


def job(folder: Path, **train: Any) -> dict[str, Any]:
    return {
        **DECODER,
        "data": {**DECODER["data"], "cache": str(folder / "cache")},
        "train": {**DECODER["train"], **train},
    }

DISK: dict[str, Any] = {
    "parameters": {"offload_parameters": "disk"},
    "optimizer": {"offload_optimizer": "disk"},
    "activations": {"offload_activations": "disk"},
    "all": {"offload_parameters": "disk", "offload_optimizer": "disk", "offload_activations": "disk"},
}

@pytest.mark.parametrize("kind", DISK)
def test_one_process_repeats_every_bit(kind: str, tmp_path: Path) -> None:
    text = job(tmp_path)
    one = one_process(tmp_path / "plain", text, 3)
    other = spread_over(tmp_path / "run", text, Plan(micro_batch=3, **DISK[kind]))
    same_bits(one, other)
    assert not (tmp_path / "run" / "scratch").exists()
