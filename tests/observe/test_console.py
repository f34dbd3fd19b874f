"""Output of consoles: plain lines, a live display that restores the terminal, or only errors."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console.console import PlainConsole
from wanma.observe.console.dataset_progress import show_dataset_progress
from wanma.observe.console.opening import open_console
from wanma.observe.console.progress import DownsampledSeries, RunProgress, recovery_text, sparkline


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = {"loss": 10.0 / number, "tokens_per_second": 1000.0, "step_seconds": 2.0, "mfu": 0.25}
    return {
        "kind": "step",
        "step": number,
        "time": 2.0 * number,
        "memory_bytes": 1 << 30,
        **record,
        **changes,
    }


def shown(run: RunDirectory, mode: str, events: list[dict[str, Any]], every: int = 10) -> list[str]:
    stream = io.StringIO()
    observe = ObserveSection(console=mode, log_every_steps=every)  # type: ignore[arg-type]  # one of the four
    with open_console(run, observe, 30, stream) as console:
        for event in events:
            console.write(event)
    return stream.getvalue().splitlines()


def test_plain_lines_tell_the_run_from_start_to_end(run: RunDirectory) -> None:
    events = [
        {"kind": "start", "step": 0, "steps": 30},
        *(step(number) for number in range(1, 31)),
        {"kind": "validation", "step": 30, "loss": 0.5, "perplexity": 1.6487},
        {"kind": "checkpoint", "step": 30, "bytes": 1 << 20, "write_seconds": 0.5},
        {"kind": "finish", "step": 30, "outcome": "finished"},
    ]
    assert shown(run, "plain", events) == [
        f"run directory: {run.path}",
        "training 30 steps",
        "step  1/30  loss 10.00  1,000 tokens/s  MFU 25.0 %  memory 1.0 GiB  ETA 58 s",
        "step 10/30  loss 1.000  1,000 tokens/s  MFU 25.0 %  memory 1.0 GiB  ETA 40 s",
        "step 20/30  loss 0.5000  1,000 tokens/s  MFU 25.0 %  memory 1.0 GiB  ETA 20 s",
        "step 30/30  loss 0.3333  1,000 tokens/s  MFU 25.0 %  memory 1.0 GiB",
        "validation loss 0.5000, perplexity 1.649 (step 30)",
        "checkpoint of step 30, 1.0 MiB in 0.50 s",
        "finished at step 30",
    ]


def test_a_resumed_run_says_where_it_carries_on(run: RunDirectory) -> None:
    start = {"kind": "start", "step": 20, "steps": 30, "source": "step-00000020"}
    lines = shown(run, "plain", [start, step(21)])
    assert [line for line in lines if "resuming" in line] == ["resuming from step 20 of 30 (step-00000020)"]
    assert lines[1].startswith("resuming")
    assert lines[2].startswith("step 21/30")


def test_the_quiet_console_shows_only_what_is_wrong(run: RunDirectory) -> None:
    events = [
        step(10),
        {"kind": "message", "level": "info", "text": "hello"},
        {"kind": "message", "level": "warning", "text": "slow"},
        {"kind": "message", "level": "error", "text": "gone"},
    ]
    assert shown(run, "quiet", events) == ["warning: slow", "error: gone"]


def test_a_nan_loss_is_shown_as_such(run: RunDirectory) -> None:
    lines = shown(run, "plain", [step(10, loss=float("nan")), step(20, loss=None)])
    assert all("loss nan" in line for line in lines[1:3])


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_node_without_rank_0_says_what_it_is_and_waits_for_no_step(run: RunDirectory, mode: str) -> None:
    text = "joined the run at 10.0.0.1:29500 as node rank 1 of 2"
    said = "\n".join(shown(run, mode, [{"kind": "joined", "text": text, "shows_the_run": False}]))
    assert text in said
    assert ("progress is shown on the node of rank 0" in said) == (mode == "live")
    assert "waiting for the first step" not in said


@pytest.mark.parametrize("mode", ["plain", "live", "quiet"])
def test_an_alert_is_shown(run: RunDirectory, mode: str) -> None:
    alert = {"kind": "alert", "level": "warning", "text": "DiskFull: 1 % is free", "time": 0.0}
    assert "warning: DiskFull: 1 % is free" in "\n".join(shown(run, mode, [alert]))


def test_without_a_terminal_auto_is_plain(run: RunDirectory) -> None:
    console = open_console(run, ObserveSection(), 30, io.StringIO())
    assert isinstance(console, PlainConsole)


LIVE = """
import sys, time
from pathlib import Path
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console.opening import open_console

with open_console(RunDirectory(Path("runs/gpt")), ObserveSection(), 30) as console:
    console.write({"kind": "start", "step": 0, "steps": 30, "time": 0.0})
    for step in range(1, 31):
        console.write({"kind": "step", "step": step, "time": 2.0 * step, "loss": 3.0, "step_seconds": 2.0,
                       "tokens_per_second": 1234.0, "mfu": None, "memory_bytes": 1 << 30})
    console.write({"kind": "message", "level": "warning", "text": "a [red]warning[/red]", "time": 0.0})
    if sys.argv[1] == "fail":
        raise RuntimeError("boom")
    console.write({"kind": "finish", "step": 30, "outcome": "finished", "time": 0.0})
"""


def on_a_terminal(argument: str) -> str:
    """Output of the live console to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30"}
    command = [sys.executable, "-c", LIVE, argument]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    assert process.wait(20) == (1 if argument == "fail" else 0)
    return said.decode()


