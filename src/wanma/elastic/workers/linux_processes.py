"""Linux functions for processes: name, state, safety of a fork."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from wanma.job.errors import WanmaError

_PR_SET_NAME = 15
_NAME_BYTES = 15
"""Most bytes of a process's name in the kernel."""
_STATES = {
    "T": "stopped (SIGSTOP?)",
    "t": "stopped by a debugger",
    "D": "blocked in a disk or driver call",
    "Z": "dead",
}


def require_linux() -> None:
    """Check that this is Linux: elsewhere an orphan could survive its supervisor.

    Raises:
        WanmaError: it is not.
    """
    if sys.platform != "linux":
        raise WanmaError(
            f"supervised ranks need Linux; this is {sys.platform}",
            "run inside a Linux container or virtual machine, or use wanma.session in one process",
        )


def set_process_name(*names: str) -> None:
    """Name this process by the first of `names` that is short enough, or else the last.

    `ps -e`, `top` and `pgrep` list it: the ranks of a run have one and the same command line.
    """
    name = next((name for name in names if len(name.encode()) <= _NAME_BYTES), names[-1])
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def process_state(pid: int) -> str:
    """Return the process's state in words; empty when it simply runs or sleeps."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    return _STATES.get(status.rpartition(")")[2].split()[0], "")


def process_start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it is gone or dead.

    Together with the number it identifies a process: numbers are used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def find_fork_hazard(own_sockets: Collection[int]) -> str:
    """Return the reason why this process must not be forked now; empty if it may be.

    A forked child has only the thread that forked: locks held by others stay locked, thread pools have no
    threads, a CUDA context does not work, and a shared socket has two readers.
    """
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        names_text = f" ({', '.join(names)})" if names else " (of a native library)"
        thread_text = "1 other thread" if threads == 2 else f"{threads - 1} other threads"
        return f"{thread_text}{names_text} still run{'s' if threads == 2 else ''} after the imports"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import created a CUDA context"
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this listing itself
        if target.startswith("/dev/nvidia"):
            return f"an import opened {target}"
        if target.startswith("socket:") and int(link.name) not in own_sockets:
            return f"an import opened a socket (descriptor {link.name})"
    return ""
