"""Sink for TensorBoard, through TensorBoard's own record writer, without torch and without a thread.

On resume a new file begins with a session start at the first step, which makes TensorBoard discard what
earlier files hold from that step on.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from wanma.job.errors import WanmaError, missing_extra_error
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.sinks.jsonl import AppendFile

STEP_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "samples": "train/samples",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "mfu": "speed/mfu",
    "memory_bytes": "memory/bytes",
}
"""TensorBoard tag of each key of a step record."""


class TensorBoardSink:
    """Sink that writes scalars of steps and validations into `run.tensorboard`.

    Raises:
        WanmaError: the package `tensorboard` is not installed.
    """

    output_name = "the TensorBoard file"

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import record_writer
        except ImportError as error:
            raise missing_extra_error("tensorboard", "tensorboard", "observe.tensorboard = true") from error
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._records: Any = record_writer
        self._writer: Any = None

    def open(self, run: RunDirectory, first_step: int) -> None:
        now = time.time()
        path = run.tensorboard / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}"
        try:
            run.tensorboard.mkdir(parents=True, exist_ok=True)
            self._writer = self._records.RecordWriter(AppendFile(path))
            self._write_record(wall_time=now, file_version="brain.Event:2")
            if first_step > 1:
                start_log = self._events.SessionLog(status=self._events.SessionLog.START)
                self._write_record(wall_time=now, step=first_step, session_log=start_log)
        except OSError as error:
            raise WanmaError(
                f"cannot write {path}: {error.strerror or error}",
                "free space on its disk, or set observe.tensorboard = false",
            ) from error

    def write(self, event: Event) -> None:
        scalars = to_scalars(event)
        if scalars:
            kind = self._summaries.Summary
            summary = kind(value=[kind.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
            self._write_record(wall_time=event["time"], step=event["step"], summary=summary)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_record(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())


def to_scalars(event: Event) -> dict[str, float]:
    """Return the scalars of an event by their TensorBoard tag; empty for most kinds."""
    if event["kind"] == "step":
        values = {tag: event.get(key) for key, tag in STEP_TAGS.items()}
        for group in ("phases", "exposed_communication_seconds", "communication_seconds", "layer_grad_norms"):
            values |= {f"{group}/{name}": seconds for name, seconds in event.get(group, {}).items()}
    elif event["kind"] == "validation":
        values = {
            f"validation/{key}": value
            for key, value in event.items()
            if key not in ("step", "time") and isinstance(value, int | float)
        }
        values |= {f"validation/{name}": value for name, value in event.get("metrics", {}).items()}
    else:
        return {}
    return {tag: float(value) for tag, value in values.items() if value is not None}
