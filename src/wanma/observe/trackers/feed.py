"""Feed of one tracker: reads the records of a run as they come, and hands over what has not arrived yet."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.job.run.worker import Event
from wanma.observe.console.record_follower import RecordFollower
from wanma.observe.sinks.tensorboard import to_scalars
from wanma.observe.trackers.tracker import Scalars, TrackedRun, Tracker

POLL_SECONDS = 1.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
PATIENCE_SECONDS = 600.0
"""Time after the end of a run for which a tracker that does not answer is asked again."""
BATCH_STEPS = 500
"""Most steps that are handed over at once."""


class _GivenUpError(Exception):
    """The tracker cannot work, or has not answered until too long after the run's end."""


class Feed:
    """Feed of one tracker.

    Args:
        settings: keys of the job with their values.
        end: the run's end: what is missing is handed over, and no more awaited.
        say: writes a text into the trackers' log.
    """

    def __init__(
        self,
        name: str,
        make_tracker: Callable[[], Tracker],
        run: RunDirectory,
        settings: Mapping[str, str],
        end: threading.Event,
        say: Callable[[str], object],
    ) -> None:
        self._name, self._make_tracker, self._run = name, make_tracker, run
        self._end, self._say = end, say
        folder = run.path / "trackers" / name.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self._state_file = folder / "state.json"
        self._tracked = TrackedRun(run.name, settings, folder)
        self._steps = {"step": 0, "validation": 0}
        """Newest step that has arrived, by kind of event."""
        self._began = 0.0
        """Time of the start from step 0 that the tracker's run belongs to."""
        self._outcome = "crashed"
        self._deadline = math.inf
        """Time, on the monotonic clock, after which a tracker that does not answer is given up."""
        self._tracker: Tracker | None = None

    def run(self) -> None:
        """Feed the tracker until the run has ended and all has arrived, or too long after its end."""
        with contextlib.suppress(_GivenUpError):
            self._follow()

    def _follow(self) -> None:
        self._read_state()
        follower = RecordFollower(self._run, from_start=True)
        waiting: list[Event] = []
        while True:
            was_ended = self._end.is_set()
            new = follower.read()
            self._take_starts(new)
            waiting += new
            while waiting:
                self._hand_over(waiting[:BATCH_STEPS])
                del waiting[:BATCH_STEPS]
            if was_ended and not new:  # one reading has at most some megabytes
                break
            self._end.wait(POLL_SECONDS)
        if self._tracker is not None:
            self._repeat(lambda tracker: tracker.finish(self._outcome))

    def _hand_over(self, events: list[Event]) -> None:
        # What is older belongs to a training that another has replaced (`--fresh`).
        recorded = [e for e in events if e["kind"] in self._steps and e["time"] >= self._began]
        scalars = [(e["kind"], Scalars(e["step"], e["time"], to_scalars(e))) for e in recorded]
        if not any(entry.values for _, entry in scalars):
            return
        self._repeat(lambda _: None)  # once it is open, the steps that have arrived are known
        new = [(kind, entry) for kind, entry in scalars if entry.values and entry.step > self._steps[kind]]
        if not new:
            return
        self._repeat(lambda tracker: tracker.log([entry for _, entry in new]))
        for kind, entry in new:
            self._steps[kind] = max(self._steps[kind], entry.step)
        self._write_state()

    def _take_starts(self, events: Iterable[Event]) -> None:
        """Note starts and ends among events that were read at once: steps and starts are in two files."""
        for event in events:
            if event["kind"] == "finish":
                self._outcome = event.get("outcome", "finished")
            elif event["kind"] == "start":
                self._outcome = "crashed"
                is_first = event.get("step", 0) == 0 and not event.get("is_restart")
                if is_first and event["time"] > self._began:
                    if self._began:
                        self._begin_again()
                    self._began = event["time"]

    def _begin_again(self) -> None:
        """Leave the tracker's run: another training begins in the folder (`--fresh`)."""
        if self._tracker is not None:
            self._repeat(lambda tracker: tracker.finish("interrupted"))
        self._tracker = None
        self._tracked.state.clear()
        self._steps = dict.fromkeys(self._steps, 0)

    def _repeat(self, act: Callable[[Tracker], None]) -> None:
        """Open the tracker if need be, and act, until it works."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                if self._tracker is None:
                    tracker = self._make_tracker()
                    arrived = tracker.open(self._tracked)
                    if arrived is not None:
                        self._steps |= arrived
                    self._tracker = tracker
                    self._write_state()
                act(self._tracker)
            except (ImportError, WanmaError) as error:  # no time will mend that
                self._say(f"{self._name}: {error}")
                raise _GivenUpError from error
            except Exception as error:  # whatever the library raises
                if self._end.is_set():
                    self._deadline = min(self._deadline, time.monotonic() + PATIENCE_SECONDS)
                if time.monotonic() > self._deadline:
                    self._say(f"{self._name}: {type(error).__name__}: {error}; the run's next start goes on")
                    raise _GivenUpError from error
                self._say(f"{self._name}: {type(error).__name__}: {error}; tried again in {pause:g} s")
                if self._end.is_set():
                    time.sleep(pause)
                else:
                    self._end.wait(pause)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)
            else:
                return

    def _read_state(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            value: dict[str, Any] = json.loads(self._state_file.read_text())
            self._steps |= value["steps"]
            self._tracked.state |= value["state"]
            self._began = value["began"]

    def _write_state(self) -> None:
        with contextlib.suppress(OSError):  # the next start repeats what it cannot know
            value = {"began": self._began, "steps": self._steps, "state": self._tracked.state}
            write_json(self._state_file, value)
