"""Recorder of a job with its sinks, the events of its start and recovery, and each rank's step log."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path

from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Restart, WorkerContext
from wanma.job.sections.job import Job
from wanma.observe.recorder import Recorder, Sink, SupervisorSink
from wanma.observe.sinks.jsonl import JsonLinesSink
from wanma.observe.sinks.tensorboard import TensorBoardSink
from wanma.training.balancing.share_rebalancer import ShareChange
from wanma.training.run.rank_memory import peak_rank_memory_bytes


def open_recorder(job: Job, worker: WorkerContext, first_step: int) -> Recorder:
    """Open rank 0's recorder: files in the run directory, and the supervisor's console."""
    sinks: list[Sink] = [JsonLinesSink(), SupervisorSink(worker.supervisor_client)]
    if job.observe.tensorboard:
        sinks.append(TensorBoardSink())
    return Recorder(RunDirectory(worker.run_directory), sinks, first_step, worker.check_record_fence)


def warn_per_node(text: str, worker: WorkerContext, recorder: Recorder | None) -> None:
    """Warn of a matter of one node: its first rank does, and rank 0 records it."""
    if recorder is not None:
        recorder.message(text, "warning")
    elif worker.local_rank == 0:
        worker.supervisor_client.send_event({"kind": "message", "level": "warning", "text": text})


def record_start(
    recorder: Recorder,
    step: int,
    steps: int,
    plan: Plan,
    targets_per_sample: int,
    *,
    nodes: int,
    is_restart: bool,
    source: str = "",
) -> None:
    """Record that the ranks begin after `step` of `steps` steps.

    Args:
        recorder: recorder of rank 0.
        step: optimizer steps done.
        steps: optimizer steps of the job.
        plan: plan of the run.
        targets_per_sample: targets of a sample; where it is 1, speed is in samples rather than tokens.
        nodes: nodes on which the ranks are.
        is_restart: true if the ranks were started again.
        source: name of the checkpoint that a run continues from; empty at its beginning.
    """
    fields = {"step": step, "steps": steps, "world_size": plan.world_size, "nodes": nodes, "plan": str(plan)}
    rate_unit = "samples/s" if targets_per_sample == 1 else "tokens/s"
    fields |= {"rate_unit": rate_unit} | ({"source": source} if source else {})
    recorder.event("start", **fields, **({"is_restart": True} if is_restart else {}))


def record_recovery(recorder: Recorder, restart: Restart, source: str, step: int) -> None:
    """Record a failure or resize, and its cost.

    Args:
        recorder: recorder of rank 0.
        restart: reason of the ranks' start.
        source: source of the state that the ranks have restored.
        step: step of that state.
    """
    change = asdict(restart.resize) if restart.resize is not None else None
    recorder.event(
        "recovery" if restart.failure else "resize",
        **({"failure": restart.failure, "attempt": restart.attempt} if restart.failure else {}),
        **({"change": change} if change is not None else {}),
        source=source,
        step=step,
        repeated_steps=max(restart.last_finished_step - step, 0),
        seconds=time.monotonic() - restart.failed_at,
    )


def record_share_change(recorder: Recorder, change: ShareChange) -> None:
    """Record a change of the batch shares."""
    recorder.event(
        "batch_shares",
        step=change.step,
        batch_shares=list(change.shares),
        previous_batch_shares=list(change.previous_shares),
        level="info",
        text=change.text,
    )


class RankStepLog:
    """Log of one rank: a line with the run's loss every few steps, on every rank and not only rank 0.

    The file is the one to which a supervisor has sent this process's output; without one no other process
    writes it.
    """

    def __init__(self, job: Job, worker: WorkerContext) -> None:
        self._interval_steps, self._steps = job.observe.log_every_steps, job.train.steps
        self._path: Path = RunDirectory(worker.run_directory).rank_log(worker.rank)

    def log_step(self, step: int, loss: float, gradient_norm: float, seconds: float, device: str) -> None:
        """Write the line of `step` if it is due.

        Args:
            step: optimizer steps done.
            loss: mean loss of the step.
            gradient_norm: gradient norm of the step.
            seconds: seconds of the step.
            device: device of the plan. The report reads this rank's peak memory from the line.
        """
        if step % self._interval_steps and step != self._steps:
            return
        numbers = f"loss {loss:.6f}  gradient norm {gradient_norm:.4g}  {seconds:.3f} s"
        numbers += f"  peak memory {peak_rank_memory_bytes(device)} bytes"
        with contextlib.suppress(OSError):  # a full disk costs this line and not the run
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as log:
                log.write(f"step {step}/{self._steps}  {numbers}\n")
