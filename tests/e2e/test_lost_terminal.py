"""A run whose terminal goes, or whose output nobody takes, loses nothing by it."""

from __future__ import annotations

import signal

import pytest

from support.command import LIMIT_SECONDS, Desk, Running, Training


def started(desk: Desk, name: str, *before: str) -> tuple[Running, Training]:
    training = desk.training(name)
    running = desk.start(
        "train",
        "text.toml",
        "--run-dir",
        name,
        "train.steps=2000",
        "checkpoint.every_steps=1000",
        before=before,
    )
    assert running.until(lambda: training.steps_begun() >= 3)
    return running, training


def stopped(training: Training) -> str:
    """The checkpoint of the step that an orderly stop came after."""
    assert training.events[-1]["kind"] == "finish"
    assert training.events[-1]["outcome"] == "interrupted"
    return f"step-{training.metrics[-1]['step']:08d}"


@pytest.mark.full
def test_ctrl_c_stops_in_order_also_where_nobody_reads_the_output_any_more(desk: Desk) -> None:
    """As in `wanma train job.toml | tee log`, where Ctrl-C ends tee first."""
    running, training = started(desk, "piped")
    assert running.process.stdout is not None
    running.process.stdout.close()
    seen = training.steps_begun()
    assert running.until(lambda: training.steps_begun() >= seen + 20), "it goes on without a reader"
    running.signal(signal.SIGINT)
    assert running.process.wait(LIMIT_SECONDS) == 130
    assert running.process.stderr is not None
    assert "Traceback" not in running.process.stderr.read()
    assert training.checkpoints() == [stopped(training)]


@pytest.mark.full
def test_a_hangup_stops_in_order_and_nohup_keeps_the_run_going(desk: Desk) -> None:
    running, training = started(desk, "hangup")
    running.signal(signal.SIGHUP)
    running.signal(signal.SIGHUP)  # of the kernel and of the shell
    ran = running.end()
    ran.check(143)
    assert "stopping after this step: SIGHUP\n" in ran.out
    assert training.checkpoints() == [stopped(training)]

    running, training = started(desk, "nohup", "nohup")
    running.signal(signal.SIGHUP)
    seen = training.steps_begun()
    assert running.until(lambda: training.steps_begun() >= seen + 20)
    running.signal(signal.SIGTERM)
    assert running.end().code == 143
