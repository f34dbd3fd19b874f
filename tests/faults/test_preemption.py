"""SIGTERM, and a SIGKILL that would follow: what can be saved by then is, and the same command carries on."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.command import Desk, Ran, Running, Training, assert_bitwise_equal
from support.injection import Fault, after_exchange, injected, struck
from support.networks import free_address
from support.supervisors import wait_for_listener
from wanma.cli.main import main

COMMON = (
    "text.toml",
    "train.steps=12",
    "train.schedule=constant",
    "checkpoint.in_memory_every_steps=1",
    "checkpoint.every_steps=0",
)
FLUSH_SECONDS = 100.0
"""Time kept for each flush: on a busy machine it takes longer than on a user's."""
FOREVER = Fault("sleep", rank=1, step=8, phase="forward and backward", argument="600")


def train(desk: Desk, name: str, *overrides: str) -> Ran:
    return desk.run("train", *COMMON, *overrides, "--run-dir", name)


def preempt(running: Running, marks: Path, faults: int = 1) -> Ran:
    """SIGTERM when so many faults have struck, and the end, though the last one takes minutes."""
    assert running.until(lambda: len(struck(marks)) == faults)
    running.look()
    running.signal(signal.SIGTERM)
    ran = running.end()
    assert running.left() == []
    return ran


def check_carries_on(desk: Desk, training: Training, whole: Training, step: int) -> None:
    ran = train(desk, training.path.name).check()
    assert f"resuming from step {step:,} of 12" in ran.out
    assert [line["step"] for line in training.metrics] == list(range(1, 13)), "each once, in order"
    assert training.losses == whole.losses[:12]
    assert_bitwise_equal(training.state(), whole.state(12))


def test_a_step_that_does_not_end_in_time_is_given_up_and_the_copy_in_memory_saved(
    desk: Desk, whole: Training, tmp_path: Path
) -> None:
    grace = (
        f"cluster.grace_seconds={5 + 2 * FLUSH_SECONDS:g}",
        "cluster.requeue_exit_code=75",
        f"checkpoint.upload={tmp_path}/bucket",
    )
    marks = desk.folder / "marks-long"
    faults = after_exchange(FOREVER, 2)
    environment = injected(marks, *faults, flush_seconds=FLUSH_SECONDS)
    running = desk.start("train", *COMMON, *grace, "--run-dir", "long", **environment)
    ran = preempt(running, marks, len(faults)).check(75)
    assert "SIGTERM, 3 min 25 s until SIGKILL" in ran.out
    assert "flushed to disk: checkpoint of step 7 " in ran.out
    assert f"; uploaded to {tmp_path}/bucket" in ran.out
    assert (tmp_path / "bucket" / "step-00000007" / "manifest.json").exists()
    training = desk.training("long")
    assert training.checkpoints() == ["step-00000007"]
    checkpoint, finish = training.events[-2:]
    assert (checkpoint["kind"], checkpoint["step"]) == ("checkpoint", 7)
    assert (finish["kind"], finish["step"], finish["outcome"]) == ("finish", 7, "interrupted")
    assert main(["checkpoint", "verify", str(training.path)]) == 0
    check_carries_on(desk, training, whole, 7)


@pytest.mark.full
def test_of_several_machines_each_writes_its_part_and_the_first_commits(desk: Desk) -> None:
    place = free_address()
    grace = (
        f"cluster.grace_seconds={5 + FLUSH_SECONDS:g}",
        "cluster.nodes=2",
        f"cluster.rendezvous={place}",
        "--run-dir",
        "nodes",
    )
    marks = desk.folder / "marks-nodes"
    faults = after_exchange(FOREVER, 2)
    environment = injected(marks, *faults, flush_seconds=FLUSH_SECONDS)
    machines = []
    for node in (0, 1):
        arguments = (*COMMON, *grace, f"cluster.node_rank={node}")
        machines.append(desk.start("train", *arguments, **environment))
        wait_for_listener(place)
    assert machines[0].until(lambda: len(struck(marks)) == len(faults))
    for machine in machines:
        machine.signal(signal.SIGTERM)
    for ran in [machine.end() for machine in machines]:
        ran.check(143)
        assert ran.out.count("stopping after this step: SIGTERM") == 1
        assert ran.out.count("the in-memory checkpoint was flushed to disk: checkpoint of step 7 in ") == 1
    training = desk.training("nodes")
    assert training.checkpoints() == ["step-00000007"]
    sizes = [path.stat().st_size for path in (training.path / "checkpoints").rglob("*.safetensors")]
    assert len(sizes) == 2, "replicas: each holds all, and each wrote a part"
    assert max(sizes) < 0.7 * sum(sizes)
    desk.run("checkpoint", "verify", "nodes").check()


