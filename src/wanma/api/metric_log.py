"""Metrics of a user's script: `wanma.log(step=10, loss=0.3)`, in any interpreter that finds wanma.

Nothing but the standard library is imported. `wanma launch` names the file in the variable WANMA_METRICS; a
script without wanma appends lines of JSON to it itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError
from wanma.observe.sinks.jsonl import AppendFile, to_json_line

METRICS_VARIABLE = "WANMA_METRICS"
"""Name of the environment variable with the path of this rank's file of metrics."""
_NO_FILE_TEXT = f"wanma.log: {METRICS_VARIABLE} is not set, so nothing is recorded; start with `wanma launch`"
_files: dict[str, AppendFile] = {}


def log(*, step: int, **values: Any) -> None:
    """Record metrics of one step of a script that `wanma launch` started; `wanma show` prints the newest.

    Metrics of rank 0 are the run's (metrics.jsonl); those of the others are beside their logs. Outside of
    `wanma launch` nothing is recorded, and the first call says so.

    Args:
        step: number of the step.
        values: numbers or texts by name, such as `loss=0.3`; arrays and tensors with one element are numbers.

    Raises:
        WanmaError: a `wanma.session` is open, which records its steps itself; a value is none of these; or
            the file cannot be written.
    """
    worker = sys.modules.get("wanma.job.run.worker")
    if "wanma.api.session" in sys.modules and worker is not None and worker.in_session.get():
        raise WanmaError(
            "wanma.log is for scripts without wanma.session, whose steps are recorded already",
            "remove the call, or call it before the session is opened",
        )
    record: dict[str, Any] = {"step": int(step), "time": time.time()}
    record |= {name: _to_json(name, value) for name, value in values.items()}
    path = os.environ.get(METRICS_VARIABLE, "")
    if path not in _files:
        if not path:
            print(_NO_FILE_TEXT, file=sys.stderr, flush=True)
        _files[path] = _open(Path(path or os.devnull))
    _files[path].write(to_json_line(record))


def _open(path: Path) -> AppendFile:
    try:
        return AppendFile(path)
    except OSError as error:
        raise WanmaError(
            f"wanma.log cannot write {path}: {error.strerror or error}", f"correct {METRICS_VARIABLE}"
        ) from error


def _to_json(name: str, value: Any) -> float | int | str | None:
    if hasattr(value, "item"):
        value = value.item()
    elif hasattr(value, "numpy"):
        value = value.numpy().item()
    if value is None or isinstance(value, float | int | str):
        return value
    raise WanmaError(
        f"wanma.log: {name} is {type(value).__name__}, and metrics are numbers or texts",
        f"convert it, such as {name}=float(value)",
    )
