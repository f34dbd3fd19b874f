import pytest
import torch
import torch.nn.functional as F

from wanma.data.batch import IGNORED, Batch, stack_rows
from wanma.job.errors import WanmaError
from wanma.training.loss import classification_loss, sum_losses, user_loss


def batch(targets: torch.Tensor, real: list[bool] | None = None) -> Batch:
    rows = targets.shape[0]
    return Batch(
        inputs=(torch.arange(rows),),
        targets=targets,
        samples=torch.arange(rows),
        real=torch.tensor(real or [True] * rows),
    )


def test_ignored_targets_count_neither_in_the_sum_nor_in_the_number() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, IGNORED, 2], [0, 4, IGNORED]])
    loss, count = classification_loss(logits, batch(targets))
    kept = targets.flatten() != IGNORED
    expected = F.cross_entropy(logits.flatten(0, 1)[kept], targets.flatten()[kept], reduction="sum")
    assert loss.item() == pytest.approx(expected.item())
    assert count.item() == 4


def test_low_precision_logits_are_summed_in_fp32() -> None:
    loss, _ = classification_loss(
        torch.randn(1, 2, 5).bfloat16(), batch(torch.zeros(1, 2, dtype=torch.int64))
    )
    assert loss.dtype == torch.float32


def test_double_logits_stay_double() -> None:
    loss, _ = classification_loss(torch.randn(1, 2, 5).double(), batch(torch.zeros(1, 2, dtype=torch.int64)))
    assert loss.dtype == torch.float64


def test_padding_rows_count_nothing_in_a_users_loss() -> None:
    loss = user_loss(lambda output, targets: (output - targets) ** 2)
    output = torch.tensor([[1.0, 2.0], [5.0, float("nan")]])
    total, count = loss(output, batch(torch.zeros(2, 2), real=[True, False]))
    assert total.item() == 5.0
    assert count.item() == 2


def test_a_loss_per_sample_is_refused_where_ranks_share_each_sample() -> None:
    loss = user_loss(lambda output, targets: (output - targets).mean(dim=1), by_position=True)
    with pytest.raises(WanmaError, match=r"shape \(2,\) for targets of \(2, 3\).*parallel.cp"):
        loss(torch.ones(2, 3), batch(torch.zeros(2, 3)))
    total, count = user_loss(lambda output, targets: output - targets, by_position=True)(
        torch.ones(2, 3), batch(torch.zeros(2, 3))
    )
    assert (total.item(), count.item()) == (6.0, 6)


def test_a_loss_that_is_already_averaged_is_refused_with_the_way_out() -> None:
    with pytest.raises(WanmaError, match="reduction='none'"):
        sum_losses(torch.tensor(1.0), batch(torch.zeros(2)))


def test_stacking_fills_every_micro_batch_with_rows_that_have_no_targets() -> None:
    first = batch(torch.tensor([[1, 2], [3, 4]]))
    second = batch(torch.tensor([[5, 6]]))
    whole = stack_rows([first, second], 2)
    assert whole.targets.tolist() == [[1, 2], [3, 4], [5, 6], [IGNORED, IGNORED]]
    assert whole.real.tolist() == [True, True, True, False]
    assert whole.samples.tolist() == [0, 1, 0, -1]
