"""Contenders in turns: one runs while the other is stopped, and only whole steps of a turn count."""

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
    return importlib.import_module("benchmarks.turns")


def start(turns, folder, name, program=COUNT, count=100):
    # A child of a child, as ranks are.
    child = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    command = [sys.executable, "-c", child, program, str(folder / name), str(count)]
    return turns.Start(command, {}, folder / f"{name}.log")


def times(folder, name):
    return [float(line) for line in (folder / name).read_text().split()]


def test_one_contender_runs_while_the_other_is_stopped(turns, tmp_path):
    starts = {name: start(turns, tmp_path, name) for name in ("ours", "theirs")}
    pairs = turns.take_turns(starts, 0.2, 60.0)
    assert len(pairs) >= 2
    for ours, theirs in pairs:
        assert (ours.name, theirs.name) == ("ours", "theirs")
        for mine, other in ((ours, "theirs"), (theirs, "ours")):
            assert not any(mine.began + 0.02 < time < mine.ended - 0.02 for time in times(tmp_path, other))
    # Second before first in every other pair, so that two turns of one follow each other.
    assert [ours.began < theirs.began for ours, theirs in pairs[:2]] == [True, False]
    assert len(times(tmp_path, "ours")) == len(times(tmp_path, "theirs")) == 100, "both came to their ends"
    assert sum(turns.steps_within(pair[0], times(tmp_path, "ours"), 1)[0] for pair in pairs) > 10


def test_only_whole_steps_of_a_turn_count(turns):
    turn = turns.Turn("ours", 10.0, 20.0, 0.0)
    assert turns.steps_within(turn, [5.0, 9.0, 11.0, 13.0, 19.0, 21.0], 1) == (2, 8.0)
    assert turns.steps_within(turn, [5.0, 9.0, 11.0, 13.0, 19.0, 21.0], 4) == (1, 6.0)
    assert turns.steps_within(turn, [9.0, 21.0], 1) == (0, 0.0)


def test_a_contender_that_fails_is_an_error_with_its_last_words(turns, tmp_path):
    starts = {
        "ours": start(turns, tmp_path, "ours"),
        "theirs": start(turns, tmp_path, "theirs", "raise SystemExit('no more hay')"),
    }
    with pytest.raises(importlib.import_module("benchmarks.common").BenchmarkError, match="no more hay"):
        turns.take_turns(starts, 0.2, 60.0)
