"""Every fault at an exact place: the run goes on by itself, and ends with the bits of an untroubled one.

Every day, those of checkpoints on disk strike one after another in one run; in the full suite, each of all
has a run of its own.
"""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from support.command import Desk, Training, memory_group, small_disk
from support.fault_table import Row
from support.injection import Fault
from support.recovered import STEPS, Met, check_whole, meet, run_name
from support.slowness import patient

HOST = socket.gethostname()
IN_STEP_8: dict[str, Any] = {"step": 8, "phase": "forward and backward"}
KILL = Fault("kill", rank=1, **IN_STEP_8)
REPLICAS, SHARDS = "2 replicas", "ZeRO-3 on 2 ranks"
PLANS: dict[str, tuple[str, ...]] = {
    REPLICAS: (),
    SHARDS: (
        "parallel.dp_replicate=1",
        "parallel.dp_shard=2",
        "parallel.shard=parameters",
    ),
    "tensor 2 × pipeline 2": (
        "model.layers=2",
        "parallel.dp_replicate=1",
        "parallel.tp=2",
        "parallel.pp=2",
    ),
}
NO_COPIES = "checkpoint.in_memory_every_steps=off"
SIGKILLED = "its process was killed by SIGKILL"
OF_STEP = ("await checkpoint", "flip checkpoint", "tear checkpoint")
"""Faults whose argument is a step."""


@dataclass(frozen=True)
class Cell:
    """Faults of one run, and how it gets over them."""

    failure: str
    """Text that tells of the fault; '': no rank goes back."""
    faults: tuple[Fault, ...]
    overrides: tuple[str, ...] = ()
    checkpoint: int | None = None
    """Step of the checkpoint from which it goes on; None: from memory."""
    attempt: int = 1
    plans: Literal["all", "replicas"] = "replicas"
    around: Literal["", "little memory", "little disk", "permissions"] = ""
    """Surroundings that the run needs."""

    @property
    def loses_a_save(self) -> bool:
        return self.around in ("little disk", "permissions")


def one(what: str, rank: int = 1, phase: str = "forward and backward", step: int = 8) -> tuple[Fault]:
    return (Fault(what, rank, step, phase),)


SAVED = Fault("await checkpoint", 0, 7, "forward and backward", argument="5")
"""Wait for a checkpoint that is written beside the steps, which are short."""

