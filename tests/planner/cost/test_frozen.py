"""Time of training where a part of the model is frozen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from wanma.hardware.catalogue.lookup import named
from wanma.hardware.cluster_file.node_builder import machines
from wanma.job.cluster import Cluster
from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job, ModelSection, ParameterGroupSection
from wanma.models.model_spec import model_spec
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.workload.model_workload import section_dimensions, section_workload
from wanma.planner.forecast.plan_forecast import anatomy, pieces_of
from wanma.planner.forecast.plan_forecast import time as step_time
from wanma.planner.forecast.problem import Problem, problem_of

MODEL = {"family": "decoder", "layers": 4, "hidden": 256, "heads": 4, "vocabulary": 512}
SEQUENCE, BATCH = 128, 8


def frozen(*names: str) -> list[ParameterGroupSection]:
    return [ParameterGroupSection(match=name, frozen=True) for name in names]


def problem(groups: list[ParameterGroupSection], device: str = "H100 SXM", **model: Any) -> Problem:
    section = ModelSection(**{**MODEL, **model})
    job = Job.model_validate(
        {
            "model": {**MODEL, **model},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": BATCH, "parameter_groups": groups},
        }
    )
    workload = section_workload(
        section, groups=groups, vocabulary=None, sequence_length=SEQUENCE, image_shape=None, classes=None
    )
    assert workload is not None
    cluster = Cluster((machines(named(device), cards=None),))
    return problem_of(job, cluster, workload, section_dimensions(section, None))


MATRICES = frozen("layers.*.attention.*", "layers.*.feed_forward.*")
PLAN = Plan(micro_batch=BATCH, precision="bf16", device="cuda")


def test_backward_of_frozen_matrices_is_that_of_their_inputs() -> None:
    trained, found = (pieces_of(problem(groups), PLAN).blocks[0].part for groups in ([], MATRICES))
    assert found.forward == trained.forward
    assert found.backward_inputs == trained.backward_inputs
    assert found.backward_weights < 0.01 * trained.backward_weights


def test_what_lies_before_all_that_is_trained_has_no_backward() -> None:
    groups = frozen("embedding.*", "layers.[012].*")
    trained, found = (pieces_of(problem(one), PLAN) for one in ([], groups))
    assert found.before[0].part.backward_inputs == 0
    assert found.after == trained.after
    part, whole = found.blocks[0].part, trained.blocks[0].part
    assert part.backward_inputs == pytest.approx(whole.backward_inputs / 4)
    assert part.backward_weights == pytest.approx(whole.backward_weights / 4)
    # As later layers are frozen instead, gradients pass them.
    later = pieces_of(problem(frozen("layers.[123].*")), PLAN).blocks[0].part
    assert later.backward_inputs == whole.backward_inputs
    assert later.backward_weights == pytest.approx(whole.backward_weights / 4)


def test_adapters_cost_their_own_products() -> None:
    part = pieces_of(problem(MATRICES), PLAN).blocks[0].part
    adapted = pieces_of(problem([], lora_rank=4), PLAN).blocks[0].part
    assert part.forward < adapted.forward
    assert adapted.backward_weights > 0


def test_gradients_and_updates_are_those_of_trained_parameters() -> None:
    plan = PLAN.but(dp_replicate=8, micro_batch=1)
    whole, part = (anatomy(problem(groups), plan) for groups in ([], frozen("layers.[012].*")))
    assert part.reduce_seconds < whole.reduce_seconds
    assert part.optimizer_seconds <= whole.optimizer_seconds


def test_model_flops_leave_out_what_is_not_computed() -> None:
    def workload(groups: list[ParameterGroupSection]) -> Workload:
        return problem(groups).workload

    *_, head = workload([]).layers
    head_only = workload(frozen("embedding.*", "layers.*", "norm.*"))
    forward = sum(layer.count * layer.flops_per_sample for layer in head_only.layers)
    trained = head.flops_per_sample * (1 + head_only.layers[-1].trained_share)
    assert head_only.flops_per_sample == pytest.approx(forward + trained)


def measured_seconds(groups: list[ParameterGroupSection]) -> float:
    """Processor seconds of a forward and backward on one core, the least of five."""
    spec = model_spec(
        ModelSection(**MODEL), vocabulary=None, sequence_length=SEQUENCE, image_shape=None, classes=None
    )
    model = spec.make()
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


@pytest.mark.full  # measured seconds: not while other tests run beside it
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
    assert steps[0] is not None
    assert steps[1] is not None
    forecast = steps[0].compute / steps[1].compute
    assert measured == pytest.approx(forecast, rel=0.3)
