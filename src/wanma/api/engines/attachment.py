"""Attachment to a submitted run: its console, as if it were in the foreground, from its records."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Protocol

from wanma.engines.engine import Engine, RunStatus
from wanma.engines.engine_record import EngineRecord, read_engine_record
from wanma.engines.selection import get_engine
from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import RunDirectory, read_tail
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console.console import Console
from wanma.observe.console.opening import open_console
from wanma.observe.console.record_follower import RecordFollower
from wanma.report.log_position import LogPosition
from wanma.report.run_report import read_report
from wanma.report.script_run import read_script_run

RECORD_SECONDS = 0.5
"""Interval, in seconds, at which records are read."""
STATUS_SECONDS = 5.0
"""Interval, in seconds, at which the engine is asked."""
END_CHECKS = 5
"""Number of times that the engine is asked at once after the run has recorded its end."""
FETCH_SECONDS = 2.0
"""Interval, in seconds, at which records are fetched from elsewhere."""
MOST_STOPS = 2
"""Ctrl-C that the engine is asked for; a further one ends this command."""
UNKNOWN_SECONDS = 60.0
"""Time, in seconds, after which a run of which nothing is known counts as ended."""
LAST_LINES = 12
"""Lines of the engine's output that are shown when a run ends without a record."""
LAST_BYTES = 1 << 14
"""Bytes at the end of that output in which they lie."""


class OutputFollower:
    """Reader of the lines that a script's supervisors have written since the last call, as messages.

    Args:
        record: record of the run.
        engine: its engine.
    """

    def __init__(self, record: EngineRecord, engine: Engine) -> None:
        self._record, self._engine, self._positions = record, engine, dict[Path, LogPosition]()

    def read(self) -> list[Event]:
        """Return the new lines."""
        events: list[Event] = []
        self._record = _newest_record(self._record)
        for path in self._engine.log_files(self._record.handle):
            with path.open("rb") as file:
                self._positions.get(path, LogPosition()).seek(file)
                begin = file.tell()
                block = file.read()
                complete = block[: block.rfind(b"\n") + 1]
                self._positions[path] = LogPosition.at(file, begin + len(complete))
            lines = complete.decode(errors="replace").splitlines()
            events += [{"kind": "message", "level": "info", "text": line} for line in lines]
        return events


class Follower(Protocol):
    """Source of a run's events."""

    def read(self) -> list[Event]:
        """Return the events since the last call."""


def attach(
    run: RunDirectory,
    record: EngineRecord,
    *,
    from_start: bool = True,
    engine: Engine | None = None,
    is_held: bool = False,
) -> int:
    """Show a submitted run until it ends.

    A run that this command holds ends with it: Ctrl-C stops it after its step, with a checkpoint, and another
    Ctrl-C ends it at once. Ctrl-C leaves any other run as it is.

    Args:
        run: run directory.
        record: its engine.
        from_start: show the records that are there already.
        engine: engine that holds the run; default: a new one.
        is_held: True if `engine` holds the run.

    Returns:
        the exit code of the run, or 130 when the user left.

    Raises:
        WanmaError: the engine does not answer.
    """
    engine = engine or get_engine(record.engine)
    follower: Follower
    if not record.is_script:
        job = load_recorded_job(run.engine_files / "job.toml")
        follower, opened = RecordFollower(run, from_start=from_start), (job.observe, job.train.steps)
    else:
        follower, opened = OutputFollower(record, engine), (ObserveSection(console="plain"), 0)
    with open_console(run, *opened) as console:
        for note in () if from_start else record.notes:
            _say(console, note, level="warning")
        _say(console, _rule_text(run, record, is_held=is_held))
        attachment = _Attachment(run, record, engine, console, follower)
        stops = 0
        while True:
            try:
                return attachment.show_end(attachment.follow())
            except KeyboardInterrupt:
                if not is_held:
                    _say(
                        console,
                        f"left: the run goes on. `wanma attach {run.name}` shows it again, `wanma cancel "
                        f"{run.name}` stops it{_with_checkpoint(record)}",
                    )
                    return EXIT_INTERRUPTED
                stops += 1
                if stops > MOST_STOPS:
                    raise
                attachment.stop(is_immediate=stops > 1)


