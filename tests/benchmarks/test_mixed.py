"""Evaluation of the samples of the benchmark of unlike ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.mixed.contenders import (
    CONTENDERS,
    IDEAL,
    NEAR_SECONDS,
    Setting,
    Stream,
    Training,
    beside_the_ideal,
    pace,
    rounds,
)
from benchmarks.mixed.report import ratios, recoveries, report, steps_to_recover, summary

from wanma.bench.turns.own_clock import OwnClock
from wanma.job.sections.job import Job

SETTING = Setting(quota=30, steps=30, settle=20, layers=4, hidden=256, sequence=128, batch=26, micro_batch=4)


PLANNED = (21, 5)


def test_the_first_guess_is_in_proportion_to_the_cores() -> None:
    assert SETTING.by_quota == (20, 6)
    assert Setting(**{**vars(SETTING), "quota": 50}).by_quota == (17, 9)


def test_a_ranks_pace_is_what_a_sample_takes_and_what_a_step_takes_whatever_its_samples() -> None:
    steps = [{"step_seconds": 1.0, "phases": {"forward_backward": 0.8}}] * 3
    found = pace(steps, 4)
    assert (found.seconds_per_row, found.fixed_seconds) == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize("contender", [IDEAL, *CONTENDERS])
def test_every_contender_is_a_job(contender: str) -> None:
    import tomllib

    jobs = [Job.model_validate(tomllib.loads(SETTING.job(contender, PLANNED, 51, rank))) for rank in (0, 1)]
    assert jobs[0].train.steps == 51
    assert [job.train.global_batch for job in jobs] == ([21, 5] if contender == IDEAL else [26, 26])
    assert jobs[0].parallel.batch_shares == ([21, 5] if contender == "planned" else [])
    assert jobs[0].parallel.load_balancing == ("on" if contender in ("dynamic", "changed") else "off")


def test_the_ideals_two_trainings_are_one_contender(tmp_path: Path) -> None:
    apart, even = (Training(SETTING, name, PLANNED, tmp_path, 51) for name in (IDEAL, "even"))
    assert [run.path.name for run in apart.runs] == ["first", "second"]
    assert apart.command[2].count("wanma train") == 2
    assert len(even.runs) == 1
    assert even.command[2].count("benchmarks.mixed.gated train") == 1
    assert [SETTING.samples(IDEAL, PLANNED, rank) for rank in (0, 1)] == list(PLANNED)


def test_a_contender_is_set_beside_the_sum_of_the_ideals_two_runs() -> None:
    """A step a turn, as long as it takes: 100 tokens a second beside 60 + 40, after ten steps 50."""
    own, turns = 0.0, []
    for step in range(40):
        seconds = 1.0 if step < 10 else 2.0
        turns.append((own, own + seconds, own + 2 * seconds))
        own += 2 * seconds
    clocks = [
        OwnClock(0.0, [(middle, end) for _, middle, end in turns]),
        OwnClock(1.0, [(begin, middle) for begin, middle, _ in (*turns[1:], (own, own + 1, own + 1))]),
    ]
    first, second = [], []
    for _, middle, end in turns:  # of 0.5 s, and of 1 s
        first += [middle + 0.5 * number for number in range(1, 2 * int(end - middle) + 1)]
        second += [middle + 1.0 * number for number in range(1, int(end - middle) + 1)]
    streams = {
        "even 0": Stream(0, [middle for _, middle, _ in turns], 100),
        "apart 0": Stream(1, first, 30),
        "apart 1": Stream(1, second, 40),
    }
    found = rounds(clocks, streams, 10, lambda *_: 0.0)
    assert len(found) == 12, "60 seconds after ten steps, in blocks of five"
    assert all((one["tokens_per_second"], one["ideal"]) == (50.0, 100.0) for one in found)
    steps = beside_the_ideal(clocks, streams, 10, lambda *_: 0.0)
    assert [step["seconds"] for step in steps] == [2.0] * 30
    assert [step["ideal"] for step in steps] == pytest.approx([100.0] * 30)
    assert NEAR_SECONDS < 10, "else the blocks before would count"


def step(seconds: float, *, disturbed: bool = False) -> dict[str, Any]:
    return {"seconds": seconds, "ideal": 100.0, "foreign_cpu": 0.0, "disturbed": disturbed}


def test_a_change_is_recovered_from_when_three_steps_in_a_row_are_fast_enough() -> None:
    steps = [step(seconds) for seconds in (3.0, 3.0, 1.0, 3.0, 1.3, 1.4, 1.3, 1.3)]
    assert steps_to_recover(steps, 120) == 5
    assert steps_to_recover(steps, 119) is None


def test_the_report_tells_of_rounds_and_runs_that_nothing_disturbed() -> None:
    def taken(speed: float, **more: Any) -> dict[str, Any]:
        quiet = {"tokens_per_second": speed, "ideal": 100.0, "foreign_cpu": 0.0, "disturbed": False}
        rounds = [quiet, {**quiet, "tokens_per_second": 1.0, "disturbed": True}]
        run = {"planned_shares": [21, 5], "moves": [], "rounds": rounds}
        return {**run, "date": "2026-01-01", "commit": "abc", **more}

    tokens = SETTING.batch * SETTING.sequence
    fast, slow = step(tokens / 95), step(tokens / 50)
    changed = [
        taken(85.0, moves=[[25, [21, 5]]], changed_after=20, steps=[slow, fast, fast, fast]),
        taken(85.0, changed_after=21, steps=[slow] * 4),
        taken(85.0, changed_after=22, steps=[fast, step(1.0, disturbed=True), fast]),
    ]
    piece = {
        "settings": vars(SETTING),
        "pairs": [],
        "turns": {"even": [taken(50.0)], "planned": [taken(95.0), taken(93.0)], "changed": changed},
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
    }
    assert ratios(piece, "planned") == [0.95, 0.93]
    assert recoveries(piece) == [2, None], "the third was disturbed"
    told = report([piece])
    assert "run by run: 2, never (goal: 20" in told
    assert "| planned shares | 0.94 | 2 | 2 | [21, 5] |" in told
    assert summary(piece, "even") == "  even: 0.50 of the ideal, 1 rounds"
    assert summary(piece, "dynamic") == "  dynamic: no undisturbed round yet"
    assert report([]) == "Nothing has been measured yet.\n"
