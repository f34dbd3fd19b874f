"""Machines come and go: a run goes on under another plan, and ends with the weights of an untroubled one.

Every day, one is lost in `test_separate_nodes`; whether it pays to take another: every day in
tests/elastic/coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.command import Desk, Ran, Training
from support.fault_table import Row
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import Machines

Note = Callable[[Row], None]
STEPS, SHORT = 120, 20
JOB = (
    "text.toml",
    f"train.steps={STEPS}",
    "train.schedule=constant",
    f"checkpoint.every_steps={SHORT}",
    f"checkpoint.keep_every_steps={SHORT}",
    "train.precision=fp64",
    "model.layers=2",
    "checkpoint.in_memory_every_steps=1",
    "observe.log_every_steps=20",
    "cluster.last_call_timeout_seconds=100",  # all of a gang begin, however slow their imports are
    "cluster.health_check=never",  # they share a few cores: one may well be slow, and would be set aside
)
pytestmark = pytest.mark.timeout(900)  # four commands and a planner, on a busy machine
TOLERANCE = 1e-9
"""Tolerance of losses and weights in fp64, between two orders of summation, as in tests/parallel."""
STOP = Fault("stop", rank=2, step=8, phase="forward and backward")  # nobody gets further without it


@pytest.fixture(scope="module")
def untroubled(shared_desk: Desk) -> Training:
    """The run on one machine, as one process."""
    ran = shared_desk.run("train", *JOB, "parallel.dp_replicate=1", "--run-dir", "untroubled-fp64")
    ran.check()
    return shared_desk.training("untroubled-fp64")


@pytest.mark.full
def test_a_lost_machine_is_gone_on_without(desk: Desk, untroubled: Training) -> None:
    """Its state comes from its partner's memory."""
    sharded = ("parallel.dp_replicate=1", "parallel.dp_shard=2", "parallel.shard=parameters")
    words = (f"train.steps={SHORT}", "cluster.nodes=1..2", *sharded)
    two = Gang(desk, "halves", 2, replace(STOP, rank=1), words=words)
    two.lose(1)
    ran = two.end_all()
    check_whole(ran, two.training, untroubled, SHORT)
    [recovery] = changes(two.training)
    assert (recovery["kind"], recovery["source"]) == ("recovery", "memory")
    assert recovery["repeated_steps"] == 0
    change = recovery["change"]
    assert (change["machines_before"], change["machines"], change["most_machines"]) == (2, 1, 2)
    assert change["plan_before"] == "2 ranks (dp_shard 2), parameters sharded, fp64, cpu"
    assert change["plan"] == "1 rank (one process), fp64, cpu"
    assert ran.out.count("resized: 1 of at most 2 node") == 1


@pytest.mark.full
@pytest.mark.parametrize("most", [2, 3])
def test_a_lost_machine_is_gone_on_without_and_taken_again_when_it_is_back(
    desk: Desk, untroubled: Training, note: Note, most: int
) -> None:
    """Each of three has a third of the state, then half of it: images travel."""
    fewer, last = most - 1, most - 1
    stop = replace(STOP, rank=last)
    # So that it pays to take the last again.
    slow = Fault("slow", rank=0, step=10, generation=2, argument="0.5")
    words = ("parallel.dp_replicate=1", f"parallel.dp_shard={most}", "parallel.shard=parameters")
    gang = Gang(desk, "shards", most, stop, slow, words=(f"cluster.nodes={fewer}..{most}", *words))
    gang.lose(last)
    gang.start(last)
    ran = gang.end_all()
    check_whole(ran, gang.training, untroubled)
    recovery, growth = changes(gang.training)
    assert (recovery["kind"], growth["kind"]) == ("recovery", "resize")
    assert (recovery["source"], growth["source"]) == ("memory", "memory")
    assert recovery["repeated_steps"] == 0
    assert growth["repeated_steps"] == 0
    shrunk, grown = recovery["change"], growth["change"]
    assert (shrunk["machines_before"], shrunk["machines"], shrunk["most_machines"]) == (most, fewer, most)
    assert (grown["machines_before"], grown["machines"]) == (fewer, most)
    whole = f"{most} ranks (dp_shard {most}), parameters sharded, fp64, cpu"
    one, two = "1 rank (one process), fp64, cpu", "2 ranks (dp_shard 2), parameters sharded, fp64, cpu"
    assert shrunk["plan_before"] == grown["plan"] == whole
    assert shrunk["plan"] == grown["plan_before"] == (one if most == 2 else two)
    assert "steps save" in grown["reason"]
    assert ran.out.count(f"resized: {fewer} of at most {most} node") == 1
    assert ran.out.count(f"resized: {most} of at most {most} node") == 1
    if most == 3:
        note(row("a node is lost; the others continue", recovery))
        note(row("the lost node rejoins", growth))