def _rule_text(run: RunDirectory, record: EngineRecord, *, is_held: bool) -> str:
    """Return the sentence that says what becomes of the run when this command ends."""
    if is_held:
        return (
            f"this command holds the run, which ends with it: Ctrl-C stops it{_with_checkpoint(record)}; "
            "-d starts one that goes on"
        )
    return f"the run goes on when this command ends: Ctrl-C leaves it, `wanma cancel {run.name}` stops it"


def _with_checkpoint(record: EngineRecord) -> str:
    """Return the words that promise a checkpoint at a stop; empty for a script, which saves what it likes."""
    return "" if record.is_script else " with a checkpoint"


class _Attachment:
    """Console of one submitted run."""

    def __init__(
        self,
        run: RunDirectory,
        record: EngineRecord,
        engine: Engine,
        console: Console,
        follower: Follower,
    ) -> None:
        self._run, self._record, self._engine = run, record, engine
        self._console, self._follower = console, follower
        self._shown = ""
        self._fetched_at = -math.inf
        self._problems: dict[str, str] = {}
        """Newest problem of each kind of question; empty: the last one was answered."""
        self._unknown_since = math.inf
        self._failure: Event | None = None
        """Failed end that the engine has not confirmed."""
        self._end_checks = 0
        """Number of questions to the engine that do not wait for `STATUS_SECONDS`."""

    def follow(self) -> RunStatus:
        """Show the events of the run until its engine says that it is over; return that status."""
        asked_at = -math.inf
        while True:
            status = None
            if self._end_checks or time.monotonic() - asked_at > STATUS_SECONDS:
                status = self._ask_status()
                asked_at, self._end_checks = time.monotonic(), max(self._end_checks - 1, 0)
            is_over = status is not None and self._is_over(status)
            self._show_events(is_last=is_over)
            if status is not None and is_over:
                return status
            time.sleep(RECORD_SECONDS)

    def _ask_status(self) -> RunStatus | None:
        """Ask the engine for the state of the run, and show it; None: it does not answer for the moment.

        Raises:
            WanmaError: it has never answered.
        """
        self._record = _newest_record(self._record)
        try:
            (status,) = self._engine.statuses([self._record.handle])
            self._show_status(status)
        except WanmaError as error:
            if not self._shown:
                raise
            self._note_problem("status", error.message)
            return None
        self._note_problem("status", "")
        return status

    def _is_over(self, status: RunStatus) -> bool:
        """Return True if the run has ended, or nothing has been known of it for a while.

        A host that does not answer at once says nothing of the run, nor do the records of an earlier start.
        """
        if status.state != "unknown":
            self._unknown_since = math.inf
            return status.is_over
        self._unknown_since = min(self._unknown_since, time.monotonic())
        if (script := read_script_run(self._run)) is not None:
            is_running, has_ended = script.state == "running", (script.ended or 0.0) > self._record.submitted
        else:
            events, has_job = self._run.events, self._run.job.exists()
            is_running = has_job and read_report(self._run, tail_only=True).state == "running"
            has_ended = events.exists() and events.stat().st_mtime > self._record.submitted
        if is_running:
            return False
        return has_ended or time.monotonic() - self._unknown_since > UNKNOWN_SECONDS

    def stop(self, *, is_immediate: bool) -> None:
        """Stop the run in order, or at once."""
        text = "stopping after the current step, with a checkpoint"
        if self._record.is_script:
            text = "stopping the script"
        text += "; Ctrl-C again ends the run at once"
        _say(self._console, "ending the run at once" if is_immediate else text)
        self._engine.cancel(self._record.handle, is_immediate=is_immediate)

    def show_end(self, status: RunStatus) -> int:
        """Show the failure of a run, if any, and the place of its checkpoints; return its exit code."""
        if self._failure is not None:  # its text is that of the error
            is_error = status.state not in ("finished", "cancelled")
            self._console.write({**self._failure, "text": ""} if is_error else self._failure)
        code = _show_end(self._run, self._record, self._engine, status, self._console)
        advice = self._engine.checkpoint_advice(self._record.handle)
        if advice is not None and self._run.job.exists() and read_report(self._run).checkpoints:
            _say(self._console, f"its checkpoints are on the hosts; to copy them here: {advice}")
        return code

    def _show_status(self, status: RunStatus) -> None:
        if (text := _state_text(self._record, status)) == self._shown:
            return
        self._shown = text
        _say(self._console, text)
        if status.state == "pending":
            for line in (explanation := self._engine.explain(self._record.handle)).advice:
                _say(self._console, f"  {line}")
            _say(self._console, f"  {explanation.summary}")

    def _note_problem(self, kind: str, text: str) -> None:
        """Show the problem of a question, once as long as it lasts; an empty text: there is none."""
        if text and text != self._problems.get(kind):
            _say(self._console, f"{text}; tried again", level="warning")
        self._problems[kind] = text

    def _show_events(self, *, is_last: bool) -> None:
        """Fetch and show what is new; records that cannot be fetched for a while are a warning."""
        if is_last or time.monotonic() - self._fetched_at > FETCH_SECONDS:
            try:
                self._engine.fetch(self._record.handle)
                self._note_problem("records", "")
            except WanmaError as error:
                self._note_problem("records", error.message)
            self._fetched_at = time.monotonic()
        for event in self._follower.read():
            if self._failure is not None:  # the run was started again
                self._console.write(self._failure)
                self._failure = None
            if event["kind"] == "finish":
                self._end_checks = END_CHECKS
                if event["outcome"] == "failed":
                    self._failure = event
                    continue
            self._console.write(event)


