"""Real server processes, a coordinator, and workers in threads that train a small problem."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.networks import Proxy
from support.server_runs import (
    IDS,
    OPTIMIZERS,
    PARAMETERS,
    RATE,
    SECRET,
    Run,
    assert_close,
    compute,
    expected,
    fetched,
    gradients,
    in_threads,
    process_ids,
)
from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServerPosition, StepContribution
from wanma.parameter_server import client as client_module
from wanma.parameter_server import coordinator as coordinator_module
from wanma.parameter_server import server_processes as processes_module
from wanma.parameter_server.client import ParameterServerClient
from wanma.parameter_server.coordinator import ServerCoordinator
from wanma.parameter_server.frames import Connection, PeerLostError
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost, ServerProcess


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "adam"])
def test_synchronous_updates_are_those_of_one_optimizer(run: Callable[..., Run], optimizer: str) -> None:
    served = run(2)
    weights = served.begin(optimizer)
    for _ in range(4):
        in_threads(*(lambda w=w: compute(served.clients[w], w) for w in range(2)))
    found, state = fetched(served.clients[0])
    position = served.clients[0].join()
    assert_close(found, expected(weights, optimizer, range(4), 2))
    assert (position.step, position.updates) == (2, 4), "the chief has not come back with the last two"
    moments = {"exp_avg", "exp_avg_sq", "step"}
    kinds = {"sgd": {"momentum_buffer"}, "adagrad": {*moments, "sum"}}
    assert set(state) == kinds.get(optimizer, moments)
    pulled = served.clients[1].pull({"t": torch.tensor([0, 9])})
    assert torch.equal(pulled["t"], found["t"][[0, 9]])
    assert torch.equal(pulled["b"], found["b"])


def test_a_killed_server_is_replaced_with_all_that_was_acknowledged(
    run: Callable[..., Run], group: ServerGroup
) -> None:
    served = run()
    weights = served.begin()
    for step, server in enumerate((0, 1, 0)):
        compute(served.clients[0], 0)
        os.kill(process_ids(group)[server], signal.SIGKILL)
        found, _ = fetched(served.clients[0])
        assert_close(found, expected(weights, "adamw", range(step + 1), 1))


class Cut:
    """Connections of clients to one server, which fail until `is_over` says otherwise."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        address: tuple[str, int],
        is_over: Callable[[int], bool],
        error: Exception | None = None,
    ) -> None:
        self.refused = 0

        class CutConnection(Connection):
            def __init__(self, target: tuple[str, int], *arguments: float) -> None:
                if target == address and not is_over(cut.refused):
                    cut.refused += 1
                    raise error or PeerLostError("no route")
                super().__init__(target, SECRET, *arguments[1:])

        cut = self
        monkeypatch.setattr(client_module, "Connection", CutConnection)
        monkeypatch.setattr(client_module, "OUTAGE_RETRY_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("refusals", "error"),
    [(1, None), (5, None), (5, WanmaError("another program listens there"))],
)
def test_a_worker_cut_from_a_living_server_waits_for_the_network(
    run: Callable[..., Run],
    group: ServerGroup,
    monkeypatch: pytest.MonkeyPatch,
    refusals: int,
    error: Exception | None,
) -> None:
    served = run()
    weights = served.begin()
    compute(served.clients[0], 0)
    before, (address, *_) = process_ids(group), group.endpoints.values()
    cut = Cut(monkeypatch, address, lambda refused: refused == refusals, error)
    served.clients[0].drop(address)
    compute(served.clients[0], 0)
    assert_close(fetched(served.clients[0])[0], expected(weights, "adamw", range(2), 1))
    assert cut.refused == refusals
    assert process_ids(group) == before


