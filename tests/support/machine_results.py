"""Made results of machine benchmarks: figures by a rule, with noise and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from support.benchmark_results import HARDWARE, STARTED
from wanma.bench.figures.summary import summarize
from wanma.bench.machine.machine_result import PROGRAM
from wanma.bench.measurements.measurement import Measurement
from wanma.bench.results.result import BenchmarkResult, ContenderRecord, SuiteRecord

RATE, LATENCY = 10e9, 20e-6
DEVICE_METRICS = ("products.bf16_flops_per_second", "memory_copy_bytes_per_second")


def figures(
    ranks: int,
    generator: np.random.Generator,
    noise: float,
    speed: Callable[[int, int], float] = lambda _first, _second: 1.0,
    device_speed: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """Figures of one execution: links and devices that are alike, but for the noise and what is planted.

    Args:
        speed: speed of the link from one rank to another.
        device_speed: speed of a rank's device, 1 for others.
    """
    drift = float(np.exp(generator.normal(0, 0.1)))  # of the whole machine

    def varied(value: float) -> float:
        return value * drift * float(np.exp(noise * generator.standard_t(5)))

    found = {"products.bf16_flops_per_second": varied(4e12), "products.fp32_flops_per_second": varied(1e12)}
    found |= {"memory_copy_bytes_per_second": varied(200e9), "ring_bytes_per_second": varied(8e9)}
    for first, second in permutations(range(ranks), 2):
        found[f"pair.{first}-{second}_bytes_per_second"] = varied(RATE * speed(first, second))
        if first < second:
            slowest = min(speed(first, second), speed(second, first))
            found[f"pair.{first}-{second}.latency_seconds"] = LATENCY**2 / varied(LATENCY * slowest)
    for rank in range(ranks if ranks > 1 else 0):
        for metric in DEVICE_METRICS:
            found[f"rank.{rank}.{metric}"] = varied(1e12 * (device_speed or {}).get(rank, 1.0))
    if ranks > 1:
        found["link_bytes_per_second"] = varied(RATE)
        for size in (4096, 1 << 20):
            for algorithm in ("backend", "ring"):
                found[f"all_reduce.{algorithm}.fp32.{size}_seconds"] = size / varied(5e9)
        found["all_reduce_bus_bytes_per_second"] = varied(5e9)
        found["backend.gloo"] = 1.0
    found["product.bf16.1024x512x512_seconds"] = 1e-3 / varied(1.0)
    found["storage.write_bytes_per_second"] = varied(2e9)
    return found


def machine_result(
    ranks: int = 4,
    executions: int = 5,
    noise: float = 0.03,
    seed: int = 0,
    nodes: int = 1,
    disturbed: Mapping[int, float] | None = None,
    has_summaries: bool = True,
    **planted: Any,
) -> BenchmarkResult:
    """Result of one number of ranks.

    Args:
        disturbed: executions that do not count, with the factor of their rates.
        has_summaries: False leaves out the estimates, which take most of the time; all executions count.
        planted: `speed` and `device_speed` of `figures`.
    """
    generator = np.random.default_rng(seed)
    name = f"ranks={ranks}"
    measurements = []
    for number in range(executions):
        found = figures(ranks, generator, noise, **planted)
        factor = (disturbed or {}).get(number)
        if factor is not None:
            found = {key: factor * value for key, value in found.items()}
        reasons = () if factor is None else ("Other programs used 1.50 CPUs; the limit is 0.1.",)
        measurements.append(
            Measurement(
                name, number, STARTED + 100 * number, 30.0, 0, (), figures=found, disturbances=reasons
            )
        )
    settings = {
        "ranks": str(ranks),
        "nodes": str(nodes),
        "parts": "compute,links,storage",
        "storage": "/data",
    }
    result = BenchmarkResult(
        id="20261122-101530-machine",
        name="machine",
        title="Limits of the machine",
        created="2026-11-22T10:15:30+00:00",
        contenders=(ContenderRecord(name, "command", settings, ("python", "-m", PROGRAM)),),
        suite=SuiteRecord("machine", "a1b2"),
        hardware=HARDWARE,
        measurements=tuple(measurements),
        ended="2026-11-22T11:15:30+00:00",
    )
    if has_summaries:
        return summarize(result, [0] * executions)
    values = {
        metric: {one.round: one.figures[metric] for one in measurements} for metric in measurements[0].figures
    }
    return replace(result, values={name: values})
