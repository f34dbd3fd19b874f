"""Nodes leave an elastic run in order: it continues on the others, and no step is repeated."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.command import Desk, Ran, Running, Training
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import Machines
from wanma.elastic.supervisor.stop_signals import SIGNAL_REPEAT_SECONDS

STEPS = 30
JOB = (
    "text.toml",
    f"train.steps={STEPS}",
    "train.schedule=constant",
    f"checkpoint.every_steps={STEPS}",
    "train.precision=fp64",
    "model.layers=2",
    "checkpoint.in_memory_every_steps=1",
    "observe.log_every_steps=20",
    "cluster.last_call_timeout_seconds=100",
    "cluster.health_check=never",
    "cluster.grace_seconds=200",  # the machine is busy
    "parallel.dp_replicate=1",
)
SHARDED = ("cluster.nodes=2..3", "parallel.dp_shard=3", "parallel.shard=parameters")
pytestmark = pytest.mark.timeout(900)
TOLERANCE = 1e-9
"""Tolerance of losses and weights in fp64 between two orders of summation."""
SLOW = Fault("slow", rank=0, step=5, generation=1, argument="0.4")
"""From step 5 on, steps are long enough for signals to come between them."""


@pytest.fixture(scope="module")
def untroubled(shared_desk: Desk) -> Training:
    """The run on one machine, as one process."""
    shared_desk.run("train", *JOB, "--run-dir", "untroubled-leave").check()
    return shared_desk.training("untroubled-leave")


class Gang(Machines):
    """Machines of a run whose faults have struck, but for `later`."""

    def __init__(
        self,
        desk: Desk,
        name: str,
        *faults: Fault,
        words: tuple[str, ...],
        count: int = 3,
        later: tuple[Fault, ...] = (),
    ) -> None:
        self.marks = desk.folder / f"marks-{name}"
        super().__init__(desk, name, *JOB, *words, **injected(self.marks, *faults, *later))
        for node in range(count):
            self.start(node)
        has_met = self.running[0].until(lambda: len(struck(self.marks)) == len(faults))
        assert has_met, f"the run ended before its faults\n{self.running[0].end().text}"

    def leave(self, node: int, number: signal.Signals = signal.SIGTERM) -> Running:
        """Send the signal to the supervisor alone."""
        running = self.running[node]
        running.look()
        running.signal(number)
        return running


def resizes(training: Training) -> list[dict[str, Any]]:
    return [event for event in training.events if event["kind"] in ("recovery", "resize")]


def check_whole(ran: Ran, training: Training, untroubled: Training) -> None:
    ran.check()
    assert [step["step"] for step in training.metrics] == list(range(1, STEPS + 1)), "each once, in order"
    assert training.losses == pytest.approx(untroubled.losses, rel=TOLERANCE)
    one, other = training.state(STEPS), untroubled.state(STEPS)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert [event["outcome"] for event in training.events if event["kind"] == "finish"] == ["finished"]


def check_left(ran: Ran) -> None:
    ran.check(143)
    assert "continues on 2 nodes; the same command" in ran.out
    assert "the run continues on 2 nodes" in ran.out


def test_one_of_three_leaves_and_no_step_is_repeated(desk: Desk, untroubled: Training) -> None:
    three = Gang(desk, "one", SLOW, words=SHARDED)
    left = three.leave(2).end()
    check_left(left)
    assert three.running.pop(2).left() == []
    first, second = three.end()
    check_whole(first, three.training, untroubled)
    assert second.code == 0
    [resize] = resizes(three.training)
    assert (resize["kind"], resize["source"], resize["repeated_steps"]) == ("resize", "memory", 0)
    assert (resize["change"]["machines_before"], resize["change"]["machines"]) == (3, 2)
    assert "node 2 (" in first.text
    assert "SIGTERM, 3 min 20 s until SIGKILL" in first.text
    assert "2 of at most 3 nodes (3 before)" in first.out
    assert "was lost" not in first.text


@pytest.mark.full
def test_two_of_three_at_once_drain_the_run(desk: Desk, untroubled: Training) -> None:
    three = Gang(desk, "two", SLOW, words=SHARDED)
    for node in (1, 2):
        three.leave(node)
    ended = three.end()
    assert [ran.code for ran in ended] == [143] * 3, [ran.text for ran in ended]
    assert all("stopping after this step: SIGTERM" in ran.out for ran in ended)
    assert three.training.events[-1]["outcome"] == "interrupted"
    assert resizes(three.training) == []
    assert three.training.losses == pytest.approx(
        untroubled.losses[: len(three.training.losses)], rel=TOLERANCE
    )


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_coordinator_s_node_leaves(desk: Desk, untroubled: Training, number: signal.Signals) -> None:
    three = Gang(desk, f"host-{number.name}", SLOW, words=SHARDED)
    left = three.leave(0, number).end().check(143)
    assert three.running.pop(0).left() == []
    second, third = three.end()
    check_whole(second, three.training, untroubled)
    assert third.code == 0
    assert "this node now runs the coordinator" in second.text
    assert "was lost" not in second.text + third.text + left.text
    [resize] = resizes(three.training)
    assert (resize["kind"], resize["source"], resize["repeated_steps"]) == ("resize", "memory", 0)


@pytest.mark.full
def test_a_node_leaves_without_partner_copies(desk: Desk, untroubled: Training) -> None:
    """Its part of the state reaches the others by way of the disk."""
    three = Gang(desk, "alone", SLOW, words=(*SHARDED, "checkpoint.partner=false"))
    check_left(three.leave(2).end())
    three.running.pop(2)
    first, _ = three.end()
    check_whole(first, three.training, untroubled)
    [resize] = resizes(three.training)
    assert (resize["kind"], resize["source"], resize["repeated_steps"]) == ("resize", "checkpoint", 0)


@pytest.mark.full
def test_a_node_leaves_while_ranks_are_just_starting(desk: Desk, untroubled: Training) -> None:
    slow = Fault("sleep", rank=1, step=0, phase="building the model", generation=1, argument="600")
    three = Gang(desk, "starting", slow, words=SHARDED)
    began = time.monotonic()
    check_left(three.leave(2).end())
    assert time.monotonic() - began < 200
    three.running.pop(2)
    first, _ = three.end()
    check_whole(first, three.training, untroubled)
    [resize] = resizes(three.training)
    assert resize["kind"] == "resize"


@pytest.mark.full
def test_a_node_whose_step_takes_too_long_leaves_in_time(desk: Desk, untroubled: Training) -> None:
    forever = Fault("sleep", rank=0, step=8, phase="forward and backward", argument="600")
    faults = after_exchange(forever, 3)
    three = Gang(desk, "long", *faults, words=(*SHARDED, "cluster.grace_seconds=20"))
    began = time.monotonic()
    left = three.leave(2).end()
    assert time.monotonic() - began < 200, "before the step ends"
    left.check(143)
    three.running.pop(2)
    first, _ = three.end()
    check_whole(first, three.training, untroubled)
    [recovery] = resizes(three.training)
    assert recovery["kind"] == "recovery"
    assert recovery["repeated_steps"] == 0


@pytest.mark.full
def test_a_second_signal_is_a_loss(desk: Desk, untroubled: Training) -> None:
    until_asked = replace(SLOW, what="await stop", step=8)
    forever = replace(until_asked, what="sleep", argument="600")
    three = Gang(desk, "twice", until_asked, words=SHARDED, later=(forever,))
    asked = three.leave(2)
    assert asked.until(lambda: len(struck(three.marks)) == 2), "the first is heard"
    time.sleep(SIGNAL_REPEAT_SECONDS[signal.SIGTERM])
    three.leave(2).end().check(143)
    three.running.pop(2)
    first, _ = three.end()
    check_whole(first, three.training, untroubled)
    [recovery] = resizes(three.training)
    assert recovery["kind"] == "recovery"
    assert "node 2 (" in recovery["failure"]