def _state_text(record: EngineRecord, status: RunStatus) -> str:
    name = f"{record.engine} {', '.join(status.job_ids)}"
    if status.state == "pending":
        return f"{name}: waiting for nodes ({status.reason or 'no reason given'})"
    if status.state == "running":
        reason = f" ({status.reason})" if status.reason else ""
        return f"{name}: running on {', '.join(status.nodes)}{reason}"
    return f"{name}: {status.state}"


def _show_end(
    run: RunDirectory, record: EngineRecord, engine: Engine, status: RunStatus, console: Console
) -> int:
    """Show the failure of a run that has ended, if any; return its exit code."""
    report = read_report(run, tail_only=True) if run.job.exists() else None
    script = read_script_run(run)
    recorded_state = report.state if report is not None else script.state if script is not None else "new"
    if status.state == "finished" or (status.state == "unknown" and recorded_state == "finished"):
        return 0
    if status.state == "cancelled":
        return EXIT_INTERRUPTED
    recorded = script.failure if script is not None else ""
    if report is not None:
        recorded = report.failure or report.failed_start
    _say(console, recorded or status.reason or f"the run ended: {status.state}", level="error")
    if not recorded:
        for path in engine.log_files(record.handle)[-1:]:
            _say(console, f"last lines of {path}:")
            for line in read_tail(path, LAST_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]:
                _say(console, f"  {line}")
    return status.exit_code or EXIT_FAILED


def _newest_record(record: EngineRecord) -> EngineRecord:
    """Return the record as it is by now: a run may go on in a further job."""
    run = RunDirectory(Path(record.submission["run_directory"]))
    with contextlib.suppress(WanmaError):
        return read_engine_record(run) or record
    return record


def _say(console: Console, text: str, level: str = "info") -> None:
    console.write({"kind": "message", "level": level, "text": text})


def require_engine_record(run: RunDirectory, record: EngineRecord | None) -> EngineRecord:
    """Return the record of a submitted run.

    Raises:
        WanmaError: the run was not submitted to an engine.
    """
    if record is None:
        raise WanmaError(
            f"the run '{run.name}' was not submitted: a command has it, or had it, in its foreground",
            "`wanma show` shows it; Ctrl-C in its terminal stops it; -d submits a run",
        )
    return record
