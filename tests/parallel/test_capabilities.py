"""Capabilities of the runtime as the planner publishes them, beside its behavior."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from torch import nn

from support.compare import one_process
from support.text import DECODER, text_job
from support.traced import spread_traced
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection
from wanma.job.sections.parallel import Schedule
from wanma.models.model_spec import resolve_model_spec
from wanma.parallel.context.context_parallel import apply_context_parallel
from wanma.parallel.expert.expert_parallel import apply_expert_parallel
from wanma.parallel.pipeline.pipeline_runner import SCHEDULES
from wanma.parallel.pipeline.stage_partition import pipeline_parallel_spec
from wanma.parallel.tensor.tensor_parallel import apply_tensor_parallel
from wanma.planner.rules.capabilities import (
    supports_compiled_recompute,
    unsupported_reason,
)
from wanma.torch_internals.versions import installed_torch_version

HERE = Cluster((NodeGroup("here", 8, 16 << 30, ()),))
IMAGES = ("cifar-convnet", "resnet-18")


def test_the_schedules_are_those_that_the_runtime_has() -> None:
    assert tuple(SCHEDULES) == get_args(Schedule)


def test_the_version_of_torch_is_the_one_that_is_imported() -> None:
    assert torch.__version__.startswith("{}.{}.".format(*installed_torch_version()))


@pytest.mark.parametrize("preset", IMAGES)
@pytest.mark.parametrize("axis", ["pp", "tp", "cp", "ep"])
def test_what_image_models_do_not_declare_the_runtime_cannot_split(preset: str, axis: str) -> None:
    plan = Plan(**{axis: 2}, **({"dp_replicate": 2} if axis == "ep" else {}))  # type: ignore[arg-type]  # sizes
    told = unsupported_reason(Job(model=ModelSection(preset=preset)), plan, HERE)
    assert told == f"{preset} does not declare how to split it over {axis}"
    spec = resolve_model_spec(
        ModelSection(preset=preset),
        vocabulary_size=None,
        sequence_length=None,
        image_shape=(3, 32, 32),
        classes=4,
    )
    with torch.device("meta"):
        model = spec.build_module()
    group = SimpleNamespace(get_group=lambda: None)
    parallel_mesh = cast(Any, SimpleNamespace(plan=plan, dim_mesh=lambda _: group))
    with pytest.raises(JobError, match=rf"parallel\.{axis} = 2: "):
        _split(model, spec.require_parallel_spec(axis), axis, plan, parallel_mesh)


def _split(model: nn.Module, parallel_spec: Any, axis: str, plan: Plan, parallel_mesh: Any) -> None:
    """As `parallelize` does."""
    if axis == "pp":
        pipeline_parallel_spec(model, parallel_spec, plan)
    else:
        {"tp": apply_tensor_parallel, "cp": apply_context_parallel, "ep": apply_expert_parallel}[axis](
            model, parallel_spec, parallel_mesh
        )


@pytest.mark.full
def test_split_matrices_are_compiled_to_run_again_where_torch_can(tmp_path: Path) -> None:
    """Guard a limit of torch: where this fails, `supports_compiled_recompute` can allow it."""
    job = text_job(tmp_path, DECODER, text=__file__, steps=2, global_batch=4, validation_samples=2)
    plan = Plan(tp=2, micro_batch=4, compile=True, recompute="full")
    if supports_compiled_recompute(plan, installed_torch_version()):
        one = one_process(tmp_path / "one", job, 4)
        assert spread_traced(tmp_path / "run", job, plan).losses == pytest.approx(one.losses, 1e-5)
    else:
        with pytest.raises(AssertionError, match=r"to be Tensors, got types: .*DeviceMesh"):
            spread_traced(tmp_path / "run", job, plan)
