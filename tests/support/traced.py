"""torch.compile without compilation: what it traces and differentiates is run by the kernels of eager mode.

Inductor, which writes C++ and compiles it, takes several times as long: one test of each way to split a
block runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn

from support.compare import precision_of
from support.ranks import Outcome, run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import train


def trace_only(worker: WorkerContext, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(worker, *arguments)` on one rank, with compiled blocks that are only traced."""
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        return function(worker, *arguments)


def spread_traced(folder: Path, job: dict[str, Any], plan: Plan) -> Outcome:
    """Train as `spread_over` does, with compiled blocks that are only traced."""
    plan = replace(plan, precision=precision_of(job))
    run_ranks(trace_only, plan.world_size, (_train, folder, job, plan), is_reused=True)
    return Outcome(folder)


def _train(worker: WorkerContext, folder: Path, job: dict[str, Any], plan: Plan) -> str:
    return train(replace(worker, run_directory=folder), TrainRequest(Job.model_validate(job), plan))
