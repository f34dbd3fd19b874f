"""Process in which a node flushes in-memory checkpoints of its dead ranks to disk.

`Rescuer` is the supervisor's handle of it, `main` runs there: the supervisor itself never waits for disks.
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

from wanma.checkpoint.in_memory.flush import drop_attempt, rescue_anywhere
from wanma.checkpoint.in_memory.partial_checkpoints import ranks_text, write_part
from wanma.checkpoint.remote.remote_checkpoints import Remote
from wanma.checkpoint.remote.remote_storage import Storage
from wanma.checkpoint.store.checkpoint_folder import committed, read_manifest
from wanma.elastic.protocol.messages import Rescued
from wanma.elastic.transport.event_loop import Loop
from wanma.elastic.workers.linux_processes import die_with_parent
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import append_event, restore_steps
from wanma.observe.units import bytes_text, duration_text


@dataclass(frozen=True)
class Order:
    """Command to one node's flush process."""

    run_directory: str
    images: Mapping[str, str]
    """Rank → path; keys are text, as JSON has them."""
    world_size: int
    name: str
    """Name of this save, the same on all nodes."""
    deadline: float
    """Deadline of the flush, on the monotonic clock."""
    upload: str | None = None
    """URL that a copy of each checkpoint is uploaded to; None: no upload."""
    is_last_word: bool = False
    """True if the run has failed, and its end is recorded by others; no kill follows."""
    given_up: tuple[str, ...] = ()
    """Names of earlier attempts, whose processes are gone."""
    is_apart: bool = False
    """True if this node's part goes to a place of its own."""


class Rescuer:
    """Handle of the flush process, until it has answered."""

    def __init__(self, order: Order, loop: Loop, on_end: Callable[[Rescued], None]) -> None:
        self._loop, self._on_end = loop, on_end
        self._socket, theirs = socket.socketpair()
        self._output = os.memfd_create("wanma-rescue-output", os.MFD_CLOEXEC)
        self._answer = b""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "wanma.elastic.recovery.flush_process",
                str(theirs.fileno()),
                str(os.getpid()),
                json.dumps(asdict(order)),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        theirs.close()
        loop.watch(self._socket, self._said, selectors.EVENT_READ)

    def _said(self, _events: int) -> None:
        data = self._socket.recv(1 << 16)
        self._answer += data
        if data:
            return
        self._loop.forget(self._socket)
        code = self._process.wait()
        if self._answer:
            self._on_end(Rescued(**json.loads(self._answer)))
            return
        printed = os.pread(self._output, 4096, max(0, os.fstat(self._output).st_size - 4096))
        how = f"the process that writes it {_ending(code)}"
        text = f"{how}\n{printed.decode(errors='replace')}".strip()
        self._on_end(Rescued("", text, remedy="again"))  # the in-memory checkpoints are still there

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._loop.forget(self._socket)
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._output)


def carry_out(order: Order) -> Rescued:
    """Write this node's part; the node that commits the checkpoint also uploads it and records the end."""
    run = RunDirectory(Path(order.run_directory))
    images = {int(rank): path for rank, path in order.images.items()}
    began = time.monotonic()
    before = [path for _, path in committed(run.checkpoints)]
    for name in order.given_up:
        drop_attempt(run.checkpoints, name, images)
    try:
        if order.is_apart:
            return Rescued(_keep_apart(run, images))
        path = rescue_anywhere(run.checkpoints, images, order.world_size, order.name, order.deadline)
        if path is None or (order.is_last_word and path in before):
            return Rescued("")
        manifest = read_manifest(path)
    except WanmaError as error:
        # Each of several nodes may only know that another one failed: all are asked for their parts.
        is_shared = len(images) < order.world_size and not order.is_apart
        return Rescued("", f"{error}", "apart" if is_shared else "")
    except OSError as error:
        return Rescued("", f"{run.path}: {error.strerror or error}")
    seconds = time.monotonic() - began
    with contextlib.suppress(OSError):  # the checkpoint counts without the record
        restore_steps(run, manifest.step)
        append_event(run, "checkpoint", step=manifest.step, bytes=manifest.bytes, write_seconds=seconds)
        if not order.is_last_word:
            best = manifest.state.get("best_loss")
            append_event(run, "finish", step=manifest.step, outcome="interrupted", best_loss=best)
    text = f"checkpoint of step {manifest.step:,} in {path}"
    text += f" ({bytes_text(manifest.bytes)} in {duration_text(seconds)})"
    if order.upload is not None:
        text += f"; {_upload(order.upload, path, manifest.step, order.deadline)}"
    return Rescued(text)


def _keep_apart(run: RunDirectory, images: Mapping[int, str]) -> str:
    """Write this node's part where it has room, and return a description."""
    part = write_part(run.checkpoints, images)
    size = sum(path.stat().st_size for path in part.iterdir())
    return f"{ranks_text(sorted(images))} in {part} on {socket.gethostname()} ({bytes_text(size)})"


def _ending(code: int) -> str:
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
            Remote(Storage(url)).upload(path, step)
            outcome.append(f"uploaded to {url}")
        except Exception as error:  # the thread has no caller
            outcome.append(f"not uploaded to {url}: {error}")

    thread = threading.Thread(target=send, name="checkpoint-upload", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.0))
    return outcome[0] if outcome else f"not uploaded to {url} in time: the same command tries again"


def main() -> None:
    """Run the process: arguments are the descriptor for the answer, the parent, and the command."""
    descriptor, parent, order = sys.argv[1:]
    die_with_parent(int(parent))
    answer = socket.socket(fileno=int(descriptor))
    answer.sendall(json.dumps(asdict(carry_out(Order(**json.loads(order))))).encode())
    answer.close()
    sys.stdout.flush()
    os._exit(0)  # an upload may still be under way: its thread must not be waited for


if __name__ == "__main__":
    main()
