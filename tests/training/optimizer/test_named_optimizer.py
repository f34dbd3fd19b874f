import pytest
import torch
from torch import nn

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import ParameterGroupSection, TrainSection
from wanma.models.structure.parameter_roles import find_parameter_roles
from wanma.training.optimizer.named_optimizer import (
    NamedOptimizer,
    build_optimizer,
    check_parameter_patterns,
    parameter_rules,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def updater_of(model: nn.Module, train: TrainSection) -> NamedOptimizer:
    return build_optimizer(dict(model.named_parameters()), train, Plan(), roles=find_parameter_roles(model))


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def test_norms_and_biases_are_not_decayed() -> None:
    rules = parameter_rules(find_parameter_roles(Small()), TrainSection(weight_decay=0.3))
    assert {name: rule.weight_decay for name, rule in rules.items()} == {
        "embedding.weight": 0.3,
        "inner.weight": 0.3,
        "inner.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_the_first_matching_group_wins() -> None:
    train = TrainSection(
        parameter_groups=[
            ParameterGroupSection(match="inner.*", learning_rate_scale=0.5, weight_decay=0.7),
            ParameterGroupSection(match="*", learning_rate_scale=2.0),
        ]
    )
    rules = parameter_rules(find_parameter_roles(Small()), train)
    assert (rules["inner.bias"].learning_rate_scale, rules["inner.bias"].weight_decay) == (0.5, 0.7)
    assert rules["norm.weight"].learning_rate_scale == 2.0


def test_frozen_parameters_get_no_gradient_and_no_update() -> None:
    model = Small()
    before = model.embedding.weight.clone()
    train = TrainSection(parameter_groups=[ParameterGroupSection(match="embedding.*", frozen=True)])
    updater = updater_of(model, train)
    give_gradients(model)
    updater.step(0.1)
    assert not model.embedding.weight.requires_grad
    assert torch.equal(model.embedding.weight, before)
    assert set(updater.parameters) == {"inner.weight", "inner.bias", "norm.weight", "norm.bias"}


def test_freezing_everything_is_refused() -> None:
    train = TrainSection(parameter_groups=[ParameterGroupSection(match="*", frozen=True)])
    with pytest.raises(JobError, match="freezes every parameter"):
        updater_of(Small(), train)


def test_a_pattern_that_matches_nothing_is_a_typing_error() -> None:
    train = TrainSection(parameter_groups=[ParameterGroupSection(match="iner.weight")])
    with pytest.raises(JobError, match=r"Did you mean 'inner\.weight'"):
        check_parameter_patterns(["inner.weight", "inner.bias"], train)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_every_rule_steps_and_gives_its_state_by_parameter_name(name: str) -> None:
    model = Small()
    updater = updater_of(model, TrainSection(optimizer=name))
    before = {n: p.clone() for n, p in model.named_parameters()}
    give_gradients(model)
    updater.step(0.1)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    known = set(before)
    assert all(any(key.startswith(f"{n}.") for n in known) for key in updater.state_tensors())


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_allocating_state_changes_no_weight_and_the_state_continues_exactly(name: str) -> None:
    train = TrainSection(optimizer=name)
    torch.manual_seed(0)
    one, other = Small(), Small()
    other.load_state_dict(one.state_dict())
    first = updater_of(one, train)
    give_gradients(one)
    first.step(0.1)

    second = updater_of(other, train)
    start = {n: p.clone() for n, p in other.named_parameters()}
    second.allocate_state(first.state_tensors())
    assert second.state_tensors().keys() == first.state_tensors().keys()
    assert all(torch.equal(p, start[n]) for n, p in other.named_parameters())
    other.load_state_dict(one.state_dict())
    for key, tensor in second.state_tensors().items():
        tensor.copy_(first.state_tensors()[key])
    second.update_count = first.update_count
    for model, updater in ((one, first), (other, second)):
        give_gradients(model)
        updater.step(0.05)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_state_is_allocated_only_for_parameters_that_had_some() -> None:
    updater = updater_of(Small(), TrainSection())
    name = next(iter(updater.parameters))
    updater.allocate_state([f"{name}.exp_avg", f"{name}.exp_avg_sq"])
    assert set(updater.state_tensors()) == {f"{name}.exp_avg", f"{name}.exp_avg_sq"}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_state_that_was_reserved_changes_no_bit_and_is_nobodys_before_its_first_gradient(name: str) -> None:
    train = TrainSection(optimizer=name)
    torch.manual_seed(0)
    one, other = Small(), Small()
    other.load_state_dict(one.state_dict())
    lazy, eager = (updater_of(m, train) for m in (one, other))
    eager.preallocate_state()
    assert eager.state_tensors() == {}
    places = {tensor.data_ptr() for pair in eager._preallocated.values() for tensor in pair}
    for _ in range(2):
        for model, updater in ((one, lazy), (other, eager)):
            give_gradients(model)
            next(model.parameters()).grad = None
            updater.step(0.1)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert eager.state_tensors().keys() == lazy.state_tensors().keys()
    for key, tensor in lazy.state_tensors().items():
        assert torch.equal(tensor, eager.state_tensors()[key])
    used = {
        t.data_ptr() for key, t in eager.state_tensors().items() if key.endswith(("exp_avg", "exp_avg_sq"))
    }
    assert used <= places
    assert bool(places) == (name != "sgd")
