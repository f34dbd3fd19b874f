"""What the benchmark of unlike ranks makes of its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.common import BenchmarkError
from benchmarks.mixed.contenders import CONTENDERS, Setting, Training, pace, together
from benchmarks.mixed.report import ratios, recoveries, report, steps_to_recover

from wanma.job.sections import Job

SETTING = Setting(quota=30, steps=30, settle=20, layers=4, hidden=256, sequence=128, batch=26, micro_batch=4)


PLANNED = (21, 5)


def test_the_first_guess_is_in_proportion_to_the_cores() -> None:
    assert SETTING.by_quota == (20, 6)
    assert Setting(**{**vars(SETTING), "quota": 50}).by_quota == (17, 9)


def test_a_ranks_pace_is_what_a_sample_takes_and_what_a_step_takes_whatever_its_samples() -> None:
    steps = [{"step_seconds": 1.0, "phases": {"forward_backward": 0.8}}] * 3
    found = pace(steps, 4)
    assert (found.row_seconds, found.fixed_seconds) == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_is_a_job(contender: str) -> None:
    import tomllib

    jobs = [Job.model_validate(tomllib.loads(SETTING.job(contender, PLANNED, rank))) for rank in (0, 1)]
    assert jobs[0].train.steps == 51
    assert [job.train.global_batch for job in jobs] == ([21, 5] if contender == "apart" else [26, 26])
    assert jobs[0].parallel.batch_shares == ([21, 5] if contender == "planned" else [])
    assert jobs[0].parallel.balance == ("on" if contender in ("dynamic", "changed") else "off")


def lines(first: float, seconds: float, tokens: int, count: int) -> list[dict[str, float]]:
    return [
        {"time": first + seconds * step, "step_seconds": seconds, "tokens_per_second": tokens / seconds}
        for step in range(1, count + 1)
    ]


def test_the_ideal_is_the_sum_of_what_runs_side_by_side() -> None:
    assert together([lines(0, 0.5, 100, 20), lines(1, 1.0, 60, 12)], settle=4) == pytest.approx(260)
    with pytest.raises(BenchmarkError, match="hardly overlapped"):
        together([lines(0, 0.5, 100, 20), lines(50, 1.0, 60, 12)], settle=4)


def test_a_change_is_recovered_from_when_three_steps_in_a_row_are_fast_enough() -> None:
    seconds = [1.0] * 5 + [1.5, 3.0, 3.0, 1.0, 3.0, 1.2, 1.2, 1.2, 1.2]
    sample = {"step_seconds": seconds, "changed_after": 5, "step_tokens": 120}
    assert steps_to_recover(sample, 100.0) == 5
    assert steps_to_recover(sample, 101.0) is None


def test_the_report_sets_every_contender_beside_the_ideal_of_its_own_round() -> None:
    def sample(speed: float, **more: Any) -> dict[str, Any]:
        return {
            "tokens_per_second": speed,
            "planned_shares": [21, 5],
            "moves": [],
            "disturbed": False,
            **more,
        }

    changed = sample(85.0, step_seconds=[1.0] * 9, changed_after=3, step_tokens=95)
    one = {
        "apart": sample(100),
        "even": sample(50),
        "planned": sample(95),
        "dynamic": sample(92),
        "changed": changed,
    }
    two = {**one, "apart": sample(200)}
    piece = {
        "settings": vars(SETTING),
        "pairs": [{**taken, "date": "2026-01-01", "commit": "abc"} for taken in (one, two)],
        "environment": {"machine": "a machine", "versions": {"torch": "2.13"}},
    }
    assert ratios(piece, "even") == [0.5, 0.25]
    assert recoveries(piece) == [1, None]
    assert "round by round: 1, never" in report([piece])
    assert report([]) == "Nothing has been measured yet.\n"
    taken = {"apart": sample(100), "planned": sample(95), "date": "2026-01-01", "commit": "abc"}
    disturbed = {**taken, "planned": {**sample(1), "disturbed": True}}
    in_turns = {**piece, "pairs": [], "turns": {"planned": [taken, disturbed]}}
    assert "planned shares 0.95 (0.95–0.95) of 1 rounds, shares [21, 5]" in report([in_turns])


def test_the_ideals_two_trainings_are_one_contender(tmp_path: Path) -> None:
    apart, even = (Training(SETTING, name, PLANNED, tmp_path) for name in ("apart", "even"))
    assert [run.path.name for run in apart.runs] == ["first", "second"]
    assert apart.command[2].count("wanma train") == 2
    assert len(even.runs) == 1
    assert [SETTING.samples("apart", PLANNED, rank) for rank in (0, 1)] == list(PLANNED)