@pytest.mark.full
def test_the_machine_that_decides_is_gone_on_without_as_well(
    desk: Desk, untroubled: Training, note: Note
) -> None:
    sharded = ("parallel.dp_replicate=1", "parallel.dp_shard=3", "parallel.shard=parameters")
    three = Gang(desk, "host", 3, STOP, words=(f"train.steps={SHORT}", "cluster.nodes=2..3", *sharded))
    three.lose(0)
    ran = three.end_all()
    check_whole(ran, three.training, untroubled, SHORT)
    assert "this node now runs the coordinator" in ran.text
    [recovery] = changes(three.training)
    assert recovery["source"] == "memory"
    assert recovery["repeated_steps"] == 0
    change = recovery["change"]
    assert (change["machines_before"], change["machines"], change["most_machines"]) == (3, 2, 3)
    assert change["plan"] == "2 ranks (dp_shard 2), parameters sharded, fp64, cpu"
    note(row("the coordinator's node is lost; the others continue", recovery))


@pytest.mark.full
def test_half_of_a_tensor_parallel_run_is_gone_on_without(desk: Desk, untroubled: Training) -> None:
    words = (f"train.steps={SHORT}", "cluster.nodes=1..2", "parallel.dp_replicate=2", "parallel.tp=2")
    two = Gang(desk, "tensors", 2, STOP, words=words, ranks_per_node=2)
    two.lose(1)
    ran = two.end_all()
    check_whole(ran, two.training, untroubled, SHORT)
    [recovery] = changes(two.training)
    assert recovery["source"] == "memory"
    assert recovery["change"]["plan"] == "2 ranks (tp 2), fp64, cpu"


@pytest.mark.full
def test_of_a_pipeline_s_replicas_one_is_left_and_a_machine_stands_by(
    desk: Desk, untroubled: Training
) -> None:
    words = (f"train.steps={SHORT}", "cluster.nodes=2..4", "parallel.dp_replicate=2", "parallel.pp=2")
    four = Gang(desk, "stages", 4, STOP, words=words)
    four.lose(2)
    ran = four.end_all()
    check_whole(ran, four.training, untroubled, SHORT)
    [recovery] = changes(four.training)
    assert recovery["source"] == "memory"
    change = recovery["change"]
    assert (change["plan"], change["machines"]) == ("2 ranks (pp 2), fp64, cpu", 2)
    assert "uses 2 of 3 joined nodes (at most 4)" in ran.out


@pytest.mark.full
def test_a_lost_site_is_gone_on_without_from_what_all_share(desk: Desk) -> None:
    seldom = ("parallel.synchronize=diloco", "parallel.synchronize_every=5")
    words = (f"train.steps={SHORT}", "cluster.nodes=2..3", "parallel.dp_replicate=3", *seldom)
    three = Gang(desk, "sites", 3, STOP, words=words)
    three.lose(2)
    ran = three.end_all()
    ran.check()
    assert [step["step"] for step in three.training.metrics] == list(range(1, SHORT + 1))
    [recovery] = changes(three.training)
    assert recovery["source"] == "memory"
    change = recovery["change"]
    assert change["plan_before"].endswith("diloco between 3 sites every 5 steps")
    assert change["plan"] == "2 ranks (dp_replicate 2), fp64, cpu, diloco between 2 sites every 5 steps"
    assert "saved by 3 sites" in ran.text
    met = [step["step"] for step in three.training.metrics if "pseudo_gradient_norm" in step]
    assert met == [5, 10, 15, 20]


class Gang(Machines):
    """Machines of a run that has met its first fault; those of `later` come in a later generation."""

    def __init__(
        self,
        desk: Desk,
        name: str,
        count: int,
        stop: Fault,
        *later: Fault,
        words: tuple[str, ...],
        ranks_per_node: int = 1,
    ) -> None:
        marks = desk.folder / f"marks-{name}"
        faults = after_exchange(stop, count * ranks_per_node)
        super().__init__(desk, name, *JOB, *words, **injected(marks, *faults, *later))
        for node in range(count):
            self.start(node)
        has_met = self.running[0].until(lambda: len(struck(marks)) == len(faults))
        assert has_met, f"the run ended before its fault\n{self.running[0].end().text}"

    def end_all(self) -> Ran:
        first, *others = self.end()
        assert [one.code for one in others] == [first.code] * len(others), [one.text for one in others]
        return first


def row(fault: str, change: dict[str, Any]) -> Row:
    plan, weights = "ZeRO-3 on 2 or 3 nodes", f"within {TOLERANCE:g} in fp64"
    return Row(fault, plan, change["source"], change["repeated_steps"], change["seconds"], weights)


def changes(training: Training) -> list[dict[str, Any]]:
    return [event for event in training.events if event["kind"] in ("recovery", "resize")]


def check_whole(ran: Ran, training: Training, untroubled: Training, steps: int = STEPS) -> None:
    ran.check()
    assert [step["step"] for step in training.metrics] == list(range(1, steps + 1)), "each once, in order"
    assert training.losses == pytest.approx(untroubled.losses[:steps], rel=TOLERANCE)
    one, other = training.state(steps), untroubled.state(steps)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)
