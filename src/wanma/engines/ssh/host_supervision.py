"""Program that starts the supervisor of a host, stays with it, and answers questions about it.

The supervisor is in a session of its own. Two files in the run's folder `engine` belong to node rank R:

    node-R.json     process, start time, end and exit code of the supervisor
    output-R.log    its output

A run that the caller holds ends with the caller: at the end of standard input, or when the caller's signs of
life stop, the supervisor gets a SIGTERM, and what is left after the grace period a SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterator, Tuple

SIGN_OF_LIFE_SECONDS = 300.0
"""Silence of the caller, in seconds, after which it counts as dead; it says something every ten seconds."""
KILL_MARGIN_SECONDS = 10.0
"""Time, in seconds, after the grace period until what is left is killed."""
FULL_BYTES = 64 << 10
"""Free bytes of a disk below which it counts as full: records and checkpoints do not fit."""
IMMEDIATE_SECONDS = 5.0
"""Time, in seconds, in which a run that is to end at once may end by itself."""
ENVIRONMENT_COMPLETE = "complete.json"
"""File of an environment whose installation has ended, as in `engines.environment.install`."""
MARK_VARIABLE = "WANMA_PLACEMENT"
"""Environment variable by which all processes of a run on this host are found, orphans too."""


def main(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Do the operation of the request: start, stop, leave or state."""
    try:
        if request["operation"] == "start":
            return _start(request, reply)
        if request["operation"] == "stop":
            return _stop(request, reply)
        if request["operation"] == "leave":
            return _leave(request, reply)
        reply([_state(folder, rank) for folder, rank in request["runs"]])
    except OSError as error:
        reply(_problem(error, request))
    return 0


def _problem(error: OSError, request: Dict[str, Any]) -> Dict[str, str]:
    """Return the answer for an error of a file."""
    kind = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable"
    place = error.filename or request.get("folder", "")  # a write names no file
    return {"problem": kind, "text": "{}: {}".format(place, error.strerror)}


def _start(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Start the supervisor and stay with it until it ends.

    Args:
        request: `folder`, the run directory; `rank` of the node; `python`, interpreter of the run's
            environment, or empty: this one; `command`, its arguments;
            `environment`; `code`: cache of the code and archive; `unpacker`; `grace_seconds`; `is_held`.
        reply: sends `process`, and of a held run also `exit`.
    """
    if _state(request["folder"], request["rank"])["is_alive"]:
        reply({"problem": "active", "text": ""})
        return 0
    if request["is_held"]:
        return _stay(request, reply, _launch(request, reply))
    # Two processes: this one answers and ends, as ssh waits for it; the other stays with the supervisor.
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8") as answer:
            reply(json.loads(answer.read() or '{"problem": "start", "text": "the runner ended at once"}'))
        return 0
    os.close(reader)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)

    def answer_parent(value: Any) -> None:
        with open(writer, "w", encoding="utf-8") as file:
            json.dump(value, file)

    try:
        process = _launch(request, answer_parent)
    except OSError as error:
        answer_parent(_problem(error, request))
        return 0
    process.wait()
    _record_exit(request, process.returncode)
    return 0


def _launch(request: Dict[str, Any], reply: Callable[[Any], None]) -> subprocess.Popen[bytes]:
    """Start the supervisor in the unpacked code, which counts as in use until it ends."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine = os.path.join(request["folder"], "engine")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(engine, "cancelled-{}".format(request["rank"])))
    mark = f"{os.getpid()}-{time.time()}"
    supervisor = [request["python"] or sys.executable, *request["command"]]
    unpack = [sys.executable, "-I", "-S", "-", request["code"]["archive"], request["code"]["cache"], "--"]
    enter = ["/bin/sh", "-c", 'cd "$WANMA_CODE" && exec "$@"', "sh"]
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(
            open(os.path.join(engine, "output-{}.log".format(request["rank"])), "ab")
        )
        in_use = stack.enter_context(_environment_in_use(request["python"]))
        process = subprocess.Popen(
            [*unpack, *enter, *supervisor],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **request["environment"], MARK_VARIABLE: mark},
            start_new_session=True,
            preexec_fn=_default_signals,
            pass_fds=in_use,
        )
    record = {
        "process": process.pid,
        "started": _start_time(process.pid),
        "runner": os.getpid(),
        "runner_started": _start_time(os.getpid()),
        "boot": _boot(),
        "mark": mark,
        "time": time.time(),
        "exit": None,
    }
    _write_record(request["folder"], request["rank"], record)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request["unpacker"].encode())
        process.stdin.close()
    reply({"process": process.pid})
    return process


