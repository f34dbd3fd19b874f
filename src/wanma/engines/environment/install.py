"""Program that makes a virtual environment from an archive: once for all processes of a folder.

The file imports only the standard library (Python 3.8 or newer) and no module of wanma, so that a host
without wanma runs it.

    FOLDER/
        NAME/            virtual environment; it counts once NAME/complete.json exists, which is written last
        NAME.lock        locked exclusively to make or remove it, shared while a run uses it; its time is that
                         of the last use
        .NAME.*          archive that is being installed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import select
import shutil
import signal
import site
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NoReturn

SETTINGS = "environment.json"
"""Member of the archive: title, lock, wheel, packages, system_site_packages."""
COMPLETE = "complete.json"
REPORT_SECONDS = 5.0
"""Longest silence towards the caller, in seconds."""
KEPT_ENVIRONMENTS = 5
"""Number of last used environments that stay in a folder."""
UNUSED_SECONDS = 14 * 86400.0
"""Time without use after which an older environment is removed."""
TAIL_LINES = 8
"""Lines of pip's output in a message."""
_LATER_LINES = ("[notice]", "WARNING: You are using pip", "WARNING: Running pip as")


class InstallError(Exception):
    """Failure to make an environment: a message with the cause, and a hint with the way out."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def main(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Make the environment of a request, or find it.

    Args:
        request: `folder` of environments, `digest` and `bytes` of the archive, which comes on standard input
            once it is asked for, and `values` of environment variables for pip.
        reply: sends `needs_archive`; then `progress`, a text, at least every few seconds; at the end
            `python`, `is_new` and `seconds`, or `problem`, `text` and `hint`.
    """
    try:
        folder = os.path.expanduser(request["folder"])
        found = find(folder, request["digest"])
        if found is not None:
            reply({"python": found, "is_new": False, "seconds": 0.0})
            return 0
        reply({"needs_archive": True})
        data = b""
        while len(data) < request["bytes"]:
            block = sys.stdin.buffer.read(min(request["bytes"] - len(data), 1 << 20))
            if not block:
                return 1
            data += block
        reply(
            install(
                folder,
                request["digest"],
                data,
                request["values"],
                lambda text: reply({"progress": text}),
                _is_caller_gone,
            )
        )
    except InstallError as problem:
        reply({"problem": "environment", "text": problem.message, "hint": problem.hint})
    except BrokenPipeError:
        return 1
    return 0


def _is_caller_gone() -> bool:
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and not os.read(0, 4096)


def environment_name(digest: str) -> str:
    """Return the name of an environment: of its archive, and of the interpreter and machine here."""
    base = [
        platform.python_implementation(),
        platform.python_version(),
        sysconfig.get_platform(),
        os.path.realpath(sys.executable),
        sorted(site.getsitepackages()),
    ]
    return f"{digest[:16]}-{hashlib.sha256(json.dumps(base).encode()).hexdigest()[:8]}"


def find(folder: str, digest: str) -> str | None:
    """Return the interpreter of an environment that exists, which counts as used now; else None.

    Raises:
        InstallError: another user could change its packages.
    """
    path = os.path.join(folder, environment_name(digest))
    if not os.path.exists(os.path.join(path, COMPLETE)):
        return None
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        _check_owner(folder)
        _check_owner(path)
    with contextlib.suppress(OSError):
        os.utime(path + ".lock")
    return os.path.join(path, "bin", "python")


