"""Time of training where a part of the model is frozen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from support.text import text_spec
from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group
from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection
from wanma.job.sections.train import ParameterGroupSection
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config
from wanma.planner.forecast.plan_forecast import forecast_step_time as step_time
from wanma.planner.forecast.plan_forecast import model_cost_of, step_components
from wanma.planner.forecast.problem import PlanningProblem, build_problem

MODEL = {"family": "decoder", "layers": 4, "hidden": 256, "heads": 4, "vocabulary": 512}
SEQUENCE, BATCH = 128, 8


def frozen(*names: str) -> list[ParameterGroupSection]:
    return [ParameterGroupSection(match=name, frozen=True) for name in names]


def problem(groups: list[ParameterGroupSection], device: str = "H100 SXM", **model: Any) -> PlanningProblem:
    section = ModelSection(**{**MODEL, **model})
    job = Job.model_validate(
        {
            "model": {**MODEL, **model},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": BATCH, "parameter_groups": groups},
        }
    )
    workload = build_section_workload(
        section,
        parameter_groups=groups,
        vocabulary_size=None,
        sequence_length=SEQUENCE,
        image_shape=None,
        classes=None,
    )
    assert workload is not None
    cluster = Cluster((build_node_group(require_device_kind(device), nics=None),))
    return build_problem(job, cluster, workload, resolve_section_decoder_config(section, None))


MATRICES = frozen("layers.*.attention.*", "layers.*.feed_forward.*")
PLAN = Plan(micro_batch=BATCH, precision="bf16", device="cuda")


def test_backward_of_frozen_matrices_is_that_of_their_inputs() -> None:
    trained, found = (model_cost_of(problem(groups), PLAN).blocks[0].cost for groups in ([], MATRICES))
    assert found.forward == trained.forward
    assert found.backward_input == trained.backward_input
    assert found.backward_weight < 0.01 * trained.backward_weight


def test_what_lies_before_all_that_is_trained_has_no_backward() -> None:
    groups = frozen("embedding.*", "layers.[012].*")
    trained, found = (model_cost_of(problem(one), PLAN) for one in ([], groups))
    assert found.pre_block[0].cost.backward_input == 0
    assert found.post_block == trained.post_block
    part, whole = found.blocks[0].cost, trained.blocks[0].cost
    assert part.backward_input == pytest.approx(whole.backward_input / 4)
    assert part.backward_weight == pytest.approx(whole.backward_weight / 4)
    # As later layers are frozen instead, gradients pass them.
    later = model_cost_of(problem(frozen("layers.[123].*")), PLAN).blocks[0].cost
    assert later.backward_input == whole.backward_input
    assert later.backward_weight == pytest.approx(whole.backward_weight / 4)


def test_adapters_cost_their_own_products() -> None:
    part = model_cost_of(problem(MATRICES), PLAN).blocks[0].cost
    adapted = model_cost_of(problem([], lora_rank=4), PLAN).blocks[0].cost
    assert part.forward < adapted.forward
    assert adapted.backward_weight > 0


def test_gradients_and_updates_are_those_of_trained_parameters() -> None:
    plan = PLAN.with_changes(dp_replicate=8, micro_batch=1)
    whole, part = (step_components(problem(groups), plan) for groups in ([], frozen("layers.[012].*")))
    assert part.reduce_seconds < whole.reduce_seconds
    assert part.optimizer_seconds <= whole.optimizer_seconds


def test_model_flops_leave_out_what_is_not_computed() -> None:
    def workload(groups: list[ParameterGroupSection]) -> Workload:
        return problem(groups).workload

    *_, head = workload([]).layers
    head_only = workload(frozen("embedding.*", "layers.*", "norm.*"))
    forward = sum(layer.count * layer.flops_per_sample for layer in head_only.layers)
    trained = head.flops_per_sample * (1 + head_only.layers[-1].trainable_share)
    assert head_only.flops_per_sample == pytest.approx(forward + trained)


def measured_seconds(groups: list[ParameterGroupSection]) -> float:
    """Processor seconds of a forward and backward on one core, the least of five."""
    spec = text_spec(MODEL, None, SEQUENCE)
    model = spec.build_module()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(not is_frozen(name, groups))
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE))
    found = []
    for _ in range(5):
        begin = time.process_time()
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        found.append(time.process_time() - begin)
        model.zero_grad()
    return min(found)


@pytest.mark.exhaustive  # measured seconds: not while other tests run beside it
@pytest.mark.parametrize(
    "groups",
    [frozen("embedding.*", "layers.[01].*"), frozen("embedding.*", "layers.*"), MATRICES],
    ids=["half", "all but the head", "matrices of blocks"],
)
def test_steps_of_partly_frozen_models_are_as_much_shorter_as_forecast(
    groups: list[ParameterGroupSection],
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = measured_seconds(groups) / measured_seconds([])
    finally:
        torch.set_num_threads(threads)
    plan = Plan(micro_batch=BATCH)
    steps = [step_time(problem(one, "Xeon Platinum 8480+"), plan) for one in (groups, [])]
    forecast = steps[0].compute / steps[1].compute
    assert measured == pytest.approx(forecast, rel=0.3)
