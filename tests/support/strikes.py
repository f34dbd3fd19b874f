"""Faults, in the process of the rank that they strike."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS = 200.0
"""Limit of a strike's wait for its target, in seconds."""
FILLER = "filler"
KINDS = frozenset(
    [
        "kill",
        "stop",
        "segfault",
        "process exit",
        "raise",
        "kill fork server",
        "kill supervisor",
        "await checkpoint",
        "await exchange",
        "await stop",
        "sleep",
        "slow",
        "slow upload",
        "wrong product",
        "allocate",
        "out of memory",
        "flip",
        "nan",
        "spike",
        "flip snapshot",
        "flip checkpoint",
        "tear checkpoint",
        "fill disk",
        "free disk",
        "deny",
        "allow",
    ]
)
"""Kinds of faults that can be ordered."""


def strike(what: str, argument: str, making: int, spec: Any) -> None:
    """See `injection.Fault`.

    Args:
        making: the step that is being made, or was just finished.
        spec: `WorkerSpec` of the rank.
    """
    checkpoints = Path(spec.run_directory) / "checkpoints"
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill fork server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the kernel ends this process with its parent: soon, but not at once
        case "process exit":
            os._exit(7)
        case "raise":
            raise ValueError("injected")
        case "await checkpoint":
            folder = checkpoints / f"step-{int(argument):08d}"
            _wait(folder.exists, str(folder))
        case "await exchange":
            _await_exchange()
        case "await stop":
            from wanma.elastic.workers.progress_board import ProgressBoard

            board = _only(ProgressBoard)
            _wait(lambda: board.is_drain_requested() or board.is_suspend_requested(), "a request to stop")
        case "sleep":
            time.sleep(float(argument))
        case "slow":
            from wanma.training.step.forward_backward import ForwardBackward

            _delay(ForwardBackward, "__call__", float(argument))
        case "slow upload":
            from wanma.checkpoint.remote.remote_storage import RemoteStorage

            _delay(RemoteStorage, "upload_file", float(argument))
        case "wrong product":
            _spoil_product()
        case "allocate":
            import torch

            torch.empty(1 << 60, dtype=torch.uint8)
        case "out of memory":
            _eat(Path(argument))
        case "flip":
            from support.faults import flip_bit

            flip_bit(next(iter(_trainer().state.weight_tensors().values())))
        case "nan" | "spike":
            from wanma.checkpoint.format.local_shards import local_tensor

            for gradient in _trainer().state.named_optimizer.gradients():
                local_tensor(gradient).mul_(float("nan") if what == "nan" else 1e6)
        case "flip snapshot":
            _flip_snapshots(spec.memory_file_paths, making - 1)
        case "flip checkpoint" | "tear checkpoint":
            _damage(checkpoints / f"step-{int(argument):08d}", tear=what == "tear checkpoint")
        case "fill disk":
            _fill(checkpoints)
        case "free disk":
            (checkpoints / FILLER).unlink()
        case "deny":
            checkpoints.chmod(0o555)
        case "allow":
            checkpoints.chmod(0o755)
        case _:
            raise AssertionError(f"unknown fault {what}")


def _delay(kind: type, method: str, seconds: float) -> None:
    quick = getattr(kind, method)

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return quick(*arguments, **keywords)

    setattr(kind, method, slow)


def _spoil_product() -> None:
    from wanma.hardware.checks import device_check

    right = device_check.multiply

    def wrong(*factors: Any) -> Any:
        found = right(*factors)
        found[5, 77] += 4
        return found

    device_check.multiply = wrong


def _eat(group: Path) -> None:
    """More memory than this control group has: the kernel kills."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    eaten = []
    while True:
        eaten.append(os.urandom(1 << 20))


def _await_copy(paths: tuple[str, ...], step: int) -> None:
    """Wait until one of this rank's copies in memory is whole and of `step`, or later."""
    from wanma.checkpoint.in_memory.memory_file import read_header

    def is_there() -> bool:
        heads = [read_header(path) for path in paths]
        return any(head is not None and head.is_complete and head.step >= step for head in heads)

    _wait(is_there, f"a copy of step {step}")


def _await_exchange() -> None:
    """Wait until this rank's newest copy in memory is whole and exchanged with its partner node."""
    from wanma.checkpoint.in_memory.in_memory_checkpointer import InMemoryCheckpointer

    thread = _only(InMemoryCheckpointer)._thread
    _wait(lambda: thread is None or not thread.is_alive(), "the end of the exchange")


def _flip_snapshots(paths: tuple[str, ...], step: int) -> None:
    """One bit in each of this rank's copies, as soon as one is of `step`: whichever is taken up is wrong."""
    from wanma.checkpoint.in_memory.memory_file import HEADER_BYTES

    _await_copy(paths, step)
    for path in paths:
        _flip(Path(path), HEADER_BYTES + 100)


def _damage(checkpoint: Path, tear: bool) -> None:
    """The largest file of a checkpoint, which may still be being written."""
    _wait(checkpoint.exists, str(checkpoint))
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    if tear:
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        _flip(largest, largest.stat().st_size // 2)


def _flip(path: Path, offset: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 8]), offset)
    finally:
        os.close(descriptor)


def _fill(folder: Path) -> None:
    """Until nothing more fits; the folder is on a small disk of its own."""
    with (folder / FILLER).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.005)


def _trainer() -> Any:
    from wanma.training.run.trainer import Trainer

    return _only(Trainer)


def _only(kind: type) -> Any:
    """The one object of this kind in this process."""
    (found,) = (one for one in gc.get_objects() if isinstance(one, kind))
    return found
