"""Law 4: whatever is killed, and whenever, the same command carries on to the same weights."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from support.command import Desk, Running, Training, assert_bitwise_equal
from support.injection import Fault, injected, struck
from wanma.elastic.supervisor.stop_signals import SIGNAL_REPEAT_SECONDS

PLANS = {
    "replicate 2": (),
    "ZeRO-3 2": ("parallel.dp_replicate=1", "parallel.dp_shard=2", "parallel.shard=parameters"),
}


def victims(running: Running, training: Training) -> dict[str, int]:
    """Processes that can be killed now, by name; 'everything' is the command and all below it."""
    below = [one.pid for one in running.look()]
    found = {"everything": 0, "supervisor": running.process.pid}
    if below:
        found["fork server"] = below[0]
    for rank in (0, 1):
        if (pid := training.rank_process(rank)) in below:
            assert pid is not None
            found[f"rank {rank}"] = pid
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("replicate 2", 3),
        pytest.param("replicate 2", 6, marks=pytest.mark.full),
        pytest.param("ZeRO-3 2", 6, marks=pytest.mark.full),
    ],
)
def test_kills_at_random_moments_cost_no_step_and_change_no_bit(
    desk: Desk, whole_of_plan: Callable[[tuple[str, ...]], Training], name: str, rounds: int
) -> None:
    plan = PLANS[name]
    whole = whole_of_plan(plan)
    dice = random.Random(len(plan))
    training = desk.training(f"killed-{len(plan)}-{rounds}")
    # Without recoveries, so that every kill ends the command; tests/faults has those that do not.
    command = ("train", "text.toml", "--run-dir", training.path.name, "cluster.max_restarts=0", *plan)
    order = ["rank 0", "rank 1", "supervisor", "everything", "fork server"]
    dice.shuffle(order)
    kills = 0
    for number in range(rounds):
        running = desk.start(*command)
        # Mostly while it trains, and once early: while it starts, resumes, or has nothing to kill yet.
        goal = training.steps_begun() + dice.randint(1, 5) if number else 0
        came = running.until(lambda goal=goal: not goal or training.steps_begun() >= goal)
        time.sleep(dice.uniform(0, 0.02 if number else 1.0))
        if not came or running.process.poll() is not None:
            break
        there = victims(running, training)
        who = next((name for name in order[number % 5 :] + order if name in there), "everything")
        if who == "everything":
            running.kill_all()
        else:
            os.kill(there[who], signal.SIGKILL)
        kills += 1
        ran = running.end()
        assert running.left() == [], f"killing {who} left processes behind"
        if who.startswith("rank") and ran.code != 0:  # it may have done its work just before
            assert ran.code == 1
            assert f"error: {who} (" in ran.told_once()
            assert "was killed by SIGKILL" in ran.text
    assert kills >= rounds - 2, "the run ended before it could be killed often enough"
    ran = desk.run(*command)
    ran.check()
    assert [step["step"] for step in training.metrics] == list(range(1, 61))
    assert training.losses == whole.losses
    assert_bitwise_equal(training.state(), whole.state())


@pytest.mark.full
@pytest.mark.parametrize("is_repeated", [False, True])
def test_ctrl_c_finishes_the_step_and_twice_leaves_at_once_and_both_can_be_carried_on(
    desk: Desk, whole: Training, is_repeated: bool
) -> None:
    """Every day tests/elastic has the signals, and tests/engines/local a stop and its resumption."""
    training = desk.training(f"interrupted-{is_repeated}")
    command = ("train", "text.toml", "--run-dir", training.path.name)

    # Held in a step until it is asked to stop: however late the signal is sent, there are steps left.
    marks = desk.folder / f"marks-{training.path.name}"
    held = Fault("await stop", step=4)
    running = desk.start(*command, **injected(marks, held, repeat_seconds=600))
    assert running.until(lambda: bool(struck(marks)))
    running.look()
    for _ in range(2):  # as `timeout` and other launchers do: to the process, then to its group
        running.signal(signal.SIGINT)
    ran = running.end()
    assert (ran.code, running.left()) == (130, [])
    assert "error" not in ran.text
    stopped = training.metrics[-1]["step"]
    assert training.checkpoints()[-1] == f"step-{stopped:08d}"
    assert 3 <= stopped < 60
    assert training.events[-1] | {"time": 0, "best_loss": None} == {
        "kind": "finish", "time": 0, "step": stopped, "outcome": "interrupted", "best_loss": None,
    }  # fmt: skip

    if is_repeated:
        marks = desk.folder / f"marks-{training.path.name}-again"
        faults = [Fault(what, step=stopped + 3, argument="600") for what in ("await stop", "sleep")]
        running = desk.start(*command, **injected(marks, *faults))
        assert running.until(lambda: bool(struck(marks)))
        running.look()
        running.signal(signal.SIGINT)
        assert running.until(lambda: len(struck(marks)) == 2), "the first is heard"
        time.sleep(SIGNAL_REPEAT_SECONDS[signal.SIGINT])
        running.signal(signal.SIGINT)
        ran = running.end()
        assert (ran.code, running.left()) == (130, [])
        assert "Traceback" not in ran.text
        assert (training.events[-1]["kind"], training.events[-1]["outcome"]) == ("finish", "aborted")

    ran = desk.run(*command)
    ran.check()
    assert [step["step"] for step in training.metrics] == list(range(1, 61))
    assert_bitwise_equal(training.state(), whole.state())


@pytest.mark.full
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_carries_on(desk: Desk, whole: Training) -> None:
    training = desk.training("damaged")
    shutil.copytree(whole.path, training.path)
    file = training.path / "checkpoints" / "step-00000060" / "rank-00001.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
    ran = desk.run("train", "text.toml", "--run-dir", training.path.name)
    assert ran.code == 0
    assert "step-00000060 is skipped: rank-00001" in ran.text
    assert "step 55 of 60 (step-00000055)" in ran.text
    assert [step["step"] for step in training.metrics] == list(range(1, 61))
    assert_bitwise_equal(training.state(60), whole.state(60))


@pytest.mark.full
@pytest.mark.parametrize("torn", ["manifest.json", "rank-00000.safetensors"])
def test_a_torn_file_counts_as_damage(desk: Desk, whole: Training, torn: str) -> None:
    training = desk.training(f"torn-{torn}")
    shutil.copytree(whole.path, training.path)
    file = training.path / "checkpoints" / "step-00000060" / torn
    os.truncate(file, file.stat().st_size // 2)
    ran = desk.run("train", "text.toml", "--run-dir", training.path.name)
    assert ran.code == 0
    assert f"step-00000060 is skipped: {torn}" in ran.text
    assert_bitwise_equal(training.state(60), whole.state(60))
