"""Distributed training of a user's own model: planning, launch, training, recovery and reports.

The public names load on first use, so that the command line starts without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanma.api.best_plans import plan
    from wanma.api.load import Loaded, load
    from wanma.api.metric_log import log
    from wanma.api.session import session
    from wanma.api.train import Result, train
    from wanma.data.batch import Batch
    from wanma.data.index.records import open_records
    from wanma.job.callbacks import (
        Callback,
        CheckpointEnd,
        RunEnd,
        RunStart,
        StepEnd,
        StopTraining,
        ValidationEnd,
    )
    from wanma.job.errors import JobError, WanmaError
    from wanma.parallel.data_parallel.global_batch import global_batch, global_rows

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Callback",
    "CheckpointEnd",
    "JobError",
    "Loaded",
    "Result",
    "RunEnd",
    "RunStart",
    "StepEnd",
    "StopTraining",
    "ValidationEnd",
    "WanmaError",
    "global_batch",
    "global_rows",
    "load",
    "log",
    "open_records",
    "plan",
    "session",
    "train",
]

_HOMES = {
    "train": "wanma.api.train",
    "Result": "wanma.api.train",
    "session": "wanma.api.session",
    "load": "wanma.api.load",
    "Loaded": "wanma.api.load",
    "log": "wanma.api.metric_log",
    "plan": "wanma.api.best_plans",
    "Batch": "wanma.data.batch",
    "open_records": "wanma.data.index.records",
    "global_batch": "wanma.parallel.data_parallel.global_batch",
    "global_rows": "wanma.parallel.data_parallel.global_batch",
    **dict.fromkeys(
        ("Callback", "CheckpointEnd", "RunEnd", "RunStart", "StepEnd", "StopTraining", "ValidationEnd"),
        "wanma.job.callbacks",
    ),
    "WanmaError": "wanma.job.errors",
    "JobError": "wanma.job.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wanma' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
