import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wanma.job.errors import WanmaError
from wanma.models.layers.batch_norm import (
    GroupedBatchNorm,
    convert_batch_norm,
    find_instance_norm_statistics,
    find_sample_coupling_modules,
    find_step_statistics_modules,
)


def norm(group: int, **keys: object) -> GroupedBatchNorm:
    module = GroupedBatchNorm(3, group, **keys).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        module.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    return module


IMAGES = torch.randn(12, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_one_group_is_torchs_own_batch_normalization() -> None:
    ours, theirs = norm(12), nn.BatchNorm2d(3).double()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(IMAGES), theirs(IMAGES), rtol=1e-12, atol=1e-12)
    ours.apply_sums(*ours.pop_sums())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.eval()(IMAGES), theirs.eval()(IMAGES), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("splits", [[12], [4, 8], [4, 4, 4], [8, 4]])
def test_numbers_do_not_depend_on_micro_batches(splits: list[int]) -> None:
    whole, module = norm(4), norm(4)
    expected = whole(IMAGES)
    expected.square().sum().backward()
    whole.apply_sums(*whole.pop_sums())
    parts = []
    for images in IMAGES.split(splits):
        parts.append(module(images))
        parts[-1].square().sum().backward()
    module.apply_sums(*module.pop_sums())
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)


