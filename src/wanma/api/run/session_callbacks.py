"""Callbacks of a session, called in the process of rank 0, which sees no events of a supervisor."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from wanma.api.run.callback_thread import CallbackThread, load_callbacks
from wanma.job.callbacks import Callback
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, SupervisorClient, WorkerContext
from wanma.job.sections.job import Job


class CallbackSupervisorClient:
    """Supervisor client that also passes each event to callbacks, and ends the run if one asks for it."""

    def __init__(self, supervisor_client: SupervisorClient, callbacks: CallbackThread) -> None:
        self._supervisor_client, self._callbacks = supervisor_client, callbacks
        self._is_stop_requested = False
        self.outcome = "interrupted"
        self.report_progress = supervisor_client.report_progress
        self.report_finished_step = supervisor_client.report_finished_step
        self.report_work_time = supervisor_client.report_work_time
        self.is_suspend_requested = supervisor_client.is_suspend_requested
        self.profile_request = supervisor_client.profile_request
        self.report_suspend = supervisor_client.report_suspend
        self.kill_deadline = supervisor_client.kill_deadline
        self.report_drain = supervisor_client.report_drain

    def send_event(self, event: Event) -> None:
        self._supervisor_client.send_event(event)
        if event["kind"] == "finish":
            self.outcome = str(event["outcome"])
        if (reason := self._callbacks.on_event(event)) is not None and not self._is_stop_requested:
            self._is_stop_requested = True
            text = f"{reason}: the run stops after this step"
            self._supervisor_client.send_event({"kind": "message", "level": "info", "text": text})

    def is_drain_requested(self) -> bool:
        return self._is_stop_requested or self._supervisor_client.is_drain_requested()


@contextmanager
def with_callbacks(callbacks: Sequence[Callback], job: Job, worker: WorkerContext) -> Iterator[WorkerContext]:
    """Yield `worker` with its events passed to the callbacks, those that the job names included.

    Raises:
        WanmaError: a callback has failed; the run has ended in order before.
    """
    if worker.rank != 0 or not (callbacks or job.observe.callbacks):
        yield worker
        return
    run = RunDirectory(worker.run_directory)
    called = CallbackThread([*callbacks, *load_callbacks(job.observe.callbacks)], run)
    control = CallbackSupervisorClient(worker.supervisor_client, called)
    with called:
        try:
            yield replace(worker, supervisor_client=control)
        except BaseException as error:
            plain = traceback.format_exception_only(error)[-1].strip()
            called.end_run(1, str(error) if isinstance(error, WanmaError) else plain)
            raise
        called.end_run(0 if control.outcome == "finished" else 1, None)
    if called.failure:
        raise WanmaError(
            f"{called.failure}\n  the run stopped in order with a checkpoint; the same call resumes it"
        )
