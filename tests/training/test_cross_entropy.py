import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.data.batch import IGNORED
from wanma.training import cross_entropy
from wanma.training.cross_entropy import cross_entropy_sum


def reference(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    precise = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        logits.to(precise).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(2, 40), st.integers(1, 200), st.integers(0, 10**6))
def test_loss_and_gradient_equal_torchs_for_any_size_of_block(
    rows: int, sequence: int, classes: int, block: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, sequence, classes, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(-1, classes, (rows, sequence), generator=generator)
    targets[targets < 0] = IGNORED
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
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad) == 0


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert logits.grad is not None
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]
