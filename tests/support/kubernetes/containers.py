"""A container: a process with a root file system, PIDs and a host name of its own, in its pod's network.

Its image is this machine: an overlay of `/`, whose changes vanish with it. Limits of CPU and memory are not
enforced.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.kubernetes.resources import Object, now

_KILLED = b"unshare: sigprocmask unblock failed: Invalid argument\n"
"""Last words of util-linux 2.38, which exits with 1 when what it has started is killed by SIGKILL."""


@dataclass(frozen=True)
class Mount:
    """A folder or file of the machine, and where the container sees it."""

    source: Path
    target: str
    is_read_only: bool = False


@dataclass
class Container:
    """One instance of a container.

    Attributes:
        enter: command that takes on the user and the working directory, and becomes what follows it.
        lines: lines of its output, both streams in the order of their arrival.
        code: exit code, None while it runs.
    """

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, str]
    started: str = field(default_factory=now)
    finished: str = ""
    code: int | None = None
    has_term: bool = False
    enter: list[str] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def poll(self) -> int | None:
        """Return the exit code, once the process has ended and its output is read."""
        code = self.process.poll()
        if self.code is None and code is not None:
            for reader in self.readers:
                reader.join(5)
            if self.lines and self.lines[-1] == _KILLED:
                self.lines.pop()
                code = 137
            self.code = code if code >= 0 else 128 - code
            self.finished = now()
        return self.code

    def pid(self) -> int | None:
        """Return the process ID, outside, of the container's first process."""
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return int(words[0]) if words else None
        return None

    @property
    def is_started(self) -> bool:
        """True once the container has its own root, in which its program starts."""
        return self.code is not None or (self.folder / "started").exists()

    def signal(self, number: int) -> None:
        pid = self.pid()
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)
            elif number == signal.SIGKILL:
                self.process.kill()

    def state(self) -> Object:
        if self.poll() is None and not self.is_started:
            return {"waiting": {"reason": "ContainerCreating"}}
        if self.code is None:
            return {"running": {"startedAt": self.started}}
        is_start_error = self.code == 128 and (self.folder / "start-error").exists()
        reason = "StartError" if is_start_error else "Error" if self.code else "Completed"
        ended = {
            "exitCode": self.code,
            "reason": reason,
            "startedAt": self.started,
            "finishedAt": self.finished,
        }
        if is_start_error:
            ended["message"] = (self.folder / "start-error").read_text().strip()
        return {"terminated": {**ended, "containerID": f"containerd://{self.process.pid:064x}"}}

    def execute(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start another process in the container."""
        enter = ["nsenter", f"--target={self.pid()}", "--mount", "--pid", "--net", "--uts", "--ipc", "--wd=/"]
        enter += ["chroot", f"{self.folder}/box/root"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*enter, *self.enter, *command], stdin=pipe, stdout=pipe, stderr=pipe, env=self.environment
        )


def start(
    name: str, folder: Path, command: list[str], mounts: list[Mount], environment: dict[str, str], *,
    network: str, hostname: str, directory: str, user: list[str], is_read_only: bool,
) -> Container:  # fmt: skip
    """Start a container; `user` has the options of `setpriv` that make it another user than root."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "start.sh"
    enter = ["sh", "-c", 'cd "$0" && exec "$@"', directory]
    if user:  # the signal at the death of its parent is set anew: a change of user clears it
        enter = ["setpriv", *user, "--pdeathsig", "KILL", *enter]
    script.write_text(_script(folder, enter, command, mounts, hostname, is_read_only))
    outer = [
        "nsenter",
        f"--net=/run/netns/{network}",
        "unshare",
        "--mount",
        "--pid",
        "--uts",
        "--ipc",
        "--fork",
    ]
    process = subprocess.Popen(  # dies with the thread that has started it, too
        [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *outer,
            "--kill-child=KILL",
            "--propagation",
            "private",
            "sh",
            script,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    made = Container(name, process, folder, environment, enter=enter)
    for pipe in (process.stdout, process.stderr):
        made.readers.append(threading.Thread(target=_read, args=(pipe, made.lines), daemon=True))
        made.readers[-1].start()
    return made


def _read(pipe: Any, lines: list[bytes]) -> None:
    lines.extend(pipe)


def _script(
    folder: Path, enter: list[str], command: list[str], mounts: list[Mount], hostname: str, is_read_only: bool
) -> str:
    box = folder / "box"
    box.mkdir(exist_ok=True)
    root, quoted = f"{box}/root", shlex.quote
    lines = [
        "set -e",
        f"mount -t tmpfs none {box}",
        f"mkdir {box}/upper {box}/work {root}",
        f"mount -t overlay overlay -o lowerdir=/,upperdir={box}/upper,workdir={box}/work {root}",
        f"mount --rbind /dev {root}/dev && mount --rbind /sys {root}/sys && mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o size=64m shm {root}/dev/shm",  # as container runtimes do
        f"chmod 755 {root}/root",  # the interpreter may lie there, and the container may not be root
    ]
    for mount in mounts:
        lines += [f"place={root}$(chroot {root} realpath -m {quoted(mount.target)})"]
        make = 'mkdir -p "$place"' if mount.source.is_dir() else 'mkdir -p "${place%/*}"; touch "$place"'
        lines += [make, f'mount --rbind {quoted(str(mount.source))} "$place"']
        lines += ['mount -o remount,bind,ro "$place"'] if mount.is_read_only else []
    error = f'exec: "{command[0]}": executable file not found in $PATH'
    find = f"chroot {root} {shlex.join([*enter[:-4], 'sh', '-c', f'command -v -- {quoted(command[0])}'])}"
    lines += [f"mount -o remount,ro {root}"] if is_read_only else []
    lines += [
        f"hostname {quoted(hostname)}",
        f"{find} >/dev/null || {{ echo {quoted(error)} >{folder}/start-error; exit 128; }}",
        f": >{folder}/started",
        f"exec chroot {root} {shlex.join([*enter, *command])}",
    ]
    return "\n".join(lines) + "\n"