@contextlib.contextmanager
def _environment_in_use(python: str) -> Iterator[Tuple[int, ...]]:
    """Yield descriptors that keep the environment of an interpreter from removal while they are open."""
    if not python:
        yield ()
        return
    folder = os.path.dirname(os.path.dirname(python))
    path = folder + ".lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path))
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for a process that makes or removes the environment
            while not _is_same_file(file.fileno(), path):
                stack.close()  # removed between open and lock, and perhaps made again
                file = stack.enter_context(open(path))
                fcntl.flock(file, fcntl.LOCK_SH)
            os.stat(os.path.join(folder, ENVIRONMENT_COMPLETE))
        except FileNotFoundError:
            raise FileNotFoundError(2, "the environment is gone; start the run again", folder) from None
        with contextlib.suppress(OSError):
            os.utime(path)
        yield (file.fileno(),)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _default_signals() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _stay(request: Dict[str, Any], reply: Callable[[Any], None], process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the supervisor, or end it when the caller is gone."""
    is_open, heard = True, time.monotonic()
    kill_at: float | None = None
    while process.poll() is None:
        if is_open:
            ready, _, _ = select.select([0], [], [], 0.2)
            if ready:
                heard = time.monotonic()
                is_open = bool(os.read(0, 4096))
            elif time.monotonic() - heard > SIGN_OF_LIFE_SECONDS:
                is_open = False
        else:
            time.sleep(0.1)
        if not is_open and kill_at is None:
            kill_at = time.monotonic() + request["grace_seconds"] + KILL_MARGIN_SECONDS
            os.kill(process.pid, signal.SIGTERM)
        if kill_at is not None and time.monotonic() > kill_at:
            _kill_all(_read_record(request["folder"], request["rank"]))
            kill_at += KILL_MARGIN_SECONDS
    _record_exit(request, process.returncode)
    with contextlib.suppress(OSError):  # the caller is gone
        reply({"exit": process.returncode})
    return 0


def _record_exit(request: Dict[str, Any], code: int) -> None:
    """Record the exit code, and end what the supervisor has left."""
    record = _read_record(request["folder"], request["rank"])
    _kill_all(record)
    _write_record(request["folder"], request["rank"], {**record, "exit": code, "ended": time.time()})


def _stop(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Ask the supervisor to end in order, or end it at once.

    Args:
        request: `folder`, `rank`, and `is_immediate`.
        reply: sends True once it is done.
    """
    folder, rank = request["folder"], request["rank"]
    if not _state(folder, rank)["is_alive"]:
        reply(True)
        return 0
    open(os.path.join(folder, "engine", f"cancelled-{rank}"), "w").close()
    record = _read_record(folder, rank)
    with contextlib.suppress(ProcessLookupError):
        if request["is_immediate"]:
            os.kill(record["process"], signal.SIGTERM)
        os.kill(record["process"], signal.SIGINT)  # after a SIGTERM it ends the run at once
    if request["is_immediate"]:
        deadline = time.monotonic() + IMMEDIATE_SECONDS
        while _is_process(record, "process", "started") and time.monotonic() < deadline:
            time.sleep(0.05)
        _kill_all(record)
    reply(True)
    return 0


def _leave(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Ask the supervisor to leave an elastic run in order, which goes on without it.

    Args:
        request: `folder` and `rank`.
        reply: sends True once it has been asked.
    """
    folder, rank = request["folder"], request["rank"]
    if _state(folder, rank)["is_alive"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_read_record(folder, rank)["process"], signal.SIGTERM)
    reply(True)
    return 0


def _state(folder: str, rank: int) -> Dict[str, Any]:
    """Return the state of a supervisor.

    `is_known`, `is_alive`, `exit`, `process`, `is_cancelled`, and `is_full`: its disk is full.
    """
    record = _read_record(folder, rank)
    if not record:
        nothing = dict.fromkeys(("is_known", "is_alive", "is_cancelled", "is_full"), False)
        return {**nothing, "exit": None, "process": None}
    is_alive = record["exit"] is None and (
        _is_process(record, "process", "started") or _is_process(record, "runner", "runner_started")
    )
    if not is_alive and record["exit"] is None:
        record = _read_record(folder, rank)  # the runner may have recorded the end meanwhile
    cancelled = os.path.exists(os.path.join(folder, "engine", f"cancelled-{rank}"))
    return {
        "is_known": True,
        "is_alive": is_alive,
        "exit": record["exit"],
        "process": record["process"],
        "is_cancelled": cancelled,
        "is_full": shutil.disk_usage(folder).free < FULL_BYTES,
    }


def _record_path(folder: str, rank: int) -> str:
    return os.path.join(folder, "engine", f"node-{rank}.json")


def _read_record(folder: str, rank: int) -> Dict[str, Any]:
    try:
        with open(_record_path(folder, rank)) as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def _write_record(folder: str, rank: int, record: Dict[str, Any]) -> None:
    path = _record_path(folder, rank)
    temporary = f"{path}.{os.getpid()}.new"
    with open(temporary, "w") as file:
        json.dump(record, file)
    os.replace(temporary, path)


def _is_process(record: Dict[str, Any], number: str, started: str) -> bool:
    """Return True if the process lives; a later one with its number has another start time or boot."""
    start = _start_time(record[number])
    return start is not None and (start, _boot()) == (record[started], record["boot"])


def _start_time(process: int) -> int | None:
    fields = _stat(process)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _stat(process: int) -> Tuple[str, ...] | None:
    """Return the fields of /proc/N/stat from the state on; None if the process is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return tuple(file.read().rpartition(")")[2].split())
    except OSError:
        return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _kill_all(record: Dict[str, Any]) -> None:
    """Kill every process that has the run's mark, also those that processes start meanwhile."""
    mark = "{}={}".format(MARK_VARIABLE, record.get("mark")).encode()
    for _ in range(5):
        found = [process for process in _processes() if _has_mark(process, mark)]
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def _has_mark(process: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
