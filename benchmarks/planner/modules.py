"""Forecasts of published training speeds of models other than decoders, derived from their modules.

    python -m benchmarks.planner.modules [--write]

All rows are NVIDIA's own (github.com/NVIDIA/DeepLearningExamples, folder and revision beside each), on one
device: with more, their figures are bound by reading and decoding images on the host, which is no part of
these forecasts. Nothing was fitted to them. `benchmarks.planner.recommenders` has rows of many devices.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS
from benchmarks.planner import recommenders
from benchmarks.planner.machines import machine
from benchmarks.planner.step_times import module_step_time
from wanma.job.forecast.forecast import StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import Precision
from wanma.models.workload.model_workload import trace_module_workload
from wanma.planner.cost.decoder_layers import FrameworkTraits


@dataclass(frozen=True)
class Row:
    """Published measurement."""

    model: str
    source: str
    device: str
    precision: str
    micro_batch: int
    global_batch: int
    samples_per_second: float


_RESNET = "ConvNets/resnet50v1.5/README.md at 291f0d0, configs.yml at 097c7ff"
_RESNEXT = "ConvNets/resnext101-32x4d/README.md at 46ff370, configs.yml at 097c7ff"
_DLRM = "Recommendation/DLRM/README.md at 23a6382, dlrm/model.py at 7fe3d5b"

ROWS = (
    Row("ResNet-50", _RESNET, "A100 SXM 80 GB", "amp", 256, 2048, 2470),
    Row("ResNet-50", _RESNET, "A100 SXM 80 GB", "tf32", 256, 2048, 938),
    Row("ResNet-50", _RESNET, "V100 SXM2 16 GB", "amp", 256, 2048, 1200),
    Row("ResNet-50", _RESNET, "V100 SXM2 16 GB", "fp32", 112, 2016, 367),
    Row("ResNet-50", _RESNET, "V100 SXM2 32 GB", "amp", 256, 2048, 1156),
    Row("ResNet-50", _RESNET, "V100 SXM2 32 GB", "fp32", 112, 2016, 356),
    Row("ResNeXt-101 32x4d", _RESNEXT, "A100 SXM 40 GB", "amp", 128, 1024, 908.4),
    Row("ResNeXt-101 32x4d", _RESNEXT, "A100 SXM 40 GB", "tf32", 128, 1024, 300.42),
    Row("ResNeXt-101 32x4d", _RESNEXT, "V100 SXM2 16 GB", "amp", 128, 1024, 534.91),
    Row("ResNeXt-101 32x4d", _RESNEXT, "V100 SXM2 16 GB", "fp32", 64, 1024, 150.05),
    Row("DLRM", _DLRM, "V100 SXM2 32 GB", "amp", 32768, 32768, 875e3),
    Row("DLRM", _DLRM, "V100 SXM2 32 GB", "fp32", 32768, 32768, 494e3),
)
"""Published rows, on one GPU each.

Micro-batches and steps are those of `configs.yml` and of the command beside the table; in mixed precision
convolutions have channels innermost (`--memory-format nhwc`)."""


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet-50 v1.5 (stride in the 3 × 3 convolution) and of ResNeXt."""

    def __init__(self, channels: int, width: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_normalized(channels, width, 1),
            nn.ReLU(inplace=True),
            *_normalized(width, width, 3, stride, groups),
            nn.ReLU(inplace=True),
            *_normalized(width, out, 1),
        )
        self.carry = (
            nn.Sequential(*_normalized(channels, out, 1, stride))
            if channels != out or stride > 1
            else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.branch(x) + self.carry(x))
        return result


def _normalized(
    channels: int, out: int, window: int, stride: int = 1, groups: int = 1
) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, out, window, stride, window // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(out)


