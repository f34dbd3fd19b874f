"""Real server processes, a coordinator, and workers in threads that train a small problem."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter, ServerPosition, StepContribution
from wanma.parameter_server import client as client_module
from wanma.parameter_server.client import ParameterServerClient
from wanma.parameter_server.coordinator import ServerCoordinator, UpdateRule
from wanma.parameter_server.frames import Connection, PeerLostError
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost
from wanma.parameter_server.step_clock import StepClock

PARAMETERS = (
    ServedParameter("w", (5, 3), weight_decay=0.1),
    ServedParameter("t", (10, 4), is_table=True),
    ServedParameter("b", (), learning_rate_scale=2.0),
)
SETTINGS = {"betas": (0.9, 0.95), "epsilon": 1e-8, "momentum": 0.9, "tables": None}
OPTIMIZERS = {
    "adamw": {**SETTINGS, "kind": "adamw"},
    "sgd": {**SETTINGS, "kind": "sgd"},
    **{
        name: {**SETTINGS, "kind": "adamw", "tables": name} for name in ("adagrad", "adam", "rowwise_adagrad")
    },
}
RATE = 0.1


class Run:
    """Coordinator over the module's server processes, and clients by worker."""

    def __init__(
        self, group: ServerGroup, workers: int = 1, mode: str = "synchronous", **settings: object
    ) -> None:
        bound = settings.get("staleness")
        clock = StepClock(
            workers,
            is_synchronous=mode == "synchronous",
            staleness=bound if isinstance(bound, int) else None,
        )
        rule = UpdateRule(float(str(settings.get("clip", 0.0))), settings.get("non_finite", "stop") == "stop")
        self.coordinator = ServerCoordinator(SECRET, clock, rule)
        self.coordinator.start(group, lambda _text, _level: None)
        compression = str(settings.get("compression", "none"))
        self.clients = [
            ParameterServerClient(self.coordinator.access, worker, 1, mode, compression)
            for worker in range(workers)
        ]

    def begin(self, optimizer: str = "adamw", pause_step: int = 1000) -> dict[str, Tensor]:
        """Fill the servers; returns the weights."""
        torch.manual_seed(1)
        weights = {one.name: torch.randn(one.shape) for one in PARAMETERS}
        for client in self.clients:
            client.join()
        self.clients[0].load(PARAMETERS, OPTIMIZERS[optimizer], weights, {}, ServerPosition(True))
        for client in self.clients:
            client.begin(pause_step, ServerPosition(True))
        return weights

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.coordinator.close()


SECRET = b"0" * 32


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    logs = tmp_path_factory.mktemp("logs")
    group, host = ServerGroup(2, 2, SECRET, logs, lambda _text, _level: None), ServerHost(SECRET, logs)
    group.set_hosts({0: host})
    yield group
    group.close()
    host.close()


@pytest.fixture
def run(group: ServerGroup) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(workers: int = 1, mode: str = "synchronous", **settings: object) -> Run:
        runs.append(Run(group, workers, mode, **settings))
        return runs[-1]

    yield make
    for one in runs:
        one.close()


IDS = [torch.tensor([0, 3, 9]), torch.tensor([3, 4]), torch.tensor([], dtype=torch.int64)]


def gradients(step: int, worker: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    rows = len(IDS[(step + worker) % 3])
    shapes = {"w": (5, 3), "t": (rows, 4), "b": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compute(client: ParameterServerClient, worker: int, loss: float = 1.0) -> int | None:
    """One step of a worker: pull, push, finish."""
    offer = client.next_step(False)
    if offer.step is None:
        return None
    ids = IDS[(offer.step + worker) % 3]
    client.pull({"t": ids})
    client.push(offer.step, gradients(offer.step, worker), {"t": ids})
    client.finish(StepContribution(offer.step, loss, 2.0, 1.0, RATE))
    return offer.step


def in_threads(*functions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def expected(weights: dict[str, Tensor], kind: str, steps: range, workers: int) -> dict[str, Tensor]:
    """The weights after one process with torch's optimizers has taken the steps."""
    tensors = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    groups = [
        {
            "params": [tensors[one.name]],
            "weight_decay": one.weight_decay,
            "lr": RATE * one.learning_rate_scale,
        }
        for one in PARAMETERS
        if not (one.is_table and OPTIMIZERS[kind]["tables"])
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(groups, momentum=0.9)
        if kind == "sgd"
        else torch.optim.AdamW(groups, betas=(0.9, 0.95))
    ]
    if kind == "adagrad":
        optimizers.append(torch.optim.Adagrad([tensors["t"]], RATE, eps=1e-8))
    elif kind == "adam":
        optimizers.append(torch.optim.SparseAdam([tensors["t"]], RATE, betas=(0.9, 0.95)))
    for step in steps:
        for tensor in tensors.values():
            tensor.grad = None
        for worker in range(workers):
            given = gradients(step, worker)
            given["t"] = torch.zeros(10, 4).index_add_(0, IDS[(step + worker) % 3], given["t"])
            for name, tensor in tensors.items():
                scaled = given[name] / (2.0 * workers)
                tensor.grad = scaled if tensor.grad is None else tensor.grad + scaled
        if kind == "adam":
            tensors["t"].grad = tensors["t"].grad.to_sparse(1)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "adam"])
def test_synchronous_updates_are_those_of_one_optimizer(run: Callable[..., Run], optimizer: str) -> None:
    served = run(2)
    weights = served.begin(optimizer)
    for _ in range(4):
        in_threads(*(lambda w=w: compute(served.clients[w], w) for w in range(2)))
    found, state, position = served.clients[0].fetch()
    assert_close(found, expected(weights, optimizer, range(4), 2))
    assert (position.step, position.updates) == (3, 4), "the chief has not recorded the last"
    moments = {"exp_avg", "exp_avg_sq", "step"}
    kinds = {"sgd": {"momentum_buffer"}, "adagrad": {*moments, "sum"}}
    assert set(state) == kinds.get(optimizer, moments)
    pulled = served.clients[1].pull({"t": torch.tensor([9, 0])})
    assert torch.equal(pulled["t"], found["t"][[9, 0]])
    assert torch.equal(pulled["b"], found["b"])


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "rowwise_adagrad"])
def test_servers_that_join_and_leave_move_the_ranges_with_their_state(
    run: Callable[..., Run], optimizer: str
) -> None:
    served, still = run(), run()
    weights = served.begin(optimizer)
    for count in (3, 2):
        compute(served.clients[0], 0)
        served.coordinator.resize(count)
    compute(served.clients[0], 0)
    found, state, _ = served.clients[0].fetch()
    if optimizer != "rowwise_adagrad":
        assert_close(found, expected(weights, optimizer, range(3), 1))
    still.begin(optimizer)
    for _ in range(3):
        compute(still.clients[0], 0)
    unmoved, unmoved_state, _ = still.clients[0].fetch()
    assert_close(found, unmoved)
    for kind, tensors in state.items():
        assert_close(tensors, unmoved_state[kind])


