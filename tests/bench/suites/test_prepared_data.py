"""Shipped suites that train on made images: their target, and what a result says of their data."""

from __future__ import annotations

from wanma.bench.benchmark import data_sentence
from wanma.bench.programs.target import Progress
from wanma.bench.suites.suite_file import find_suite
from wanma.bench.suites.suite_of_job import read_suite_or_job


def test_the_suite_of_images_has_a_target_that_its_synthetic_images_reach() -> None:
    """Losses of a run on 1 rank, and on 4 alike: nothing is to be gained after 44 steps."""
    path = find_suite("cifar10")
    suite, rule = read_suite_or_job(path)
    assert suite.target is not None
    assert rule.steps is not None
    losses = [2.29, 2.26, 2.11, 1.72, 1.07, 0.39, 0.055, 0.007]  # at steps 1, 7, 13, ... 43
    points = [
        Progress(float(step), 128.0 * step, {"loss": losses[min(step // 6, len(losses) - 1)]})
        for step in range(1, rule.steps + 1)
    ]
    reached = suite.target.first_reached(points)
    assert reached is not None
    assert 36 <= reached.time <= 44
    assert suite.target.first_reached(points[:120]) == reached, "an execution ends soon after it"
    assert read_suite_or_job(path, is_smoke=True)[0].target is None, "too few steps"


def test_synthetic_images_are_told_and_those_of_the_user_not() -> None:
    path = find_suite("cifar10")
    assert "synthetic" in data_sentence(read_suite_or_job(path)[0])
    assert data_sentence(read_suite_or_job(path, overrides=["data.images=/images"])[0]) == ""
    assert data_sentence(read_suite_or_job(find_suite("gpt"))[0]) == ""
