"""Comparing runs: curves, final tensors, and how far a tensor moved from where it began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from support.ranks import Outcome, run_job
from wanma.job.plan.plan import Plan

EXACT_TRAIN = {
    "precision": "fp64",
    "steps": 3,
    "learning_rate": 1e-2,
    "gradient_clip": 0.5,
    "deterministic": True,
}
"""Keys of `[train]` for a few deterministic steps in fp64, the same numbers in every layout."""


def one_process(folder: Path, job: dict[str, Any], micro_batch: int, **more: Any) -> Outcome:
    """The run that all layouts are measured against."""
    return run_job(folder, job, Plan(micro_batch=micro_batch, precision=precision_of(job)), **more)


def spread_over(folder: Path, job: dict[str, Any], plan: Plan, **more: Any) -> Outcome:
    """The same job under `plan`."""
    return run_job(folder, job, replace(plan, precision=precision_of(job)), **more)


def precision_of(job: dict[str, Any]) -> Any:
    return job["train"].get("precision", "fp32")


def same_curve(one: Outcome, other: Outcome, tolerance: float) -> None:
    """Losses and gradient norms agree to `tolerance`, relative."""
    assert other.losses == pytest.approx(one.losses, rel=tolerance)
    assert other.norms == pytest.approx(one.norms, rel=tolerance)


def same_numbers(one: Outcome, other: Outcome, tolerance: float = 1e-10) -> None:
    """Losses, gradient norms and every tensor of the last checkpoint agree to `tolerance`, relative."""
    same_curve(one, other, tolerance)
    same_tensors(one.tensors(), other.tensors(), tolerance)


def same_training(one: Outcome, other: Outcome, *, curve: float, weights: float, start: Outcome) -> None:
    """Losses and norms agree to `curve`, relative; the change of every parameter tensor to `weights`.

    Args:
        start: a run that ended where `one` began.
    """
    same_curve(one, other, curve)
    initial, expected, got = start.tensors(), one.tensors(), other.tensors()
    assert expected.keys() == got.keys()
    for name in (n for n in expected if n.startswith("model.")):
        change = (expected[name].double() - initial[name].double()).norm()
        if change == 0:  # a bias of balancing may end where it began
            assert torch.equal(got[name], expected[name]), name
            continue
        assert (got[name].double() - expected[name].double()).norm() / change <= weights, name


def same_tensors(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float) -> None:
    """Same names, and each tensor's difference is small next to the tensor."""
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        difference = (got[name].double() - tensor.double()).norm()
        assert difference <= tolerance * max(float(tensor.double().norm()), 1e-3), name


def same_bits(one: Outcome, other: Outcome) -> None:
    """Losses, gradient norms and every tensor are equal bit for bit."""
    assert other.losses == one.losses
    assert other.norms == one.norms
    equal(one, other)


def equal(one: Outcome, other: Outcome) -> None:
    """Every tensor of the last checkpoints is equal bit for bit."""
    expected, got = one.tensors(), other.tensors()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a parameter, which a rank may hold in part; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
