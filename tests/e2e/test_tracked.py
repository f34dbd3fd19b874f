"""A training whose records a tracker of the user's own gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import Desk, end_commands
from support.waiting import wait_until

TRACKER = """
import json, time
from pathlib import Path

FILE = Path(__file__).with_name("tracked.jsonl")

class Slow:
    def open(self, run):
        while not FILE.with_name("answer").exists():
            time.sleep(0.05)
        self.write({"name": run.name, "steps": run.settings["train.steps"]})

    def log(self, scalars):
        for entry in scalars:
            self.write({"step": entry.step, **entry.values})

    def finish(self, outcome):
        self.write({"outcome": outcome})

    def write(self, value):
        with FILE.open("a") as file:
            file.write(json.dumps(value) + "\\n")
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path, tmp_path)
    end_commands()


def test_a_slow_tracker_gets_all_records_and_the_training_does_not_wait(desk: Desk) -> None:
    (desk.folder / "own_tracker.py").write_text(TRACKER)
    file = desk.folder / "tracked.jsonl"
    options = ("observe.trackers=[own_tracker:Slow]", "train.steps=4")
    running = desk.start("train", "text.toml", *options)
    wait_until(lambda: desk.training("runs/text").steps_begun() >= 4, "the steps")
    (desk.folder / "answer").touch()  # the training did not wait for it
    running.end().check(0)
    wait_until(lambda: "outcome" in file.read_text(), "the end")
    first, *steps, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert first == {"name": "text", "steps": "4"}
    assert last == {"outcome": "finished"}
    recorded = [(record["step"], record["loss"]) for record in desk.training("runs/text").metrics]
    assert [(step["step"], step["train/loss"]) for step in steps if "train/loss" in step] == recorded
