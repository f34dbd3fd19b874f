"""Failures during a run: one message, the right exit code, no process left, nothing lost."""

from __future__ import annotations

import socket
import subprocess

import pytest
import torch

from support.command import Desk, Training, assert_bitwise_equal, small_disk, small_memory
from support.slowness import patient

NO_RETRY = "cluster.max_restarts=0"


def faulty(what: str, **more: object) -> str:
    """The override that makes the model of own.toml do `what`."""
    pairs = ", ".join(f"{key}={value!r}" for key, value in {"what": what, **more}.items())
    return f"model.arguments={{{pairs}}}"


@pytest.mark.parametrize("carries_on", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_exception_in_one_rank_is_told_once_everywhere_and_costs_no_checkpoint(
    desk: Desk, carries_on: bool
) -> None:
    name = f"raised-{carries_on}"
    training = desk.training(name)
    running = desk.start("train", "own.toml", "--run-dir", name, faulty("raise", seconds=0.1), NO_RETRY)
    running.until(lambda: training.steps_begun() >= 1)
    running.look()
    ran = running.end()
    assert (ran.code, running.left()) == (1, [])
    assert ran.text.count("error: rank 1 (") == ran.text.count("error: ") == 1
    assert "ValueError: no such column: prize" in ran.text
    assert "faulty.py" in ran.text
    assert f"log: {training.path}/logs/rank-1.log" in ran.text
    assert training.checkpoints() == ["step-00000002"], "the one that was being written is finished"

    shown = desk.call("show", name)
    assert shown.out.startswith(f"{name}: Failed after 2 of 8 steps")
    assert "ValueError: no such column: prize" in shown.out
    page = (training.path / "report.html").read_text()
    assert "ValueError: no such column: prize" in page

    if not carries_on:
        return
    assert desk.run("train", "own.toml", "--run-dir", name).code == 1, "it is another model now"
    again = desk.run("train", "own.toml", "--run-dir", name, "checkpoint.resume=changed")
    assert again.code == 0, "the same command, the cause removed"
    assert "resuming from step 2" in again.out
    assert [step["step"] for step in training.metrics] == list(range(1, 9))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        pytest.param("exit", "exited with code 7 before its work was finished", marks=pytest.mark.full),
        pytest.param("crash", "was killed by SIGSEGV", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named_with_its_log(desk: Desk, what: str, told: str) -> None:
    ran = desk.run("train", "own.toml", "--run-dir", what, faulty(what), NO_RETRY)
    assert ran.code == 1
    assert f"error: rank 1 (node 0, {socket.gethostname()}) failed: its process {told}" in ran.told_once()
    assert f"{what}/logs/rank-1.log" in ran.text


@pytest.mark.root
def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_so(desk: Desk) -> None:
    training = desk.training("eaten")
    with small_memory(1 << 30) as inside:
        running = desk.start(
            "train", "own.toml", "--run-dir", "eaten", faulty("eat"), NO_RETRY, before=inside
        )
        running.until(lambda: training.steps_begun() >= 1)
        running.look()
        ran = running.end()
        assert (ran.code, running.left()) == (1, [])
    assert f"rank 1 (node 0, {socket.gethostname()}) failed: its process was killed by SIGKILL" in ran.text
    struck = (
        "the kernel's out-of-memory killer: processes on this node can use 1.0 GiB in total; use a smaller"
    )
    assert struck in ran.told_once()


@pytest.mark.full
def test_a_hang_ends_at_its_deadline_and_names_the_odd_rank(desk: Desk) -> None:
    training = desk.training("hung")
    limit = f"cluster.hang_timeout_seconds={patient(2)}"
    running = desk.start("train", "own.toml", "--run-dir", "hung", faulty("sleep"), limit, NO_RETRY)
    running.until(lambda: training.steps_begun() >= 1)
    running.look()
    ran = running.end()
    assert (ran.code, running.left()) == (1, [])
    assert [event["kind"] for event in training.events][-2:] == ["hang", "finish"]
    lines = ran.told_once().splitlines()
    assert any(
        line.startswith("  rank 1 has been in forward and backward of step 2") and line.endswith("<- outlier")
        for line in lines
    ), ran.text
    assert any(line.startswith("  rank 0 has been ") and "waits in all_reduce" in line for line in lines)
    assert limit.replace("=", " = ") in ran.text
    assert "faulty.py" in (training.path / "logs" / "hang-report.txt").read_text()


def test_a_loss_that_is_no_number_stops_with_step_and_rank(desk: Desk) -> None:
    ran = desk.run("train", "own.toml", "--run-dir", "nan", faulty("nan"), NO_RETRY)
    assert ran.code == 1
    assert "step 3: the loss is nan and the gradient norm nan; non-finite on rank 1\n" in ran.told_once()
    assert "train.non_finite = 'skip'" in ran.text
    assert desk.training("nan").checkpoints() == ["step-00000002"]
    (event,) = [event for event in desk.training("nan").events if event["kind"] == "non_finite"]
    assert (event["step"], event["ranks"], event["samples"]) == (3, [1], "")


def test_a_step_without_a_number_can_be_skipped_and_leaves_the_weights_alone(desk: Desk) -> None:
    training = desk.training("skipped")
    overrides = ("train.non_finite=skip", "train.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=9")
    ran = desk.run("train", "own.toml", "--run-dir", "skipped", faulty("nan"), *overrides)
    assert ran.code == 0
    assert "warning: step 3: skipped" in ran.out
    before, skipped, after = (training.state(step) for step in (2, 3, 4))
    assert_bitwise_equal(before, skipped)
    assert any(not torch.equal(after[name], skipped[name]) for name in after)
    assert [step["loss"] is None for step in training.metrics] == [False, False, True, False]


@pytest.mark.full
def test_an_error_that_explains_itself_comes_out_of_a_rank_without_traceback(desk: Desk) -> None:
    ran = desk.run("train", "own.toml", "--run-dir", "row", "data.arguments={broken='yes'}")
    assert ran.code == 1
    assert "data: sample " in ran.told_once()
    assert "of Numbers failed: OSError: row " in ran.text


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        pytest.param("nan", "; sample 13 of Numbers: NaN or infinity in the data", marks=pytest.mark.full),
        pytest.param("ragged", " (sample 13 has shape (3,), most others (4,))", marks=pytest.mark.full),
        ("raises", "sample 13 of Numbers failed: OSError: "),
    ],
)
def test_a_sample_that_is_always_wrong_is_named_and_tried_twice(desk: Desk, broken: str, told: str) -> None:
    """The steps before it are kept, though no checkpoint was due."""
    keys = (f"data.arguments={{broken='{broken}'}}", "train.steps=14", "checkpoint.every_steps=0")
    name = f"always-{broken}"
    ran = desk.run("train", "own.toml", "--run-dir", name, *keys, "checkpoint.in_memory_every_steps=1")
    assert ran.code == 1
    assert told in ran.told_once()
    training = desk.training(name)
    steps = len(training.metrics)
    assert steps > 0
    assert f"occurred twice after step {steps}" in ran.text
    [saved] = training.checkpoints()
    assert int(saved.removeprefix("step-")) >= steps - 1
    logs = (training.path / "logs" / "rank-0.log").read_text()
    started = [logs.count(f", generation {number}, ") for number in (1, 2, 3)]
    assert started == [1, 1, 0]


