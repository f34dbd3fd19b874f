"""Servers of tests: a coordinator over real server processes, and clients that train a small problem."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from wanma.job.run.parameter_servers import ServedParameter, ServerPosition, StepContribution
from wanma.parameter_server.client import ParameterServerClient
from wanma.parameter_server.coordinator import ServerCoordinator
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.step_clock import StepClock
from wanma.parameter_server.update_rule import UpdateRule

SECRET = b"0" * 32
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
_GENERATIONS = itertools.count(1, 2)
"""Numbers of starts of workers: servers refuse those before; each run may start them twice."""


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
        self.generation = next(_GENERATIONS)
        compression = str(settings.get("compression", "none"))
        self.clients = [
            ParameterServerClient(self.coordinator.access, worker, self.generation, mode, compression)
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


IDS = [torch.tensor([0, 3, 9]), torch.tensor([3, 4]), torch.tensor([], dtype=torch.int64)]


def gradients(step: int, worker: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    rows = len(IDS[(step + worker) % 3])
    shapes = {"w": (5, 3), "t": (rows, 4), "b": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compute(client: ParameterServerClient, worker: int) -> int | None:
    """The next step of a worker."""
    step = client.next_step(False).step
    if step is not None:
        work(client, worker, step)
    return step


def work(client: ParameterServerClient, worker: int, step: int) -> None:
    """One step of a worker: pull, push, finish."""
    ids = IDS[(step + worker) % 3]
    client.pull({"t": ids})
    client.push(step, gradients(step, worker), {"t": ids})
    client.finish(StepContribution(step, 1.0, 2.0, 1.0, RATE))


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


def process_ids(group: ServerGroup) -> dict[int, int]:
    """Process of each server."""
    return {number: process.process_id for number, process in group._processes.running.items()}


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


def fetched(client: ParameterServerClient) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The weights, and the optimizer's state by kind, that the servers hold."""
    client._fetched_update = None  # all rows
    found: dict[str, dict[str, Tensor]] = {}
    for parameter, rows, tensors in client.fetch():
        for kind, part in tensors.items():
            by_name = found.setdefault(kind, {})
            whole = torch.cat([by_name[parameter.name], part]) if part.ndim and rows.start else part
            is_complete = whole.shape == (parameter.rows, parameter.width)
            by_name[parameter.name] = whole.reshape(parameter.shape) if is_complete else whole
    return found.pop("weight"), found