CELLS = {
    "SIGKILL in forward": Cell(SIGKILLED, one("kill"), plans="all"),
    "SIGKILL of rank 0, which serves the store, in the optimizer step": Cell(
        SIGKILLED, one("kill", 0, "update"), plans="all"
    ),
    "SIGKILL at the end of a step": Cell(SIGKILLED, one("kill", phase="step done")),
    "SIGKILL in data loading": Cell(SIGKILLED, one("kill", phase="waiting for data")),
    "SIGKILL during a checkpoint": Cell(SIGKILLED, one("kill", phase="checkpoint", step=5), plans="all"),
    "SIGSTOP: a hang, detected after 3 s": Cell(
        "rank 1 has been in forward and backward of step 7 for",
        one("stop"),
        (f"cluster.hang_timeout_seconds={patient(3)}",),
        plans="all",
    ),
    "crash (SIGSEGV)": Cell("its process was killed by SIGSEGV", one("segfault", 0)),
    "process exit": Cell("its process exited with code 7", one("process exit")),
    "exception": Cell("ValueError: injected", one("raise"), plans="all"),
    "out of memory: allocation of a tensor": Cell("can't allocate memory", one("allocate")),
    "out of memory: killed by the kernel": Cell(SIGKILLED, one("out of memory"), around="little memory"),
    "NaN gradients, once": Cell(
        "step 8: the loss is ", one("nan", phase="update"), ("train.non_finite=retry",), plans="all"
    ),
    "a rank is slow for 2 s": Cell("", (Fault("sleep", 1, **IN_STEP_8, argument="2"),)),
    "SIGKILL of the fork server": Cell("the fork server of node 0", one("kill fork server")),
    "SIGKILL of two ranks at once": Cell(
        SIGKILLED, tuple(Fault("kill", rank, **IN_STEP_8, together=2) for rank in (0, 1)), plans="all"
    ),
    "SIGKILL of another rank during the recovery, joining": Cell(
        SIGKILLED, (KILL, Fault("kill", 0, 0, "joining", generation=2)), attempt=2
    ),
    "SIGKILL of another rank during the recovery, building the model": Cell(
        SIGKILLED, (KILL, Fault("kill", 0, 0, "building the model", generation=2)), attempt=2, plans="all"
    ),
    "bit flip in a weight": Cell(
        f"step 8: ranks 0 ({HOST}), 1 ({HOST}) are replicas, but ", one("flip", phase="step done")
    ),
    "bit flip in the in-memory checkpoints, then SIGKILL": Cell(
        SIGKILLED, (SAVED, *one("flip snapshot"), KILL), checkpoint=5, plans="all"
    ),
    "SIGKILL without in-memory checkpoints": Cell(
        SIGKILLED, (SAVED, KILL), (NO_COPIES,), checkpoint=5, plans="all"
    ),
    "bit flip in the newest checkpoint on disk, then SIGKILL": Cell(
        SIGKILLED,
        (Fault("flip checkpoint", 1, **IN_STEP_8, argument="6"), KILL),
        (NO_COPIES, "checkpoint.every_steps=3"),
        checkpoint=3,
        plans="all",
    ),
    "newest checkpoint on disk truncated, then SIGKILL": Cell(
        SIGKILLED,
        (Fault("tear checkpoint", 1, **IN_STEP_8, argument="6"), KILL),
        (NO_COPIES, "checkpoint.every_steps=3"),
        checkpoint=3,
    ),
    "disk full during a checkpoint, then SIGKILL": Cell(
        SIGKILLED, (*one("fill disk", 0, step=4), KILL, *one("free disk", 0, step=9)), around="little disk"
    ),
    "no write permission for a checkpoint, then SIGKILL": Cell(
        SIGKILLED, (*one("deny", 0, step=4), KILL, *one("allow", 0, step=9)), around="permissions"
    ),
}
ON_SHARDS = ("SIGKILL in forward", "bit flip in the in-memory checkpoints, then SIGKILL")
"""Also in the full suite's runs with shards."""
RETRY, EVERY_3 = ("train.non_finite=retry",), (NO_COPIES, "checkpoint.every_steps=3")
IN_ONE_RUN: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "in-memory checkpoints": (
        RETRY,
        {
            name: 5 * number
            for number, name in enumerate(
                name for name, cell in CELLS.items() if cell.around == "" and cell.overrides in ((), RETRY)
            )
        },
    ),
    "checkpoints on disk": (
        EVERY_3,
        {
            "bit flip in the newest checkpoint on disk, then SIGKILL": 0,
            "newest checkpoint on disk truncated, then SIGKILL": 6,
            "SIGKILL without in-memory checkpoints": 13,
        },
    ),
}
"""Overrides of the run, and the steps by which each of its cells comes later than alone."""


def grid() -> list[Any]:
    """Every fault on replicas, the most different ones under the other plans too."""
    found = []
    for plan in PLANS:
        for name, cell in CELLS.items():
            if plan == REPLICAS or cell.plans == "all":
                marks = [pytest.mark.root] if cell.around.startswith("little") else []
                if plan != REPLICAS and not (plan == SHARDS and name in ON_SHARDS):
                    marks.append(pytest.mark.exhaustive)
                else:
                    marks.append(pytest.mark.full)
                found.append(pytest.param(plan, name, id=f"{plan}: {name}", marks=marks))
    return found


@pytest.mark.parametrize(("plan", "name"), grid())
def test_a_fault_costs_little_and_changes_no_bit(
    desk: Desk,
    whole_of: Callable[[tuple[str, ...]], Training],
    note: Callable[[Row], None],
    plan: str,
    name: str,
) -> None:
    cell, whole = CELLS[name], whole_of(PLANS[plan])
    run = f"{plan} {name}"
    with surroundings(desk, run, cell) as (words, argument):
        met = meet(
            desk,
            run,
            *(replace(fault, argument=fault.argument or argument) for fault in cell.faults),
            overrides=(*PLANS[plan], *cell.overrides),
            before=words,
        )
        check_whole(met.ran, met.training, whole)
        check_cost(met, cell)
    [recovery] = met.recoveries or [{"source": "", "repeated_steps": 0}]
    note(Row(name, plan, recovery["source"], recovery["repeated_steps"], met.longest_seconds))