def test_a_network_that_stays_away_is_one_error_and_loses_no_acknowledged_update(
    run: Callable[..., Run], group: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = run()
    weights = served.begin()
    compute(served.clients[0], 0)
    before, address = process_ids(group), group.endpoints[1]
    with monkeypatch.context() as patch:
        Cut(patch, address, lambda _: False)
        patch.setattr(client_module, "OUTAGE_SECONDS", 0.0)
        served.clients[0].drop(address)
        with pytest.raises(WanmaError, match=f"worker 0 .*server 1 .*{address[1]}"):
            compute(served.clients[0], 0)
    newer = ParameterServerClient(served.coordinator.access, 0, served.generation + 1, "synchronous")
    assert newer.join().is_loaded
    newer.begin(1000, ServerPosition(True))
    assert_close(fetched(newer)[0], expected(weights, "adamw", range(1), 1))
    assert process_ids(group) == before
    newer.close()


class ReplicaCut(Proxy):
    """Proxy before a server that, while it is a cut, drops those who pass an update on to it."""

    is_cut = False
    dropped = 0

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:  # type: ignore[override]
        try:
            while data := one.recv(1 << 16):
                if self.is_cut and b'"replicate"' in data:
                    self.dropped += 1
                    break
                other.sendall(data)
        except OSError:
            pass
        finally:
            for end in (one, other):
                with suppress(OSError):  # closed already
                    end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
                end.close()


@pytest.mark.full
@pytest.mark.parametrize("is_mended", [True, False])
def test_holders_cut_from_each_other_wait_for_the_network_and_both_have_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mended: bool
) -> None:
    proxies: dict[int, ReplicaCut] = {}

    class ProxiedHost(ServerHost):
        def start(self, number: int) -> ServerProcess:
            process = super().start(number)
            proxies[number] = ReplicaCut(f"127.0.0.1:{process.endpoint[1]}")
            host, _, port = proxies[number].address.rpartition(":")
            return replace(process, endpoint=(host, int(port)))

    monkeypatch.setattr(processes_module, "OUTAGE_RETRY_SECONDS", 0.05)
    group = ServerGroup(2, 2, SECRET, tmp_path, lambda _text, _level: None)
    with closing(ProxiedHost(SECRET, tmp_path)) as host, closing(group):
        group.set_hosts({0: host})
        served = Run(group)
        weights = served.begin()
        compute(served.clients[0], 0)
        before, cut = process_ids(group), proxies[1]
        cut.is_cut = True
        if not is_mended:
            monkeypatch.setattr(processes_module, "OUTAGE_SECONDS", 0.0)
            with pytest.raises(WanmaError, match=r"server 0 .*server 1"):
                compute(served.clients[0], 0)
            assert process_ids(group) == before
            served.close()
            return

        def mend() -> None:
            while cut.dropped < 3:
                time.sleep(0.01)
            assert served.coordinator._clock.steps == 1, "not acknowledged"
            cut.is_cut = False

        in_threads(lambda: compute(served.clients[0], 0), mend)
        assert process_ids(group) == before
        os.kill(before[0], signal.SIGKILL)
        assert_close(fetched(served.clients[0])[0], expected(weights, "adamw", range(2), 1))
        served.close()


