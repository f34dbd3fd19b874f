"""Problems for tests of searches: small decoders on machines with round numbers."""

from __future__ import annotations

from typing import Any

from support.machines import CHIP, machine
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.problem import PlanningProblem

SMALL = DecoderConfig(4, 512, 8, 8, 2048, 8192)
SEQUENCE = 512


def job(parallel: dict[str, Any] | None = None, **train: Any) -> Job:
    """Job on text; `parallel` and `train` as in a job file."""
    return Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": 16, "precision": "bf16", **train},
            "parallel": parallel or {},
        }
    )


def cluster(devices: int = 8, memory_bytes: int = 80 << 30) -> Cluster:
    """Machines of eight devices, or one smaller one."""
    device = Device("cuda", CHIP.name, memory_bytes, dict(CHIP.peak_flops_per_second))
    within = min(devices, 8)
    return Cluster((NodeGroup("node", 64, 1 << 40, (device,) * within, count=devices // within),))


def problem(
    of: Job | None = None,
    dimensions: DecoderConfig = SMALL,
    devices: int = 8,
    memory_bytes: float = 80 << 30,
    **links: float,
) -> PlanningProblem:
    of = of or job()
    return PlanningProblem(
        of,
        cluster(devices, int(memory_bytes)),
        compute_decoder_workload(dimensions, of.data.sequence_length),
        machine(devices, **links),
        memory_bytes,
        dimensions,
    )
