import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.ranks import run_here
from wanma.data.batch import IGNORE_INDEX, Batch, concatenate_padded
from wanma.data.datasets.dataset import make_batch
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.training.loss.cross_entropy import cross_entropy_sum
from wanma.training.loss.loss_functions import CrossEntropy, correct_count, wrap_user_loss
from wanma.training.loss.target_counting import sum_and_count_losses
from wanma.training.loss.validation_metrics import class_accuracy


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
    targets = torch.tensor([[1, IGNORE_INDEX, 2], [0, 4, IGNORE_INDEX]])
    loss, count = CrossEntropy(classes_last=True)(logits, batch(targets))
    kept = targets.flatten() != IGNORE_INDEX
    expected = F.cross_entropy(logits.flatten(0, 1)[kept], targets.flatten()[kept], reduction="sum")
    assert loss.item() == pytest.approx(expected.item())
    assert count.item() == 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32])
def test_small_integers_are_classes_like_others(dtype: torch.dtype) -> None:
    logits, classes = torch.randn(3, 200, requires_grad=True), torch.tensor([156, 3, 156])
    made = make_batch((logits,), classes.to(dtype), np.arange(3))
    expected = F.cross_entropy(logits, classes, reduction="sum").item()
    own = wrap_user_loss(lambda output, targets: F.cross_entropy(output, targets.long(), reduction="none"))
    for loss in (CrossEntropy(), own):
        total, count = loss(logits, made)
        assert (total.item(), count.item()) == (pytest.approx(expected), 3)
    assert made.class_range == (3, 156)
    assert class_accuracy(F.one_hot(classes, 200), made.targets) == (3, 3)
    assert concatenate_padded([made], 4).targets.tolist() == [156, 3, 156, IGNORE_INDEX]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_classes_that_a_loss_itself_makes_ignored_are_refused_with_the_way_out(dtype: torch.dtype) -> None:
    def void_is_zero(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, targets.long() - 1, ignore_index=-1, reduction="none")

    logits, loss = torch.randn(3, 4, requires_grad=True), wrap_user_loss(void_is_zero)
    _, count = loss(logits, batch(torch.tensor([1, 4, 2], dtype=dtype)))
    assert count.item() == 3
    with pytest.raises(WanmaError, match="ignores 1 of class -1") as refused:
        loss(logits, batch(torch.tensor([1, 0, 2], dtype=dtype)))
    assert "(losses, mask)" in (refused.value.hint or "")


def test_a_users_loss_is_given_targets_in_their_own_dtype() -> None:
    made = make_batch((), torch.tensor([5], dtype=torch.uint8), np.arange(1))
    total, _ = wrap_user_loss(lambda output, targets: output * (4 - targets))(torch.ones(1), made)
    assert total.item() == 255.0  # bytes wrap, as in a plain loop


def test_low_precision_logits_are_summed_in_fp32() -> None:
    loss, _ = CrossEntropy(classes_last=True)(
        torch.randn(1, 2, 5).bfloat16(), batch(torch.zeros(1, 2, dtype=torch.int64))
    )
    assert loss.dtype == torch.float32


def test_double_logits_stay_double() -> None:
    loss, _ = CrossEntropy(classes_last=True)(
        torch.randn(1, 2, 5).double(), batch(torch.zeros(1, 2, dtype=torch.int64))
    )
    assert loss.dtype == torch.float64


def test_padding_rows_count_nothing_in_a_users_loss() -> None:
    loss = wrap_user_loss(lambda output, targets: (output - targets) ** 2)
    output = torch.tensor([[1.0, 2.0], [5.0, float("nan")]])
    total, count = loss(output, batch(torch.zeros(2, 2), real=[True, False]))
    assert total.item() == 5.0
    assert count.item() == 2


def test_losses_of_one_sample_with_the_targets_of_others_are_refused() -> None:
    loss = wrap_user_loss(nn.MSELoss(reduction="none"))
    with pytest.raises(WanmaError, match=r"\(3, 3\).*\(3, 1\).*\(3,\)"):
        loss(torch.ones(3, 1), batch(torch.zeros(3)))
    total, count = loss(torch.ones(3, 1), batch(torch.zeros(3, 1)))
    assert (total.item(), count.item()) == (3.0, 3)
    quantiles = wrap_user_loss(lambda output, targets: output - targets[:, None])
    assert quantiles(torch.ones(3, 5), batch(torch.zeros(3)))[1].item() == 15


