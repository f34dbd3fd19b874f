"""Alerts of real faults reach a webhook; the times of the rules are a twentieth of the real ones."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.command import Desk, end_commands, small_disk
from support.nodes import Machines
from support.prometheus import wait_until
from support.webhook import Webhook

QUICK = [sys.executable, "-m", "support.quick_rules"]
TESTS = Path(__file__).parents[2]
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
FAULTS = {
    "TrainingStalled": "stall",
    "LossNotFinite": "nan",
    "LossSpike": "spike",
    "SlowerThanBefore": "slow",
    "DataWait": "slow data",
    "Straggler": "slow rank",
    "RestartLoop": "death",
}
"""Fault by the alert that it must cause."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    shutil.copy(Path(__file__).with_name("struck.py"), tmp_path)
    (tmp_path / "own.toml").write_text(JOB)
    yield Desk(tmp_path, tmp_path)
    end_commands()


def start(desk: Desk, webhook: Webhook, *words: str) -> Callable[[], int]:
    """Start a run; return the number of its steps so far."""
    paths = f"{desk.folder}:{TESTS}"
    desk.start_program([*QUICK, "train", "own.toml", *words], PYTHONPATH=paths, HOOK=webhook.url)
    training = desk.training("runs/own")
    wait_until(lambda: training.steps_begun() > 20, "some steps")
    return training.steps_begun


def wait_for(webhook: Webhook, alert: str) -> None:
    seen = []
    while True:
        event = json.loads(webhook.wait(100))
        seen.append((event["alert"], event["is_firing"]))
        if (alert, True) in seen:
            return


@pytest.mark.parametrize(("alert", "fault"), FAULTS.items())
def test_a_fault_of_the_program_causes_its_alert(alert: str, fault: str, desk: Desk) -> None:
    with Webhook() as webhook:
        start(desk, webhook)
        time.sleep(15)  # the past that a spike and slow steps are compared with
        assert webhook.bodies == [], "nothing fires before the fault"
        (desk.folder / "fault").write_text(fault)
        wait_for(webhook, alert)


@pytest.mark.root
def test_a_disk_that_fills(desk: Desk) -> None:
    with Webhook() as webhook, small_disk(desk.folder / "runs", "8m") as disk:
        start(desk, webhook, "checkpoint.keep=1")
        (disk / "others").write_bytes(bytes(int(7.5 * 2**20)))
        wait_for(webhook, "DiskFull")
        end_commands()


def test_a_node_that_is_gone(desk: Desk) -> None:
    with Webhook() as webhook:
        paths = f"{desk.folder}:{TESTS}"
        words = ("own.toml", "cluster.nodes=2", "parallel.dp_replicate=4", "cluster.max_restarts=3")
        machines = Machines(desk, "runs/own", *words, PYTHONPATH=paths, HOOK=webhook.url)
        machines.start(0)
        machines.start(1)
        wait_until(lambda: machines.training.steps_begun() > 20, "some steps")
        machines.lose(1)
        wait_for(webhook, "RankDown")
