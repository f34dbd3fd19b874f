"""Training on conversations: only answers give gradients, and ranks give the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.chats import conversations, write_chats, write_tokenizer
from support.ranks import run_here, run_job
from wanma.data.batch import IGNORE_INDEX
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection
from wanma.training.loss.loss_functions import CrossEntropy


def job(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {
            "path": [str(write_chats(tmp_path / "chats.jsonl", conversations(24)))],
            "columns": {"messages": "messages"},
            "tokenizer": str(write_tokenizer(tmp_path / "tokenizer")),
            "sequence_length": 200,
            "cache": str(tmp_path / "cache"),
            "validation_fraction": 0,
            "document_masks": True,
        },
        "train": {"steps": 3, "global_batch": 4, "learning_rate": 1e-2},
    }


def test_two_ranks_fine_tune_on_chats_as_one_does(tmp_path: Path) -> None:
    given = job(tmp_path)
    prepare_job_data(DataSection.model_validate(given["data"]))
    alone = run_here(tmp_path / "runs" / "alone", given, Plan(micro_batch=4))
    shared = run_job(tmp_path / "runs" / "shared", given, Plan(dp_replicate=2, micro_batch=1))
    assert shared.losses == pytest.approx(alone.losses, rel=1e-5)
    assert alone.losses[-1] < alone.losses[0]


def test_targets_are_those_of_the_answers_and_no_other_label_has_a_gradient(tmp_path: Path) -> None:
    section = DataSection.model_validate(job(tmp_path)["data"])
    data = open_dataset(section, TrainSection(steps=3, global_batch=4))
    batch = data.batch(range(data.train_samples))
    is_target = batch.targets != IGNORE_INDEX
    (source,) = data.describe()["sources"]
    answers = [m["content"] for chat in conversations(24) for m in chat if m["role"] == "assistant"]
    assert int(is_target.sum()) == source["targets"] == sum(len(text.encode()) + 1 for text in answers)
    logits = torch.randn(*batch.targets.shape, data.vocabulary_size or 0, requires_grad=True)
    loss, count = CrossEntropy()(logits, batch)
    loss.backward()
    assert logits.grad is not None
    assert int(count) == source["targets"]
    assert ((logits.grad != 0).any(-1) == is_target).all()
