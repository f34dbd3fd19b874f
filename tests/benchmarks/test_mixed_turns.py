"""Turns of a contender with a gate: it is stopped between its steps, and its clock stands still."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNT = """
import sys, time
with open(sys.argv[1], "w") as file:
    for _ in range(int(sys.argv[2])):
        time.sleep(0.01)
        print(time.time(), file=file, flush=True)
"""


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.mixed.turns")


def start(turns, folder, name, program=COUNT, count=100):
    # A child of a child, as ranks are.
    child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    command = [sys.executable, "-c", child, program, str(folder / name), str(count), str(ROOT)]
    return importlib.import_module("benchmarks.common").Start(command, {}, folder / f"{name}.log")


STEP = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
import time
from benchmarks.mixed.gate import Gate
gate = Gate(Path(sys.argv[1] + ".gate"), ranks=1)
with open(sys.argv[1], "w") as file:
    for step in range(1, int(sys.argv[2]) + 1):
        time.sleep(0.05)
        print(time.time(), file=file, flush=True)
        gate.wait(0, step)
"""


def times(folder, name):
    return [float(line) for line in (folder / name).read_text().split()]


def test_a_contender_with_a_gate_is_stopped_between_its_steps(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours", STEP, count=8),
        "beside": start(turns, tmp_path, "beside", count=100_000),
    }
    gate = importlib.import_module("benchmarks.mixed.gate").Gate(tmp_path / "ours.gate", ranks=1, first=3)
    pairs = turns.take_turns_by_steps(starts, gate, 60.0)
    assert len(pairs) == 1 + 5, "three steps at once, then one each; after the last there is no other's turn"
    ours = times(tmp_path, "ours")
    assert len(ours) == 8
    for number, (mine, other) in enumerate(pairs):
        made = [time for time in ours if mine.began < time < mine.ended]
        assert len(made) == (3 if number == 0 else 1)
        assert other.began >= mine.ended
        assert not any(other.began < time < other.ended for time in ours)
        assert other.ended - other.began >= mine.ended - mine.began - 0.01
        if number:
            assert mine.ended - mine.began >= 0.05, "the whole of a step"


def test_the_one_beside_it_may_not_end_first(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours", STEP),
        "beside": start(turns, tmp_path, "beside", count=1),
    }
    gate = importlib.import_module("benchmarks.mixed.gate").Gate(tmp_path / "ours.gate", ranks=1, first=3)
    with pytest.raises(importlib.import_module("benchmarks.common").BenchmarkError, match="beside was over"):
        turns.take_turns_by_steps(starts, gate, 60.0)


def test_a_clock_stands_still_while_the_other_contender_runs(turns):
    def turn(name, began, foreign=0.0):
        return turns.Turn(name, began, began + 4.0, foreign)

    pairs = [
        (turn("ours", 0.0), turn("theirs", 4.0)),
        (turn("ours", 12.0, 0.5), turn("theirs", 8.0)),
        (turn("ours", 16.0), turn("theirs", 20.0)),
    ]
    # On their own clocks: steps of 2 seconds each, and of 4; two of theirs go on through the other's turns.
    ends = {"ours": [2.0, 4.0, 14.0, 16.0, 18.0, 20.0, 30.0], "theirs": [5.0, 9.0, 21.0, 40.0]}
    first, second = turns.blocks(pairs, ends, 1, 3.0)
    assert (first.steps, second.steps) == ({"ours": 1.5, "theirs": 0.75}, {"ours": 1.5, "theirs": 0.75})
    assert (first.foreign_cpu["ours"], second.foreign_cpu["ours"]) == (0.5, 0.5)
    assert first.foreign_cpu["theirs"] == 0.0
    halves = turns.blocks(pairs, ends, 1, 1.0)
    assert [block.steps["ours"] for block in halves] == [0.5] * 7
    assert [block.steps["theirs"] for block in halves] == [0.25] * 7
    assert turns.blocks(pairs, ends, 1, 9.0) == []


def test_a_contender_that_fails_is_an_error_with_its_last_words(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours", "raise SystemExit('no more hay')"),
        "beside": start(turns, tmp_path, "beside", count=100_000),
    }
    gate = importlib.import_module("benchmarks.mixed.gate").Gate(tmp_path / "ours.gate", ranks=1)
    with pytest.raises(importlib.import_module("benchmarks.common").BenchmarkError, match="no more hay"):
        turns.take_turns_by_steps(starts, gate, 60.0)