def test_a_killed_server_is_replaced_with_all_that_was_acknowledged(
    run: Callable[..., Run], group: ServerGroup
) -> None:
    served = run()
    weights = served.begin()
    for step, server in enumerate((0, 1, 0)):
        compute(served.clients[0], 0)
        os.kill(group.process_ids[server], signal.SIGKILL)
        found, _, _ = served.clients[0].fetch()
        assert_close(found, expected(weights, "adamw", range(step + 1), 1))


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_worker_cut_from_a_server_loses_no_acknowledged_update(
    run: Callable[..., Run], group: ServerGroup, monkeypatch: pytest.MonkeyPatch, is_reachable: bool
) -> None:
    served = run()
    weights = served.begin()
    compute(served.clients[0], 0)
    before, (cut, *_) = group.process_ids, group.endpoints.values()
    refused: list[tuple[str, int]] = []

    class CutConnection(Connection):
        def __init__(self, address: tuple[str, int], *arguments: object) -> None:
            if address == cut:
                refused.append(address)
                if not is_reachable or len(refused) == 1:
                    raise PeerLostError("no route")
            super().__init__(address, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(client_module, "Connection", CutConnection)
    served.clients[0].drop(cut)
    compute(served.clients[0], 0)
    assert_close(served.clients[0].fetch()[0], expected(weights, "adamw", range(2), 1))
    assert len(refused) == 2
    assert (group.process_ids == before) is is_reachable


def test_a_slow_worker_holds_up_no_other(run: Callable[..., Run]) -> None:
    served = run(2, "asynchronous")
    served.begin()
    offer = served.clients[1].next_step(False)
    assert offer.step == 0
    assert [compute(served.clients[0], 0) for _ in range(5)] == [1, 2, 3, 4, 5]
    served.clients[1].push(0, gradients(0, 1), {"t": IDS[1]})
    served.clients[1].finish(StepContribution(0, 1.0, 2.0, 1.0, RATE))
    assert served.clients[0].staleness_histogram() == {0: 5, 5: 1}


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_of_its_table_is_refused_with_its_table(run: Callable[..., Run], bad: int) -> None:
    served = run()
    served.begin()
    with pytest.raises(WanmaError, match=rf"t has rows 0 to 9.* {bad}"):
        served.clients[0].pull({"t": torch.tensor([3, bad])})


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
    assert_close(skipping.clients[0].fetch()[0], weights, 0.0)
    compute(skipping.clients[0], 0)
    assert_close(skipping.clients[0].fetch()[0], expected(weights, "adamw", range(1, 2), 1))


def test_gradients_are_clipped_by_the_norm_over_all_servers(run: Callable[..., Run]) -> None:
    served = run(1, clip=0.01)
    weights = served.begin("sgd")
    compute(served.clients[0], 0)
    given = {name: tensor / 2 for name, tensor in gradients(0, 0).items()}
    norm = torch.stack([tensor.square().sum() for tensor in given.values()]).sum().sqrt()
    found, _, _ = served.clients[0].fetch()
    moved = found["b"] - weights["b"]
    torch.testing.assert_close(moved, -2 * RATE * given["b"] * 0.01 / (norm + 1e-6), rtol=1e-4, atol=1e-8)


def test_rounded_pushes_are_close(run: Callable[..., Run]) -> None:
    served = run(1, compression="bf16")
    weights = served.begin("sgd")
    compute(served.clients[0], 0)
    exact = expected(weights, "sgd", range(1), 1)
    found, _, _ = served.clients[0].fetch()
    assert_close(found, exact, 1e-2)
    assert not torch.equal(found["w"], exact["w"])


def test_a_worker_of_an_earlier_start_is_refused(run: Callable[..., Run], tmp_path: Path) -> None:
    served = run()
    served.begin()
    compute(served.clients[0], 0)
    access = served.coordinator.access
    newer = ParameterServerClient(access, 0, 2, "synchronous")
    assert newer.join().is_loaded
    with pytest.raises(WanmaError, match="earlier start"):
        served.clients[0].next_step(False)
    newer.begin(1000, ServerPosition(True))
    assert compute(newer, 0) == 1
    newer.close()
