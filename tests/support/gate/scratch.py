"""Folders of test runs: what a run writes lies below one of its own, and goes with it; for any Python 3.11.

    python scratch.py clean            # remove what earlier test runs left
    python scratch.py run COMMAND ...  # a command whose temporary files, home and caches are its own

Names that tests give to folders, network namespaces and control groups begin with `wanma-test-`, followed,
for what is not a folder, by the process that made it. What a living run holds stays, and so do
`wanma-rescued-*`: there lies a user's last checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

PREFIX = "wanma-test-"
OWNER = "owner"
"""File of a run's folder with the identity of the process that holds it."""
_OLD_SECONDS = 24 * 3600


def main(words: Sequence[str]) -> int:
    if list(words) == ["clean"]:
        for line in remove_leftovers():
            print(f"removed: {line}", flush=True)
        return 0
    if words and words[0] == "run":
        return run_isolated(words[1:])
    print(__doc__, file=sys.stderr)
    return 2


def run_isolated(command: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Its folder goes when it succeeds; after a failure it stays, and its name is printed.
    """
    folder = new_folder()
    process = subprocess.Popen(command, env=environment(folder))
    # The command gets the terminal's signals itself, and decides what they mean.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: process.send_signal(received))
    code = process.wait()
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"its files are in {folder}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def new_folder() -> Path:
    """Make a folder of this process, which others leave alone as long as it lives."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / OWNER).write_text(identity(os.getpid()))
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment variables of a command that keeps its files below `folder`.

    Packages that pip and uv have downloaded are still taken from the user's caches, by the user's settings.
    """
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    kept = {"PIP_CACHE_DIR": str(cache / "pip"), "UV_CACHE_DIR": str(cache / "uv")}
    if settings.exists():
        kept["PIP_CONFIG_FILE"] = str(settings)
    own = {
        "TMPDIR": folder,
        "HOME": folder / "home",
        "XDG_CACHE_HOME": folder / "home" / ".cache",
        "XDG_CONFIG_HOME": folder / "home" / ".config",
        "XDG_DATA_HOME": folder / "home" / ".local" / "share",
        "XDG_STATE_HOME": folder / "home" / ".local" / "state",
        "XDG_RUNTIME_DIR": folder / "run",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
    }
    for name in ("HOME", "XDG_RUNTIME_DIR"):
        own[name].mkdir(mode=0o700, exist_ok=True)
    return {**kept, **os.environ, **{name: str(path) for name, path in own.items()}}


def remove_leftovers() -> Iterator[str]:
    """Remove what test runs left that are no more; one line for each."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        if folder.is_dir() and not folder.is_symlink() and not _is_held(folder):
            yield from end_processes_of(folder)
            for mount in sorted(_mounts_below(folder), reverse=True):
                subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
                yield f"mount {mount}"
            shutil.rmtree(folder, ignore_errors=True)
            yield str(folder)
    for name in _names(Path("/run/netns")):
        if not _is_alive(_maker(name)):
            inside = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            )
            _kill(int(pid) for pid in inside.stdout.split())
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
            yield f"network namespace {name}"
    for root in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")):
        for name in _names(root):
            if not _is_alive(_maker(name)):
                _kill(int(pid) for pid in (root / name / "cgroup.procs").read_text().split())
                _until_done((root / name).rmdir)
                yield f"control group {root / name}"
    yield from _old_pytest_folders()


def identity(pid: int) -> str:
    """The process, told from later ones with its number by the time of its start; "" if it is no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def _is_held(folder: Path) -> bool:
    try:
        owner = (folder / OWNER).read_text()
    except OSError:  # of a test that stood alone, or whose run died while it was made
        return time.time() - folder.stat().st_mtime < _OLD_SECONDS
    return owner != "" and identity(int(owner.split()[0])) == owner


def end_processes_of(folder: Path) -> Iterator[str]:
    """Kill what still runs with files below `folder` in its environment."""
    mark = str(folder).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    if found:
        _kill(found)
        yield f"{len(found)} processes of {folder.name}"


def _mounts_below(folder: Path) -> list[str]:
    places = [line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{folder}/")]


def _names(root: Path) -> list[str]:
    try:
        return sorted(path.name for path in root.iterdir() if path.name.startswith(PREFIX))
    except OSError:
        return []


def _maker(name: str) -> int:
    """The process in a name `wanma-test-PID` or `wanma-test-PID-WORD`; 0 if there is none."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _is_alive(pid: int) -> bool:
    return pid > 0 and identity(pid) != ""


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _until_done(action: Callable[[], object], seconds: float = 5) -> None:
    """Repeat the action until the kernel allows it: processes that were killed leave their group later."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            action()
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        else:
            return


def _old_pytest_folders() -> Iterator[str]:
    """Remove pytest's folders that nothing has touched for a day."""
    for folder in Path(tempfile.gettempdir()).glob("pytest-of-*/pytest-*"):
        if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
            continue
        if time.time() - folder.stat().st_mtime > _OLD_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
            yield str(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
