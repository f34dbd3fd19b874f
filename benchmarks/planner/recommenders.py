"""Forecasts of the preset `dcnv2-mlperf` beside published runs of MLPerf Training's DLRM-DCNv2.

`mlperf_dcnv2.csv` has a row for each: steps and seconds between two evaluations of `result_0.txt`, from
`eval_stop` to `eval_start`, as median of the log or in its last such interval. Steps are the difference of
`epoch_num` times 4,195,197,692 samples over `global_batch_size`. Nothing was fitted to them.
`benchmarks.planner.modules` writes their page.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.planner.machines import machine
from benchmarks.planner.step_times import module_step_time
from wanma.job.forecast.forecast import StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.model import ModelSection
from wanma.models.workload.model_workload import build_section_workload
from wanma.planner.cost.decoder_layers import FrameworkTraits

TABLE = Path(__file__).parent / "mlperf_dcnv2.csv"

HUGECTR = FrameworkTraits(
    fuses_pointwise=True, cuda_graphs=True, gradient_bytes=2, optimizer_bytes=20, weight_storage="copies"
)
"""Traits of HugeCTR in the submissions (v3.0, Dell's `train.py`): CUDA graphs, mixed precision, fused layers.

Adagrad reads a gradient, a master weight and a sum, and writes these two and a copy in 16 bits; no clipping.
"""
WANMA = FrameworkTraits()
"""Traits of wanma's own run: with `parallel.embedding` nothing is compiled, the host launches each kernel."""


@dataclass(frozen=True)
class Submission:
    """Published run."""

    device: str
    devices: int
    global_batch: int
    step_seconds: float
    source: str


def submissions() -> list[Submission]:
    with TABLE.open(newline="") as file:
        return [
            Submission(
                row["device"],
                int(row["devices"]),
                int(row["global_batch"]),
                float(row["seconds"]) / int(row["steps"]),
                row["source"],
            )
            for row in csv.DictReader(file)
        ]


@cache
def workload() -> Workload:
    """Return the workload of the preset, whose tables the ranks share, with Adagrad's state."""
    traced = build_section_workload(
        ModelSection(preset="dcnv2-mlperf"),
        vocabulary_size=None,
        sequence_length=1,
        image_shape=None,
        classes=None,
        precision="fp16",
        table_state=float,
    )
    assert traced is not None
    return traced


def forecast(run: Submission, framework: FrameworkTraits = HUGECTR) -> StepTime:
    """Return the forecast of one step, with tables where `parallel.embedding = "auto"` places them."""
    plan = Plan(
        dp_replicate=run.devices,
        micro_batch=run.global_batch // run.devices,
        precision="fp16",
        device="cuda",
        embedding="auto",
    )
    hardware = machine(run.device, run.devices)
    return module_step_time(workload(), plan, run.global_batch, hardware, framework)


def error(run: Submission) -> float:
    """Return the error of the forecast step time, as a share of the measured one."""
    return forecast(run).seconds / run.step_seconds - 1


_HEAD = """## DLRM-DCNv2 of MLPerf Training

Preset `dcnv2-mlperf`, 26.1 billion parameters, beside submissions of the closed division, all by HugeCTR in
fp16. Published: samples between two evaluations of a log over the time between them. The forecast counts
CUDA graphs, fused operators and gradients in 16 bits, as HugeCTR has them, and tables where
`parallel.embedding = "auto"` places them. It is too slow, above all between nodes: HugeCTR works on
embeddings and dense layers at the same time, and the parts of a large table send a sum of each bag, where
the forecast exchanges all different vectors, exposed. Column `wanma`: forecast of wanma's own run, whose
host launches each kernel. wanma has run on none of these machines, and its exchange of vectors never over
NCCL. Nothing was fitted to these rows.

| devices | global batch | published, samples/s | forecast | error of time | wanma | source |
|---|---|---|---|---|---|---|"""


def report() -> str:
    lines = [_HEAD]
    runs = submissions()
    for run in runs:
        speed, own = (run.global_batch / forecast(run, traits).seconds for traits in (HUGECTR, WANMA))
        lines.append(
            f"| {run.devices} × {run.device} | {run.global_batch:,} "
            f"| {run.global_batch / run.step_seconds:,.0f} | {speed:,.0f} | {error(run):+.1%} | {own:,.0f} "
            f"| {run.source} |"
        )
    errors = [abs(error(run)) for run in runs]
    lines += ["", f"Mean |error| {statistics.fmean(errors):.1%}, median {statistics.median(errors):.1%}.", ""]
    return "\n".join(lines)