def test_a_loss_per_sample_is_refused_where_ranks_share_each_sample() -> None:
    loss = wrap_user_loss(lambda output, targets: (output - targets).mean(dim=1), is_per_position=True)
    with pytest.raises(WanmaError, match=r"\(2,\) for .*\(2, 3\).*parallel.cp"):
        loss(torch.ones(2, 3), batch(torch.zeros(2, 3)))
    total, count = wrap_user_loss(lambda output, targets: output - targets, is_per_position=True)(
        torch.ones(2, 3), batch(torch.zeros(2, 3))
    )
    assert (total.item(), count.item()) == (6.0, 6)


def test_a_loss_that_is_already_averaged_is_refused_with_the_way_out() -> None:
    with pytest.raises(WanmaError, match="reduction='none'"):
        sum_and_count_losses(torch.tensor(1.0), batch(torch.zeros(2)))


def test_stacking_fills_every_micro_batch_with_rows_that_have_no_targets() -> None:
    first = batch(torch.tensor([[1, 2], [3, 4]]))
    second = batch(torch.tensor([[5, 6]]))
    whole = concatenate_padded([first, second], 2)
    assert whole.targets.tolist() == [[1, 2], [3, 4], [5, 6], [IGNORE_INDEX, IGNORE_INDEX]]
    assert whole.real.tolist() == [True, True, True, False]
    assert whole.samples.tolist() == [0, 1, 0, -1]


def test_torchs_own_logits_have_their_classes_in_dim_1_and_language_models_in_the_last() -> None:
    logits, targets = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    expected = F.cross_entropy(logits, targets, reduction="sum")
    for given in (logits, logits.movedim(1, -1)):
        loss, count = CrossEntropy()(given, batch(targets))
        assert (loss.item(), count.item()) == (pytest.approx(expected.item()), 6)


def test_logits_that_can_be_read_both_ways_are_refused_with_a_loss_for_each() -> None:
    with pytest.raises(WanmaError, match=r"\(2, 3, 3\).*dim 1.*last dim") as error:
        CrossEntropy()(torch.randn(2, 3, 3), batch(torch.randint(3, (2, 3))))
    assert "movedim(-1, 1)" in (error.value.hint or "")
    known, _ = CrossEntropy(classes_last=True)(torch.randn(2, 3, 3), batch(torch.randint(3, (2, 3))))
    assert known.isfinite()


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 5), (6, 5)])
def test_logits_that_do_not_fit_the_targets_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WanmaError, match=r"takes .*classes. for"):
        CrossEntropy()(torch.randn(shape), batch(torch.zeros(2, 3, dtype=torch.int64)))


@pytest.mark.parametrize(("wrong", "told"), [(5, "class 5"), (-1, "class -1")])
def test_classes_that_the_model_does_not_know_are_an_error_from_the_hosts_numbers_alone(
    wrong: int, told: str
) -> None:
    targets = torch.tensor([1, wrong, IGNORE_INDEX])
    made = make_batch((torch.zeros(3),), targets, np.arange(3))
    assert made.class_range == (min(wrong, 1), max(wrong, 1))
    with pytest.raises(WanmaError, match=f"{told}, but the model has 5 classes"):
        CrossEntropy()(torch.randn(3, 5), made)
    with pytest.raises((RuntimeError, IndexError)):  # whoever does not know the range reads no other memory
        cross_entropy_sum(torch.randn(3, 5), targets)


def test_targets_that_are_no_classes_are_refused_with_the_way_out() -> None:
    with pytest.raises(WanmaError, match=r"float32.*needs integer classes") as error:
        CrossEntropy()(torch.randn(2, 5), batch(torch.zeros(2)))
    assert "custom loss" in (error.value.hint or "")


@dataclass
class Output:
    logits: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, Output])
def test_logits_are_found_in_dicts_and_objects(wrap: Any) -> None:
    logits, targets = torch.randn(2, 5), torch.tensor([1, 2])
    loss, _ = CrossEntropy()(wrap(logits), batch(targets))
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item())
    assert int(correct_count(wrap(logits), targets)) == int((logits.argmax(-1) == targets).sum())


def test_outputs_without_logits_are_one_clear_error_and_have_no_accuracy() -> None:
    output = (torch.randn(2, 5), torch.randn(2, 5))
    with pytest.raises(WanmaError, match=r"returns a tuple of 2.*no logits"):
        CrossEntropy()(output, batch(torch.tensor([1, 2])))
    assert correct_count(output, torch.tensor([1, 2])) == 0
    assert correct_count(torch.randn(2, 3, 5), torch.tensor([1, 2])) == 0


