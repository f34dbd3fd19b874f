"""Nodes that share no file system, only an object store: the run survives the loss of its coordinator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from support.command import Desk, Running, Training
from support.fault_table import Row
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import Machines
from support.object_store import ObjectStore, object_store

STEPS = 14
STOP = Fault("stop", rank=1, step=8, phase="forward and backward")
TOLERANCE = 1e-9
JOB = (
    "text.toml",
    f"train.steps={STEPS}",
    "train.schedule=constant",
    "train.precision=fp64",
    "checkpoint.every_steps=0",
    "checkpoint.in_memory_every_steps=1",
    "cluster.last_call_timeout_seconds=100",
    "cluster.health_check=never",
)
SHARDED = (
    "parallel.dp_replicate=1",
    "parallel.dp_shard=2",
    "parallel.shard=parameters",
    "cluster.nodes=1..2",
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store(monkeypatch) as store:
        yield store


class SeparateMachines(Machines):
    """Machines with a run directory each."""

    def __init__(self, desk: Desk, store: ObjectStore, *words: str, **environment: str) -> None:
        super().__init__(desk, "run", *JOB, *SHARDED, *words, **store.environment, **environment)
        self.desk = desk

    def command(self, node: int, before: tuple[str, ...] = ()) -> Running:
        name, self._name = self._name, f"machine-{node}/{self._name}"
        try:
            return super().command(node, before)
        finally:
            self._name = name

    def training_of(self, node: int) -> Training:
        return self.desk.training(f"machine-{node}/run")


def check_equal(survivor: Training, first_step: int, untroubled: Training) -> None:
    """The survivor's steps and weights are those of the run that nothing happened to."""
    steps = [step["step"] for step in survivor.metrics]
    assert steps == list(range(first_step, STEPS + 1)), "each once, in order"
    assert survivor.losses == pytest.approx(untroubled.losses[first_step - 1 :], rel=TOLERANCE)
    one, other = survivor.state(), untroubled.state()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture
def untroubled(desk: Desk) -> Training:
    """The run on one machine, as one process."""
    ran = desk.run("train", *JOB, "parallel.dp_replicate=1", "--run-dir", "untroubled")
    ran.check()
    return desk.training("untroubled")


def start_two(desk: Desk, store: ObjectStore, *faults: Fault) -> SeparateMachines:
    """Two machines of a sharded run, of which one may be lost; the first generation has met its faults."""
    marks = desk.folder / "marks"
    first = sum(fault.generation in (None, 1) for fault in faults)
    urls = (f"cluster.claims={store.url('run')}", f"checkpoint.upload={store.url('run')}")
    two = SeparateMachines(desk, store, *urls, **injected(marks, *faults))
    for node in range(2):
        two.start(node)
    has_met = two.running[0].until(lambda: len(struck(marks)) == first)
    assert has_met, f"the run ended before its faults\n{two.running[0].end().text}"
    return two


def test_the_survivor_of_two_goes_on_from_its_partner_s_memory(
    desk: Desk, store: ObjectStore, untroubled: Training, note: Callable[[Row], None]
) -> None:
    two = start_two(desk, store, *after_exchange(STOP, 2))
    began = time.monotonic()
    two.lose(0)
    [ran] = two.end()
    ran.check()
    assert "this node now runs the coordinator" in ran.text
    survivor = two.training_of(1)
    [recovery] = [event for event in survivor.events if event["kind"] == "recovery"]
    assert recovery["source"] == "memory"
    assert recovery["repeated_steps"] == 0
    change = recovery["change"]
    assert (change["machines_before"], change["machines"], change["most_machines"]) == (2, 1, 2)
    assert change["plan_before"] == "2 ranks (dp_shard 2), parameters sharded, fp64, cpu"
    assert change["plan"] == "1 rank (one process), fp64, cpu"
    check_equal(survivor, recovery["step"] + 1, untroubled)
    names = set(store.names("run"))
    assert {"generations/1", "generations/2", "generations/2.ended.0"} <= names
    assert f"step-{STEPS:08d}/manifest.json" in names
    assert len(store.requests) < 60 + 36 * (time.monotonic() - began) / 60, Counter(store.requests)
    fault, plan = "the coordinator's node is lost; nodes share only an object store", "ZeRO-3 on 2 nodes"
    weights = f"within {TOLERANCE:g} in fp64"
    note(Row(fault, plan, recovery["source"], recovery["repeated_steps"], recovery["seconds"], weights))


@pytest.mark.full
def test_a_coordinator_that_comes_back_finds_itself_followed_and_writes_nothing_more(
    desk: Desk, store: ObjectStore, untroubled: Training
) -> None:
    """As a virtual machine that was paused: it has not noticed anything."""
    slow = [
        Fault("slow", rank=1, step=3, generation=1, argument="0.5"),
        Fault("slow", rank=0, step=7, generation=2, argument="4"),
    ]
    two = start_two(desk, store, *slow)
    first, survivor = two.training_of(0), two.training_of(1)
    assert two.running[0].until(lambda: first.steps_begun() >= 5)
    machine = two.running[0]
    paused = [psutil.Process(machine.process.pid), *machine.look()]
    for process in paused:
        process.suspend()
    assert two.running[1].until(lambda: survivor.steps_begun() >= 1), two.running[1].end().text
    written, objects = (
        first.steps_begun(),
        {name: store.objects[f"run/{name}"] for name in store.names("run")},
    )
    for process in reversed(paused):
        process.resume()
    ranks = [process for process in paused if "rank" in process.name()]
    assert ranks
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "its ranks were ended"
    assert first.steps_begun() == written
    assert not any(event["kind"] == "checkpoint" for event in first.events)
    changed = {name for name, content in objects.items() if store.objects.get(f"run/{name}") != content}
    assert changed <= {"generations/2.heartbeat", "generations/1.heartbeat"}, changed
    two.lose(0)
    [ran] = two.end()
    ran.check()
    check_equal(survivor, survivor.metrics[0]["step"], untroubled)