@pytest.mark.parametrize("argument", ["fail", "finish"])
def test_the_live_display_shows_the_run_and_restores_the_terminal(argument: str) -> None:
    said = on_a_terminal(argument)
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert said.count(hide) == said.count(show) == 1
    assert said.index(hide) < said.index(show)
    assert "step 30/30" in said
    assert "1,234 tokens/s" in said
    assert "warning: a [red]warning[/red]" in said
    assert said.count("run directory: runs/gpt") == 1
    assert ("finished at step 30" in said) == (argument == "finish")


def test_the_console_needs_neither_torch_nor_rich_until_it_is_live() -> None:
    code = "import sys, wanma.observe.console.opening; assert not {'torch', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_remaining_time_counts_pauses_and_forgets_an_earlier_start() -> None:
    progress = RunProgress(100)
    progress.update({"kind": "start", "step": 0, "steps": 100})
    for number in range(1, 11):
        progress.update(step(number, time=3.0 * number))  # steps of 2 s, with a second between them
    assert progress.remaining_seconds() == pytest.approx(270)
    progress.update({"kind": "start", "step": 10, "steps": 100})
    progress.update(step(11, time=1000.0))
    assert progress.remaining_seconds() == pytest.approx(89 * 2)


def test_a_long_curve_stays_short_and_keeps_its_shape() -> None:
    curve = DownsampledSeries()
    for value in range(10_000):
        curve.add(float(-value))
    assert 16 <= len(curve.points) <= 64
    assert curve.points == sorted(curve.points, reverse=True)
    assert sparkline(curve.points, 8) == "█▇▆▅▄▃▂▁"


def test_a_sparkline_of_nothing_or_of_one_height_is_calm() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([2.0, 2.0, 2.0], 10) == "▁▁▁"


RECOVERY = {
    "kind": "recovery",
    "failure": "rank 1 (node 0, a) failed: its process was killed by SIGKILL",
    "source": "memory",
    "step": 1200,
    "repeated_steps": 1,
    "seconds": 0.4821,
    "attempt": 1,
}


@pytest.mark.parametrize("mode", ["plain", "quiet"])
def test_a_recovery_is_one_message_on_every_console(run: RunDirectory, mode: str) -> None:
    events = [{"kind": "start", "step": 1200, "steps": 3000, "is_restart": True}, RECOVERY]
    lines = [line for line in shown(run, mode, events) if "run directory" not in line]
    assert lines == [
        "warning: recovered from: rank 1 (node 0, a) failed: its process was killed by SIGKILL",
        "  resumed from the in-memory checkpoint of step 1,200, 1 step repeated; "
        "0.48 s from the failure to the next finished step",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"source": "checkpoint", "repeated_steps": 30},
            "the checkpoint of step 1,200, 30 steps ",
        ),
        ({"source": "beginning", "step": 0}, "from the beginning, 1 step repeated; "),
        ({"repeated_steps": 0}, "in-memory checkpoint of step 1,200, no "),
        ({"attempt": 2}, "to the next finished step (attempt 2)"),
    ],
)
def test_a_recovery_says_what_it_cost(changes: dict[str, Any], said: str) -> None:
    assert said in recovery_text({**RECOVERY, **changes})


CHANGE = {
    "machines": 3,
    "machines_before": 4,
    "most_machines": 4,
    "plan_before": "4 ranks (dp_replicate 4), fp32, cpu",
    "plan": "3 ranks (dp_replicate 3), fp32, cpu",
    "reason": "change to it: there is room for 3",
}


def test_a_recovery_on_fewer_machines_says_so_in_the_same_message(run: RunDirectory) -> None:
    lines = shown(run, "quiet", [{**RECOVERY, "change": CHANGE}])
    assert lines[2:4] == [
        "  resized: 3 of at most 4 nodes (4 before): 4 ranks (dp_replicate 4), fp32, cpu -> "
        "3 ranks (dp_replicate 3), fp32, cpu",
        "  change to it: there is room for 3",
    ]


def test_a_run_that_grows_says_what_it_took(run: RunDirectory) -> None:
    event = {"kind": "resize", "source": "memory", "step": 20, "repeated_steps": 0, "seconds": 1.25}
    lines = shown(run, "plain", [{**event, "change": {**CHANGE, "machines": 4, "machines_before": 3}}])
    assert [line for line in lines if "run directory" not in line] == [
        "resized: 4 of at most 4 nodes (3 before): 4 ranks (dp_replicate 4), fp32, cpu -> "
        "3 ranks (dp_replicate 3), fp32, cpu",
        "  change to it: there is room for 3",
        "  resumed after step 20; 1.25 s from the last step before the resize to the first after it",
    ]


def test_drawing_while_events_arrive_does_not_fail(tmp_path: Path) -> None:
    stream = io.StringIO()
    observe = ObserveSection(console="live")
    with open_console(RunDirectory(tmp_path), observe, 5000, stream) as console:
        end = time.monotonic() + 0.6
        number = 0
        while time.monotonic() < end:
            number += 1
            console.write(step(number))
    assert f"run directory: {tmp_path}" in stream.getvalue()


def test_work_on_data_that_ends_soon_shows_no_line_without_a_terminal() -> None:
    stream = io.StringIO()
    with show_dataset_progress(is_quiet=False, stream=stream) as progress:
        progress(0, 100)
        progress(100, 100)
    assert stream.getvalue() == ""
