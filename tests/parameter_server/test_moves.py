"""Row ranges that move between real server processes, while workers train and servers are killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from support.server_runs import (
    IDS,
    RATE,
    Run,
    assert_close,
    compute,
    expected,
    fetched,
    gradients,
    in_threads,
    work,
)
from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServerPosition, StepContribution
from wanma.parameter_server.client import ParameterServerClient
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost, ServerProcess
from wanma.parameter_server.server_processes import ServerProcesses


def hook(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[ServerProcesses, dict[str, Any], bool], None]
) -> None:
    """Call `action` before (False) and after (True) each request of a group to its servers."""
    original = ServerProcesses.ask

    def ask(self: ServerProcesses, numbers: list[int], message: dict[str, Any]) -> object:
        action(self, message, False)
        answer = original(self, numbers, message)
        action(self, message, True)
        return answer

    monkeypatch.setattr(ServerProcesses, "ask", ask)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "rowwise_adagrad"])
def test_servers_that_join_and_leave_move_the_ranges_with_their_state(
    run: Callable[..., Run], optimizer: str
) -> None:
    served, still = run(), run()
    weights = served.begin(optimizer)
    for count in (3, 2):
        compute(served.clients[0], 0)
        assert served.coordinator.resize(count)
    compute(served.clients[0], 0)
    found, state = fetched(served.clients[0])
    if optimizer != "rowwise_adagrad":
        assert_close(found, expected(weights, optimizer, range(3), 1))
    still.begin(optimizer)
    for _ in range(3):
        compute(still.clients[0], 0)
    unmoved, unmoved_state = fetched(still.clients[0])
    assert_close(found, unmoved)
    for kind, tensors in state.items():
        assert_close(tensors, unmoved_state[kind])


def test_a_push_before_a_move_is_repeated_after_it(run: Callable[..., Run]) -> None:
    served = run()
    weights = served.begin()
    client = served.clients[0]
    assert client.next_step(False).step == 0
    client.push(0, gradients(0, 0), {"t": IDS[0]})
    assert served.coordinator.resize(3)
    client.finish(StepContribution(0, 1.0, 2.0, 1.0, RATE))
    assert served.coordinator.resize(2)
    assert_close(fetched(client)[0], expected(weights, "adamw", range(1), 1))


def test_servers_serve_while_ranges_move(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    served = run()
    weights = served.begin()
    client = served.clients[0]
    compute(client, 0)
    ids = IDS[1]
    moves: list[dict[str, Tensor]] = []

    def train_on(_: ServerProcesses, message: dict[str, Any], is_after: bool) -> None:
        if message["op"] == "prepare" and is_after and not moves:
            assert client.next_step(False).step == 1
            moves.append(client.pull({"t": ids}))
            moves.append(fetched(client)[0])
            client.push(1, gradients(1, 0), {"t": ids})

    hook(monkeypatch, train_on)
    assert served.coordinator.resize(3)
    before = expected(weights, "adamw", range(1), 1)
    assert_close(moves[1], before)
    assert_close(moves[0], {**before, "t": before["t"][ids]})
    client.finish(StepContribution(1, 1.0, 2.0, 1.0, RATE))
    assert served.coordinator.resize(2)
    assert_close(fetched(client)[0], expected(weights, "adamw", range(2), 1))


@pytest.mark.full
def test_workers_train_on_while_servers_join_and_leave(run: Callable[..., Run]) -> None:
    served = run(2)
    weights = served.begin("sgd")
    is_over = threading.Event()

    def train(worker: int) -> None:
        client = served.clients[worker]
        while (offer := client.next_step(worker == 0 and is_over.is_set())).step is not None:
            work(client, worker, offer.step)
        if offer.is_pause:
            client.resume(0, "finished")

    def resize() -> None:
        for count in (3, 2):
            assert served.coordinator.resize(count)
        is_over.set()

    in_threads(lambda: train(0), lambda: train(1), resize)
    updates = served.clients[0].join().updates
    assert updates > 3
    assert_close(fetched(served.clients[0])[0], expected(weights, "sgd", range(updates), 2), 1e-3)


@pytest.mark.parametrize(
    ("count", "server", "operation", "is_after"),
    [
        (3, 0, "prepare", False),
        *(
            pytest.param(count, server, operation, is_after, marks=pytest.mark.full)
            for count in (3, 2)
            for server in (0, 1, 2)
            for operation in ("prepare", "activate")
            for is_after in (False, True)
            if (count, server, operation, is_after) != (3, 0, "prepare", False)
        ),
    ],
)
def test_a_server_killed_during_a_move_loses_no_acknowledged_update(
    run: Callable[..., Run],
    group: ServerGroup,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    server: int,
    operation: str,
    is_after: bool,
) -> None:
    served = run()
    weights = served.begin()
    client = served.clients[0]
    if count == 2:
        assert served.coordinator.resize(3)
    compute(client, 0)
    killed: list[int] = []

    def kill(processes: ServerProcesses, message: dict[str, Any], is_now_after: bool) -> None:
        if (message["op"], is_now_after) == (operation, is_after) and not killed:
            killed.append(processes.running[server].process_id)
            os.kill(killed[0], signal.SIGKILL)

    with monkeypatch.context() as patch:
        hook(patch, kill)
        assert served.coordinator.resize(count)
    assert killed
    compute(client, 0)
    assert_close(fetched(client)[0], expected(weights, "adamw", range(2), 1))
    assert set(group.endpoints) == set(range(count))
    assert served.coordinator.resize(2)


def test_a_move_to_a_server_that_does_not_start_leaves_the_others(
    run: Callable[..., Run], group: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, shown = run(), list[tuple[str, str]]()
    served.coordinator.start(group, lambda text, level: shown.append((level, text)))
    weights = served.begin()
    original = ServerHost.start

    def start(self: ServerHost, number: int) -> ServerProcess:
        if number == 2:
            raise WanmaError("no memory for server 2")
        return original(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(ServerHost, "start", start)
        served.coordinator.resize(3)
    ((level, text),) = shown
    assert (level, "no memory for server 2" in text) == ("warning", True)
    compute(served.clients[0], 0)
    assert_close(fetched(served.clients[0])[0], expected(weights, "adamw", range(1), 1))
    assert set(group.endpoints) == {0, 1}


def test_a_worker_lost_during_a_move_does_not_end_it(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, started = run(), list[ParameterServerClient]()
    weights = served.begin()
    old = served.clients[0]
    compute(old, 0)
    assert old.next_step(False).step == 1
    old.push(1, gradients(1, 0), {"t": IDS[1]})

    def restart_workers(_: ServerProcesses, message: dict[str, Any], is_after: bool) -> None:
        if message["op"] == "prepare" and is_after and not started:
            generation = served.generation + 1
            started.append(ParameterServerClient(served.coordinator.access, 0, generation, "synchronous"))
            assert started[0].join().is_loaded

    hook(monkeypatch, restart_workers)
    assert served.coordinator.resize(3)
    with pytest.raises(WanmaError):
        old.finish(StepContribution(1, 1.0, 2.0, 1.0, RATE))
    (new,) = started
    new.begin(1000, ServerPosition(True))
    assert compute(new, 0) == 1
    assert_close(fetched(new)[0], expected(weights, "adamw", range(2), 1))
    assert served.coordinator.resize(2)
    new.close()
