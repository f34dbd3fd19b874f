"""Callbacks of a session, called in the process of rank 0, which sees no events of a supervisor."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from wanma.api.run.callback_thread import Callbacks, named_callbacks
from wanma.job.callbacks import Callback
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Control, Event, Worker
from wanma.job.sections.job import Job


class CalledControl:
    """Supervisor client that also passes each event to callbacks, and ends the run if one asks for it."""

    def __init__(self, control: Control, called: Callbacks) -> None:
        self._control, self._called = control, called
        self._is_stopped = False
        self.outcome = "interrupted"
        self.progress = control.progress
        self.step_done = control.step_done
        self.worked = control.worked
        self.pause_requested = control.pause_requested
        self.pausing = control.pausing
        self.stop_until = control.stop_until
        self.leaving = control.leaving

    def event(self, event: Event) -> None:
        self._control.event(event)
        if event["kind"] == "finish":
            self.outcome = str(event["outcome"])
        if (reason := self._called.see(event)) is not None and not self._is_stopped:
            self._is_stopped = True
            text = f"{reason}: the run ends in order"
            self._control.event({"kind": "message", "level": "info", "text": text})

    def stop_requested(self) -> bool:
        return self._is_stopped or self._control.stop_requested()


@contextmanager
def calling(callbacks: Sequence[Callback], job: Job, worker: Worker) -> Iterator[Worker]:
    """Yield `worker` with its events passed to the callbacks, those that the job names included.

    Raises:
        WanmaError: a callback has failed; the run has ended in order before.
    """
    if worker.rank != 0 or not (callbacks or job.observe.callbacks):
        yield worker
        return
    run = RunDirectory(worker.run_directory)
    called = Callbacks([*callbacks, *named_callbacks(job.observe.callbacks)], run)
    control = CalledControl(worker.control, called)
    with called:
        try:
            yield replace(worker, control=control)
        except BaseException as error:
            plain = traceback.format_exception_only(error)[-1].strip()
            called.end(1, str(error) if isinstance(error, WanmaError) else plain)
            raise
        called.end(0 if control.outcome == "finished" else 1, None)
    if called.failure:
        raise WanmaError(f"{called.failure}\n  the run has stopped in order; the same call carries it on")
