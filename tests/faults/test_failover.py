"""The machine that hosts the coordinator is lost with all that its memory held: another one hosts it."""

from __future__ import annotations

import pytest

from support.command import Desk, Training, assert_bitwise_equal
from support.injection import Fault, injected, struck
from support.nodes import SHARDED, Machines
from wanma.job import claims

THREE = (*SHARDED, "cluster.nodes=3", "parallel.dp_shard=3", "train.global_batch=6")


def lose_the_host(desk: Desk, name: str, nodes: int, *words: str) -> Training:
    """Node 0 is lost while step 8 is made; another machine takes its place, and another node hosts."""
    marks = desk.folder / f"marks-{name}"
    fault = Fault("stop", rank=1, step=8, phase="forward and backward")  # so that nobody gets further
    machines = Machines(desk, name, *words, **injected(marks, fault))
    for node in range(nodes):
        machines.start(node)
    assert machines.running[0].until(lambda: bool(struck(marks)))
    machines.lose(0)
    machines.start(0)
    ended = machines.end()
    assert [one.code for one in ended] == [0] * nodes, [one.text for one in ended]
    assert "this machine hosts the run from now on" in ended[1].text
    claim = claims.newest(machines.training.path)
    assert claim is not None
    assert (claim.generation, claim.node, claim.ended) == (2, 1, 0)
    return machines.training


def check_whole(training: Training, untroubled: Training) -> None:
    assert [step["step"] for step in training.metrics] == list(range(1, 13)), "each once, in order"
    assert training.losses == untroubled.losses
    assert_bitwise_equal(training.state(), untroubled.state())
    [recovery] = [event for event in training.events if event["kind"] == "recovery"]
    assert recovery["source"] == "partner"
    assert recovery["repeated_steps"] <= 2, "the copy of the step before was under way"
    assert recovery["failure"].startswith("node 0 (")
    print(f"\n{recovery['seconds']:.2f} s, {recovery['repeated_steps']} steps repeated")


def test_a_run_of_two_machines_survives_its_host(desk: Desk, untroubled: Training) -> None:
    check_whole(lose_the_host(desk, "host-of-two", 2, *SHARDED), untroubled)


@pytest.mark.slow
def test_a_run_of_three_machines_survives_its_host(desk: Desk) -> None:
    whole = Machines(desk, "three", *THREE)
    for node in range(3):
        whole.start(node)
    assert [one.code for one in whole.end()] == [0, 0, 0]
    check_whole(lose_the_host(desk, "host-of-three", 3, *THREE), whole.training)
