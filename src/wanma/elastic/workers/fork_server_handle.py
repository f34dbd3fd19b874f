"""Supervisor's handle of its fork server: early start, commands, certain end."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from wanma.elastic.failure import explain_sigkill, signal_name
from wanma.elastic.protocol.framing import MAX_LINE_BYTES, Framer, encode
from wanma.elastic.protocol.local_messages import ForkCommand, PreloadCommand
from wanma.elastic.protocol.messages import (
    Message,
)
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.elastic.workers.environment import is_environment_for
from wanma.elastic.workers.linux_processes import require_linux
from wanma.job.run.resource_limits import count_oom_kills

SHUTDOWN_TIMEOUT_SECONDS = 10.0
"""Time, in seconds, that the fork server may take to end its workers before the kernel does it."""


class ForkServerHandle:
    """Fork server of this node.

    `Node.start` returns at once; the other process imports while the command continues. Call it from a thread
    that lives as long as the node: the kernel ends the ranks with that thread.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        output: int,
        environment: Mapping[str, str],
    ) -> None:
        self.control, self.environment = control, environment
        self._process, self._output = process, output
        self._has_forked = self._closed = False
        self._oom_kills_at_start = count_oom_kills()

    @classmethod
    def start(
        cls,
        preload_modules: Sequence[str] = ("torch",),
        environment: Mapping[str, str] | None = None,
        *,
        is_complete: bool = True,
    ) -> ForkServerHandle:
        """Start the fork server, which imports `preload_modules`.

        Args:
            preload_modules: modules to import.
            environment: added to this process's; variables that must be set before a process starts
                (`environment.make_worker_environment`) belong here.
            is_complete: False if `complete` follows, with further modules.

        Raises:
            WanmaError: this is not Linux.
        """
        require_linux()
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.memfd_create("wanma-fork-server-output", os.MFD_CLOEXEC)
        # numpy's OpenBLAS starts its threads at import, and a process with threads must not fork.
        inherited = {"OPENBLAS_NUM_THREADS": "1", **os.environ, **(environment or {})}
        if sys.flags.optimize:
            inherited["PYTHONOPTIMIZE"] = str(sys.flags.optimize)  # the same code as here, of one file
        inherited.pop(SECRET_VARIABLE, None)
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "wanma.elastic.workers.fork_server",
                str(child_socket.fileno()),
                str(os.getpid()),
            ],
            env=inherited,
            pass_fds=(child_socket.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        child_socket.close()
        node = cls(process, parent_socket, output, environment or {})
        node._preload(preload_modules, is_last=is_complete)
        return node

    def complete(self, preload_modules: Sequence[str], environment: Mapping[str, str]) -> ForkServerHandle:
        """Import what is missing; return this fork server, or another that has the environment."""
        if not is_environment_for(self.environment, environment):
            self.close()
            return ForkServerHandle.start(preload_modules, environment)
        self._preload(preload_modules, is_last=True)
        return self

    def _preload(self, modules: Sequence[str], *, is_last: bool) -> None:
        self.send(PreloadCommand(tuple(modules), tuple(sys.path), is_last))

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one packet; `receive` notices a fork server that has ended, a closed one gets nothing."""
        if self._closed:
            return
        self._has_forked = self._has_forked or isinstance(message, ForkCommand)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [encode(message)], descriptors)

    def receive(self) -> Message | None:
        """Return the next packet that has arrived; None if there is none now.

        Raises:
            EOFError: the fork server has ended.
        """
        try:
            packet = self.control.recv(MAX_LINE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError
        framer = Framer()
        framer.feed(packet)
        return framer.read_message()

    def describe_exit(self) -> tuple[str, str]:
        """Return the end of the fork server with the end of its output, and a hint."""
        code = self._process.wait()
        exit_text = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        size = os.fstat(self._output).st_size
        printed = os.pread(self._output, 4096, max(0, size - 4096)).decode(errors="replace").strip()
        hint = self.explain_sigkill() if -code == signal.SIGKILL else ""
        return f"{exit_text}\n{printed}" if printed else exit_text, hint

    def explain_sigkill(self) -> str:
        """Return the hint for a process of this node that was killed by SIGKILL."""
        return explain_sigkill(self._oom_kills_at_start)

    def __enter__(self) -> ForkServerHandle:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the fork server and every worker, and return when they are gone; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.control.close()
        if not self._has_forked:
            self._process.kill()  # without children yet, and perhaps busy importing
        try:
            self._process.wait(SHUTDOWN_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._output)
        remove_empty_cache(os.environ)


def remove_empty_cache(environment: Mapping[str, str]) -> None:
    """Remove the folder of the compiler's cache if it is empty: torch makes it as soon as it is imported.

    Args:
        environment: variables that may name another folder.
    """
    with contextlib.suppress(KeyError, OSError):  # no user name, no folder, or not empty
        name = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        default = Path(tempfile.gettempdir()) / f"torchinductor_{name}"
        if environment.get("TORCHINDUCTOR_CACHE_DIR", str(default)) == str(default):  # torch sets it, too
            default.rmdir()
