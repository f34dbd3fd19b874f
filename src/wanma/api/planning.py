"""From a job to a plan and its forecast, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wanma.data.open import prepare
from wanma.data.tokenizer import load_tokenizer
from wanma.hardware.cpu_peak import stored_cpu_peak
from wanma.hardware.discover import discover
from wanma.job.cluster import Cluster
from wanma.job.forecast import Forecast, Workload
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.models.presets import decoder_dimensions, is_decoder
from wanma.models.workload import decoder_workload, module_workload
from wanma.planner.choose import Planned, complete, layout


@dataclass(frozen=True)
class Prepared:
    """All that is known of a job before its ranks start."""

    cluster: Cluster
    planned: Planned
    workload: Workload | None
    peak_flops_per_second: float | None
    """Of one rank's device; None when nobody has measured or published it."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def to_json(self) -> dict[str, Any]:
        """plan.json."""
        forecast: Forecast | None = self.planned.forecast
        return {
            "plan": self.plan.to_json(),
            "forecast": forecast.to_json() if forecast else None,
            "reasons": list(self.planned.reasons),
            "cluster": self.cluster.to_json(),
            "parameters": self.workload.parameters if self.workload else None,
            "flops_per_sample": self.workload.flops_per_sample if self.workload else None,
        }


def first_layout(job: Job) -> tuple[Cluster, Plan]:
    """The machines and the part of the plan that is known without the model."""
    cluster = discover()
    return cluster, layout(job, cluster)


def prepare_job(
    job: Job,
    cluster: Cluster,
    start: Plan,
    *,
    objects: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Build the data's token files where they are missing, and finish the plan.

    Raises:
        JobError, WanmaError: the data or model cannot be had, or nothing fits.
    """
    objects = objects or {}
    if "data" not in objects:
        prepare(job.data, progress)
    workload = read_workload(job, objects)
    planned = complete(job, start, cluster, workload)
    return Prepared(cluster, planned, workload, _peak(job, planned.plan, cluster))


def read_workload(job: Job, objects: dict[str, Any]) -> Workload | None:
    """The model as the planner sees it; None for a module whose inputs only its data knows."""
    if "model" in objects or job.model.factory is not None:
        return None
    if is_decoder(job.model):
        vocabulary = load_tokenizer(job.data.tokenizer).vocabulary
        return decoder_workload(decoder_dimensions(job.model, vocabulary), job.data.sequence_length)
    from wanma.data.open import open_data
    from wanma.models.build import example_inputs, model_spec

    data = open_data(job.data, job.train)
    spec = model_spec(
        job.model, vocabulary=None, sequence_length=None, image_shape=data.image_shape, classes=data.classes
    )
    return module_workload(spec.make(), example_inputs(data.batch([0])))


def _peak(job: Job, plan: Plan, cluster: Cluster) -> float | None:
    if plan.device == "cuda":
        return cluster.nodes[0].devices[0].peak_flops_per_second.get(plan.precision)
    # A rank's share of the machine's measured peak: threads of one process reach about their number.
    return stored_cpu_peak(plan.threads_per_rank).get(plan.precision)
