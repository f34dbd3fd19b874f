"""Context parallel in whole jobs: the numbers of one process, with every other axis and option beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.compare import one_process, same_numbers, spread_over
from support.ranks import Outcome
from wanma.job.plan import Plan


def job(folder: Path, *, data: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """A small decoder on many short texts; 5 samples per step, which no world divides."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(120):
        # 4 to 50 bytes: a sequence of 32 holds several documents, or a part of one.
        (texts / f"{number:03}.txt").write_text(
            " ".join(str(number**power) for power in range(1, number % 9 + 2))
        )
    return {
        "model": {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, **model},
        "data": {
            "text": [str(texts)],
            "sequence_length": 32,
            "cache": str(folder / "cache"),
            **(data or {}),
        },
        "train": {
            "steps": 3,
            "global_batch": 5,
            "precision": "fp64",
            "learning_rate": 1e-2,
            "gradient_clip": 0.5,
            "deterministic": True,
            "validation_samples": 3,
            "validate_every_steps": 2,
        },
        "checkpoint": {"every_steps": 0},
    }


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"data": {"document_masks": True}},
    "tied, dropout": {"tie_embeddings": True, "dropout": 0.1},
    "one key/value head, documents, dropout": {
        "kv_heads": 1,
        "dropout": 0.1,
        "data": {"document_masks": True},
    },
}

PLANS: list[tuple[str, Plan]] = [
    ("plain", Plan(cp=2, micro_batch=5)),
    ("plain", Plan(cp=2, context="all_to_all", micro_batch=2)),
    ("documents", Plan(cp=2, micro_batch=2)),
    ("documents", Plan(cp=2, context="all_to_all", micro_batch=5)),
    ("one key/value head, documents, dropout", Plan(cp=4, micro_batch=5)),
    ("one key/value head, documents, dropout", Plan(cp=4, context="all_to_all", micro_batch=2)),
    ("tied, dropout", Plan(cp=2, shard="parameters", micro_batch=2, recompute="full")),
    ("documents", Plan(cp=2, dp_shard=2, shard="parameters", micro_batch=1)),
    ("tied, dropout", Plan(cp=2, dp_shard=2, shard="gradients", context="all_to_all", micro_batch=1)),
    ("tied, dropout", Plan(cp=2, dp_replicate=2, micro_batch=2)),
    ("documents", Plan(cp=2, dp_replicate=2, shard="optimizer", context="all_to_all", micro_batch=2)),
    ("documents", Plan(cp=2, pp=2, micro_batch=1)),
    ("tied, dropout", Plan(cp=2, pp=2, schedule="gpipe", context="all_to_all", micro_batch=2)),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per job."""
    made: dict[str, Outcome] = {}

    def run(name: str) -> Outcome:
        if name not in made:
            folder = tmp_path_factory.mktemp("one")
            made[name] = one_process(folder / "run", job(folder, **JOBS[name]), 5)
        return made[name]

    return run


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=lambda value: str(value).replace(" ", "-"))
def test_ranks_that_share_sequences_follow_one_process(
    name: str, plan: Plan, tmp_path: Path, reference: Any
) -> None:
    other = spread_over(tmp_path / "run", job(tmp_path, **JOBS[name]), plan)
    same_numbers(reference(name), other)
    assert validation(other) == pytest.approx(validation(reference(name)), rel=1e-10)


def validation(outcome: Outcome) -> list[float]:
    lines = (outcome.directory / "events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["kind"] == "validation"]
    assert len(losses) == 2
    return losses
