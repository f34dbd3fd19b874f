"""Which sinks a job's records go to."""

from __future__ import annotations

from wanma.job.run_directory import RunDirectory
from wanma.job.sections import Job
from wanma.job.worker import Worker
from wanma.observe.forward import ForwardSink
from wanma.observe.jsonl import JsonLinesSink
from wanma.observe.recorder import Recorder, Sink
from wanma.observe.tensorboard import TensorBoardSink


def open_recorder(job: Job, worker: Worker, first_step: int) -> Recorder:
    """Rank 0's recorder: files in the run directory, and the supervisor's console."""
    sinks: list[Sink] = [JsonLinesSink(), ForwardSink(worker.control)]
    if job.observe.tensorboard:
        sinks.append(TensorBoardSink())
    return Recorder(RunDirectory(worker.run_directory), sinks, first_step)
