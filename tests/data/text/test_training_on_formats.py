"""Training on stored records and tokens: the losses of the same documents as plain text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_here, run_job
from support.text_formats import TEXT_CASES, json_lines, write_megatron, write_plain
from wanma.data.opening import prepare_job_data
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection

DOCUMENTS = [" ".join(random.Random(seed).choices("abcdefgh", k=200)) for seed in range(30)]


def job(corpus: Path) -> dict[str, Any]:
    return {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {
            "text": [str(corpus)],
            "sequence_length": 32,
            "cache": str(corpus.parent / "cache"),
            "validation_fraction": 0,
            "document_masks": True,
        },
        "train": {"steps": 3, "global_batch": 4, "learning_rate": 1e-2},
    }


@pytest.fixture
def losses(tmp_path: Path) -> list[float]:
    (tmp_path / "plain").mkdir()
    write_plain(tmp_path / "plain", DOCUMENTS)
    return run_here(tmp_path / "runs" / "plain", job(tmp_path / "plain"), Plan(micro_batch=4)).losses


def test_compressed_json_lines_on_two_ranks_train_as_plain_text(losses: list[float], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    TEXT_CASES["jsonl.zst"].write(tmp_path / "corpus", DOCUMENTS)
    given = job(tmp_path / "corpus")
    prepare_job_data(DataSection.model_validate(given["data"]))
    plan = Plan(dp_replicate=2, micro_batch=2)
    outcome = run_job(tmp_path / "runs" / "rows", given, plan)
    assert outcome.losses == pytest.approx(losses, rel=1e-5)


def test_rows_that_were_left_out_are_in_the_records_of_the_run(losses: list[float], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    lines = json_lines(DOCUMENTS).splitlines()
    lines.insert(3, b'{"text": 7}')
    (tmp_path / "corpus" / "a.jsonl").write_bytes(b"\n".join(lines))
    given = job(tmp_path / "corpus")
    given["data"] |= {"bad_data": "skip"}
    outcome = run_here(tmp_path / "runs" / "rows", given, Plan(micro_batch=4))
    assert outcome.losses == losses
    events = map(json.loads, (outcome.directory / "events.jsonl").read_text().splitlines())
    (text,) = (
        event["text"] for event in events if event["kind"] == "message" and "bad rows" in event["text"]
    )
    assert "1 bad rows or files" in text
    assert "a.jsonl: row 3: the field 'text'" in text


def test_mapped_files_of_megatron_train_as_plain_text(losses: list[float], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_megatron(tmp_path / "corpus" / "a.bin", [[*text.encode(), 256] for text in DOCUMENTS])
    outcome = run_here(tmp_path / "runs" / "tokens", job(tmp_path / "corpus"), Plan(micro_batch=4))
    assert outcome.losses == losses
    assert not list((tmp_path / "cache" / "tokens").glob("*/tokens.bin"))[1:], "only of the plain text"
