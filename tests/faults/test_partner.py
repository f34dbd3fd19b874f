"""A machine is lost with all that its memory held: the run goes on from what its partner kept of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from support.command import Desk, Ran, Training
from support.fault_table import Row
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import SHARDED, Machines
from support.recovered import check_whole

Note = Callable[[Row], None]
PLAN = "ZeRO-3 on 2 nodes"


def lose_in_step_8(desk: Desk, name: str, *overrides: str) -> tuple[Ran, Training]:
    """Node 1 is lost while step 8 is made; another machine takes its place."""
    marks = desk.folder / f"marks-{name}"
    saved = Fault("await checkpoint", rank=1, step=7, phase="forward and backward", argument="5")
    stop = Fault("stop", rank=1, step=8, phase="forward and backward")  # so that nobody gets further
    faults = after_exchange(stop, 2, saved)
    both = Machines(desk, name, *SHARDED, *overrides, **injected(marks, *faults))
    both.start(0)
    both.start(1)
    assert both.running[0].until(lambda: len(struck(marks)) == len(faults))
    both.lose(1)
    both.start(1)
    first, second = both.end()
    second.check(first.code)
    return first, both.training


def row(fault: str, recovery: dict[str, Any]) -> Row:
    """Its seconds are those that the survivors count."""
    return Row(fault, PLAN, recovery["source"], recovery["repeated_steps"], recovery["seconds"])


def recovery_of(training: Training) -> dict[str, Any]:
    [recovery] = [event for event in training.events if event["kind"] == "recovery"]
    return recovery


@pytest.mark.full
def test_a_lost_machine_costs_the_steps_since_its_partner_s_copy(
    desk: Desk, untroubled: Training, note: Note
) -> None:
    ran, training = lose_in_step_8(desk, "lost")
    check_whole(ran, training, untroubled)
    recovery = recovery_of(training)
    assert recovery["source"] == "partner"
    assert recovery["repeated_steps"] == 0
    assert "was lost" in recovery["failure"]
    assert "in-memory checkpoint of step" in ran.text
    assert "(lost node: from its partner)" in ran.text
    note(row("a node is lost and replaced", recovery))


@pytest.mark.full
def test_without_partners_a_lost_machine_costs_the_steps_since_the_newest_checkpoint(
    desk: Desk, untroubled: Training, note: Note
) -> None:
    ran, training = lose_in_step_8(desk, "alone", "checkpoint.partner=false")
    check_whole(ran, training, untroubled)
    recovery = recovery_of(training)
    assert (recovery["source"], recovery["step"]) == ("checkpoint", 5)
    assert "rank 1, is missing on node 1" in training.messages
    assert "its partner, node 0" in training.messages
    note(row("a node is lost and replaced, without partner copies", recovery))


@pytest.mark.full
def test_a_rank_that_dies_is_started_again_from_its_own_node(
    desk: Desk, untroubled: Training, note: Note
) -> None:
    marks = desk.folder / "marks-rank"
    kill = Fault("kill", rank=1, step=8, phase="forward and backward")
    both = Machines(desk, "rank", *SHARDED, **injected(marks, *after_exchange(kill, 2)))
    both.start(0)
    both.start(1)
    first, _ = both.end()
    check_whole(first, both.training, untroubled)
    recovery = recovery_of(both.training)
    assert recovery["source"] == "memory"
    assert recovery["repeated_steps"] == 0
    note(row("SIGKILL in forward", recovery))


@pytest.mark.full
def test_an_interrupt_ends_both_machines_in_order(desk: Desk) -> None:
    both = Machines(desk, "interrupted", *SHARDED, "train.steps=2000")
    both.start(0)
    both.start(1)
    assert both.running[0].until(lambda: both.training.steps_begun() >= 3)
    both.running[0].signal(signal.SIGINT)
    assert [one.code for one in both.end()] == [130, 130]
    assert both.training.events[-1]["outcome"] == "interrupted"
