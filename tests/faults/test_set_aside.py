"""A machine that multiplies wrongly takes no part: it is sent away, and the run waits for another."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from support.command import Desk, Running
from support.injection import Fault, injected
from support.nodes import Machines
from support.supervisors import wait_for_listener

WRONG = Fault("wrong product", rank=1, step=0, phase="joining")


def start(desk: Desk, name: str, place: str, node: int, environment: dict[str, str]) -> Running:
    running = desk.start(
        "train",
        "text.toml",
        "train.steps=4",
        "cluster.nodes=2",
        f"cluster.rendezvous={place}",
        f"cluster.node_rank={node}",
        "--run-dir",
        name,
        **environment,
    )
    wait_for_listener(place)
    return running


def health_of(desk: Desk, name: str) -> list[dict[str, Any]]:
    return [event for event in desk.training(name).events if event["kind"] == "health_check"]


@pytest.mark.full
def test_the_machine_that_errs_is_set_aside_with_the_evidence_and_another_takes_its_place(desk: Desk) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{sock.getsockname()[1]}"
    environment = injected(desk.folder / "marks-wrong", WRONG)
    first = start(desk, "wrong", place, 0, environment)
    bad = start(desk, "wrong", place, 1, environment).end()
    assert bad.code == 1
    host = socket.gethostname()
    evidence = (
        f"rank 1 (node 1, {host}) failed: cpu: a matrix product with a known result was wrong "
        "(torch.float32, round 1): 1 of 65,536 values, first at [5, 77]: "
    )
    assert f"error: {evidence}" in bad.told_once()
    good = start(desk, "wrong", place, 1, environment).end()
    good.check()
    ran = first.end()
    ran.check()
    assert f"warning: {evidence}" in ran.out
    assert "is excluded\n  1 node missing" in ran.out
    [health] = health_of(desk, "wrong")
    assert health["devices"] == 2
    assert health["least_bandwidth_bytes_per_second"] > 1e6
    assert health["seconds"] > 0
    assert health["text"].startswith(
        "health check passed: 2 devices (arithmetic and memory); slowest link node "
    )
    assert [step["step"] for step in desk.training("wrong").metrics] == [1, 2, 3, 4]


@pytest.mark.full
def test_after_a_failure_devices_are_checked_before_ranks_begin_again(desk: Desk) -> None:
    kill = Fault("kill", rank=0, step=3, phase="update")
    marks = injected(desk.folder / "marks-after", kill)
    ran = desk.start("train", "text.toml", "train.steps=6", "--run-dir", "after", **marks).end()
    ran.check()
    [health] = health_of(desk, "after")
    assert (health["devices"], "least_bandwidth_bytes_per_second" in health) == (2, False)
    assert health["seconds"] > 0


@pytest.mark.full
def test_the_machine_that_hosts_the_coordinator_is_set_aside_as_well(desk: Desk) -> None:
    kill = Fault("kill", rank=1, step=3, phase="update")
    wrong = Fault("wrong product", rank=0, step=0, phase="joining", generation=2)
    marks = injected(desk.folder / "marks-host", kill, wrong)
    words = ("text.toml", "train.steps=6", "cluster.nodes=2", "checkpoint.in_memory_every_steps=1")
    both = Machines(desk, "wrong-host", *words, **marks)
    both.start(0)
    both.start(1)
    bad = both.running.pop(0).end()
    assert bad.code == 1
    assert "with a known result was wrong" in bad.told_once()
    both.start(0)
    ended = both.end()
    assert [one.code for one in ended] == [0, 0], [one.text for one in ended]
    assert "this node now runs the coordinator" in ended[1].text
    assert [step["step"] for step in both.training.metrics] == list(range(1, 7)), "each once, in order"