def residual_network(counts: tuple[int, ...], groups: int, width: int) -> nn.Module:
    """Return a residual network for 224 × 224 images; `width` inner channels in the first stage."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(counts):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            blocks.append(Bottleneck(channels, width << stage, 256 << stage, stride, groups))
            channels = 256 << stage
    stem = (*_normalized(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(*stem, *blocks, *head)


class Recommender(nn.Module):
    """Recommender DLRM with that repository's default sizes; rows of tables do not matter to its speed."""

    def __init__(self, tables: int = 26, rows: int = 1_300_000, width: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for _ in range(tables))
        self.bottom = _perceptron(13, 512, 256, width)
        self.top = _perceptron(width + (tables + 1) * tables // 2 + 1, 1024, 1024, 512, 256)
        self.out = nn.Linear(256, 1)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        # Mixed precision leaves tables, and so what they give, in 32 bits.
        found = (table(indices[:, number]).float() for number, table in enumerate(self.tables))
        vectors = [x, *found]
        joined = torch.cat(vectors, 1).view(-1, len(vectors), x.shape[1])
        products = torch.bmm(joined, joined.transpose(1, 2))
        lower = torch.tril_indices(len(vectors), len(vectors), -1)
        pairs = products[:, lower[0], lower[1]]
        padding = torch.zeros_like(x[:, :1])
        result: Tensor = self.out(self.top(torch.cat([x, pairs, padding], 1)))
        return result


def _perceptron(*sizes: int) -> nn.Module:
    layers = ((nn.Linear(size, out), nn.ReLU(inplace=True)) for size, out in pairwise(sizes))
    return nn.Sequential(*(part for layer in layers for part in layer))


_IMAGES = (torch.zeros(1, 3, 224, 224),)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "ResNet-50": (lambda: residual_network((3, 4, 6, 3), 1, 64), _IMAGES),
    "ResNeXt-101 32x4d": (lambda: residual_network((3, 4, 23, 3), 32, 128), _IMAGES),
    "DLRM": (Recommender, (torch.zeros(1, 13), torch.zeros(1, 26, dtype=torch.int64))),
}


@cache
def workload(model: str, precision: Precision) -> Workload:
    make, inputs = MODELS[model]
    return trace_module_workload(make, inputs, precision=precision, autocast=True)


def forecast(row: Row) -> StepTime:
    """Return the forecast of one step."""
    precision: Precision = "fp16" if row.precision == "amp" else "fp32"
    # SGD with momentum reads a gradient, a weight and a momentum and writes two of them; no clipping.
    # Autocast casts what it multiplies, and no tables: `casts` of all parameters would be of those.
    software = FrameworkTraits(
        optimizer_bytes=20, channels_last=row.precision == "amp", weight_storage="copies"
    )
    plan = Plan(micro_batch=row.micro_batch, precision=precision, device="cuda")
    return module_step_time(
        workload(row.model, precision), plan, row.global_batch, machine(row.device, 1), software
    )


def error(row: Row) -> float:
    """Return the error of the forecast step time, as a share of the measured one."""
    return forecast(row).seconds * row.samples_per_second / row.global_batch - 1


def report() -> str:
    lines = [
        "# Forecast training speed of other models beside published measurements",
        "",
        "NVIDIA DeepLearningExamples, folder PyTorch; one GPU. Nothing was fitted to these rows.",
        "",
        "| model | device | precision | micro-batch | published, samples/s | forecast | error of time "
        "| source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        speed = row.global_batch / forecast(row).seconds
        lines.append(
            f"| {row.model} | {row.device} | {row.precision} | {row.micro_batch} "
            f"| {row.samples_per_second:,.0f} | {speed:,.0f} | {error(row):+.1%} | {row.source} |"
        )
    errors = [abs(error(row)) for row in ROWS]
    lines += ["", f"Mean |error| {statistics.fmean(errors):.1%}, median {statistics.median(errors):.1%}.", ""]
    return "\n".join([*lines, recommenders.report()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS / 'planner-modules.md'}")
    options = parser.parse_args()
    text = report()
    print(text)
    if options.write:
        (RESULTS / "planner-modules.md").write_text(text)


if __name__ == "__main__":
    main()
