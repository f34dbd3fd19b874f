"""Modules with parametrizations are sent to other processes as they are."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from wanma.models.user_modules.parametrization_pickling import dumps_by_value


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Tied(nn.Module):
    """A layer under two names, a chain of parametrizations, a buffer, and a reference to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(3, 3))
        self.two = parametrizations.spectral_norm(nn.Linear(3, 3))
        self.three = nn.Linear(3, 3)
        parametrize.register_parametrization(self.three, "weight", Symmetric())
        parametrize.register_parametrization(self.three, "weight", nn.Tanh(), unsafe=True)
        parametrize.register_parametrization(self.three, "bias", nn.Softplus(), unsafe=True)
        self.shared: Any = self.one
        self.owner = [self]

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.three(self.two(self.shared(x)))
        return hidden


def test_a_parametrized_module_arrives_with_its_values_gradients_and_ties() -> None:
    torch.manual_seed(0)
    model = Tied()
    parametrize.register_parametrization(model.two, "bias", nn.Tanh(), unsafe=True)
    came: Tied = pickle.loads(dumps_by_value({"model": model.eval()}))["model"]
    x = torch.randn(2, 3)
    assert torch.equal(came(x), model(x))
    assert [name for name, _ in came.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert came.state_dict().keys() == model.state_dict().keys()
    assert came.shared is came.one
    assert came.owner[0] is came
    assert isinstance(came.one, nn.Linear)
    for one in (model, came):
        one(x).square().sum().backward()
    for (name, here), there in zip(model.named_parameters(), came.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad), name  # type: ignore[arg-type]  # both have one
    again: Tied = pickle.loads(dumps_by_value(came))
    assert torch.equal(again(x), model(x))
    came.one.weight = torch.ones(3, 3)  # by the right inverse
    torch.testing.assert_close(came.one.weight, torch.ones(3, 3))
