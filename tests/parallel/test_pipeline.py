"""Every pipeline schedule follows one process: losses, gradient norms and the change of every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, same_numbers, spread_over
from support.ranks import Outcome
from wanma.job.plan import Plan

TEXT = [str(Path(json.__file__).parent)]
"""Some files that nobody changes while tests run."""
TWO = {"virtual_stages": 2}


def job(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """A small decoder on real text; 7 samples per step, so that some micro-batches are padded."""
    dimensions = {"family": "decoder", "layers": 4, "hidden": 16, "heads": 2, "kv_heads": 1}
    return {
        "model": {**dimensions, **(model or {})},
        "data": {"text": TEXT, "sequence_length": 16, "cache": str(folder / "cache")},
        "train": {
            "steps": 3,
            "global_batch": 7,
            "precision": "fp64",
            "learning_rate": 1e-2,
            "gradient_clip": 0.5,
            "deterministic": True,
            "validate_every_steps": 2,
            "validation_samples": 5,
            **train,
        },
        "checkpoint": {"every_steps": 0},
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per job."""
    made: dict[str, Outcome] = {}

    def run(name: str, text: dict[str, Any]) -> Outcome:
        if name not in made:
            made[name] = one_process(tmp_path_factory.mktemp("one"), text, micro_batch=7)
        return made[name]

    return run


def validation_losses(outcome: Outcome) -> list[float]:
    lines = (outcome.directory / "events.jsonl").read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["kind"] == "validation"]


PLANS = {
    "gpipe, 2 ranks": Plan(pp=2, schedule="gpipe", micro_batch=4),
    "gpipe, one micro-batch": Plan(pp=2, schedule="gpipe", micro_batch=7),
    "1f1b, 4 ranks": Plan(pp=4, micro_batch=1),
    "1f1b, recomputing": Plan(pp=2, micro_batch=2, recompute="full"),
    "interleaved, 2 ranks": Plan(pp=2, schedule="interleaved_1f1b", micro_batch=2, **TWO),
    "interleaved, fewer micro-batches than ranks": Plan(
        pp=2, schedule="interleaved_1f1b", micro_batch=7, **TWO
    ),
    "interleaved, recomputing": Plan(
        pp=2, schedule="interleaved_1f1b", micro_batch=2, recompute="full", **TWO
    ),
    "interleaved zero bubble": Plan(pp=2, schedule="interleaved_zero_bubble", micro_batch=2, **TWO),
    "zbv": Plan(pp=2, schedule="zbv", micro_batch=2, **TWO),
    "zbv, one micro-batch": Plan(pp=2, schedule="zbv", micro_batch=7, **TWO),
    "dualpipev": Plan(pp=2, schedule="dualpipev", micro_batch=1, **TWO),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_schedule_follows_one_process(name: str, tmp_path: Path, reference: Any) -> None:
    text = job(tmp_path)
    one = reference("plain", text)
    other = spread_over(tmp_path / "run", text, PLANS[name])
    same_numbers(one, other)
    assert validation_losses(other) == pytest.approx(validation_losses(one), rel=1e-10)
