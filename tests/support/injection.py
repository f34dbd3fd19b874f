"""Faults at an exact place of a run: what happens to which rank, in which step and phase, once.

    desk.start("train", "text.toml", **injected(folder, Fault("kill", rank=1, step=7, phase="update")))

Product code knows nothing of it. The ranks' interpreter reads `injected/sitecustomize.py`, which puts a
probe between a rank and the board on which it notes where it stands, as a debugger would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from support.strikes import KINDS, strike

VARIABLE = "WANMA_TEST_FAULTS"
SUPPORT = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """Strikes when the rank reports that it is in `phase` of `step`; steps count from 1.

    Phases: joining, opening data, building the model (their step is 0); then, of the step that is being
    made, waiting for data, forward and backward, update, step done, checkpoint.
    """

    what: str
    """kill, stop (SIGSTOP), segfault, process exit, raise, kill fork server; allocate (a too large tensor),
    out of memory (`argument`: folder of a control group); flip (a bit of a weight, at the phase step done),
    nan and spike (the rank's gradients, at the phase update); sleep (`argument`: seconds), await checkpoint
    (`argument`: of which step, until it is complete), await exchange (until the rank's newest copy in memory
    is whole, and exchanged with its partner node), await stop (a request of the supervisor's), slow (from
    then on each forward and backward takes `argument` seconds more), slow upload (each file takes so much
    longer),
    wrong product (of the matrices that the health check multiplies). What shows only later: flip snapshot
    (all of the rank's), flip checkpoint, tear checkpoint (`argument`: of which step), fill disk, free disk,
    deny and allow (writing into the folder of checkpoints). At the phase rescue, half way through the rank's
    file: kill (the process that writes it), kill supervisor (which is its parent)."""
    rank: int = 1
    step: int = 3
    phase: str = "forward and backward"
    generation: int | None = None
    """Only in this one; None: in whichever comes there first."""
    argument: str = ""
    together: int = 1
    """Strikes when so many faults of the run are due or have struck: who comes first waits for the others."""

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            raise ValueError(f"unknown fault {self.what!r}; known are {', '.join(sorted(KINDS))}")


def injected(
    folder: Path, *faults: Fault, flush_seconds: float | None = None, repeat_seconds: float | None = None
) -> dict[str, str]:
    """Environment of a command whose ranks are to meet `faults`; `struck` later tells when they did.

    Args:
        folder: new, for the marks of faults that have struck.
        flush_seconds: time before a kill that the supervisor keeps for each place of a flush; None: what it
            keeps for one on an ordinary machine, which may be too little where many tests share the cores.
        repeat_seconds: time in which a second Ctrl-C is the same one; None: the usual, too little for both to
            be heard on a busy machine.
    """
    folder.mkdir()
    path = [str(SUPPORT / "injected"), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]
    trace = folder.with_name(f"{folder.name}-trace")
    order = {
        "folder": str(folder),
        "trace": str(trace),
        "faults": [asdict(fault) for fault in faults],
        "flush_seconds": flush_seconds,
        "repeat_seconds": repeat_seconds,
    }
    return {VARIABLE: json.dumps(order), "PYTHONPATH": os.pathsep.join(filter(None, path))}


def after_exchange(fault: Fault, ranks: int, *earlier: Fault) -> list[Fault]:
    """The fault, after waits that leave each of `ranks` ranks and its partner with a copy of the step before.

    While the exchange of one copy goes on, no other is begun: so that of the last but one is awaited as well.
    It strikes when all of the list have marks; those that come before it without being awaited are `earlier`.
    """
    phase, generation = "forward and backward", fault.generation
    waits = [
        Fault("await exchange", rank, step, phase, generation)
        for step in (fault.step - 1, fault.step)
        for rank in range(ranks)
    ]
    # A wait has its mark when it begins: another one of its rank tells its end.
    ends = [Fault("sleep", rank, fault.step, phase, generation, "0") for rank in range(ranks)]
    before = [*earlier, *waits, *ends]
    return [*before, replace(fault, together=len(before) + 1)]


@dataclass(frozen=True)
class Strike:
    """Time at which a fault struck, by two clocks."""

    monotonic: float
    unix: float


def struck(folder: Path) -> list[Strike]:
    """The faults that have struck, in the order of `injected`."""
    marks = sorted(folder.iterdir(), key=lambda mark: int(mark.name))
    return [Strike(*map(float, mark.read_text().split())) for mark in marks]


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

    def __init__(self, folder: Path, trace: Path, faults: Sequence[Fault], spec: Any) -> None:
        self._folder, self._spec = folder, spec
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._faults = {
            number: fault
            for number, fault in enumerate(faults)
            if fault.rank == spec.rank and fault.generation in (None, spec.generation)
        }

    def at(self, step: int, phase: str) -> None:
        report = Report(self._spec.rank, self._spec.generation, step, phase, time.time())
        os.write(self._trace, json.dumps(asdict(report)).encode() + b"\n")
        making = step + (phase in ("waiting for data", "forward and backward", "update"))
        for number, fault in self._faults.items():
            if (making, phase) == (fault.step, fault.phase) and _mark(self._folder, number):
                self._await(fault.together)
                strike(fault.what, fault.argument, making, self._spec)

    def _await(self, marks: int) -> None:
        deadline = time.monotonic() + 200
        while len(list(self._folder.iterdir())) < marks:
            assert time.monotonic() < deadline, "the other ranks never came to their faults"
            time.sleep(0.001)


def install() -> None:
    """Put a probe into every rank that this process becomes the parent of, and into one that rescues."""
    order = json.loads(os.environ[VARIABLE])
    faults = [Fault(**fault) for fault in order["faults"]]
    if order["flush_seconds"] is not None:
        from wanma.elastic.recovery import flush_deadline

        flush_deadline.FLUSH_STARTUP_SECONDS = order["flush_seconds"]
    if order["repeat_seconds"] is not None:
        from wanma.elastic.supervisor import stop_signals

        stop_signals.SIGNAL_REPEAT_SECONDS[signal.SIGINT] = order["repeat_seconds"]
    if "wanma.elastic.recovery.flush_process" in sys.orig_argv:
        _install_in_rescue(Path(order["folder"]), faults)
        return
    from wanma.elastic.workers import worker_process

    run = worker_process._run

    def probed(spec: Any, *rest: Any) -> int:
        probe = Probe(Path(order["folder"]), Path(order["trace"]), faults, spec)
        probe.at(0, "born")

        class Probed(worker_process.WorkerSupervisorClient):
            def __init__(self, channel: Any, board: Any, writer: Any) -> None:
                super().__init__(channel, board, writer)
                progress, finished = self.report_progress, self.report_finished_step

                def told(step: int, phase: str) -> None:
                    progress(step, phase)
                    probe.at(step, phase)

                def done(step: int) -> None:
                    finished(step)
                    probe.at(step, "step done")

                self.report_progress, self.report_finished_step = told, done

        worker_process.WorkerSupervisorClient = Probed  # type: ignore[misc]  # in this rank's own process
        return run(spec, *rest)

    worker_process._run = probed


def _install_in_rescue(folder: Path, faults: Sequence[Fault]) -> None:
    from wanma.checkpoint.in_memory import flush, flushed_parts

    write_file = flush.write_file

    def write(path: Path, *content: memoryview) -> str:
        for number, fault in enumerate(faults):
            if fault.phase == "rescue" and f"-{fault.rank:05d}" in path.name and _mark(folder, number):
                path.write_bytes(content[-1][: len(content[-1]) // 2])
                os.kill(os.getppid() if fault.what == "kill supervisor" else os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return write_file(path, *content)

    flush.write_file = flushed_parts.write_file = write  # type: ignore[attr-defined]  # in this process


def _mark(folder: Path, number: int) -> bool:
    """Make the mark of a fault, whole at once: a rank may be killed while it writes.

    Returns:
        Whether it is new; a mark is made once, whoever else comes there in a later generation.
    """
    written = folder.with_name(f"{folder.name}-{number}-{os.getpid()}")
    written.write_text(f"{time.monotonic()} {time.time()}")
    try:
        (folder / str(number)).hardlink_to(written)
    except FileExistsError:
        return False
    finally:
        written.unlink()
    return True
