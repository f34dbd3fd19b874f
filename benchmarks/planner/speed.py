"""Search time by number of devices: GPT-3 175B on A100s, on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.speed [--devices 64 1024 16384] [--repeats 5] [--write]
    OMP_NUM_THREADS=1 python -m benchmarks.planner.speed --devices 1024 --context

The seconds are of the process's own CPU time, of which other programs take nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.planner.machines import cluster
from wanma.job.run.resource_limits import cpu_model
from wanma.job.sections.job import Job
from wanma.models.config.presets import OWN_PRESETS
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.problem import PlanningProblem, build_problem
from wanma.planner.search.branch_and_bound import search
from wanma.planner.search.result import SearchResult
from wanma.planner.search.space import SearchSpace

GPT_3 = OWN_PRESETS["gpt-3-175b"]
SEQUENCE = 2048
TABLE = RESULTS / "planner-search.md"
DEVICES = (64, 256, 1024, 4096, 16384, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE}")
    parser.add_argument("--context", action="store_true", help="with context parallelism of 2 as well")
    options = parser.parse_args()
    if options.write and options.context:
        parser.error("the table is of the space that a job gets; --context is another one")
    lines = written(TABLE) if options.write else {}
    for devices in options.devices:
        lines[devices] = measured(devices, options.repeats, (1, 2) if options.context else None)
        print(lines[devices], flush=True)
    if options.write:
        TABLE.write_text(report([lines[devices] for devices in sorted(lines)], options.repeats))


def written(table: Path) -> dict[int, str]:
    """Return the lines of a table by devices; sizes that are not measured again keep theirs."""
    if not table.exists():
        return {}
    lines = [line for line in table.read_text().splitlines() if line.startswith("| ") and line[2].isdigit()]
    return {int(line.split("|")[1].replace(",", "")): line for line in lines}


def measured(devices: int, repeats: int, context: tuple[int, ...] | None = None) -> str:
    """Measure a search; return its line of the table.

    Args:
        context: sizes of `cp`; default: those of a job that sets none.
    """
    problem = gpt_3(devices)
    space = SearchSpace.from_job(problem.job, problem.cluster, problem.dimensions)
    if context is not None:
        space = replace(space, cp=context)
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.process_time()
        found = search(problem, space)
        seconds.append(time.process_time() - began)
    return _line(devices, problem, found, seconds)


def gpt_3(devices: int) -> PlanningProblem:
    """Return the problem of 1,536 sequences per step, as published for up to 1,024 A100s.

    With more devices the batch grows in proportion.
    """
    job = Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": SEQUENCE},
            "train": {"global_batch": 1536 * max(devices // 1024, 1), "precision": "bf16"},
        }
    )
    return build_problem(job, cluster("A100 SXM", devices), compute_decoder_workload(GPT_3, SEQUENCE), GPT_3)


def _line(devices: int, problem: PlanningProblem, found: SearchResult, seconds: list[float]) -> str:
    best = found.best
    chosen = "nothing fits"
    if best is not None:
        step = best.forecast.step
        assert step is not None
        assert best.forecast.model_flops_utilisation is not None
        chosen = f"{best.plan}; {step.seconds:.1f} s, MFU {best.forecast.model_flops_utilisation:.0%}"
    return (
        f"| {devices:,} | {problem.global_batch:,} | {found.plan_count:,} | {statistics.median(seconds):.2f} "
        f"| {min(seconds):.2f} to {max(seconds):.2f} | {chosen} |"
    )


def report(lines: list[str], repeats: int) -> str:
    return "\n".join(
        [
            "# Time of a search",
            "",
            "GPT-3 175B (96 layers, hidden 12,288, sequences of 2,048) on servers of eight A100 80 GB.",
            "Its matrices are GPT-3's, two of 4 hidden in each feed-forward network among them (preset",
            "`gpt-3-175b`: 174.6B parameters). The space is that of a job which says nothing",
            "of [parallel]: pp, dp_replicate, dp_shard, tp, ZeRO 0 to 3, sequence parallelism, micro-batch,",
            "six schedules with up to 12 stages per rank, selective and full recompute of each number of",
            "blocks, and torch.compile; on all devices and on fewer. Every search is exact: what it finds is",
            "the best of all plans (tests/planner/search/test_best.py).",
            "",
            f"CPU seconds on one core, medians of up to {repeats}; {cpu_model()}, Python",
            f"{platform.python_version()}; {os.cpu_count()} cores, which others kept busy (load "
            f"{os.getloadavg()[1]:.1f}). Goals: 1 s for 1,024 devices, 5 s for 16,384.",
            "",
            "| devices | global batch | plans | CPU seconds | range | best plan |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            "    OMP_NUM_THREADS=1 python -m benchmarks.planner.speed --write",
            "",
        ]
    )


if __name__ == "__main__":
    main()
