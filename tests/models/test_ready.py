"""Models that cannot be spread as they are: each is refused with what to give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.own import Plain
from wanma.api.train import _copy_weights
from wanma.job.errors import JobError
from wanma.models.model_spec import wrap_module


@pytest.mark.parametrize(
    ("model", "told", "way_out"),
    [
        (Plain, "the class Plain", "pass Plain(...)"),
        (lambda: Plain(), "a function, not an nn.Module", "model.factory"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight has no shape", "run the model once"),
        (nn.Sequential(nn.LazyBatchNorm1d()), "0.weight has no shape", "run the model once"),
        (nn.ParameterList([torch.ones(2, dtype=torch.complex64)]), "0 is complex", "view_as_real"),
        (
            nn.Sequential(torch.jit.script(nn.Linear(2, 2))),
            "0 is compiled by TorchScript",
            "uncompiled module",
        ),
        (torch.compile(nn.Linear(2, 2)), "the result of torch.compile", "parallel.compile"),
    ],
    ids=["class", "function", "lazy", "lazy norm", "complex", "script", "compiled"],
)
def test_a_model_that_cannot_be_spread_is_refused(model: Any, told: str, way_out: str) -> None:
    with pytest.raises(JobError) as refusal:
        wrap_module(model, batch_norm_group=2)
    assert told in str(refusal.value)
    assert way_out in str(refusal.value)


def test_a_lazy_model_that_has_run_once_is_taken() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model(torch.zeros(1, 2))
    assert wrap_module(model).build_module() is model


class Named(nn.Module):
    """Saves more than tensors, keeps a tensor out of what it saves, and has one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.again = self.linear
        self.register_buffer("kept", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> dict[str, str]:
        return {"name": "me"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        raise AssertionError("nobody has saved it")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.again(x)
        return output


def test_a_module_that_saves_more_than_tensors_takes_its_trained_weights() -> None:
    model = Named()
    weight = model.linear.weight
    _copy_weights(model, {"linear.weight": torch.ones(2, 2), "linear.bias": torch.full((2,), 2.0)})
    assert model.again.weight is weight
    assert model(torch.ones(1, 2)).tolist() == [[4.0, 4.0]]
