"""Alerts of real faults reach a webhook; the times of the rules are a twentieth of the real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.command import Desk, Training, end_commands, small_disk
from support.nodes import Machines
from support.quick_rules import FASTER
from support.waiting import wait_until
from support.webhook import Webhook

QUICK = [sys.executable, "-m", "support.quick_rules"]
TESTS = Path(__file__).parents[2]
NVML = TESTS / "support" / "native" / "nvml.cpp"
JOB = """\
[model]
factory = "struck:model"
[data]
factory = "struck:data"
validation_fraction = 0.0
[train]
steps = 100000
global_batch = 4
non_finite = "skip"
learning_rate = 1e-4
[parallel]
dp_replicate = 2
[checkpoint]
every_steps = 20
[cluster]
max_restarts = 30
[observe]
alert_webhook = "env:HOOK"
"""
FORECAST_JOB = """\
[model]
preset = "gpt-10m"
[data]
text = "corpus"
sequence_length = 64
[train]
steps = 100000
global_batch = 4
[parallel]
dp_replicate = 2
[observe]
alert_webhook = "env:HOOK"
"""
FAULTS = {
    "TrainingStalled": "stall",
    "LossNotFinite": "nan",
    "LossSpike": "spike",
    "SlowerThanBefore": "slow",
    "DataWait": "slow data",
    "Straggler": "slow rank",
    "RestartLoop": "death",
    "GpuMemoryRetries": "full GPU",
}
"""Fault by the alert that it must cause."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    shutil.copy(Path(__file__).with_name("struck.py"), tmp_path)
    (tmp_path / "struck.toml").write_text(JOB)
    yield Desk(tmp_path, tmp_path)
    end_commands()


def start(
    desk: Desk, webhook: Webhook, *words: str, below: list[str] | None = None, **environment: str
) -> None:
    """Start a run, as the last words of the command `below`, and wait for some steps."""
    command = [*(below or []), *QUICK, "train", "struck.toml", *words]
    desk.start_program(command, PYTHONPATH=f"{desk.folder}:{TESTS}", HOOK=webhook.url, **environment)
    training = desk.training("runs/struck")
    wait_until(lambda: training.steps_begun() > 20, "some steps")


def test_nothing_fires_in_a_healthy_hour(desk: Desk) -> None:
    words = ("train.validate_every_steps=50", "data.validation_fraction=0.1", "checkpoint.every_steps=50")
    (desk.folder / "struck.toml").write_text(FORECAST_JOB)
    with Webhook() as webhook:
        start(desk, webhook, *words)
        time.sleep(3600 / FASTER)
        assert webhook.bodies == []
        assert desk.training("runs/struck").checkpoints()


def wait_for(webhook: Webhook, *alerts: str) -> None:
    missing = set(alerts)
    while missing:
        event = json.loads(webhook.wait(100))
        if event["is_firing"]:
            missing.discard(event["alert"])


@pytest.mark.parametrize(("alert", "fault"), FAULTS.items())
def test_a_fault_of_the_program_causes_its_alert(alert: str, fault: str, desk: Desk) -> None:
    with Webhook() as webhook:
        start(desk, webhook)
        time.sleep(45)  # a quarter of an hour, with which a spike and slow steps are compared
        assert webhook.bodies == [], "nothing fires before the fault"
        (desk.folder / "fault").write_text(fault)
        wait_for(webhook, alert)


def test_a_run_that_fails(desk: Desk) -> None:
    with Webhook() as webhook:
        start(desk, webhook, "cluster.max_restarts=0")
        (desk.folder / "fault").write_text("death")
        wait_for(webhook, "RunFailed")


