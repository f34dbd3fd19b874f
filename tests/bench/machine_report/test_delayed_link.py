"""A link that is really delayed, between real ranks: measured by the benchmark's cases, and named."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.machine_results import machine_result
from support.ranks import run_ranks
from wanma.bench.machine.cases import CPU_MESSAGE_BYTES, machine_cases
from wanma.bench.machine.collective_selection import ALL_COLLECTIVES
from wanma.bench.machine.figures import execution_figures
from wanma.bench.machine.request import MachineRequest
from wanma.bench.machine.worker import times_content
from wanma.bench.machine_report.slow_parts import find_slow_parts
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.planner.calibration.round_robin import measure_round_robin

RANKS, EXECUTIONS = 4, 4
SLOW = (1, 3)
DELAY_SECONDS = 0.2
"""Much longer than a message of 16 MiB takes here, also on a busy machine."""


def measured(worker: WorkerContext) -> list[dict[str, Any]]:
    """Measure the links several times, with messages from rank 1 to rank 3 that leave late."""
    from wanma.parallel.mesh.parallel_mesh import open_mesh

    torch.set_num_threads(1)
    send = dist.isend

    def delayed(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work | None:
        if (worker.rank, peer) == SLOW and tensor.numel() >= CPU_MESSAGE_BYTES:
            time.sleep(DELAY_SECONDS)
        return send(tensor, peer, group)

    contents = []
    plan = Plan(dp_replicate=RANKS)
    with open_mesh(worker, plan, 120) as grid:
        group = dist.group.WORLD
        assert group is not None
        dist.isend = delayed
        request = MachineRequest(plan, 0.1, 1.0, worker.run_directory, ("links",), 1, ALL_COLLECTIVES)
        cases = machine_cases(worker, group, grid.device, request)
        cases = [case for case in cases if case.name.startswith("pair_stream")]
        for _ in range(EXECUTIONS):
            times = measure_round_robin(cases, 0.1, group)
            contents.append(times_content(cases, times, dist.get_backend(group), 0))
    return contents


@pytest.mark.full
def test_the_delayed_link_is_named_and_no_other() -> None:
    contents = json.loads(json.dumps(run_ranks(measured, RANKS, (), seconds=240)[0]))
    made = machine_result(RANKS, 1)
    values: dict[str, dict[int, float]] = {}
    for number, content in enumerate(contents):
        for name, value in execution_figures(content, RANKS).items():
            values.setdefault(name, {})[number] = value
    result = replace(made, values={made.contender_names[0]: values})
    (report,) = find_slow_parts(result)
    assert report.compared == RANKS * (RANKS - 1)
    (own,) = (finding.ratios for finding in report.findings if list(finding.ratios) == [SLOW])
    assert own[SLOW].high < 0.5
