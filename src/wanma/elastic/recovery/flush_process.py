"""Process in which a node flushes in-memory checkpoints of its dead ranks to disk.

`FlushProcess` is the supervisor's handle of it, `main` runs there: the supervisor itself never waits for
disks.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from wanma.checkpoint.in_memory.flush import flush_with_fallback, remove_failed_flush
from wanma.checkpoint.in_memory.flushed_parts import write_flushed_part
from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.checkpoint.store.checkpoint_folder import list_committed, read_manifest
from wanma.elastic.protocol.messages import FlushReport
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError, ranks_text
from wanma.job.run.child_process import kill_on_parent_exit
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import append_final_event, restore_steps
from wanma.observe.units import bytes_text, duration_text


@dataclass(frozen=True)
class FlushTask:
    """Command to one node's flush process."""

    run_directory: str
    memory_file_paths: Mapping[str, str]
    """Rank → path; keys are text, as JSON has them."""
    world_size: int
    save_name: str
    """Name of this save, the same on all nodes."""
    deadline: float
    """Deadline of the flush, on the monotonic clock."""
    checkpoint_upload_url: str | None = None
    """URL that a copy of each checkpoint is uploaded to; None: no upload."""
    is_run_failed: bool = False
    """True if the run has failed, and its end is recorded by others; no kill follows."""
    abandoned_saves: tuple[str, ...] = ()
    """Names of earlier attempts, whose processes are gone."""
    writes_partial_checkpoint: bool = False
    """True if this node's part goes to a place of its own."""


class FlushProcess:
    """Handle of the flush process, until it has answered."""

    def __init__(self, task: FlushTask, loop: EventLoop, on_end: Callable[[FlushReport], None]) -> None:
        self._loop, self._on_end = loop, on_end
        self._socket, child_socket = socket.socketpair()
        self._output = os.memfd_create("wanma-rescue-output", os.MFD_CLOEXEC)
        self._report = b""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "wanma.elastic.recovery.flush_process",
                str(child_socket.fileno()),
                str(os.getpid()),
                json.dumps(asdict(task)),
            ],
            pass_fds=(child_socket.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        child_socket.close()
        loop.watch(self._socket, self._read_report, selectors.EVENT_READ)

    def _read_report(self, _events: int) -> None:
        data = self._socket.recv(1 << 16)
        self._report += data
        if data:
            return
        self._loop.unwatch(self._socket)
        code = self._process.wait()
        if self._report:
            self._on_end(FlushReport(**json.loads(self._report)))
            return
        printed = os.pread(self._output, 4096, max(0, os.fstat(self._output).st_size - 4096))
        exit_text = f"the flush process {_exit_text(code)}"
        text = f"{exit_text}\n{printed.decode(errors='replace')}".strip()
        self._on_end(FlushReport("", text, retry_method="again"))  # the in-memory checkpoints are still there

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._loop.unwatch(self._socket)
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._output)


def run_flush(task: FlushTask) -> FlushReport:
    """Write this node's part; the node that commits the checkpoint also uploads it and records the end."""
    run = RunDirectory(Path(task.run_directory))
    memory_files = {int(rank): path for rank, path in task.memory_file_paths.items()}
    began = time.monotonic()
    before = [path for _, path in list_committed(run.checkpoints)]
    for name in task.abandoned_saves:
        remove_failed_flush(run.checkpoints, name, memory_files)
    try:
        if task.writes_partial_checkpoint:
            return FlushReport(_write_partial_checkpoint(run, memory_files))
        path = flush_with_fallback(
            run.checkpoints, memory_files, task.world_size, task.save_name, task.deadline
        )
        if path is None or (task.is_run_failed and path in before):
            return FlushReport("")
        manifest = read_manifest(path)
    except WanmaError as error:
        # Each of several nodes may only know that another one failed: all are asked for their parts.
        is_shared = len(memory_files) < task.world_size and not task.writes_partial_checkpoint
        return FlushReport("", f"{error}", "apart" if is_shared else "")
    except OSError as error:
        return FlushReport("", f"{run.path}: {error.strerror or error}")
    seconds = time.monotonic() - began
    with contextlib.suppress(OSError):  # the checkpoint counts without the record
        restore_steps(run, manifest.step)
        append_final_event(run, "checkpoint", step=manifest.step, bytes=manifest.bytes, write_seconds=seconds)
        if not task.is_run_failed:
            best = manifest.state.get("best_loss")
            append_final_event(run, "finish", step=manifest.step, outcome="interrupted", best_loss=best)
    text = f"checkpoint of step {manifest.step:,} in {path}"
    text += f" ({bytes_text(manifest.bytes)} in {duration_text(seconds)})"
    if task.checkpoint_upload_url is not None:
        text += f"; {_upload(task.checkpoint_upload_url, path, manifest.step, task.deadline)}"
    return FlushReport(text)


def _write_partial_checkpoint(run: RunDirectory, memory_file_paths: Mapping[int, str]) -> str:
    """Write this node's part where it has room, and return a description."""
    part = write_flushed_part(run.checkpoints, memory_file_paths)
    size = sum(path.stat().st_size for path in part.iterdir())
    return f"{ranks_text(sorted(memory_file_paths))} in {part} on {socket.gethostname()} ({bytes_text(size)})"


def _exit_text(code: int) -> str:
    """Return the end of a process in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _upload(url: str, path: Path, step: int, deadline: float) -> str:
    """Upload the checkpoint until the deadline, and return the result in words."""
    outcome: list[str] = []

    def send() -> None:
        try:
            RemoteCheckpoints(RemoteStorage(url)).upload(path, step)
            outcome.append(f"uploaded to {url}")
        except Exception as error:  # the thread has no caller
            outcome.append(f"not uploaded to {url}: {error}")

    thread = threading.Thread(target=send, name="checkpoint-upload", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.0))
    return outcome[0] if outcome else f"not uploaded to {url} in time: rerun the same command to retry"


def main() -> None:
    """Run the process: arguments are the descriptor for the answer, the parent, and the command."""
    descriptor, parent, order = sys.argv[1:]
    kill_on_parent_exit(int(parent))
    answer = socket.socket(fileno=int(descriptor))
    answer.sendall(json.dumps(asdict(run_flush(FlushTask(**json.loads(order))))).encode())
    answer.close()
    sys.stdout.flush()
    os._exit(0)  # an upload may still be under way: its thread must not be waited for


if __name__ == "__main__":
    main()
