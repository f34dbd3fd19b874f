"""Training from a store that is away for a while: nothing lost, nothing twice; or for good: one error."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest

from support.command import Desk, Running
from support.data_files import add_member
from support.labelled_images import label, picture
from support.s3_server import S3Server, s3_server
from wanma.job.errors import EXIT_FAILED

JOB = """\
[model]
preset = "cifar-convnet"
[data]
images = "s3://bucket/shapes"
cache = "away-cache"
cache_bytes = 0
probe_store = false
validation_fraction = 0
prefetch = 1
workers = 1
store_retry_seconds = {seconds}
[data.image_transform]
size = 8
augment = ["horizontal_flip"]
[train]
steps = {steps}
global_batch = 8
deterministic = true
[parallel]
dp_replicate = 2
[checkpoint]
every_steps = 3
[observe]
log_every_steps = 1
"""
STEPS = 30
IMAGES = 240


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        for shard in range(4):
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as archive:
                for number in range(shard, IMAGES, 4):
                    add_member(archive, f"{number:04d}.png", picture(number))
                    add_member(archive, f"{number:04d}.cls", str(label(number)).encode())
            server.put(f"shapes/{shard}.tar", content.getvalue())
        yield server


def start(desk: Desk, s3: S3Server, name: str, seconds: float, *overrides: str) -> Running:
    (desk.folder / f"{name}.toml").write_text(JOB.format(seconds=seconds, steps=STEPS))
    return desk.start("train", f"{name}.toml", "--run-dir", name, *overrides, **s3.environment)


def outages(desk: Desk, name: str) -> int:
    """Return how often ranks have logged that the store is away."""
    logs = (desk.folder / name / "logs").glob("rank-*.log")
    return sum(log.read_text().count("does not answer") for log in logs)


@pytest.mark.full
def test_a_store_that_comes_back_loses_no_sample_and_repeats_none(desk: Desk, s3: S3Server) -> None:
    start(desk, s3, "undisturbed", 60).end().check()
    running = start(desk, s3, "back", 60)
    training = desk.training("back")
    assert running.until(lambda: training.steps_begun() >= 8)
    s3.proxy.go_away()
    assert running.until(lambda: outages(desk, "back") >= 1)
    assert training.steps_begun() < STEPS
    s3.proxy.come_back()
    running.end().check()
    whole = desk.training("undisturbed")
    assert [step["step"] for step in training.metrics] == list(range(1, STEPS + 1))
    assert training.losses == whole.losses
    assert len(set(whole.losses)) == STEPS, "each step has samples of its own"
    assert {event["kind"] for event in training.events} == {event["kind"] for event in whole.events}


@pytest.mark.full
def test_a_store_that_stays_away_is_one_error_and_the_command_resumes_once_it_is_back(
    desk: Desk, s3: S3Server
) -> None:
    start(desk, s3, "whole", 60).end().check()
    running = start(desk, s3, "gone", 2, "cluster.max_restarts=1")
    training = desk.training("gone")
    assert running.until(lambda: training.steps_begun() >= 8)
    s3.proxy.go_away()
    ran = running.end().check(EXIT_FAILED)
    text = ran.told_once()
    for part in ("data.images[0]", "s3://bucket/shapes", "rank "):
        assert part in text
    reached = training.steps_begun()
    assert 8 <= reached < STEPS
    s3.proxy.come_back()
    start(desk, s3, "gone", 2).end().check()
    assert [step["step"] for step in training.metrics] == list(range(1, STEPS + 1))
    assert training.losses == desk.training("whole").losses
