from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from support.ranks import run_ranks
from wanma.data.batch import IGNORE_INDEX
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.training.loss import cross_entropy
from wanma.training.loss.cross_entropy import cross_entropy_sum


def reference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits.to(precise).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(2, 40), st.integers(1, 200), st.integers(0, 10**6))
def test_loss_and_gradient_equal_torchs_for_any_size_of_block(
    rows: int, sequence: int, classes: int, block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, sequence, classes, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(-1, classes, (rows, sequence), generator=generator)
    targets[targets < 0] = IGNORE_INDEX
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cross_entropy._BLOCK_ELEMENTS, "cpu", block)
        loss = cross_entropy_sum(ours, targets)
        (loss * 0.37).backward()
    expected = reference(theirs, targets)
    (expected * 0.37).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_low_precision_logits_give_an_fp32_loss_and_a_gradient_of_their_own_precision() -> None:
    logits = torch.randn(4, 8, 33).bfloat16().requires_grad_()
    targets = torch.randint(0, 33, (4, 8))
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference(logits.detach(), targets).item(), rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_batch_without_targets_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_that_nobody_wants_any_more_become_their_gradient(dtype: torch.dtype) -> None:
    hidden, targets = torch.randn(3, 5, 8, dtype=dtype), torch.randint(0, 40, (3, 5))
    targets[0, 2] = IGNORE_INDEX
    made: dict[bool, tuple[Tensor, Tensor]] = {}
    for spend in (False, True):
        head = torch.nn.Linear(8, 40, bias=spend, dtype=dtype)  # both of torch's products
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, 320).view(40, 8))
            if spend:
                head.bias.zero_()
        logits = head(hidden)
        before = logits.detach().clone()
        loss = cross_entropy_sum(logits, targets, overwrite_logits=spend)
        (loss * 0.5).backward()
        assert torch.equal(logits, before) is not spend
        if spend:
            assert logits[0, 2].count_nonzero() == 0, "the gradient of a row without a target"
        made[spend] = loss.detach(), head.weight.grad
    assert torch.equal(made[True][0], made[False][0])
    assert torch.equal(made[True][1], made[False][1])


def test_logits_that_their_maker_needs_for_backward_are_left_alone() -> None:
    hidden, targets = torch.randn(4, 8), torch.randint(0, 20, (4,))
    made: dict[bool, Tensor] = {}
    for spend in (False, True):
        weight = torch.linspace(-1, 1, 160).view(20, 8).requires_grad_()
        logits = torch.tanh(hidden @ weight.T)
        cross_entropy_sum(logits, targets, overwrite_logits=spend).backward()
        assert logits.abs().max() < 1
        assert weight.grad is not None
        made[spend] = weight.grad
    assert torch.equal(made[True], made[False])


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


CLASSES = 24


def rows_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of which some are extreme, with targets at the edges of every rank's classes."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, CLASSES + 1, CLASSES, generator=generator, dtype=torch.float64) * 5
    logits[0, 0], logits[0, 1, 7] = -100, 100
    targets = torch.cat([torch.arange(CLASSES), torch.tensor([IGNORE_INDEX])]).expand(3, -1).contiguous()
    targets[2, 5:] = IGNORE_INDEX
    return logits.to(dtype), targets


@dataclass(frozen=True)
class Found:
    """Results of one rank; arrays, for tensors would share the process's memory."""

    loss: float
    loss_dtype: torch.dtype
    gradient: np.ndarray
    gradient_dtype: torch.dtype
    collectives: tuple[int, int]
    """In forward and in backward."""


def split_loss(worker: WorkerContext, dtype: torch.dtype) -> Found:
    """The loss of logits of which a rank has its classes; over Gloo, of which torch tells the collectives."""
    with open_mesh(worker, Plan(tp=worker.world_size), 60, "gloo") as grid:
        logits, targets = rows_of(dtype)
        local = logits.chunk(worker.world_size, dim=-1)[worker.rank].clone().requires_grad_()
        split = DTensor.from_local(local, grid.dim_mesh("tp"), [Shard(2)], run_check=False)
        with CommDebugMode() as forward:
            loss = cross_entropy_sum(split, targets)
        with CommDebugMode() as backward:
            (loss * 0.37).backward()
        assert local.grad is not None
        return Found(
            loss.item(),
            loss.dtype,
            local.grad.double().numpy(),
            local.grad.dtype,
            (forward.get_total_counts(), backward.get_total_counts()),
        )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float64, 1e-14, 1e-12), (torch.float32, 1e-6, 1e-5), (torch.bfloat16, 1e-6, 2**-8)],
    ids=str,
)
@pytest.mark.daily(
    "torch.float64-1e-14-1e-12-4", "torch.float32-1e-06-1e-05-2", "torch.bfloat16-1e-06-0.00390625-2"
)
def test_logits_split_over_the_vocabulary_give_the_loss_and_gradient_of_whole_ones(
    dtype: torch.dtype, tolerance: float, gradient_tolerance: float, ranks: int
) -> None:
    logits, targets = rows_of(dtype)
    logits.requires_grad_()
    expected = reference(logits, targets)
    (expected * 0.37).backward()
    assert logits.grad is not None
    parts = run_ranks(split_loss, ranks, (dtype,))
    for part in parts:
        assert part.loss == pytest.approx(expected.item(), rel=tolerance)
        assert part.loss_dtype == torch.promote_types(dtype, torch.float32)
        assert part.gradient.shape == (3, CLASSES + 1, CLASSES // ranks)
        assert part.gradient_dtype == dtype
        assert part.collectives == (2, 0)
    gradient = torch.from_numpy(np.concatenate([part.gradient for part in parts], axis=-1))
    torch.testing.assert_close(
        gradient, logits.grad.double(), rtol=gradient_tolerance, atol=gradient_tolerance / 10
    )


def refuse(worker: WorkerContext) -> list[str]:
    """Return the refusals of a class that no rank has, and of logits that are not split over classes."""
    said = []
    with open_mesh(worker, Plan(tp=worker.world_size), 60) as grid:
        whole = torch.zeros(2, 3, 8)
        mesh = grid.dim_mesh("tp")
        for placement, target in ((Shard(2), 16), (Replicate(), 0)):
            split = DTensor.from_local(whole, mesh, [placement], run_check=False)
            try:
                cross_entropy_sum(split, torch.full((2, 3), target))
            except (RuntimeError, IndexError, ValueError) as error:
                said.append(str(error))
    return said


def test_a_class_beyond_the_vocabulary_and_other_splits_are_refused() -> None:
    (said,) = run_ranks(refuse, 1, ())
    assert "out of bounds" in said[0]
    assert "not over their last dim" in said[1]
