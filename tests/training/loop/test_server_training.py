"""Tables of parameter servers that worker 0 keeps in a file: the numbers, the memory, and what it saves."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.command import Desk, Training, assert_bitwise_equal
from support.server_jobs import DLRM
from wanma.checkpoint.load.reader import CheckpointReader

JOB = f"""{DLRM}\
steps = 8
global_batch = 50
schedule = "constant"
validate_every_steps = 4
embedding_optimizer = "adam"
[checkpoint]
every_steps = 2
keep = 9
[model.recommender.tables]
user = 3000
[parallel]
dp_replicate = 2
micro_batch = 25
[servers]
count = 2
replicas = 2
[observe]
log_every_steps = 1
console = "plain"
"""
ON_DISK = "parallel.embedding_memory_bytes=20_000"
"""Memory for the addresses of 3150 rows, and for 65 of them."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("served"), Path(__file__).parent)
    (desk.folder / "job.toml").write_text(JOB)
    return desk


@pytest.fixture(scope="module")
def in_memory(desk: Desk) -> Training:
    return desk.trained("job", "in-memory")


def metrics_of(training: Training) -> list[dict[str, float]]:
    return [event["metrics"] for event in training.validations]


def test_tables_in_a_file_have_the_bits_of_tables_in_memory_and_resume(
    desk: Desk, in_memory: Training
) -> None:
    run = ("train", "job.toml", "--run-dir", "on-disk", ON_DISK)
    desk.run(*run, "train.steps=4").check()
    desk.run(*run, "checkpoint.resume=changed").check()
    on_disk = desk.training("on-disk")
    assert on_disk.losses == in_memory.losses
    assert metrics_of(on_disk) == metrics_of(in_memory)
    assert_bitwise_equal(on_disk.state(), in_memory.state())


@pytest.mark.parametrize("keys", [(), (ON_DISK,)])
def test_an_increment_has_the_rows_that_have_changed(
    desk: Desk, in_memory: Training, keys: tuple[str, ...]
) -> None:
    """Also where a server is killed: the rows that the next copies count as changed."""
    training, is_killed = desk.training(f"increments-{len(keys)}"), bool(keys)
    running = desk.start(
        "train", "job.toml", "--run-dir", training.path.name, "checkpoint.full_every=9", *keys
    )
    assert running.until(lambda: training.steps_begun() >= 3), running.end().text
    if is_killed:
        log = (training.path / "logs" / "server-1.log").read_text()
        os.kill(int(re.findall(r"process (\d+)", log)[-1]), signal.SIGKILL)
    running.end().check()
    for step in (2, 4, 6, 8):
        assert_bitwise_equal(training.state(step), in_memory.state(step))
    user = "model.embeddings.tables.of_user.weight"
    increment = CheckpointReader(training.path / "checkpoints" / "step-00000008").tensors[user]
    assert increment.shards[0].file.startswith("base-")
    users = 100  # of the data; of two shards with 1500 rows each the killed server has one
    assert sum(change.count for change in increment.changes) <= users + 1500 * is_killed
    assert "recovery" not in {event["kind"] for event in training.events}


@pytest.mark.full
def test_the_memory_of_worker_0_does_not_grow_with_tables_in_a_file(desk: Desk) -> None:
    rows, pauses = 1_000_000, ("train.validate_every_steps=2", "train.steps=4", "checkpoint.full_every=2")
    wide = (f"model.recommender.tables={{user={rows}}}", "model.recommender.embedding=64")
    peaks = {}
    for name, keys in {
        "small": (ON_DISK,),
        "large": (*wide, "parallel.embedding_memory_bytes=8_000_000"),
    }.items():
        desk.run("train", "job.toml", "--run-dir", name, "servers.replicas=1", *pauses, *keys).check()
        peaks[name] = max(step["memory_bytes"] for step in desk.training(name).metrics)
    held = 4 * rows * 64 * 3  # vectors and moments
    assert peaks["large"] - peaks["small"] < held / 3
