"""Step time of partly frozen models as a fraction of that of a complete one, beside the forecast.

    python -m benchmarks.planner.frozen --write     # two minutes on one core; docs/results/frozen.md

Seconds are CPU seconds of one thread, of which other programs take little. The models take turns.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from benchmarks.common import RESULTS, commit, machine, table
from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group
from wanma.job.cluster import Cluster
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection
from wanma.job.sections.train import ParameterGroupSection
from wanma.models.model_spec import resolve_model_spec
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config
from wanma.planner.calibration.curve_fitting import fit_hardware_model
from wanma.planner.calibration.microbenchmarks import operator_cases
from wanma.planner.calibration.round_robin import measure_round_robin
from wanma.planner.forecast.plan_forecast import forecast_step_time
from wanma.planner.forecast.problem import build_problem
from wanma.planner.hardware_model.calibration import BenchmarkPoint
from wanma.planner.hardware_model.model import HardwareModel

PAGE = RESULTS / "frozen.md"
MODEL: Mapping[str, Any] = {"family": "decoder", "layers": 4, "hidden": 256, "heads": 4, "vocabulary": 512}
SEQUENCE, BATCH = 128, 8
NODE = "Xeon Platinum 8480+"
"""Node of the catalogue that the planning problem names; its rates are replaced by those measured here."""
RATES_SECONDS = 30.0
"""Seconds for measuring the rates of one thread, by which the forecast is made."""
HEADER = ("trained", "measured", "range", "forecast")


@dataclass(frozen=True)
class Case:
    """Part of the model that is trained: patterns of frozen parameters, and settings of `[model]`."""

    frozen: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> list[ParameterGroupSection]:
        return [ParameterGroupSection(match=name, frozen=True) for name in self.frozen]

    @property
    def section(self) -> ModelSection:
        return ModelSection(**{**MODEL, **self.model})


COMPLETE = Case()
CASES = {
    "all but the embedding and half of the blocks": Case(("embedding.*", "layers.[01].*")),
    "the head": Case(("embedding.*", "layers.*")),
    "all but the blocks' matrices": Case(("layers.*.attention.*", "layers.*.feed_forward.*")),
    "adapters of rank 8 on attention": Case(model={"lora_rank": 8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns of each model (default 15)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hardware = measure_rates()
    forecasts = {name: forecast(case, hardware) for name, case in CASES.items()}
    text = report(measure(options.rounds), forecasts, options.rounds)
    print(text)
    if options.write:
        PAGE.write_text(text)


def measure(rounds: int) -> dict[str, list[float]]:
    """Return each case's ratio to the complete model in every round; the first round is not counted."""
    steps = {name: step(case) for name, case in CASES.items()}
    complete = step(COMPLETE)
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(rounds + 1):
        for name, run in steps.items():
            seconds, whole = run(), complete()
            if number > 0:
                ratios[name].append(seconds / whole)
    return ratios


def step(case: Case) -> Callable[[], float]:
    """Return a function that runs one forward and backward, and returns its CPU seconds."""
    spec = resolve_model_spec(
        case.section, vocabulary_size=None, sequence_length=SEQUENCE, image_shape=None, classes=None
    )
    model, groups = spec.build_module(), case.groups
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(not is_frozen(name, groups) and not spec.is_frozen(name))
    tokens = torch.randint(0, MODEL["vocabulary"], (BATCH, SEQUENCE))

    def run() -> float:
        model.zero_grad()
        begin = time.process_time()
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        return time.process_time() - begin

    return run


def measure_rates() -> HardwareModel:
    """Return the hardware model of one thread of this machine."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch does not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    cases = operator_cases(group, torch.device("cpu"), ("fp32",))
    times = measure_round_robin(cases, RATES_SECONDS, group)
    dist.destroy_process_group()
    points = [
        BenchmarkPoint(case.operator, case.shape, time.seconds, case.precision)
        for case, time in zip(cases, times, strict=True)
    ]
    return fit_hardware_model("one thread", points, 1, multiprocessors=None)


def forecast(case: Case, hardware: HardwareModel) -> float:
    """Return the forecast compute time of a step over that of the complete model."""
    part, complete = (_compute_seconds(one, hardware) for one in (case, COMPLETE))
    return part / complete


def _compute_seconds(case: Case, hardware: HardwareModel) -> float:
    job = Job.model_validate(
        {
            "model": {**MODEL, **case.model},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": BATCH, "parameter_groups": case.groups},
        }
    )
    workload = build_section_workload(
        case.section,
        parameter_groups=case.groups,
        vocabulary_size=None,
        sequence_length=SEQUENCE,
        image_shape=None,
        classes=None,
    )
    assert workload is not None
    cluster = Cluster((build_node_group(require_device_kind(NODE), nics=None),))
    problem = build_problem(job, cluster, workload, resolve_section_decoder_config(case.section, None))
    problem = replace(problem, hardware=hardware)
    found = forecast_step_time(problem, Plan(micro_batch=BATCH))
    assert found is not None
    return found.compute


def report(ratios: Mapping[str, Sequence[float]], forecasts: Mapping[str, float], rounds: int) -> str:
    """Return the page: medians and quartiles of the ratios, and the forecasts."""
    rows = []
    for name in CASES:
        low, median, high = torch.tensor(ratios[name]).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        rows.append((name, f"{median:.2f}", f"{low:.2f}–{high:.2f}", f"{forecasts[name]:.2f}"))
    layers, hidden, vocabulary = (MODEL[key] for key in ("layers", "hidden", "vocabulary"))
    return "\n".join(
        [
            "# Step time with frozen parameters beside the forecast\n",
            f"Forward and backward of a decoder ({layers} layers, hidden {hidden}, vocabulary {vocabulary}, "
            f"{BATCH} × {SEQUENCE} tokens, fp32) as a fraction of those that train all parameters. Measured: "
            f"CPU seconds of one thread, median and quartiles of {rounds} turns with the complete model. "
            "Forecast: by the rates of one thread, measured in the same run.\n",
            table(HEADER, rows),
            f"{machine()}; torch {version('torch')}; wanma at {commit()}; {datetime.date.today()}:\n",
            "    python -m benchmarks.planner.frozen --write\n",
        ]
    )


if __name__ == "__main__":
    main()
