"""Two parameters in one memory are refused; one parameter of two modules is not, nor two parts of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import wanma
from support.own import Numbers
from wanma.job.errors import JobError
from wanma.models.user_modules.overlapping_parameters import reject_overlapping_parameters


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_parameters_tied_by_their_data_are_refused_by_name(tmp_path: Path) -> None:
    model = pair()
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(JobError, match=r"0\.weight and 1\.weight share"):
        reject_overlapping_parameters(model)
    job = {"train": {"steps": 1, "global_batch": 4}}
    with pytest.raises(wanma.WanmaError, match="share memory"):
        wanma.train(job, model=model, data=Numbers(), run_directory=tmp_path / "run")


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = pair()
    model.register_buffer("seen", model[0].weight.detach()[2:])
    with pytest.raises(JobError, match=r"0\.weight and seen"):
        reject_overlapping_parameters(model)


def test_what_has_no_element_in_common_is_taken() -> None:
    model, flat = pair(), torch.randn(8, 16)
    model[1].bias = model[0].bias
    model[0].weight = nn.Parameter(flat[:, :8])
    model[1].weight = nn.Parameter(flat[:, 8:])
    mask = torch.ones(4)
    model.register_buffer("mask", mask)
    model.register_buffer("again", mask[1:])
    reject_overlapping_parameters(model)