@pytest.mark.root
def test_a_disk_that_fills(desk: Desk) -> None:
    with Webhook() as webhook, small_disk(desk.folder / "runs", "64m") as disk:
        start(desk, webhook, "checkpoint.keep=1")
        training = desk.training("runs/struck")
        wait_until(lambda: any(event["kind"] == "checkpoint" for event in training.events), "a checkpoint")
        with filled(disk, 2 * 2**20):
            wait_for(webhook, "DiskFull", "NoRoomForCheckpoint", "CheckpointTooOld")
        end_commands()


@contextmanager
def filled(folder: Path, free_bytes: int) -> Iterator[None]:
    """A file system of which others take what comes free, but for `free_bytes`."""
    is_over = threading.Event()

    def fill() -> None:
        with (folder / "others").open("ab", buffering=0) as others:
            while not is_over.wait(0.05):
                others.write(bytes(max(0, shutil.disk_usage(folder).free - free_bytes)))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.root
def test_memory_of_the_node_that_others_take(desk: Desk) -> None:
    real = Path("/proc/meminfo").read_text()
    meminfo = desk.folder / "meminfo"
    meminfo.write_text(real)
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /proc/meminfo && exec "$@"', str(meminfo)]
    with Webhook() as webhook:
        start(desk, webhook, below=mount)
        meminfo.write_text(re.sub(r"(MemAvailable:\s+)\d+", r"\g<1>100000", real))
        wait_for(webhook, "NodeMemoryLow")


@pytest.mark.root
@pytest.mark.parametrize(
    ("alert", "readings"),
    {
        "GpuIdle": "2 0 0",
        "GpuThrottled": "95 64 0",
        "GpuMemoryErrors": "95 0 1",
        "GpuError": "95 0 0 79",
        "GpuMemoryLow": "95 0 0 0 79",
    }.items(),
)
def test_a_gpu_whose_driver_reports_a_fault(alert: str, readings: str, desk: Desk, tmp_path: Path) -> None:
    library, present = tmp_path / "libnvidia-ml.so.1", tmp_path / "readings"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, NVML], check=True)
    present.write_text("95 0 0")
    device = Path("/dev/nvidia-of-a-test")
    device.touch()
    variables = {
        "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": str(tmp_path),
        "NVML_READINGS": str(present), "DEVICE": str(device),
    }  # fmt: skip
    try:
        with Webhook() as webhook:
            start(desk, webhook, "cluster.device=cpu", **variables)
            time.sleep(10)
            assert webhook.bodies == [], "nothing fires before the fault"
            present.write_text(readings)
            wait_for(webhook, alert)
    finally:
        device.unlink()


def test_steps_that_are_slower_than_the_forecast(desk: Desk) -> None:
    (desk.folder / "struck.toml").write_text(FORECAST_JOB)
    with Webhook() as webhook:
        start(desk, webhook, WANMA_MEASURE_CPU="1")
        time.sleep(20)
        assert webhook.bodies == [], "nothing fires before the fault"
        with stopped_most_of_the_time(desk.training("runs/struck")):
            wait_for(webhook, "SlowerThanForecast")


@contextmanager
def stopped_most_of_the_time(training: Training) -> Iterator[None]:
    """Ranks that a scheduler lets run for a tenth of the time."""
    processes = [process for rank in range(2) if (process := training.rank_process(rank)) is not None]
    is_over = threading.Event()

    def hold() -> None:
        while not is_over.wait(0.1):
            for signal_number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.0)):
                for process in processes:
                    os.kill(process, signal_number)
                time.sleep(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_node_that_is_gone(desk: Desk) -> None:
    with Webhook() as webhook:
        paths = f"{desk.folder}:{TESTS}"
        words = ("struck.toml", "cluster.nodes=2", "parallel.dp_replicate=4", "cluster.max_restarts=3")
        machines = Machines(desk, "runs/struck", *words, PYTHONPATH=paths, HOOK=webhook.url)
        machines.start(0)
        machines.start(1)
        wait_until(lambda: machines.training.steps_begun() > 20, "some steps")
        machines.lose(1)
        wait_for(webhook, "RankDown")