@pytest.mark.full
def test_an_upload_that_does_not_end_in_time_is_left_and_the_checkpoint_is_on_disk(
    desk: Desk, tmp_path: Path
) -> None:
    slow = Fault("slow upload", rank=0, step=0, phase="building the model", argument="600")
    marks = desk.folder / "marks-upload"
    keys = ("cluster.grace_seconds=15", f"checkpoint.upload={tmp_path}/bucket")
    running = desk.start(
        "train", *COMMON, *keys, "train.steps=2000", "--run-dir", "upload", **injected(marks, slow)
    )
    training = desk.training("upload")
    running.until(lambda: training.steps_begun() >= 1)
    ran = preempt(running, marks).check(143)
    assert "the last upload did not finish" in ran.out
    [saved] = training.checkpoints()
    assert training.events[-1]["outcome"] == "interrupted"
    assert f"step-{training.events[-1]['step']:08d}" == saved


def test_a_signal_to_every_process_of_the_job_is_an_order_to_the_supervisor(desk: Desk) -> None:
    running = desk.start("train", *COMMON, "train.steps=5000", "--run-dir", "everybody")
    training = desk.training("everybody")
    running.until(lambda: training.steps_begun() >= 3)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for process in [*running.look(), running.process]:
            with suppress(psutil.NoSuchProcess):  # it may have stopped for the first signal
                process.send_signal(number)
        # Two signals at once may be heard in either order.
        running.until(lambda: "stopping after this step: SIGUSR1" in training.messages)
    ran = running.end().check(143)
    assert running.left() == []
    assert "recovered" not in ran.out
    assert "stopping after this step: SIGUSR1\n" in ran.out
    assert training.events[-1]["outcome"] == "interrupted"
    assert training.checkpoints() == [f"step-{training.events[-1]['step']:08d}"]


@pytest.mark.full
def test_sigusr1_is_a_warning_that_stops_in_order_and_twice_sigterm_leaves_at_once(desk: Desk) -> None:
    marks = desk.folder / "marks-twice"
    held = replace(FOREVER, what="await stop")
    running = desk.start("train", *COMMON, "--run-dir", "twice", **injected(marks, held, FOREVER))
    assert running.until(lambda: len(struck(marks)) == 1)
    running.signal(signal.SIGUSR1)
    assert running.until(lambda: len(struck(marks)) == 2), "it is heard"
    assert running.process.poll() is None, "it has no end, so the step under way is waited for"
    while (
        running.look()
    ):  # on a busy machine, the first may be heard late; without ranks, nobody minds signals
        running.signal(signal.SIGTERM)
        time.sleep(1.2)
    ran = running.end().check(143)
    assert "stopping after this step: SIGUSR1\n" in ran.out
    assert "SIGTERM, 30 s until SIGKILL" in ran.out
    assert desk.training("twice").checkpoints() == []


@pytest.mark.full
def test_without_a_copy_in_memory_the_run_leaves_in_time_and_says_so(desk: Desk) -> None:
    marks = desk.folder / "marks-nothing"
    keys = ("checkpoint.in_memory_every_steps=off", "cluster.grace_seconds=4", "--run-dir", "nothing")
    running = desk.start("train", *COMMON, *keys, **injected(marks, FOREVER))
    ran = preempt(running, marks).check(143)
    assert "(cluster.grace_seconds) ended before" in ran.out
    assert desk.training("nothing").checkpoints() == []
