"""Control of runs that go on: state, log files, cancellation, size, and reason for waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from wanma.api.engines.attachment import require_engine_record
from wanma.api.engines.placing import run_secret
from wanma.data.stores.file_locks import is_locked
from wanma.engines.engine import WANTED_NODES_KEY, Engine, Explanation, Handle, RunState, RunStatus
from wanma.engines.engine_record import EngineRecord, change_handle, read_engine_record
from wanma.engines.selection import get_engine
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.server_request import (
    has_server_request,
    request_servers,
    withdraw_server_request,
)
from wanma.job.sections.engines import ENGINES
from wanma.job.sections.parallel import MAX_SERVERS
from wanma.observe.units import duration_text
from wanma.report.run_report import is_finished, read_report
from wanma.report.script_run import read_script_run
from wanma.report.terminal import Placement

_TAKEN_SECONDS = 60.0
"""Longest wait for a run that takes a request."""
_POLL_SECONDS = 0.1


def find_submitted(run: RunDirectory) -> tuple[Engine, EngineRecord]:
    """Return the engine of a submitted run, and its record.

    Raises:
        WanmaError: the run was not submitted.
    """
    record = require_engine_record(run, read_engine_record(run))
    return get_engine(record.engine), record


def run_statuses(runs: Iterable[RunDirectory]) -> tuple[dict[Path, RunStatus], list[str]]:
    """Return the state of each submitted run, with one question to each engine, and what went wrong.

    An engine that does not answer leaves its runs out: a list of runs is never refused for it.
    """
    records: dict[str, list[tuple[RunDirectory, EngineRecord]]] = {}
    problems = []
    for run in runs:
        try:
            record = read_engine_record(run)
        except WanmaError as error:
            problems.append(error.message)
            continue
        if record is not None:
            records.setdefault(record.engine, []).append((run, record))
    statuses: dict[Path, RunStatus] = {}
    for name, submitted in records.items():
        try:
            answers = get_engine(name).statuses([record.handle for _, record in submitted])
        except WanmaError as error:
            problems.append(f"{name}: {error.message}")
            continue
        statuses |= {run.path: status for (run, _), status in zip(submitted, answers, strict=True)}
    return statuses, problems


def is_going_on(run: RunDirectory, state: RunState | None) -> bool:
    """Return True while a run waits, starts or trains, or a script of `wanma launch` runs.

    Args:
        state: state by the engine, which may not know it; None: the run was not submitted.
    """
    if state not in (None, "unknown"):
        return state in ("pending", "running")
    if is_locked(run.lock) or is_locked(run.nodes_lock):  # its start may not be recorded yet
        return True
    script = read_script_run(run)
    return (script.state if script is not None else read_report(run, tail_only=True).state) == "running"


def run_placements(runs: Sequence[RunDirectory]) -> tuple[dict[Path, Placement], list[str]]:
    """Return engine and state of each submitted run, for a list of runs.

    Finished runs are not asked for; interrupted and failed ones may wait again for nodes.

    The second value tells what went wrong: a list is never refused for an engine that does not answer.
    """
    submitted = [run for run in runs if run.engine.exists()]
    statuses, problems = run_statuses(run for run in submitted if not _has_finished(run))
    placements = {}
    for run in submitted:
        with contextlib.suppress(WanmaError):  # told by `run_statuses`
            if (record := read_engine_record(run)) is not None:
                status = statuses.get(run.path, RunStatus("unknown"))
                is_silent = status.state == "unknown" and bool(status.nodes)
                names = status.nodes if is_silent else status.job_ids
                place = f"{record.engine} {', '.join(names)}"
                placements[run.path] = Placement(status.state, place, is_silent)
                if is_silent:
                    problems.append(f"{run.name}: unknown since {_last_sign_of_life(run)}: {status.reason}")
    return placements, problems


def _last_sign_of_life(run: RunDirectory) -> str:
    """Return the time of the newest record of a run that has come here, and its age."""
    script, record = read_script_run(run), read_engine_record(run)
    newest = script.last_activity if script is not None else read_report(run, tail_only=True).last_activity
    newest = newest or (record.submitted if record is not None else 0.0)
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest))
    return f"{text} ({duration_text(time.time() - newest)} ago)"


def _has_finished(run: RunDirectory) -> bool:
    """Return True if the run has finished since its newest submission."""
    try:
        record = read_engine_record(run)
    except WanmaError:  # told by `run_statuses`
        return False
    if record is not None and (script := read_script_run(run)) is not None:
        return script.state == "finished" and (script.ended or 0.0) > record.submitted
    return record is not None and is_finished(run, record.submitted)


def run_status(run: RunDirectory) -> RunStatus:
    """Return the state of a submitted run. Raises `WanmaError`."""
    engine, record = find_submitted(run)
    return engine.statuses([record.handle])[0]


def fetch_records(run: RunDirectory) -> None:
    """Bring the records of a submitted run here, where its engine keeps them elsewhere.

    Raises:
        WanmaError: they cannot be fetched.
    """
    record = read_engine_record(run)
    if record is not None:
        get_engine(record.engine).fetch(record.handle)


def run_log_files(run: RunDirectory, ranks: Iterable[int] | None = None) -> list[Path]:
    """Return the logs of a run: of its ranks, or the engine's own output where there is none yet.

    Args:
        run: run directory.
        ranks: ranks to show; default: the engine's output, which is the console of the run, or the log of the
            first rank that is here.

    Raises:
        WanmaError: there is no such log.
    """
    if ranks is not None:
        files = [run.rank_log(rank) for rank in ranks]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            there = sorted(path.name for path in run.path.glob("logs/rank-*.log"))
            raise WanmaError(
                f"the run '{run.name}' has no {', '.join(missing)}",
                f"logs there: {', '.join(there[:8]) or 'none yet'}",
                EXIT_USAGE,
            )
        return files
    record = read_engine_record(run)
    files = get_engine(record.engine).log_files(record.handle) if record is not None else []
    if not files and run.rank_log(0).exists():
        files = [run.rank_log(0)]
    if not files and record is None:  # on a node without rank 0
        logs = run.path.glob("logs/rank-*.log")
        files = sorted(logs, key=lambda path: (len(path.name), path.name))[:1]
    if not files:
        raise WanmaError(
            f"the run '{run.name}' has no output yet",
            f"`wanma {'show' if record is None else 'status'} {run.name}` shows its state",
            EXIT_USAGE,
        )
    return files


def cancel_run(run: RunDirectory, *, is_immediate: bool) -> RunStatus:
    """Cancel a submitted run; return its state before. Raises `WanmaError`."""
    engine, record = find_submitted(run)
    (status,) = engine.statuses([record.handle])
    if not status.is_over:
        engine.cancel(record.handle, is_immediate=is_immediate)
    return status


def resize_run(run: RunDirectory, nodes: int) -> None:
    """Bring a submitted run to another number of nodes, within the range of its job.

    Raises:
        WanmaError: the number lies outside, the run is over, or the engine refuses.
    """
    engine, record = find_submitted(run)
    secret = run_secret(run)
    submission = record.read_submission(secret)
    if not submission.min_nodes <= nodes <= submission.nodes:
        given = (
            f"{submission.min_nodes}..{submission.nodes}" if submission.is_elastic else f"{submission.nodes}"
        )
        raise WanmaError(
            f"the run '{run.name}' was started with cluster.nodes = {given}, and {nodes} lies outside",
            "start it with a range, e.g. --nodes 1..8; a cancelled run resumes with any number of nodes",
            EXIT_USAGE,
        )

    def resize(record: EngineRecord) -> Handle:
        handle = engine.resize(record.handle, record.read_submission(secret), nodes)
        return {**handle, WANTED_NODES_KEY: nodes}

    change_handle(run, resize)


def resize_servers(run: RunDirectory, count: int) -> None:
    """Ask a run that goes on for another number of parameter servers, and wait until it takes the request.

    Raises:
        WanmaError: it has no servers, does not go on or takes no request, or the number is wrong.
    """
    report = read_report(run, tail_only=True)
    section = report.job.get("servers", {})
    least = section.get("replicas", 1)
    if not section.get("count"):
        raise WanmaError(
            f"the run '{run.name}' has no parameter servers", "start it with servers.count", EXIT_USAGE
        )
    if not least <= count <= MAX_SERVERS:
        raise WanmaError(
            f"--servers {count}: the run '{run.name}' has servers.replicas = {least}",
            f"give a number from {least} to {MAX_SERVERS:,}",
            EXIT_USAGE,
        )
    if report.state != "running":
        raise WanmaError(f"the run '{run.name}' is {report.state}", "resize a run that trains", EXIT_USAGE)
    try:
        request_servers(run, count)
    except OSError as error:
        raise WanmaError(
            f"{error.filename or run.path}: {error.strerror or error}",
            "resize it as a user who can write into the run directory",
            EXIT_USAGE,
        ) from error
    deadline = time.monotonic() + _TAKEN_SECONDS
    while has_server_request(run):
        if time.monotonic() > deadline:
            withdraw_server_request(run)
            raise WanmaError(
                f"the run '{run.name}' has not taken the request within {_TAKEN_SECONDS:.0f} s",
                "give the run directory that the node of rank 0 uses; a run takes it once its steps begin",
            )
        time.sleep(_POLL_SECONDS)


def explain_run(run: RunDirectory) -> Explanation:
    """Explain why a submitted run waits. Raises `WanmaError`."""
    engine, record = find_submitted(run)
    return engine.explain(record.handle)


def list_engines() -> list[tuple[str, str | None]]:
    """Return the name of each engine, and the reason why it cannot be used here; None: it can."""
    return [(name, get_engine(name).unusable_reason()) for name in ENGINES]