def install(
    folder: str,
    digest: str,
    data: bytes,
    values: Dict[str, str],
    progress: Callable[[str], None],
    is_abandoned: Callable[[], bool],
) -> Dict[str, Any]:
    """Make the environment of an archive, unless another process does so meanwhile.

    Args:
        folder: folder of environments, created if missing.
        digest: SHA-256 of the archive.
        data: the archive.
        values: environment variables for pip, which no output shows.
        progress: receives what is being done, at least every few seconds.
        is_abandoned: returns True once nobody waits for the environment.

    Raises:
        InstallError: it cannot be made; nothing of it is left.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise InstallError("the archive of the environment was damaged on its way", "try again")
    began = time.monotonic()
    path = os.path.join(folder, environment_name(digest))
    try:
        _create_folder(folder)
        lock = _lock(path, progress, is_abandoned)
        try:
            found = find(folder, digest)
            if found is None:
                _make(path, data, values, progress, is_abandoned, lock)
            os.utime(path + ".lock")
            _prune(folder, path)
        finally:
            os.close(lock)
    except OSError as error:
        _raise_disk_problem(error, folder)
    python = os.path.join(path, "bin", "python")
    return {"python": python, "is_new": found is None, "seconds": time.monotonic() - began}


def _create_folder(folder: str) -> None:
    """Create the folder; refuse one in which another user could exchange the packages."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _check_owner(folder)


def _check_owner(folder: str) -> None:
    """Refuse a folder of another user, and one in which any user may write; root counts as no other user."""
    status = os.stat(folder)
    for owner in (os.lstat(folder).st_uid, status.st_uid):  # a link may be another user's
        if owner not in (os.geteuid(), 0):
            raise InstallError(
                f"the folder {folder} belongs to user {owner}, who could change the packages",
                "choose another folder",
            )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise InstallError(
            f"every user may write in the folder {folder} and could change the packages",
            f"choose another folder; or, if nobody has changed it, chmod o-w {folder}",
        )


def _lock(path: str, progress: Callable[[str], None], is_abandoned: Callable[[], bool]) -> int:
    """Return a descriptor of the lock file: locked exclusively, or shared with runs that use what is made."""
    said = -REPORT_SECONDS
    while True:
        descriptor = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _try_lock(descriptor):
                if os.path.exists(os.path.join(path, COMPLETE)) and _try_lock(descriptor, fcntl.LOCK_SH):
                    break
                if is_abandoned():
                    raise InstallError("nobody waits for the environment", "start the run again")
                if time.monotonic() - said > REPORT_SECONDS:
                    progress("waiting for another process that installs the same")
                    said = time.monotonic()
                time.sleep(0.2)
            if is_same_file(descriptor, path + ".lock"):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed between open and lock


def _try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise
    return True


