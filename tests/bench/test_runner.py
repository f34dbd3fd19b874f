"""Order, end and continuation of the rounds."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.benchmark_results import measurement
from support.no_meter import NoMeter
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.programs.contender import Contender
from wanma.bench.runner import MAX_FAILURES, Rule, Surroundings, describe, run_rounds, spread_order


def contender(name: str, text: str = "") -> Contender:
    return Contender(name, "command", command=(sys.executable, "-S", "-c", text))


def surroundings(is_precise: bool = False, disturbances: tuple[str, ...] = ()) -> Surroundings:
    return Surroundings(NoMeter, lambda _: disturbances, lambda _measurements, _name, _precision: is_precise)


def rounds(
    contenders: Sequence[Contender],
    folder: Path,
    rule: Rule,
    around: Surroundings | None = None,
    earlier: Sequence[Measurement] = (),
    lines: list[str] | None = None,
) -> tuple[list[tuple[int, str]], list[Measurement]]:
    saved: list[Measurement] = []
    done = run_rounds(
        contenders,
        rule,
        None,
        folder,
        around or surroundings(),
        earlier=earlier,
        save=saved.append,
        progress=([] if lines is None else lines).append,
    )
    assert done == [*earlier, *saved]
    return [(one.round, one.contender) for one in saved], done


def test_every_second_round_is_in_reverse(tmp_path: Path) -> None:
    order, _ = rounds([contender("a"), contender("b")], tmp_path, Rule(rounds=3))
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_of_many_contenders_the_ends_come_first() -> None:
    assert spread_order(5) == [0, 4, 2, 1, 3]
    assert [spread_order(count) for count in (0, 1, 2)] == [[], [0], [0, 1]]
    assert sorted(spread_order(17)) == list(range(17))


def test_a_benchmark_that_was_killed_goes_on(tmp_path: Path) -> None:
    contenders = [contender("a"), contender("b")]
    _, done = rounds(contenders, tmp_path, Rule(rounds=3))
    order, _ = rounds(contenders, tmp_path, Rule(rounds=3), earlier=done[:3])
    assert order == [(1, "a"), (2, "a"), (2, "b")]


def test_narrow_intervals_end_it_after_the_fewest_rounds(tmp_path: Path) -> None:
    order, _ = rounds([contender("a")], tmp_path, Rule(rounds=9, min_rounds=2), surroundings(is_precise=True))
    assert len(order) == 2


def test_a_disturbed_measurement_is_repeated(tmp_path: Path) -> None:
    order, done = rounds(
        [contender("a")], tmp_path, Rule(rounds=2), surroundings(disturbances=("others used 1.0 CPUs",))
    )
    assert len(order) == 10
    assert not any(one.counts for one in done)


def test_a_contender_that_fails_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    order, _ = rounds([contender("bad", "raise SystemExit(1)"), contender("good")], tmp_path, Rule(rounds=4))
    assert [name for _, name in order].count("bad") == MAX_FAILURES
    assert [name for _, name in order].count("good") == 4


def test_nothing_starts_that_the_budget_does_not_hold(tmp_path: Path) -> None:
    slow = contender("slow", "import time; time.sleep(0.5)")
    lines: list[str] = []
    order, done = rounds([slow], tmp_path, Rule(rounds=9, budget_seconds=1.3), lines=lines)
    assert 1 <= len(order) <= 2
    assert len(lines) == len(order) + 1  # and that is said once
    with pytest.raises(dataclasses.FrozenInstanceError):
        done[0].round = 3  # type: ignore[misc]


def test_steps_that_give_no_step_time_are_told_as_the_execution_ends() -> None:
    steady = measurement("a", 0, 1.0, steps=30)
    slower = [dataclasses.replace(step, seconds=1 + step.step / 30) for step in steady.steps]
    for one, is_told in (
        (steady, False),
        (measurement("a", 0, 1.0, steps=19), True),
        (dataclasses.replace(steady, steps=tuple(slower)), True),
    ):
        assert ("no step time" in describe(one)) is is_told