@pytest.mark.parametrize("phase", ["before its pull", "before its push", "before its update"])
def test_a_slow_worker_lets_no_request_of_the_others_wait(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    served, waits = run(3, "asynchronous"), list[str]()
    original = ServerCoordinator._wait_answer

    def note_wait(coordinator: ServerCoordinator) -> dict[str, Any]:
        waits.append("a request that waits for another worker")
        return original(coordinator)

    served.begin()
    monkeypatch.setattr(ServerCoordinator, "_wait_answer", note_wait)
    slow, ids = served.clients[1], {"t": IDS[1]}
    assert slow.next_step(False).step == 0
    if phase != "before its pull":
        slow.pull(ids)
    if phase == "before its update":
        slow.push(0, gradients(0, 1), ids)
    steps = [compute(served.clients[number % 2 * 2], number % 2 * 2) for number in range(20)]
    assert steps == list(range(1, 21))
    assert waits == []
    slow.push(0, gradients(0, 1), ids)
    slow.finish(StepContribution(0, 1.0, 2.0, 1.0, RATE))
    assert slow.staleness_histogram() == {0: 20, 20: 1}


def test_stop_signals_that_a_batch_system_sends_to_every_process_end_no_server(
    run: Callable[..., Run], group: ServerGroup
) -> None:
    served = run()
    weights = served.begin()
    before = process_ids(group)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        for process in before.values():
            os.kill(process, number)
    compute(served.clients[0], 0)
    assert_close(fetched(served.clients[0])[0], expected(weights, "adamw", range(1), 1))
    assert process_ids(group) == before


@pytest.mark.parametrize("ids", [[3, 1], [9, 0, 3], [2, 2]])
def test_ids_that_do_not_ascend_each_once_are_refused(run: Callable[..., Run], ids: list[int]) -> None:
    served = run()
    served.begin()
    with pytest.raises(WanmaError, match=r"ids of t"):
        served.clients[0].pull({"t": torch.tensor(ids)})


def test_rows_are_those_of_the_ids_that_a_request_has_now(run: Callable[..., Run]) -> None:
    served = run()
    weights = served.begin()
    rows = {"t": torch.tensor([0, 9])}
    served.clients[0].pull(rows)
    rows["t"] = torch.tensor([1, 2])
    assert torch.equal(served.clients[0].pull(rows)["t"], weights["t"][[1, 2]])


def test_an_answer_is_that_of_its_request_though_servers_refused_one_before(run: Callable[..., Run]) -> None:
    served = run()
    weights = served.begin()
    with pytest.raises(WanmaError, match="no operation"):
        served.clients[0]._ask_servers("nothing", {0: [], 1: []}, {})
    assert_close(served.clients[0].pull({"t": torch.arange(10)}), weights, 0.0)


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_of_its_table_is_refused_with_its_table(run: Callable[..., Run], bad: int) -> None:
    served = run()
    served.begin()
    with pytest.raises(WanmaError, match=rf"t has rows 0 to 9.* {bad}"):
        served.clients[0].pull({"t": torch.tensor([3, bad]).sort().values})


def test_weights_that_are_not_finite_are_refused_with_their_name(run: Callable[..., Run]) -> None:
    served = run()
    served.clients[0].join()
    weights = {one.name: torch.zeros(one.shape) for one in PARAMETERS}
    weights["w"][2, 1] = float("nan")
    with pytest.raises(WanmaError, match="refuse w"):
        served.clients[0].load(PARAMETERS, OPTIMIZERS["sgd"], weights, {}, ServerPosition(True))


def broken_step(client: ParameterServerClient) -> None:
    step = client.next_step(False).step
    assert step is not None
    given = gradients(step, 0)
    given["w"][0, 0] = float("nan")
    client.push(step, given, {"t": IDS[step % 3]})
    client.finish(StepContribution(step, 1.0, 2.0, 1.0, RATE))


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_skipped(run: Callable[..., Run]) -> None:
    stopping = run()
    stopping.begin()
    with pytest.raises(WanmaError, match=r"step 1: .*worker 0"):
        broken_step(stopping.clients[0])
    skipping = run(1, non_finite="skip")
    weights = skipping.begin()
    broken_step(skipping.clients[0])
    assert_close(fetched(skipping.clients[0])[0], weights, 0.0)
    compute(skipping.clients[0], 0)
    assert_close(fetched(skipping.clients[0])[0], expected(weights, "adamw", range(1, 2), 1))


def test_gradients_are_clipped_by_the_norm_over_all_servers(run: Callable[..., Run]) -> None:
    served = run(1, clip=0.01)
    weights = served.begin("sgd")
    compute(served.clients[0], 0)
    given = {name: tensor / 2 for name, tensor in gradients(0, 0).items()}
    norm = torch.stack([tensor.square().sum() for tensor in given.values()]).sum().sqrt()
    found, _ = fetched(served.clients[0])
    moved = found["b"] - weights["b"]
    torch.testing.assert_close(moved, -2 * RATE * given["b"] * 0.01 / (norm + 1e-6), rtol=1e-4, atol=1e-8)


def test_rounded_pushes_are_close(run: Callable[..., Run]) -> None:
    served = run(1, compression="bf16")
    weights = served.begin("sgd")
    compute(served.clients[0], 0)
    exact = expected(weights, "sgd", range(1), 1)
    found, _ = fetched(served.clients[0])
    assert_close(found, exact, 1e-2)
    assert not torch.equal(found["w"], exact["w"])


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_chief_that_starts_again_is_given_the_steps_that_it_has_not_recorded(
    run: Callable[..., Run], recorded: int
) -> None:
    served = run()
    served.begin()
    for _ in range(3):
        compute(served.clients[0], 0)
    newer = ParameterServerClient(served.coordinator.access, 0, served.generation + 1, "synchronous")
    assert newer.join(recorded=recorded).step == recorded, "the second was given, and may be recorded"
    newer.begin(1000, ServerPosition(True))
    offer = newer.next_step(False)
    assert (offer.step, [one.step for one in offer.records]) == (3, list(range(recorded, 3)))
    newer.close()


def test_a_worker_with_other_data_than_the_others_is_refused(run: Callable[..., Run]) -> None:
    served = run(3)
    for worker in (1, 0):
        served.clients[worker].join("fingerprint")
    with pytest.raises(WanmaError, match=r"data: worker 2"):
        served.clients[2].join("another")


def test_a_worker_of_an_earlier_start_is_refused(run: Callable[..., Run], tmp_path: Path) -> None:
    served = run()
    served.begin()
    compute(served.clients[0], 0)
    newer = ParameterServerClient(served.coordinator.access, 0, served.generation + 1, "synchronous")
    assert newer.join().is_loaded
    with pytest.raises(WanmaError, match="earlier start"):
        served.clients[0].next_step(False)
    newer.begin(1000, ServerPosition(True))
    assert compute(newer, 0) == 1
    newer.close()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_update_that_was_ordered_in_vain_leaves_nothing_to_the_next(
    run: Callable[..., Run], group: ServerGroup, is_restarted: bool
) -> None:
    served = run(2, "asynchronous")
    weights = served.begin("sgd")
    chief, other = served.clients
    assert [client.next_step(False).step for client in (chief, other)] == [0, 1]
    other.push(1, gradients(1, 1), {"t": IDS[2]})
    os.kill(process_ids(group)[1], signal.SIGKILL)
    fields = asdict(StepContribution(1, 1.0, 2.0, 1.0, RATE))
    answer, _ = other._ask_patiently("finish", (fields.pop("statistics"),), **fields)
    assert answer["result"] == "repeat", "one of its pushes is lost with its server; another is summed"
    if is_restarted:
        access = served.coordinator.access
        chief = ParameterServerClient(access, 0, served.generation + 1, "asynchronous")
        assert chief.join().is_loaded
        chief.begin(1000, ServerPosition(True))
    assert compute(chief, 0) == 0
    assert_close(fetched(chief)[0], expected(weights, "sgd", range(1), 1))
    chief.close()


def test_a_defect_in_an_update_is_one_error_of_all_workers(run: Callable[..., Run]) -> None:
    served = run(2)
    served.begin()

    def work_with(worker: int, data_terms: tuple[float, ...]) -> None:
        client = served.clients[worker]
        assert client.next_step(False).step == 0
        client.push(0, gradients(0, worker), {"t": IDS[worker]})
        with pytest.raises(WanmaError, match="step 0: ValueError"):
            client.finish(StepContribution(0, 1.0, 2.0, 1.0, RATE, data_terms=data_terms))

    in_threads(lambda: work_with(0, ()), lambda: work_with(1, (1.0,)))


def test_workers_are_answered_and_show_life_however_long_a_server_is_replaced(
    run: Callable[..., Run], group: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, has_life = run(), threading.Event()
    weights = served.begin()
    client = served.clients[0]
    client._show_life = has_life.set
    monkeypatch.setattr(coordinator_module, "_ANSWER_SECONDS", 0.05)
    original, waited = processes_module.ServerProcesses.ask, list[bool]()

    def ask(processes: object, numbers: list[int], message: dict[str, Any]) -> object:
        if message["op"] == "prepare":
            waited.append(has_life.wait(60))
        return original(processes, numbers, message)  # type: ignore[arg-type]

    monkeypatch.setattr(processes_module.ServerProcesses, "ask", ask)
    assert client.next_step(False).step == 0
    client.push(0, gradients(0, 0), {"t": IDS[0]})
    os.kill(process_ids(group)[0], signal.SIGKILL)
    client.finish(StepContribution(0, 1.0, 2.0, 1.0, RATE))
    assert waited[0]
    assert all(waited)
    assert_close(fetched(client)[0], expected(weights, "adamw", range(1), 1))


def test_other_workers_begin_once_worker_0_has_found_what_the_servers_hold(
    run: Callable[..., Run], group: ServerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = run(2)
    served.begin()
    access, generation = served.coordinator.access, served.generation + 1
    chief, other = (ParameterServerClient(access, n, generation, "synchronous") for n in (0, 1))
    other.join()
    monkeypatch.setattr(coordinator_module, "_ANSWER_SECONDS", 0.0)
    assert "wait" in other._ask("begin", pause_step=0, table=None)[0]
    with monkeypatch.context() as patch:
        patch.setattr(group, "table", None)  # as when a lost node's servers are missed first
        assert not chief.join().is_loaded
    chief.close()
    other.close()
