"""Connections to hosts by the user's own `ssh`: questions with a deadline, and calls that are held open.

Standard input carries a program and the caller's values, so that no command line is built from them. Calls of
one host share a connection (ControlMaster), which ends with the object. A ControlPath of the user's own
ssh_config is honoured instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.engines.hosts.connections import (
    BOOTSTRAP,
    REPLY_MARK,
    Connections,
    Host,
    HostError,
    Reply,
    make_message,
    read_reply,
)
from wanma.engines.ssh.failures import SSH_FAILED, explain_exit, explain_problem

CONNECT_SECONDS = 10
"""Deadline of a connection, in seconds."""
PERSIST_SECONDS = 60
"""Time, in seconds, after which an unused connection ends if this process could not end it."""
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    f"-oConnectTimeout={CONNECT_SECONDS}",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
)


class SshConnections(Connections):
    """Connections to hosts with the same settings.

    Args:
        python: interpreter on the hosts; `~` is the home folder there.
        options: options of ssh; they come before wanma's own, so they count.
    """

    def __init__(self, python: str, options: Sequence[str]) -> None:
        self._python, self._options = python, tuple(options)
        self._folder = Path(tempfile.mkdtemp(prefix="wanma-", dir=_socket_root()))
        self._calls: dict[Host, list[str]] = {}
        self._lock = threading.Lock()
        self.close: Callable[[], object] = weakref.finalize(self, _close, self._folder, self._calls)

    def ask(
        self,
        host: Host,
        program: ModuleType,
        request: Mapping[str, Any],
        data: bytes | Path = b"",
        seconds: float = QUERY_SECONDS,
        python: str = "",
    ) -> Reply:
        """Run a program on a host and return its answer.

        Args:
            host: the host.
            program: module `host_...` of this package.
            request: JSON-able value for it.
            data: bytes, or a file, that follow.
            seconds: deadline, in seconds.
            python: interpreter for this question; empty: that of the connections.

        Raises:
            HostError: the host cannot be asked, or its program could not do its work.
        """
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
            given.write(make_message(program, request))
            if isinstance(data, Path):
                with data.open("rb") as file:
                    shutil.copyfileobj(file, given)
            else:
                given.write(data)
            given.seek(0)
            process = self._start(host, given, errors, python)
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise HostError(
                    host,
                    f"{host.text}: it gave no answer within {seconds:.0f} s",
                    "the host or the network may be overloaded; try again",
                ) from None
            except BaseException:
                _kill(process)
                raise
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        reply = read_reply(output)
        if process.returncode != 0 or reply is None:
            code = process.returncode if process.returncode > 0 else SSH_FAILED
            raise explain_exit(host, code, text or output.decode(errors="replace"), python or self._python)
        _checked(host, reply.value)
        return reply

    def hold(
        self, host: Host, program: ModuleType, request: Mapping[str, Any], seconds: float = QUERY_SECONDS
    ) -> HeldCall:
        """Start a program on a host, and return with its first answer; its standard input stays open.

        Raises:
            HostError: as of `ask`.
        """
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the call
        process = self._start(host, subprocess.PIPE, errors)
        call = HeldCall(host, process, errors)
        try:
            call.send(make_message(program, request))
            call.first = _checked(host, call.read(seconds, self._python))
        except BaseException:
            call.kill()
            raise
        return call

    def command(self, host: Host, *options: str) -> list[str]:
        """Return the words of a call of ssh, up to the destination."""
        port = ["-p", str(host.port)] if host.port is not None else []
        return ["ssh", *self._options, *options, *port, "--", host.destination]

    def _start(
        self, host: Host, stdin: int | IO[bytes], errors: IO[bytes], python: str = ""
    ) -> subprocess.Popen[bytes]:
        # The errors go to a file: a connection that stays open would keep a pipe open.
        remote = f"{remote_path(python or self._python)} -c {shlex.quote(BOOTSTRAP)}"
        try:
            return subprocess.Popen(
                [*self._call(host), remote],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        except FileNotFoundError:
            raise HostError(
                host, "there is no program ssh here", "install OpenSSH, e.g. apt-get install openssh-client"
            ) from None

    def _call(self, host: Host) -> list[str]:
        """Return the words of a call of ssh with wanma's options, the same for each call of a host."""
        with self._lock:
            if host in self._calls:
                return self._calls[host]
        options = list(_OPTIONS)
        if not self._has_control_path(host):
            options += [
                "-oControlMaster=auto",
                f"-oControlPath={self._folder}/{os.urandom(4).hex()}",
                f"-oControlPersist={PERSIST_SECONDS}",
            ]
        with self._lock:
            return self._calls.setdefault(host, self.command(host, *options))

    def _has_control_path(self, host: Host) -> bool:
        """Return True if the user's ssh_config shares connections to this host itself."""
        try:
            done = subprocess.run(
                [*self.command(host)[:1], "-G", *self.command(host)[1:]],
                capture_output=True,
                text=True,
                timeout=QUERY_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        match = re.search(r"^controlpath (.+)$", done.stdout, re.MULTILINE)
        return match is not None and match[1] != "none"


class HeldCall:
    """Call of ssh that goes on: the program on the host ends when this is closed.

    Args:
        host: the host.
        process: the call.
        errors: file of its standard error.
    """

    def __init__(self, host: Host, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.host = host
        self.first: Any = None
        """First answer."""
        self._process, self._errors = process, errors
        self._buffer = b""

    def send(self, data: bytes) -> None:
        """Send bytes to the program; one that has ended is no error here."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def read(self, seconds: float, python: str = "python") -> Any:
        """Return the next answer.

        Raises:
            HostError: the call ended without one, or the deadline passed.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            while True:
                _, mark, after = self._buffer.partition(REPLY_MARK)
                if mark and b"\n" in after:
                    line, _, self._buffer = after.partition(b"\n")
                    return json.loads(line)
                block = os.read(self._process.stdout.fileno(), 65536)
                if not block:
                    break
                self._buffer += block
        finally:
            timer.cancel()
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        if code < 0:
            message = f"{self.host.text}: it gave no answer within {seconds:.0f} s"
            raise HostError(self.host, message, "try again")
        raise explain_exit(self.host, code or SSH_FAILED, text, python)

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the standard input of the program."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the call; return False if it goes on after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End the call at once."""
        self.close()
        _kill(self._process)
        self._errors.close()


def _checked(host: Host, value: Any) -> Any:
    if isinstance(value, dict) and "problem" in value and value.get("text") is not None and value["problem"]:
        raise explain_problem(host, value["problem"], value["text"])
    return value


def remote_path(path: str) -> str:
    """Return a path as a word for the host's shell; a leading `~` is the home folder there."""
    home, slash, rest = path.partition("/")
    if re.fullmatch(r"~[\w.-]*", home) and slash:
        return f"{home}/{shlex.quote(rest)}"
    return shlex.quote(path)


def _socket_root() -> str:
    """Return a folder with a short path, as a socket's has at most 108 bytes."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return runtime if runtime and len(runtime) < 40 and os.access(runtime, os.W_OK) else "/tmp"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _close(folder: Path, calls: Mapping[Host, list[str]]) -> None:
    """End the shared connections and remove their folder."""
    for words in calls.values():
        path = next((word for word in words if word.startswith(f"-oControlPath={folder}")), None)
        if path is not None and Path(path.partition("=")[2]).exists():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["ssh", "-O", "exit", *words[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=5,
                    check=False,
                )
    shutil.rmtree(folder, ignore_errors=True)
