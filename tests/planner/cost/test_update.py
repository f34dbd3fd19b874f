"""The job's own update rule is what a forecast counts: its bytes, its products, and its state."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.forecast.forecast import Forecast, LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.cost.optimizer_update import newton_schulz_flops, optimizer_cost_of
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem, build_problem

MODEL = DecoderConfig(8, 4096, 32, 32, 4096, 32000)
"""All of a block's matrices are square."""
ALONE = Plan(precision="bf16", device="cuda")
SHARED = Plan(dp_shard=8, shard="optimizer", precision="bf16", device="cuda")


def given(**train: Any) -> PlanningProblem:
    job = Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": 1024},
            "train": {"global_batch": 8, "precision": "bf16", **train},
        }
    )
    return build_problem(job, parse_shorthand("8 H100"), compute_decoder_workload(MODEL, 1024), MODEL)


def forecast_of(plan: Plan = ALONE, **train: Any) -> Forecast:
    return forecast_plan(given(**train), plan)


def update_seconds(plan: Plan = ALONE, **train: Any) -> float:
    step = forecast_of(plan, **train).step
    return step.optimizer


@pytest.mark.parametrize(
    ("train", "moved"),
    [
        ({"optimizer": "adamw"}, 42),
        ({"optimizer": "sgd"}, 58),
        ({"optimizer": "sgd", "weight_decay": 0.0}, 46),
        ({"optimizer": "sgd", "weight_decay": 0.0, "momentum": 0.0}, 26),
        ({"optimizer": "adafactor"}, 90),
        ({"optimizer": "adafactor", "weight_decay": 0.0}, 82),
    ],
)
def test_an_update_takes_the_bytes_that_its_rule_moves(train: dict[str, Any], moved: int) -> None:
    problem = given(**train)
    assert optimizer_cost_of(problem.job.train, problem.workload, MODEL).moved_bytes == moved
    assert update_seconds(**train) == pytest.approx(update_seconds() * moved / 42, rel=0.01)


def test_muon_computes_what_its_iterations_take_and_ranks_share_it() -> None:
    problem = given(optimizer="muon")
    rule = optimizer_cost_of(problem.job.train, problem.workload, MODEL)
    assert rule.flops == pytest.approx(5 * 6 * 4096)  # of a square: three products of 2 h³ each
    alone, rest = update_seconds(optimizer="muon"), update_seconds() * rule.moved_bytes / 42
    chip = problem.hardware.chip
    rate = chip.peak_flops_per_second["bf16"] * chip.products["bf16"].attainable * chip.sustained
    assert alone == pytest.approx(rest + problem.workload.parameters * rule.flops / rate, rel=0.02)
    # Eight ranks compute an eighth each, and send their matrices to the others.
    assert alone / 8 < update_seconds(SHARED, optimizer="muon") < alone / 2


def test_matrices_that_are_wider_than_high_take_less_per_parameter() -> None:
    wide = Workload((LayerWorkload("block", 2, 100 * 100, 1.0, 1.0, is_block=True),), 1)
    assert newton_schulz_flops(wide, None) == pytest.approx(30 * 100)  # of a module: as one square
    wider = DecoderConfig(2, 128, 2, 2, 128_000, 100)
    assert newton_schulz_flops(wide, wider) == pytest.approx(20 * 128, rel=0.01)
    assert newton_schulz_flops(Workload((), 1), None) == 0.0


def test_a_rule_without_state_keeps_and_saves_none() -> None:
    parameters = given().workload.parameters
    for train, copies in (
        ({"optimizer": "adamw"}, 2),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "adafactor"}, 0),
    ):
        found = forecast_of(**train)
        assert found.optimizer_bytes == pytest.approx(4 * copies * parameters, rel=1e-3)
        saved = found.step.checkpoint * 100 * given().hardware.host.link_bytes_per_second
        assert saved == pytest.approx(4 * (1 + copies) * parameters, rel=1e-6)
