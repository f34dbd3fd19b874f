"""Turns of a contender with a gate: it is stopped between its steps, and its clock stands still."""

import importlib
import sys
from pathlib import Path

import pytest

from wanma.bench.turns.own_clock import OwnClock

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
    log = folder / f"output of {name}" / "output.log"
    return importlib.import_module("benchmarks.common").Start(command, {}, log)


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
    clocks, meter = turns.take_turns_by_steps(starts, gate, 60.0)
    mine, others = (list(turns.turns_between(clock, (0.0, 60.0))) for clock in clocks)
    assert len(mine) == 1 + 5 + 1, "three steps at once, then one each; in the last it ends"
    assert len(others) == 6
    ours = times(tmp_path, "ours")
    assert len(ours) == 8
    assert meter.foreign_cpu(mine[0][0], others[-1][1]) is not None
    for number, ((began, ended), (other_began, other_ended)) in enumerate(zip(mine, others, strict=False)):
        made = [time for time in ours if began < time < ended]
        assert len(made) == (3 if number == 0 else 1)
        assert other_began >= ended
        assert not any(other_began < time < other_ended for time in ours)
        assert other_ended - other_began >= ended - began - 0.01
        if number:
            assert ended - began >= 0.05, "the whole of a step"


def test_the_one_beside_it_may_not_end_first(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours", STEP),
        "beside": start(turns, tmp_path, "beside", count=1),
    }
    gate = importlib.import_module("benchmarks.mixed.gate").Gate(tmp_path / "ours.gate", ranks=1, first=3)
    with pytest.raises(importlib.import_module("benchmarks.common").BenchmarkError, match="beside was over"):
        turns.take_turns_by_steps(starts, gate, 60.0)


def test_a_clock_stands_still_while_the_other_contender_runs(turns):
    # They run for 4 seconds each: ours, theirs, theirs, ours, ours, theirs.
    clocks = [
        OwnClock(0.0, [(4.0, 12.0), (20.0, 24.0)]),
        OwnClock(4.0, [(12.0, 20.0), (24.0, 30.0)]),
    ]
    # On their own clocks: steps of 2 seconds each, and of 4; two of theirs go on through the other's turns.
    ends = {"ours": [2.0, 4.0, 14.0, 16.0, 18.0, 20.0], "theirs": [5.0, 9.0, 21.0]}

    def foreign(began, ended):
        return {(0.0, 4.0): None, (12.0, 20.0): 0.5}.get((began, ended), 0.0)

    first, second = turns.blocks(clocks, ends, 1, 3.0, foreign)
    assert (first.steps, second.steps) == ({"ours": 1.5, "theirs": 0.75}, {"ours": 1.5, "theirs": 0.75})
    # 8 seconds of a turn with half a CPU beside it, of the 4 + 8 + 8 and the 8 + 8 seconds of their turns.
    assert (first.foreign_cpu, second.foreign_cpu) == (4 / 20, 4 / 16)
    halves = turns.blocks(clocks, ends, 1, 1.0, foreign)
    assert [block.steps["ours"] for block in halves] == [0.5] * 7
    assert [block.steps["theirs"] for block in halves] == [0.25] * 7
    assert [block.foreign_cpu for block in halves] == pytest.approx([0.0, 0.0, *[4 / 16] * 4, 4 / 12])
    assert turns.blocks(clocks, ends, 1, 9.0, foreign) == []


def test_a_contender_that_fails_is_an_error_with_its_last_words(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours", "raise SystemExit('no more hay')"),
        "beside": start(turns, tmp_path, "beside", count=100_000),
    }
    gate = importlib.import_module("benchmarks.mixed.gate").Gate(tmp_path / "ours.gate", ranks=1)
    with pytest.raises(importlib.import_module("benchmarks.common").BenchmarkError, match="no more hay"):
        turns.take_turns_by_steps(starts, gate, 60.0)