@pytest.mark.full
@pytest.mark.root
def test_a_full_disk_costs_checkpoints_but_not_the_training(desk: Desk) -> None:
    with small_disk(desk.folder / "small", "400k") as disk:
        training = Training(disk / "run")
        ran = desk.run("train", "text.toml", "--run-dir", "small/run", "train.steps=20", "checkpoint.keep=9")
        assert ran.code == 1, "the last state is not saved, and that is no success"
        assert "Traceback" not in ran.text
        assert "step 15 was not saved: rank " in ran.text
        assert "No space left on device" in ran.text
        assert "training continues" in ran.text
        assert "finished at step 20, but" in ran.text
        saved = training.checkpoints()[0]
        assert saved == "step-00000005"
        assert training.state(5)
        # With some room, the same command brings home the last state, which was rescued.
        for name in ("report.html", "plan.json"):
            (training.path / name).unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        again = desk.run("train", "text.toml", "--run-dir", "small/run", "train.steps=20")
        again.check()
        assert "the run is complete: step 20 of 20" in again.out
        assert training.checkpoints()[-1] == "step-00000020"
        assert [step["step"] for step in training.metrics] == list(range(1, 21))


@pytest.mark.full
def test_a_second_training_in_the_same_place_is_refused_and_the_first_goes_on(desk: Desk) -> None:
    first = desk.start("train", "own.toml", "--run-dir", "busy", faulty("wait"))
    assert first.until(lambda: desk.training("busy").steps_begun() >= 1)
    second = desk.call("train", "own.toml", "--run-dir", "busy")
    assert second.code == 2
    assert second.told_once().startswith("error: another process is training in busy\n")
    (desk.folder / "go-on").touch()
    assert first.end().code == 0
    assert [step["step"] for step in desk.training("busy").metrics] == list(range(1, 9))
