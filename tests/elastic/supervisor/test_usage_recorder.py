"""Record of what a script's ranks use on a node."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from wanma.elastic.supervisor import usage_recorder
from wanma.elastic.supervisor.usage_recorder import NodeGpus, UsageRecorder, needed_memory_bytes
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.metrics.gpu import GpuReading


class Reader:
    """Reader of two GPUs, one of which reports its memory alone."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> list[GpuReading]:
        self.reads += 1
        return [GpuReading(0.97, 60.0, False, 3e9), GpuReading(None, None, None, 4e9)]


def run_until(loop: EventLoop, done: Any) -> None:
    assert loop.run_until(done, time.monotonic() + 20)


def test_the_use_of_ranks_and_gpus_is_recorded_every_few_seconds(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SAMPLE_SECONDS", "SAMPLE_INTERVAL_SECONDS"):
        monkeypatch.setattr(usage_recorder, name, 0.01)
    monkeypatch.setattr(usage_recorder, "NodeGpus", lambda loop: NodeGpus(loop, Reader))
    monkeypatch.setattr(usage_recorder, "used_gpus", lambda *_: [1])
    monkeypatch.setenv("WANMA_NODE_NAME", "a7")
    run = RunDirectory(tmp_path)
    run.create()

    def records() -> list[dict[str, Any]]:
        file = run.node_usage(1)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def poll() -> bool:
        loop.call_later(0.01, lambda: None)
        return any("gpus" in record for record in records())

    began = time.time()
    recorder = UsageRecorder(run, 1, None, loop, lambda: {5: os.getpid()}, lambda: {5: {"cached_bytes": 1e9}})
    run_until(loop, poll)
    recorder.close()
    newest = records()[-1]
    assert newest["time"] >= began
    assert newest["host"] == "a7"
    assert [rank["rank"] for rank in newest["ranks"]] == [5]
    assert newest["ranks"][0]["cpu_seconds"] > 0
    expected = [(0, 0.97, 3e9), (1, None, 4e9)]
    assert [(gpu["gpu"], gpu["utilization"], gpu["memory_bytes"]) for gpu in newest["gpus"]] == expected
    assert [gpu["rank"] for gpu in newest["gpus"]] == [None, 5]
    assert [gpu["needed_memory_bytes"] for gpu in newest["gpus"]] == [None, 3e9]


def test_of_a_script_nobody_knows_what_pytorch_can_free() -> None:
    assert needed_memory_bytes(GpuReading(0.9, 60.0, False, 3e9), {"rank": 5}) is None


def test_the_records_of_a_long_run_become_fewer(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SAMPLE_SECONDS", "SAMPLE_INTERVAL_SECONDS"):
        monkeypatch.setattr(usage_recorder, name, 0.001)
    monkeypatch.setattr(usage_recorder, "RECORDS_AT_FULL_RATE", 1)
    run, readings = RunDirectory(tmp_path), []
    run.create()
    recorder = UsageRecorder(run, 0, None, loop, lambda: {5: os.getpid()}, on_event=readings.append)
    run_until(loop, lambda: len(readings) > 60)
    recorder.close()
    assert 1 < len(run.node_usage(0).read_text().splitlines()) < 20


def test_a_driver_that_hangs_is_asked_once_and_holds_up_nothing(loop: EventLoop) -> None:
    release, opened = threading.Event(), []

    def hang() -> None:
        opened.append(threading.current_thread())
        release.wait(60)

    gpus = NodeGpus(loop, hang)
    for _ in range(3):
        gpus.request()
    assert gpus.readings == ()
    release.set()
    run_until(loop, lambda: not loop._selector.get_map())
    assert len(opened) == 1
    assert opened[0] is not threading.current_thread()


def test_without_gpus_or_after_an_error_of_the_driver_nobody_asks_again(loop: EventLoop) -> None:
    opened: list[str] = []

    def fail() -> None:
        opened.append("failed")
        raise RuntimeError("GPU is lost")

    for open_reader in (lambda: opened.append("no GPU"), fail):
        gpus = NodeGpus(loop, open_reader)
        gpus.request()
        run_until(loop, lambda: not loop._selector.get_map())
        gpus.request()
        assert gpus.readings == ()
    assert opened == ["no GPU", "failed"]


def test_a_reader_stays_open(loop: EventLoop) -> None:
    reader, opened = Reader(), []

    def open_reader() -> Any:
        opened.append(True)
        return reader

    gpus = NodeGpus(loop, open_reader)
    for number in (1, 2):
        gpus.request()
        run_until(loop, lambda number=number: reader.reads == number and not loop._selector.get_map())
    assert len(gpus.readings) == 2
    assert opened == [True]


def test_what_cannot_be_read_costs_the_record_and_not_the_run(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SAMPLE_SECONDS", "SAMPLE_INTERVAL_SECONDS"):
        monkeypatch.setattr(usage_recorder, name, 0.001)
    calls: list[int] = []

    def read(_: Path) -> dict[str, Any]:
        calls.append(len(calls))
        if len(calls) < 3:
            raise PermissionError("/proc/net/dev")
        return {"cpus": 2}

    monkeypatch.setattr(usage_recorder, "read_node_usage", read)
    run, readings = RunDirectory(tmp_path), []
    run.create()
    recorder = UsageRecorder(run, 0, None, loop, lambda: {5: os.getpid()}, on_event=readings.append)
    run_until(loop, lambda: bool(readings))
    recorder.close()
    assert len(calls) >= 3
    assert readings[0]["cpus"] == 2


def test_a_store_that_does_not_answer_holds_up_nothing(
    loop: EventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_recorder, "FIRST_SAMPLE_SECONDS", 0.001)
    release, asked, ticks = threading.Event(), threading.Event(), []

    def hang(_: Path) -> dict[str, Any]:
        asked.set()
        release.wait(60)
        return {}

    monkeypatch.setattr(usage_recorder, "read_node_usage", hang)
    run = RunDirectory(tmp_path)
    run.create()
    recorder = UsageRecorder(run, 0, None, loop, dict)
    run_until(loop, asked.is_set)
    loop.call_later(0.001, lambda: ticks.append("heartbeat"))
    run_until(loop, lambda: bool(ticks))
    recorder.close()
    file = recorder._file
    assert file is not None, "a thread that writes late must not meet another file of the same number"
    release.set()
    run_until(loop, lambda: recorder._file is None)
    assert len(run.node_usage(0).read_text().splitlines()) == 1


def test_gpus_of_ranks_are_those_that_they_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process, opened in (("7", "/dev/nvidia2"), ("8", "/dev/null")):
        (tmp_path / process / "fd").mkdir(parents=True)
        (tmp_path / process / "fd" / "3").symlink_to(opened)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert usage_recorder.used_gpus(8, [7], tmp_path) == (2,)
    assert usage_recorder.used_gpus(8, [7, 8, 9], tmp_path) == (2, 5)
    assert usage_recorder.used_gpus(8, [8], tmp_path) == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert usage_recorder.used_gpus(8, [7, 8], tmp_path) == (0, 1)
