"""Law 1 under tensor parallelism, with whole activations and with a part of the sequence on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.compare import one_process, same_numbers, spread_over
from support.ranks import Outcome
from wanma.job.plan import Plan

STEPS = 3
DECODER = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2}
QWEN_2_5 = {
    "preset": "qwen-2.5-0.5b",  # biases, tied
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 32,
    "vocabulary": 320,
}
QWEN_3 = {**QWEN_2_5, "preset": "qwen-3-8b", "hidden": 32}  # norms of single heads, untied


def job(folder: Path, model: dict[str, Any], data: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": {
            "text": [str(Path(__file__).parent)],
            "sequence_length": 16,
            "cache": str(folder / "cache"),
            **data,
        },
        "train": {
            "precision": "fp64",
            "steps": STEPS,
            "global_batch": 5,
            "learning_rate": 1e-2,
            "gradient_clip": 0.5,
            "validation_samples": 3,
            "deterministic": True,
            **train,
        },
        "checkpoint": {"every_steps": 0},
    }


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a job under a plan and compares it with one process, which runs once per job."""
    folder = tmp_path_factory.mktemp("tensor")
    made: dict[str, Outcome] = {}

    def run(
        into: Path, plan: Plan, model: dict[str, Any] = DECODER, data: Any = None, **train: Any
    ) -> Outcome:
        text = job(folder, model, data or {}, **train)
        if str(text) not in made:
            made[str(text)] = one_process(tmp_path_factory.mktemp("one"), text, 5)
        other = spread_over(into, text, plan)
        same_numbers(made[str(text)], other)
        return other

    return run


PLANS = [
    Plan(tp=2, micro_batch=5),
    Plan(tp=2, sequence=True, micro_batch=5),
    Plan(tp=2, sequence=True, micro_batch=2),
    Plan(tp=2, sequence=True, micro_batch=2, recompute="full"),
    Plan(tp=4, micro_batch=3),
    Plan(tp=4, sequence=True, micro_batch=3),
    Plan(tp=2, sequence=True, dp_shard=2, shard="optimizer", micro_batch=1),
    Plan(tp=2, sequence=True, dp_shard=2, shard="gradients", micro_batch=1),
    Plan(tp=2, sequence=True, dp_shard=2, shard="parameters", micro_batch=2),
    Plan(tp=2, sequence=True, dp_replicate=2, micro_batch=2),
    Plan(tp=2, sequence=True, pp=2, micro_batch=2),
]


def name(plan: Plan) -> str:
    words = [str(plan)]
    words += ["sequence"] * plan.sequence + [f"recompute {plan.recompute}"] * (plan.recompute != "none")
    return ", ".join([*words, f"micro-batches of {plan.micro_batch}"])


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_a_decoder_with_grouped_heads_follows_one_process(plan: Plan, compare: Any, tmp_path: Path) -> None:
    compare(tmp_path / "run", plan)
