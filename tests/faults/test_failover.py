"""The machine that hosts the coordinator is lost with all that its memory held: another one hosts it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.command import Desk, Training, assert_bitwise_equal
from support.fault_table import Row
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import SHARDED, Machines
from wanma.job.run.folder_claims import FolderClaims

THREE = (*SHARDED, "cluster.nodes=3", "parallel.dp_shard=3", "train.global_batch=6")


def lose_the_host(desk: Desk, name: str, nodes: int, *words: str) -> Training:
    """Node 0 is lost while step 8 is made; another machine takes its place, and another node hosts."""
    marks = desk.folder / f"marks-{name}"
    stop = Fault("stop", rank=1, step=8, phase="forward and backward")  # so that nobody gets further
    faults = after_exchange(stop, nodes)
    machines = Machines(desk, name, *words, **injected(marks, *faults))
    for node in range(nodes):
        machines.start(node)
    assert machines.running[0].until(lambda: len(struck(marks)) == len(faults))
    machines.lose(0)
    machines.start(0)
    ended = machines.end()
    assert [one.code for one in ended] == [0] * nodes, [one.text for one in ended]
    assert "this node now runs the coordinator" in ended[1].text
    claim = FolderClaims(machines.training.path).newest()
    assert claim is not None
    assert (claim.generation, claim.node, claim.ended) == (2, 1, 0)
    return machines.training


def check_whole(training: Training, untroubled: Training, plan: str) -> Row:
    assert [step["step"] for step in training.metrics] == list(range(1, 13)), "each once, in order"
    assert training.losses == untroubled.losses
    assert_bitwise_equal(training.state(), untroubled.state())
    [recovery] = [event for event in training.events if event["kind"] == "recovery"]
    assert recovery["source"] == "partner"
    assert recovery["repeated_steps"] == 0
    assert recovery["failure"].startswith("node 0 (")
    fault = "the coordinator's node is lost and replaced"
    return Row(fault, plan, recovery["source"], recovery["repeated_steps"], recovery["seconds"])


@pytest.mark.full
def test_a_run_of_two_machines_survives_its_host(
    desk: Desk, untroubled: Training, note: Callable[[Row], None]
) -> None:
    run = lose_the_host(desk, "host-of-two", 2, *SHARDED)
    note(check_whole(run, untroubled, "ZeRO-3 on 2 nodes"))


@pytest.mark.full
@pytest.mark.slow
def test_a_run_of_three_machines_survives_its_host(desk: Desk, note: Callable[[Row], None]) -> None:
    whole = Machines(desk, "three", *THREE)
    for node in range(3):
        whole.start(node)
    assert [one.code for one in whole.end()] == [0, 0, 0]
    run = lose_the_host(desk, "host-of-three", 3, *THREE)
    note(check_whole(run, whole.training, "ZeRO-3 on 3 nodes"))
