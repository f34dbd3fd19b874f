"""Jobs whose scaling has its knee for different reasons, on clusters from the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from wanma.bench.results.stored_study import CurvePoint
from wanma.bench.scale.forecasts import ScaledJob
from wanma.bench.scale.growth import Growth, growth_of
from wanma.bench.scale.targets import Target, target_of_cluster
from wanma.bench.suites.scale_table import doubled_counts

TEXT = """\
[model]
preset = "{preset}"

[data]
text = ["stdlib"]
sequence_length = {sequence}

[train]
global_batch = {batch}
precision = "bf16"

[parallel]
recompute = "auto"
"""


class ScalingJob(NamedTuple):
    """Job, the dimension that grows, and the part of a step that limits it."""

    preset: str
    sequence: int
    batch: int
    layout: dict[str, str]
    axis: str
    is_weak: bool
    cluster: str
    to: int
    cause: str

    def write(self, folder: Path) -> Path:
        path = folder / "job.toml"
        path.write_text(TEXT.format(preset=self.preset, sequence=self.sequence, batch=self.batch))
        return path

    def read(self, folder: Path) -> tuple[ScaledJob, Target, Growth]:
        scaled = ScaledJob.read(self.write(folder), self.layout)
        growth = growth_of(
            scaled.job(self.layout), self.axis, is_weak=self.is_weak, batch_ranks=8, settings=self.layout
        )
        return scaled, target_of_cluster(self.cluster), growth

    def counts(self, growth: Growth) -> list[int]:
        return [count for count in doubled_counts(growth.others, self.to) if count % growth.others == 0]


JOBS = {
    "shards over a slow network": ScalingJob(
        "llama-3-8b", 8192, 16, {}, "dp_shard", True, "1x8 A100 SXM 80GB, 1x100G", 4096,
        "exposed reduce-scatter of gradients (dp)",
    ),
    "shards over a fast network": ScalingJob(
        "llama-3-8b", 8192, 16, {}, "dp_shard", True, "1x8 H100 SXM, 8x400G", 65536,
        "exposed all-gather of parameters (dp)",
    ),
    "replicas over a slow network": ScalingJob(
        "gpt-125m", 1024, 64, {}, "dp_replicate", False, "1x8 A100 SXM 80GB, 1x25G", 64,
        "exposed all-reduce of gradients (dp)",
    ),
    "experts in replicas": ScalingJob(
        "gpt-moe-400m", 2048, 64, {"parallel.ep": "8", "parallel.micro_batch": "4"}, "dp_replicate", True,
        "1x8 A100 SXM 80GB, 1x100G", 256, "exposed all-reduce of gradients (dp)",
    ),
    "tensors over nodes": ScalingJob(
        "llama-3-8b", 4096, 32, {"parallel.dp_shard": "2"}, "tp", False, "1x4 H100 SXM, 4x400G", 64,
        "exposed communication (tp)",
    ),
    "stages with few micro-batches": ScalingJob(
        "llama-3-8b", 4096, 16, {"parallel.tp": "4", "parallel.micro_batch": "1"}, "pp", False,
        "1x8 H100 SXM, 8x400G", 64, "pipeline bubble",
    ),
}  # fmt: skip
"""Jobs by the reason of their knee."""


def curve(job: ScalingJob, folder: Path) -> tuple[ScaledJob, Target, Growth, list[CurvePoint]]:
    """Return the forecasts of a job's layout."""
    scaled, target, growth = job.read(folder)
    points = [scaled.forecast_layout(target, growth, count) for count in job.counts(growth)]
    return scaled, target, growth, points