@pytest.mark.parametrize("kind", IN_ONE_RUN)
@pytest.mark.daily("checkpoints on disk")
def test_faults_one_after_another_change_no_bit(desk: Desk, whole: Training, kind: str) -> None:
    overrides, delays = IN_ONE_RUN[kind]
    steps = -(-(STEPS + max(delays.values())) // STEPS) * STEPS
    cells = [later(CELLS[name], steps) for name, steps in delays.items()]
    generation, faults = 1, []
    for cell in cells:
        faults += [
            replace(
                fault,
                generation=generation + (fault.generation or 1) - 1,
                # The marks that are waited for include those of earlier cells.
                together=1 if fault.together == 1 else len(faults) + fault.together,
            )
            for fault in cell.faults
        ]
        generation += cell.attempt if cell.failure else 0
    met = meet(desk, kind, *faults, overrides=(f"train.steps={steps}", *overrides))
    check_whole(met.ran, met.training, whole, steps)
    for recovery, cell in zip(met.recoveries, [cell for cell in cells if cell.failure], strict=True):
        check_recovery(recovery, cell)
    checks = [event for event in met.training.events if event["kind"] == "health_check"]
    assert len(checks) == len(met.recoveries), "devices are checked before ranks begin again"


def later(cell: Cell, steps: int) -> Cell:
    """The cell with everything so many steps later."""
    return replace(
        cell,
        failure=re.sub(r"(?<=step )\d+", lambda step: str(int(step[0]) + steps), cell.failure),
        faults=tuple(
            replace(
                fault,
                step=fault.step and fault.step + steps,
                argument=str(int(fault.argument) + steps) if fault.what in OF_STEP else fault.argument,
            )
            for fault in cell.faults
        ),
        checkpoint=None if cell.checkpoint is None else cell.checkpoint + steps,
    )


@contextmanager
def surroundings(desk: Desk, run: str, cell: Cell) -> Iterator[tuple[tuple[str, ...], str]]:
    """Words before the command, and what to tell its faults."""
    match cell.around:
        case "":
            yield (), ""
        case "little memory":
            with memory_group(64 << 20) as group:
                yield (), str(group)
        case "little disk":
            folder = desk.folder / run_name(run) / "checkpoints"
            folder.parent.mkdir()
            with small_disk(folder, "4m"):
                yield (), ""
        case "permissions":
            bound = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")
            yield bound if os.geteuid() == 0 else (), ""


def check_cost(met: Met, cell: Cell) -> None:
    if not cell.failure:
        assert met.recoveries == []
        return
    [recovery] = met.recoveries
    check_recovery(recovery, cell)
    assert met.ran.out.count("recovered from: ") == 1
    assert "resuming from" not in met.ran.out, "one message for one recovery"
    if cell.loses_a_save:
        assert met.training.checkpoints() == ["step-00000010", "step-00000012"], "the one of step 5 failed"


def check_recovery(recovery: dict[str, Any], cell: Cell) -> None:
    assert cell.failure in recovery["failure"]
    assert recovery["attempt"] == cell.attempt
    if cell.checkpoint is None:
        assert recovery["source"] == "memory"
        assert recovery["repeated_steps"] <= 1, "the copy of the step before may have been under way"
    else:
        assert (recovery["source"], recovery["step"]) == ("checkpoint", cell.checkpoint)


KINDS = ("kill", "process exit", "raise", "segfault", "allocate", "kill fork server", "nan", "flip")
PHASES = ("waiting for data", "forward and backward", "update", "step done")
ONLY_IN = {"nan": ("update",), "flip": ("step done",)}
AT_RANDOM = 4
SEEDS = [int(seed) for seed in os.environ.get("WANMA_FAULT_SEEDS", "1 2").split()]


def draw(seed: int) -> list[Fault]:
    """Faults of one run: from its second step on, for before the first is done a failure is the end."""
    dice = random.Random(seed)
    faults = []
    for what in dice.sample(KINDS, AT_RANDOM):
        phase = dice.choice(ONLY_IN.get(what, PHASES))
        faults.append(Fault(what, dice.randrange(2), dice.randint(2, STEPS - 1), phase))
    return faults


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_at_random_places_change_no_bit(
    desk: Desk, whole: Training, note: Callable[[Row], None], seed: int
) -> None:
    faults = draw(seed)
    print(f"seed {seed}: {faults}")
    met = meet(desk, f"random {seed}", *faults, overrides=("cluster.max_restarts=5",))
    check_whole(met.ran, met.training, whole)
    repeated = sum(recovery["repeated_steps"] for recovery in met.recoveries)
    sources = " and ".join(sorted({recovery["source"] for recovery in met.recoveries}))
    places = ", ".join(f"{one.what} at step {one.step}" for one in sorted(faults, key=lambda one: one.step))
    note(Row(f"at random, seed {seed}: {places}", REPLICAS, sources, repeated, met.longest_seconds))
