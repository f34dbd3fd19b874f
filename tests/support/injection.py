"""Faults at an exact place of a run: what happens to which rank, in which step and phase, once.

    desk.start("train", "text.toml", **injected(folder, Fault("kill", rank=1, step=7, phase="update")))

Product code knows nothing of it. The ranks' interpreter reads `injected/sitecustomize.py`, which puts a
probe between a rank and the board on which it notes where it stands, as a debugger would.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "WANMA_TEST_FAULTS"
SUPPORT = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """Strikes when the rank reports that it is in `phase` of `step`; steps count from 1.

    Phases: joining, opening data, building the model (their step is 0); then, of the step that is being
    made, waiting for data, forward and backward, update, step done, checkpoint.
    """

    what: str
    """kill, stop (SIGSTOP), segfault, exit, raise, kill fork server; flip (a bit of a weight, at the phase
    step done), nan and spike (the rank's gradients, at the phase update); sleep (for `seconds`), slow (from
    now on each forward and backward takes so much longer), slow upload (each file takes so much longer),
    wrong product (of the matrices that the health check multiplies)."""
    rank: int = 1
    step: int = 3
    phase: str = "forward and backward"
    generation: int | None = None
    """Only in this one; None: in whichever comes there first."""
    seconds: float = 0.0


def injected(folder: Path, *faults: Fault) -> dict[str, str]:
    """Environment of a command whose ranks are to meet `faults`; `struck` later tells when they did.

    Args:
        folder: new, for the marks of faults that have struck.
    """
    folder.mkdir()
    path = [str(SUPPORT / "injected"), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]
    trace = folder.with_name(f"{folder.name}-trace")
    order = {"folder": str(folder), "trace": str(trace), "faults": [asdict(fault) for fault in faults]}
    return {VARIABLE: json.dumps(order), "PYTHONPATH": os.pathsep.join(filter(None, path))}


@dataclass(frozen=True)
class Strike:
    """When a fault struck, by two clocks."""

    monotonic: float
    unix: float


def struck(folder: Path) -> list[Strike]:
    """The faults that have struck, in the order of `injected`."""
    return [Strike(*map(float, mark.read_text().split())) for mark in sorted(folder.iterdir())]


@dataclass(frozen=True)
class Report:
    """A rank said where it stands; its first one, 'born', is the probe's."""

    rank: int
    generation: int
    step: int
    phase: str
    unix: float


def traced(folder: Path) -> list[Report]:
    """All that the ranks said, in time."""
    lines = folder.with_name(f"{folder.name}-trace").read_text().splitlines()
    return sorted((Report(**json.loads(line)) for line in lines), key=lambda report: report.unix)


class Probe:
    """Watches one rank and does what is due."""

    def __init__(
        self, folder: Path, trace: Path, faults: Sequence[Fault], rank: int, generation: int
    ) -> None:
        self._folder, self._rank, self._generation = folder, rank, generation
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._faults = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.rank == rank and fault.generation in (None, generation)
        }

    def at(self, step: int, phase: str) -> None:
        report = Report(self._rank, self._generation, step, phase, time.time())
        os.write(self._trace, json.dumps(asdict(report)).encode() + b"\n")
        making = step + (phase in ("waiting for data", "forward and backward", "update"))
        for number, fault in self._faults.items():
            if (making, phase) == (fault.step, fault.phase) and self._is_first(number):
                _strike(fault.what, fault.seconds)

    def _is_first(self, number: int) -> bool:
        """A mark is made once, whoever else comes there in a later generation."""
        try:
            mark = os.open(self._folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.write(mark, f"{time.monotonic()} {time.time()}".encode())
        os.close(mark)
        return True


def install() -> None:
    """Put a probe into every rank that this process becomes the parent of."""
    from wanma.elastic import worker_main

    order = json.loads(os.environ[VARIABLE])
    faults = [Fault(**fault) for fault in order["faults"]]
    run = worker_main._run

    def probed(spec: Any, *rest: Any) -> int:
        probe = Probe(Path(order["folder"]), Path(order["trace"]), faults, spec.rank, spec.generation)
        probe.at(0, "born")

        class Probed(worker_main.Supervised):
            def __init__(self, channel: Any, board: Any, writer: Any) -> None:
                super().__init__(channel, board, writer)
                progress, step_done = self.progress, self.step_done

                def told(step: int, phase: str) -> None:
                    progress(step, phase)
                    probe.at(step, phase)

                def done(step: int) -> None:
                    step_done(step)
                    probe.at(step, "step done")

                self.progress, self.step_done = told, done

        worker_main.Supervised = Probed  # type: ignore[misc]  # in this rank's own process
        return run(spec, *rest)

    worker_main._run = probed


def _strike(what: str, seconds: float) -> None:
    match what:
        case "sleep":
            time.sleep(seconds)
        case "slow":
            from wanma.training.forward_backward import ForwardBackward

            _delay(ForwardBackward, "__call__", seconds)
        case "wrong product":
            from wanma.hardware import health

            right = health.product

            def wrong(*factors: Any) -> Any:
                found = right(*factors)
                found[5, 77] += 4
                return found

            health.product = wrong
        case "slow upload":
            from wanma.checkpoint.storage import Storage

            _delay(Storage, "put", seconds)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill fork server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the kernel ends this process with its parent: soon, but not at once
        case "exit":
            os._exit(7)
        case "raise":
            raise ValueError("injected")
        case "flip":
            from support.faults import flip_bit

            flip_bit(next(iter(_trainer().state.weights().values())))
        case "nan" | "spike":
            from wanma.checkpoint.shards import local_part

            for gradient in _trainer().state.updater.gradients():
                local_part(gradient).mul_(float("nan") if what == "nan" else 1e6)
        case _:
            raise AssertionError(f"unknown fault {what}")


def _delay(kind: type, method: str, seconds: float) -> None:
    quick = getattr(kind, method)

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return quick(*arguments, **keywords)

    setattr(kind, method, slow)


def _trainer() -> Any:
    from wanma.training.trainer import Trainer

    (trainer,) = (one for one in gc.get_objects() if isinstance(one, Trainer))
    return trainer