def test_sums_of_two_ranks_added_up_commit_what_one_rank_commits() -> None:
    one, ranks = norm(4), [norm(4), norm(4)]
    one(IMAGES)
    one.apply_sums(*one.pop_sums())
    ranks[0](IMAGES[:8])
    ranks[1](IMAGES[8:])
    sums = [a + b for a, b in zip(*(rank.pop_sums() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.apply_sums(*sums)
        torch.testing.assert_close(rank.state_dict(), one.state_dict(), rtol=1e-12, atol=1e-12)


def test_forward_does_not_move_running_statistics_and_take_begins_again() -> None:
    module = norm(4)
    before = copy.deepcopy(module.state_dict())
    module(IMAGES)
    torch.testing.assert_close(module.state_dict(), before)
    assert int(module.pop_sums()[2]) == 3
    mean_sum, variance_sum, groups = module.pop_sums()
    assert (float(mean_sum.abs().sum()), float(variance_sum.abs().sum()), int(groups)) == (0, 0, 0)
    module.apply_sums(mean_sum, variance_sum, groups)
    torch.testing.assert_close(module.state_dict(), before)


def test_running_forward_again_in_backward_leaves_the_average_alone() -> None:
    plain, recomputed = norm(4), norm(4)
    plain(IMAGES)
    plain.apply_sums(*plain.pop_sums())
    checkpoint(recomputed, IMAGES, use_reentrant=False).square().sum().backward()
    recomputed.apply_sums(*recomputed.pop_sums())
    torch.testing.assert_close(recomputed.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_without_momentum_every_step_weighs_the_same() -> None:
    module = norm(4, momentum=None)
    means = []
    for images in (IMAGES, IMAGES * 2 + 1, IMAGES - 3):
        module(images)
        mean_sum, variance_sum, groups = module.pop_sums()
        means.append(mean_sum / groups)
        module.apply_sums(mean_sum, variance_sum, groups)
    torch.testing.assert_close(module.running_mean, torch.stack(means).mean(0), rtol=1e-12, atol=1e-12)


def test_rows_that_are_no_whole_number_of_groups_are_refused_with_the_keys() -> None:
    with pytest.raises(WanmaError, match=r"of 5 .* 12 rows[\s\S]*micro_batch"):
        norm(5)(IMAGES)
    assert norm(5).eval()(IMAGES).shape == IMAGES.shape


def test_bf16_images_keep_statistics_in_fp32() -> None:
    module = GroupedBatchNorm(3, 4)
    assert module(IMAGES.bfloat16()).dtype == torch.bfloat16
    assert module.pop_sums()[0].dtype == torch.float32
    low = GroupedBatchNorm(3, 4)
    low.weight.data, low.bias.data = low.weight.data.bfloat16(), low.bias.data.bfloat16()
    assert low(IMAGES.bfloat16()).dtype == torch.bfloat16
    assert low.pop_sums()[0].dtype == torch.float32


def users_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 3, 1),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(75, 8),
        nn.BatchNorm1d(8),
        nn.LayerNorm(8),
    )


def test_modules_that_couple_samples_are_named_until_they_are_converted() -> None:
    model = users_model()
    assert find_sample_coupling_modules(model) == ["1", "4"]
    assert convert_batch_norm(model, 4) is model
    assert find_sample_coupling_modules(model) == []
    assert [module.num_features for module in find_step_statistics_modules(model).values()] == [3, 8]
    assert find_sample_coupling_modules(nn.SyncBatchNorm(3)) == ["SyncBatchNorm"]


def test_instance_normalization_that_keeps_statistics_is_named() -> None:
    model = nn.Sequential(nn.InstanceNorm1d(3), nn.InstanceNorm2d(3, track_running_stats=True))
    assert find_instance_norm_statistics(model) == ["1"]
    assert find_instance_norm_statistics(nn.Sequential(nn.BatchNorm1d(3))) == []


def test_a_converted_model_keeps_its_state_and_computes_the_same_where_the_group_is_the_batch() -> None:
    model = users_model().double()
    model(IMAGES)  # moves the running statistics
    converted = convert_batch_norm(copy.deepcopy(model), 12)
    torch.testing.assert_close(converted.state_dict(), model.state_dict())
    assert list(converted.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(converted(IMAGES), model(IMAGES), rtol=1e-10, atol=1e-12)
    for module in find_step_statistics_modules(converted).values():
        module.apply_sums(*module.pop_sums())
    torch.testing.assert_close(converted.eval()(IMAGES), model.eval()(IMAGES), rtol=1e-10, atol=1e-12)
    assert isinstance(convert_batch_norm(nn.BatchNorm1d(4), 2), GroupedBatchNorm)


def test_batch_normalization_without_running_statistics_is_refused_by_name() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False))
    with pytest.raises(WanmaError, match="cannot convert BatchNorm2d '0'"):
        convert_batch_norm(model, 4)


def test_buffers_allocated_without_values_are_reset() -> None:
    with torch.device("meta"):
        module = GroupedBatchNorm(3, 4)
    module.to_empty(device="cpu").reset_buffers()
    assert module.running_mean.tolist() == [0, 0, 0]
    assert module.running_var.tolist() == [1, 1, 1]
    assert int(module.num_batches_tracked) == 0


class Activated(nn.BatchNorm2d):
    """Hands on to torch's own, and has an attribute besides."""

    slope = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(super().forward(x), self.slope)


class Centred(nn.BatchNorm2d):
    """Computes statistics by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


def test_a_subclass_keeps_its_forward_hooks_and_attributes() -> None:
    seen: list[torch.Tensor] = []
    model = nn.Sequential(Activated(3, eps=1e-3, momentum=0.2)).double()
    model[0].register_forward_hook(lambda _module, _input, output: seen.append(output))
    model[0].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
    plain = copy.deepcopy(model)
    norm = convert_batch_norm(model, 12)[0]
    torch.testing.assert_close(model(IMAGES), plain(IMAGES), rtol=1e-12, atol=1e-12)
    assert len(seen) == 2
    assert (norm.eps, norm.momentum, norm.num_features, norm.slope) == (1e-3, 0.2, 3, 0.1)
    assert isinstance(norm, GroupedBatchNorm)
    assert isinstance(norm, Activated)
    norm.apply_sums(*norm.pop_sums())
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    norm.eps = 1e4
    assert float(model(IMAGES).detach().abs().max()) < 1.0


def test_a_subclass_with_statistics_of_its_own_stays_and_is_named() -> None:
    model = convert_batch_norm(nn.Sequential(Centred(3), nn.SyncBatchNorm(3)), 4)
    assert type(model[0]) is Centred
    assert find_sample_coupling_modules(model) == ["0"]


def test_converted_modules_can_be_copied_and_pickled() -> None:
    model = convert_batch_norm(users_model().double(), 4)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(IMAGES), model(IMAGES))
        assert isinstance(again[1], GroupedBatchNorm)
