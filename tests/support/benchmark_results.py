"""Made results of benchmarks: step times by a rule, on a machine that does not exist."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from wanma.bench.figures.summary import summarize
from wanma.bench.measurements.measurement import MachineUsage, Measurement, StepRecord, Utilization
from wanma.bench.results.result import BenchmarkResult, ContenderRecord, SuiteRecord
from wanma.job.cluster import Cluster, Device, NodeGroup

STARTED = 1_700_000_000.0
CHIP = Device("other", "chip", 16 << 30, {"bf16": 1e14})
HARDWARE = json.loads(
    json.dumps(
        {
            "cluster": Cluster((NodeGroup("node", 8, 64 << 30, (CHIP,) * 2),)).to_json(),
            "processor": "a processor",
            "cores": 8,
            "memory_bytes": 64 << 30,
            "kernel": "6.1",
        }
    )
)
WARM_UP = 1


def measurement(
    contender: str, number: int, seconds: float, *, steps: int = 6, disturbances: Sequence[str] = ()
) -> Measurement:
    """Measurement in round `number` whose steps take `seconds`, the first three times as long."""
    times, now = [], STARTED + 1000 * number + 5
    for step in range(1, steps + 1):
        own = seconds * (3 if step == 1 else 1 + 0.001 * (step % 3))
        now += own
        times.append(
            StepRecord(
                step,
                now,
                own,
                samples=8.0,
                targets=512.0,
                loss=4.0 / step,
                phases={"forward_backward": 0.75 * own, "optimizer": 0.25 * own},
            )
        )
    return Measurement(
        contender,
        number,
        STARTED + 1000 * number,
        60.0,
        0,
        tuple(times),
        MachineUsage(peak_memory_bytes=float(1 << 30)),
        {"checkpoint_stall_seconds": 0.5 * seconds},
        tuple(disturbances),
        utilization=Utilization(cpu_utilization=0.75 / seconds, disk_bytes_per_second=2048.0),
    )


def benchmark_result(
    paces: Mapping[str, Sequence[float]], name: str = "20261122-101530-gpt", **changes: Any
) -> BenchmarkResult:
    """Result with the step seconds of each contender, one for each round; the first is the baseline."""
    names = list(paces)
    rounds = max(map(len, paces.values()))
    measurements = tuple(
        measurement(contender, number, paces[contender][number])
        for number in range(rounds)
        for contender in (names if number % 2 == 0 else names[::-1])
        if number < len(paces[contender])
    )
    values: dict[str, Any] = {
        "id": name,
        "name": "gpt",
        "title": "A small GPT",
        "created": "2026-11-22T10:15:30+00:00",
        "contenders": tuple(
            ContenderRecord(
                contender,
                "job",
                {"parallel.dp_shard": number + 1},
                ("wanma", "train", "job.toml"),
                '[model]\nfamily = "decoder"\n',
                {"dp_shard": number + 1},
            )
            for number, contender in enumerate(names)
        ),
        "suite": SuiteRecord("training", "a1b2"),
        "baseline": names[0],
        "rule": {"rounds": rounds},
        "environment": {"wanma": "0.1.0", "torch": "2.11.0"},
        "hardware": HARDWARE,
        "code": {"commit": "0123456789abcdef", "is_dirty": False, "hash": "ff00"},
        "measurements": measurements,
        "ended": "2026-11-22T11:15:30+00:00",
    }
    values.update(changes)
    result = BenchmarkResult(**values)
    return summarize(result, [WARM_UP] * len(result.measurements))


def with_step_samples(result: BenchmarkResult, samples: Mapping[str, float]) -> BenchmarkResult:
    """Return a result in which the steps of these contenders have other numbers of samples."""
    measurements = []
    for one in result.measurements:
        steps = [
            dataclasses.replace(step, samples=samples.get(one.contender, step.samples)) for step in one.steps
        ]
        measurements.append(dataclasses.replace(one, steps=tuple(steps)))
    return summarize(dataclasses.replace(result, measurements=tuple(measurements)), result.warm_ups)