def is_same_file(descriptor: int, path: str) -> bool:
    """Return True if a path names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _make(
    path: str,
    data: bytes,
    values: Dict[str, str],
    progress: Callable[[str], None],
    is_abandoned: Callable[[], bool],
    lock: int,
) -> None:
    """Make the environment in its folder; its programs hold the caller's lock, too."""
    folder, name = os.path.split(path)
    for leftover in os.listdir(folder):
        if leftover.startswith(f".{name}."):
            shutil.rmtree(os.path.join(folder, leftover), ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    work = tempfile.mkdtemp(prefix=f".{name}.", dir=folder)
    try:
        settings = _unpack(data, work)
        run = _Runner(values, progress, is_abandoned, lock)
        run.stage = "making a virtual environment"
        os.makedirs(path, mode=0o755, exist_ok=True)  # by others not writable under any umask
        run([sys.executable, "-I", "-m", "venv", path], work, settings["title"])
        python = os.path.join(path, "bin", "python")
        packages = run.read([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        if settings["system_site_packages"]:
            _add_interpreter_packages(packages)
        pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        install = [*pip, "install", "--no-deps", "--progress-bar", "off", "--no-warn-script-location"]
        lock_file = os.path.join(work, settings["lock"])
        run.stage, run.total = "installing packages", settings["packages"]
        run([*install, "-r", os.path.basename(lock_file)], os.path.dirname(lock_file), settings["title"])
        run.stage = "installing wanma"
        if settings["wheel"]:
            run([*install, "--no-index", os.path.join(work, settings["wheel"])], work, settings["title"])
        _check_complete(run, pip, packages, settings)
        temporary = os.path.join(path, f".{COMPLETE}.{os.getpid()}")
        with open(temporary, "w") as file:
            json.dump({**settings, "python": platform.python_version(), "time": time.time()}, file)
        os.replace(temporary, os.path.join(path, COMPLETE))
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def pip_variables(inherited: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of pip in a new environment: the inherited ones that name no other place."""
    names = r"PIP_(TARGET|PREFIX|USER|REQUIRE_VIRTUALENV|PYTHON)|(PYTHON|VIRTUAL_ENV).*"
    return {name: value for name, value in inherited.items() if not re.fullmatch(names, name)}


def _unpack(data: bytes, folder: str) -> Dict[str, Any]:
    """Write the members of an archive below a folder; return its settings."""
    archive = os.path.join(folder, "archive.tar")
    with open(archive, "wb") as file:
        file.write(data)
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if not member.isfile() or any(part in ("", ".", "..") for part in member.name.split("/")):
                raise InstallError(f"the archive has a wrong member: {member.name!r}", "start the run again")
            target = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with open(target, "wb") as file:
                shutil.copyfileobj(source, file)
    os.unlink(archive)
    with open(os.path.join(folder, SETTINGS)) as text:
        return dict(json.load(text))


def _add_interpreter_packages(packages: str) -> None:
    """Let the environment see the packages of this interpreter, which may be of a virtual environment."""
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    with open(os.path.join(packages, "interpreter-packages.pth"), "w") as file:
        file.writelines(lines)


def _check_complete(run: _Runner, pip: List[str], packages: str, settings: Dict[str, Any]) -> None:
    """Refuse a lock file that lacks what its packages, or wanma, need."""
    own = {
        _canonical(name.rsplit(".dist-info", 1)[0].rsplit("-", 1)[0])
        for name in os.listdir(packages)
        if name.endswith(".dist-info")
    }
    missing = []
    for line in run.read([*pip, "check"], is_check=True).splitlines():
        match = re.fullmatch(r"(\S+) \S+ requires (\S+), which is not installed\.", line.strip())
        if match and _canonical(match[1]) in own:
            missing.append(f"{match[2]} (of {match[1]})")
    if missing:
        raise InstallError(
            f"{settings['title']} lacks packages that others need: {run.redact(', '.join(missing[:12]))}",
            "lock all of them, as `pip freeze`, `uv pip compile` and `uv lock` do; with "
            "cluster.system_site_packages = true those of the interpreter count, too",
        )


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Runner:
    """Programs that make the environment, with reports on the way and an end when nobody waits for it.

    Args:
        values: environment variables, which no output shows.
        progress: receives what is being done.
        is_abandoned: returns True once nobody waits.
        lock: descriptor that the programs hold.
    """

    total = 0
    """Number of packages of the lock file."""
    stage = ""
    """Work of the next program, for reports."""

    def __init__(
        self,
        values: Dict[str, str],
        progress: Callable[[str], None],
        is_abandoned: Callable[[], bool],
        lock: int,
    ) -> None:
        self._environment = {**pip_variables(os.environ), **values, "PYTHONUNBUFFERED": "1"}
        self._secrets = [value for value in values.values() if value]
        self._progress, self._is_abandoned, self._lock = progress, is_abandoned, lock

    def __call__(self, command: List[str], folder: str, title: str) -> None:
        """Run a program. Raises `InstallError` with the last lines of its output."""
        code, lines = self._run(command, folder)
        if code == 0:
            return
        text = "\n".join(lines)
        lines = [self.redact(line) for line in lines]
        if "No space left on device" in text or "Disk quota exceeded" in text:
            raise InstallError(
                f"no space for the environment of {title}", "free space there, or choose another folder"
            )
        if "ensurepip" in text:
            raise InstallError(
                f"{sys.executable} cannot make virtual environments: it lacks ensurepip",
                "on Debian: apt-get install python3-venv; or name another interpreter",
            )
        last = [line for line in lines if line.strip() and not line.strip().startswith(_LATER_LINES)]
        raise InstallError(
            "the environment of {} cannot be made; the last lines of pip:\n    {}".format(
                title, "\n    ".join(last[-TAIL_LINES:]) or f"exit code {code}"
            ),
            "correct the lock file, or pip's index there (pip.conf, PIP_INDEX_URL)",
        )

    def read(self, command: List[str], is_check: bool = False) -> str:
        """Return the output of a short program, unredacted; a check may fail."""
        code, lines = self._run(command, "/")
        if code and not is_check:
            raise InstallError(
                f"{command[0]} ended with exit code {code}: {self.redact(' '.join(lines[-3:]))}", "try again"
            )
        return "\n".join(lines).strip()

    def _run(self, command: List[str], folder: str) -> tuple[int, List[str]]:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[self._lock],
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read_lines, args=(process, lines), daemon=True).start()
        kept: List[str] = []
        said, collected, text = time.monotonic(), 0, self.stage
        try:
            while True:
                try:
                    line = lines.get(timeout=0.5)
                    if line is None:
                        return process.wait(), kept
                    kept = [*kept[-200:], line]
                    collected += line.startswith(("Collecting ", "Processing "))
                    text = _stage(self.redact(line), collected, self.total) or text
                except queue.Empty:
                    pass
                if self._is_abandoned():
                    raise InstallError("nobody waits for the environment", "start the run again")
                if time.monotonic() - said > REPORT_SECONDS:
                    self._progress(text)
                    said = time.monotonic()
        finally:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def redact(self, line: str) -> str:
        """Return a line for the user: without the values of variables, and passwords of addresses."""
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return re.sub(r"(\w://)[^/\s'\"]*@", r"\1***@", line)


def _read_lines(process: subprocess.Popen[bytes], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _stage(line: str, collected: int, total: int) -> str:
    """Return what pip does, from a line of its output; empty: the line says nothing of it."""
    word, _, rest = line.strip().partition(" ")
    if word in ("Collecting", "Processing"):
        return f"package {collected} of {max(collected, total)}: {os.path.basename(rest.split(' ')[0])}"
    if word == "Downloading":
        size = re.search(r"\([\d.]+ [kMG]B\)", rest)
        name = os.path.basename(rest.split(" ")[0])
        text = f"package {collected} of {max(collected, total)}: downloading {name}"
        return f"{text} {size[0]}" if size else text
    if word == "Building":
        return "building a " + rest.split("(")[0].strip()
    return "copying files of packages" if line.startswith("Installing collected packages") else ""


def _raise_disk_problem(error: OSError, folder: str) -> NoReturn:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise InstallError(
            f"no space for the environment in {folder}", "free space there, or choose another folder"
        ) from error
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
        raise InstallError(
            f"files in {folder} cannot be locked: {error.strerror}", "choose a folder on another disk"
        ) from error
    raise InstallError(f"cannot write {error.filename or folder}: {error.strerror}", "choose another folder")


def _prune(folder: str, used: str) -> None:
    """Remove environments that were not used for long, but the last few, and none that a run uses."""
    locks = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another process has removed it
            locks += [(os.path.getmtime(path), path)] if name.endswith(".lock") else []
    for last_use, path in sorted(locks, reverse=True)[KEPT_ENVIRONMENTS:]:
        if path != used + ".lock" and time.time() - last_use >= UNUSED_SECONDS:
            _remove_unused(path[: -len(".lock")], path)


def _remove_unused(environment: str, lock_file: str) -> None:
    """Remove an environment and its lock file, unless a process uses it or has used it meanwhile."""
    with contextlib.suppress(OSError), open(lock_file, "r+") as lock:  # another process may remove it, too
        if not _try_lock(lock.fileno()) or not is_same_file(lock.fileno(), lock_file):
            return
        if time.time() - os.fstat(lock.fileno()).st_mtime < UNUSED_SECONDS:
            return
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(environment, COMPLETE))
        shutil.rmtree(environment, ignore_errors=True)
        os.unlink(lock_file)