LOGITS = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=5, reduction="none"),
        partial(F.cross_entropy, ignore_index=5, reduction="none"),
        lambda output, targets: F.cross_entropy(output, targets, ignore_index=5, reduction="none"),
    ],
)
def test_the_mean_is_over_what_torchs_own_mean_counts(loss: Any) -> None:
    targets = torch.arange(12).view(4, 3) % 6
    total, count = wrap_user_loss(loss)(LOGITS, batch(targets))
    expected = F.cross_entropy(LOGITS, targets, ignore_index=5)
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_narrow_integer_of_minus_100_is_left_out_and_a_regressions_is_not() -> None:
    targets = torch.tensor([IGNORE_INDEX, 1, 2], dtype=torch.int32)
    logits = torch.randn(3, 5, requires_grad=True)
    _, count = wrap_user_loss(lambda o, t: F.cross_entropy(o, t.long(), reduction="none"))(
        logits, batch(targets)
    )
    assert count.item() == 2
    measured = torch.tensor([IGNORE_INDEX, 1, 2])
    total, count = wrap_user_loss(lambda o, t: (o - t).square())(torch.zeros(3), batch(measured))
    assert (total.item(), count.item()) == (10005.0, 3)


def test_a_loss_may_say_itself_what_counts_or_by_which_weights_it_is_divided() -> None:
    losses, targets = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3)
    mask = torch.tensor([True, False, True])
    total, count = wrap_user_loss(lambda _, __: (losses, mask))(None, batch(targets))
    assert (total.item(), count.item()) == (5.0, 2)
    given = batch(targets, real=[True, True, False])
    total, count = wrap_user_loss(lambda _, __: (losses, torch.tensor([0.5, 2.0, 9.0])))(None, given)
    assert (total.item(), count.item()) == (3.0, 2.5)
    with pytest.raises(WanmaError, match="is not a mask or weights"):
        wrap_user_loss(lambda _, __: (losses, torch.ones(2)))(None, given)


def test_class_weights_divide_as_torch_does_when_the_loss_returns_them() -> None:
    weight, targets = torch.tensor([1.0, 3.0, 0.5, 2.0, 1.0, 1.0]), torch.arange(12).view(4, 3) % 6
    loss = wrap_user_loss(lambda o, t: (F.cross_entropy(o, t, weight, reduction="none"), weight[t]))
    total, count = loss(LOGITS, batch(targets))
    assert (total / count).item() == pytest.approx(F.cross_entropy(LOGITS, targets, weight).item(), rel=1e-6)


def test_a_loss_that_shifts_its_targets_itself_must_say_which_it_leaves_out() -> None:
    logits = torch.randn(2, 4, 5, requires_grad=True)

    def shifted(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[:, :-1].movedim(-1, 1), targets[:, 1:], reduction="none")

    full, partly = (
        torch.ones(2, 4, dtype=torch.int64),
        torch.tensor([[1, 1, 2, 2], [1, 2, IGNORE_INDEX, IGNORE_INDEX]]),
    )
    loss = wrap_user_loss(shifted)
    assert loss(logits, batch(full))[1].item() == 6
    with pytest.raises(WanmaError, match=r"ignores targets of class -100.*\(2, 4\)"):
        loss(logits, batch(partly))
    with pytest.raises(WanmaError, match="ignores targets"), torch.no_grad():
        loss(logits, batch(partly))


def test_a_table_whose_target_is_a_number_trains_by_its_squared_error(tmp_path: Path) -> None:
    table = tmp_path / "line.csv"
    table.write_text("x,y\n" + "".join(f"{x / 64},{2 * x / 64 + 1}\n" for x in range(64)))
    job: dict[str, Any] = {
        "model": {"factory": "torch.nn:Linear", "arguments": {"in_features": 1, "out_features": 1}},
        "data": {"path": str(table), "columns": {"features": ["x"], "target": "y"}, "validation_fraction": 0},
        "train": {"steps": 60, "global_batch": 16, "learning_rate": 0.2, "weight_decay": 0.0},
    }
    ran = run_here(tmp_path / "run", job, Plan(micro_batch=16))
    assert ran.losses[-1] < 1e-2 < ran.losses[0]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [record["phases"]["communication"] for record in records] == [0.0] * 60, "a rank alone"
    job["model"]["arguments"]["out_features"] = 2
    with pytest.raises(WanmaError, match=r"\(16, 2\).*\(16,\)"):
        run_here(tmp_path / "wide", job, Plan(micro_batch=16))
