"""Thread that passes a run's events, as typed records, to the user's callbacks."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

from wanma.checkpoint.format.manifest import step_folder_name
from wanma.job.callbacks import (
    Callback,
    CheckpointEnd,
    Outcome,
    RunEnd,
    RunStart,
    StepEnd,
    StopTraining,
    ValidationEnd,
)
from wanma.job.errors import JobError, did_you_mean
from wanma.job.file.import_path import import_object
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.user_frames import user_frame_text

_READING_INTERVAL = 100
"""Time between two readings of the objects that were sent, as a multiple of the time of one."""
_BUILT_IN_METRICS = ("perplexity", "accuracy")


class CallbackThread:
    """Callbacks of one run and their thread; a context manager, after which none is called.

    Args:
        callbacks: the callbacks.
        run: run directory.
        sent_objects: objects by argument of `wanma.train` of which each rank has a copy: a callback that
            changes one would change nothing there, and fails.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        run: RunDirectory,
        sent_objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._callbacks, self._run = list(callbacks), run
        self._copies = _SentCopies(sent_objects if callbacks else {})
        self._queue: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_callbacks, daemon=True, name="wanma-callbacks")
        self._stop_reason = ""
        self._step, self._has_begun = 0, False
        self.failure = ""
        """Error of a callback, with its name and line; empty if there is none."""

    def on_event(self, event: Event) -> str | None:
        """Pass an event on.

        Returns:
            the reason for which a callback asked for an orderly end of the run, once; else None.
        """
        if not self._callbacks:
            return None
        if (callback_event := _to_callback_event(event, self._run)) is not None:
            self._step, self._has_begun = callback_event[1].step, True
            self._queue.put(callback_event)
        stop, self._stop_reason = self._stop_reason, ""
        return stop or None

    def end_run(self, exit_code: int, failure: str | None) -> None:
        """End the run: call the callbacks of all pending events, and `on_end`.

        Args:
            exit_code: exit code of the run.
            failure: message of a failed run.
        """
        outcome: Outcome = "failed" if failure is not None else "interrupted" if exit_code else "finished"
        if self._callbacks and (self._has_begun or failure is not None):  # else rank 0 is on another machine
            self._queue.put(("on_end", RunEnd(self._step, outcome, failure or "")))
        self.close()

    def close(self) -> None:
        """Wait until all pending events are handled."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> Self:
        if self._callbacks:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_callbacks(self) -> None:
        failed: set[int] = set()
        while (entry := self._queue.get()) is not None:
            method, record = entry
            for number, callback in enumerate(self._callbacks):
                if number in failed:
                    continue
                name = f"{type(callback).__name__}.{method}"
                try:
                    getattr(callback, method)(record)
                except StopTraining as stop_request:
                    self._stop_reason = f"callback {name}" + (
                        f": {stop_request.reason}" if stop_request.reason else ""
                    )
                except Exception as error:  # whatever the user's code raises
                    failed.add(number)
                    line = user_frame_text(error)
                    self.failure = f"callback {name} failed: {type(error).__name__}: {error}" + (
                        f"\n    {line}" if line else ""
                    )
                    self._stop_reason = f"callback {name} failed"
            if not failed and (changed := self._copies.changed(is_last=method == "on_end")):
                failed.update(range(len(self._callbacks)))
                self._stop_reason = f"a callback changed {changed}"
                self.failure = (
                    f"a callback has changed {changed} by {method} of step {record.step}: each rank has a "
                    "copy of it, made at the start\n  compute the change from the step in the object itself; "
                    "or train.check_code = false, if the ranks need not have it"
                )


class _SentCopies:
    """Objects that were sent to the ranks, compared with their state at the start in 1 % of the time."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._states = self._read()
        self._next_reading = 0.0

    def changed(self, *, is_last: bool) -> str:
        """Return the name of the first object that has changed; empty: none, or it is too early to read."""
        start = time.perf_counter()
        if not self._objects or (start < self._next_reading and not is_last):
            return ""
        try:
            states = self._read()
        except RuntimeError:  # another thread of the user's has changed a container meanwhile
            states = self._states
        end = time.perf_counter()
        self._next_reading = end + _READING_INTERVAL * (end - start)
        return next((name for name, state in states.items() if state != self._states[name]), "")

    def _read(self) -> dict[str, int]:
        if not self._objects:
            return {}
        from wanma.training.checks.process_state import plain_state

        return {name: plain_state(value) for name, value in self._objects.items()}


def check_callbacks(callbacks: object, source: str = "callbacks") -> list[Callback]:
    """Refuse objects that are no callbacks, and methods whose names are misspelled.

    Args:
        source: argument or key that gave them.

    Raises:
        JobError: `callbacks` is no sequence of `Callback` objects.
    """
    checked: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in checked:
        if not isinstance(callback, Callback):
            type_text = (
                f"the class {callback.__name__}"
                if isinstance(callback, type)
                else f"an object of {type(callback).__name__}"
            )
            raise JobError(
                f"{source}: {type_text} is not a wanma.Callback",
                "give objects of subclasses of wanma.Callback",
            )
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(type(callback)):
            if name.startswith("on_") and name not in known:
                raise JobError(
                    f"{source}: {type(callback).__name__}.{name} is not a callback method."
                    f"{did_you_mean(name, known)}",
                    f"use {', '.join(known)}, or a name that does not begin with on_",
                )
    return checked


def load_callbacks(paths: Sequence[str]) -> list[Callback]:
    """Return the callbacks that a job names: objects, or results of classes and functions.

    Raises:
        JobError: one cannot be imported or made, or is no callback.
    """
    loaded: list[Callback] = []
    for path in paths:
        target = import_object(path, "observe.callbacks")
        try:
            result = target() if callable(target) and not isinstance(target, Callback) else target
        except Exception as error:  # whatever the user's code raises
            raise JobError(f"observe.callbacks: '{path}' failed: {type(error).__name__}: {error}") from error
        loaded += check_callbacks([result], f"observe.callbacks = '{path}'")
    return loaded


def _to_callback_event(event: Event, run: RunDirectory) -> tuple[str, Any] | None:
    """Return the callback method and its argument; None for events without a method."""
    match event["kind"]:
        case "start":
            is_recovery = bool(event.get("is_restart"))
            fields = (event["step"], event["steps"], event["world_size"], event["plan"], is_recovery)
            return "on_start", RunStart(run.path, *fields)
        case "step":
            return "on_step", StepEnd(
                event["step"],
                event["loss"],
                event["grad_norm"],
                event["learning_rate"],
                event["samples"],
                event["step_seconds"],
                event.get("layer_grad_norms", {}),
            )
        case "validation":
            built_in_metrics = {
                name: event[name] for name in _BUILT_IN_METRICS if event.get(name) is not None
            }
            metrics = {**built_in_metrics, **event.get("metrics", {})}
            loss = math.nan if event["loss"] is None else event["loss"]
            return "on_validation", ValidationEnd(event["step"], loss, metrics)
        case "checkpoint":
            path = run.checkpoints / step_folder_name(event["step"])
            return "on_checkpoint", CheckpointEnd(event["step"], path)
    return None
