"""Shard of a table: an update reads and writes the rows that a step uses, and touches no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.shards import Gradient, Shard
from wanma.parameter_server.table import ServerTable

ROWS = 1000
INDEXED = {"aten::index", "aten::index_put_", "aten::index_select", "aten::index_copy_", "aten::detach"}
"""Operators whose cost is that of the rows they are given."""


class LargeOperators(TorchDispatchMode):
    """Operators that take or return as many elements as a table has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,  # torch's interface
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
        if any(tensor.numel() >= ROWS for tensor in tensors):
            self.found.add(function.name().partition(".")[0])
        return result


@pytest.fixture
def shard() -> Callable[[str], Shard]:
    def make(optimizer: str) -> Shard:
        table = ServerTable.build(
            1, [ServedParameter("t", (ROWS, 4), is_table=True)], {0: ("127.0.0.1", 1)}, 1
        )
        settings = {
            "kind": "adamw",
            "tables": optimizer,
            "betas": (0.9, 0.95),
            "epsilon": 1e-8,
            "momentum": 0,
        }
        return Shard(table, 0, settings)

    return make


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_an_update_costs_as_much_as_its_rows(shard: Callable[[str], Shard], optimizer: str) -> None:
    used = shard(optimizer)
    gradient = Gradient(torch.ones(3, 4), torch.tensor([7, 1, 900]))
    with LargeOperators() as large:
        used.apply(1, {"t": gradient}, 0.5, 0.1)
        used.rows("t", torch.tensor([1, 2]))
    assert large.found <= INDEXED
    changed = used.weights["t"].detach().ne(0).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [1, 7, 900]


def test_an_update_without_the_one_before_is_refused(shard: Callable[[str], Shard]) -> None:
    one, gradient = shard("sgd"), {"t": Gradient(torch.ones(1, 4), torch.tensor([5]))}
    one.apply(1, gradient, 1.0, 0.1)
    before = one.rows("t", None)
    one.apply(1, gradient, 1.0, 0.1)
    with pytest.raises(WanmaError, match="update 1"):
        one.apply(3, gradient, 1.0, 0.1)
    assert torch.equal(one.rows("t", None), before)


def test_a_row_whose_gradient_is_zero_is_not_used(shard: Callable[[str], Shard]) -> None:
    one, other = shard("adam"), shard("adam")
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    one.apply(1, {"t": Gradient(values[:1], torch.tensor([5]))}, 1.0, 0.1)
    other.apply(1, {"t": Gradient(values[:1], torch.tensor([5]))}, 1.0, 0.1)
    one.apply(2, {"t": Gradient(values, torch.tensor([6, 5]))}, 1.0, 0.1)
    other.apply(2, {"t": Gradient(values[:1], torch.tensor([6]))}, 1.0, 0.1)
    for key, tensor in one.tensors("t").items():
        assert torch.equal(tensor, other.tensors("t")[key]), key


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_parameter_without_gradient_is_left_alone_with_its_state(kind: str) -> None:
    parameters = [ServedParameter(name, (4, 2), weight_decay=0.1) for name in "ab"]
    table = ServerTable.build(1, parameters, {0: ("127.0.0.1", 1)}, 1)
    one = Shard(
        table, 0, {"kind": kind, "tables": None, "betas": (0.9, 0.9), "epsilon": 1e-8, "momentum": 0.9}
    )
    weights = {name: torch.nn.Parameter(torch.ones(4, 2)) for name in "ab"}
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = (
        torch.optim.AdamW(weights.values(), betas=(0.9, 0.9), **settings)
        if kind == "adamw"
        else torch.optim.SGD(weights.values(), momentum=0.9, **settings)
    )
    for name in "ab":
        one.fill(name, 0, {"weight": torch.ones(4, 2)})
    for update, names in enumerate(("ab", "a", "", "ab"), 1):
        gradients = {name: torch.full((4, 2), float(update)) for name in names}
        one.apply(update, {name: Gradient(gradient) for name, gradient in gradients.items()}, 1.0, 0.1)
        for name, weight in weights.items():
            weight.grad = gradients.get(name)
        optimizer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(one.tensors(name)["weight"], weight.detach())
        for key, value in optimizer.state[weight].items():
            torch.testing.assert_close(one.tensors(name)[key], value)
