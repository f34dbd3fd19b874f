"""Targets of a training."""

from __future__ import annotations

import pytest

from wanma.bench.programs.target import Progress, parse_target
from wanma.job.errors import WanmaError


def losses(*values: float) -> list[Progress]:
    return [
        Progress(10.0 * number, 100.0 * number, {"loss": value}) for number, value in enumerate(values, 1)
    ]


def test_the_first_point_at_or_beyond_the_limit_reaches_it() -> None:
    reached = parse_target("loss<=2.5").first_reached(losses(4.0, 2.5, 3.0))
    assert reached is not None
    assert (reached.time, reached.samples) == (20.0, 200.0)
    assert parse_target("loss<=2.4").first_reached(losses(4.0, 2.5, 3.0)) is None


def test_a_validation_may_be_the_target() -> None:
    points = [*losses(1.0), Progress(15.0, 100.0, {"accuracy": 0.91})]
    reached = parse_target("accuracy >= 0.9").first_reached(points)
    assert reached is not None
    assert reached.time == 15.0


def test_convergence_is_the_point_after_which_nothing_improves_for_so_many_samples() -> None:
    target = parse_target("converged:0.1/200")
    assert target.first_reached(losses(3.0, 2.0, 1.99)) is None, "only 100 samples without improvement"
    reached = target.first_reached(losses(3.0, 2.0, 1.99, 1.95))
    assert reached is not None
    assert reached.samples == 200.0


@pytest.mark.parametrize("text", ["loss", "loss<2", "loss<=x", "converged:0.1", "converged:0.1/0", "Loss<=2"])
def test_another_text_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(WanmaError) as error:
        parse_target(text)
    assert "loss<=2.5" in error.value.hint
