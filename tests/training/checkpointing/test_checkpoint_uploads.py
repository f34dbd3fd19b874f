"""A run whose checkpoints go to a URL, and come back from there when the run directory is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_job
from support.text import SMALL_DECODER, text_job
from wanma.checkpoint.load.verification import find_defects
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan

TEXT = str(Path(json.__file__).parent)


def job(tmp_path: Path, steps: int, url: str, **checkpoint: Any) -> dict[str, Any]:
    train = {"steps": steps, "global_batch": 4, "warmup_steps": 0, "schedule": "constant"}
    train |= {"deterministic": True, "validate_every_steps": 0, "validation_samples": 2}
    saved = {"every_steps": 2, "upload": url, **checkpoint}
    return text_job(tmp_path, {**SMALL_DECODER, "layers": 1}, text=TEXT, checkpoint=saved, **train)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_lost_run_directory_comes_back_from_the_url_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    url, plan = f"file://{tmp_path}/there/run", Plan(dp_shard=ranks, shard="parameters", micro_batch=2)
    whole = run_job(tmp_path / "whole", job(tmp_path, 6, f"file://{tmp_path}/elsewhere"), plan)
    first = run_job(tmp_path / "run", job(tmp_path, 4, url), plan)
    assert names(tmp_path / "there" / "run") == ["step-00000002", "step-00000004"]
    assert find_defects(tmp_path / "there" / "run" / "step-00000004") == []
    assert any(text.startswith(f"checkpoint of step 4 uploaded to {url}, ") for text in first.messages)
    shutil.rmtree(tmp_path / "run")
    second = run_job(tmp_path / "run", job(tmp_path, 6, url), plan)
    assert [step["step"] for step in second.steps] == [5, 6]
    assert second.losses == whole.losses[4:]
    told = second.messages
    assert told[0].startswith(f"step-00000004 fetched from {url} in ")
    assert not any("carrying on" in text for text in told), "the start says it"
    start = next(event for event in reversed(second.events) if event["kind"] == "start")
    assert (start["step"], start["source"]) == (4, "step-00000004")
    tensors = whole.tensors()
    assert all(torch.equal(value, tensors[name]) for name, value in second.tensors().items())
    assert "step-00000006" in names(tmp_path / "there" / "run")


def test_an_upload_that_fails_is_told_and_training_ends_as_if_nothing_were(tmp_path: Path) -> None:
    plain = run_job(tmp_path / "plain", job(tmp_path, 4, f"file://{tmp_path}/fine"), Plan(micro_batch=4))
    failed = run_job(
        tmp_path / "run",
        job(tmp_path, 4, f"failing://{tmp_path}/there"),
        Plan(micro_batch=4),
        patch="support.failing_storage:lose_uploads",
    )
    assert failed.losses == plain.losses
    told = [text for text in failed.messages if "was not uploaded: " in text]
    assert told
    assert "the bucket is gone (after 2 tries" in told[0]
    assert find_defects(tmp_path / "run" / "checkpoints" / "step-00000004") == []
    assert not list((tmp_path / "there").rglob("manifest.json"))
    again = run_job(
        tmp_path / "run",
        job(tmp_path, 4, f"failing://{tmp_path}/there"),
        Plan(micro_batch=4),
        patch="support.failing_storage:register",
    )
    assert names(tmp_path / "there") == ["step-00000002", "step-00000004"]
    assert again.directory == failed.directory


def test_storage_that_cannot_be_asked_stops_a_run_that_has_nothing_here(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"fetched from checkpoint\.upload"):
        run_job(
            tmp_path / "run",
            job(tmp_path, 2, f"failing://{tmp_path}/there"),
            Plan(dp_replicate=2, micro_batch=2),
            patch="support.failing_storage:refuse_all",
        )


def test_a_run_that_starts_anew_is_not_mixed_with_an_earlier_one_at_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    run_job(tmp_path / "run", job(tmp_path, 2, url), Plan(micro_batch=4))
    with pytest.raises(AssertionError, match="an earlier run, up to step 2"):
        run_job(tmp_path / "other", job(tmp_path, 2, url, resume=False), Plan(micro_batch=4))


def test_the_url_holds_as_many_as_the_job_says(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    run_job(tmp_path / "run", job(tmp_path, 8, url, upload_keep=1, keep_every_steps=4), Plan(micro_batch=4))
    assert names(tmp_path / "there") == ["step-00000004", "step-00000008"]


def test_a_url_with_credentials_is_refused_and_not_repeated() -> None:
    text = {"model": {"preset": "gpt-1m"}, "checkpoint": {"upload": "s3://key:hunter2@bucket/run"}}
    with pytest.raises(JobError) as caught:
        to_job(text)
    assert "checkpoint" in caught.value.message
    assert "AWS_PROFILE" in caught.value.message
    assert "hunter2" not in str(caught.value)
