"""Optimizers whose parameters and state are addressed by name, and their parameter groups.

An `Updater` is one or two torch optimizers over named parameters. Rates are set from the schedule before each
step; state is exposed by parameter name, so that checkpoints do not depend on order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from wanma.checkpoint.format.local_shards import local_part
from wanma.job.errors import JobError, WanmaError, did_you_mean
from wanma.job.plan.plan import UPDATED_TOGETHER, Plan
from wanma.job.sections.job import ParameterGroupSection, TrainSection
from wanma.models.structure.parameter_roles import Role, group_of, is_frozen
from wanma.planner.rules.capabilities import split_factors
from wanma.training.optimizer.muon import Muon
from wanma.training.optimizer.optimizer_state_offload import StateHome
from wanma.training.optimizer.user_optimizer import OwnOptimizer, take_step

_COUNT = "step"
"""Key under which torch's optimizers count the updates of one parameter."""


@dataclass(frozen=True)
class GroupRule:
    """Optimizer settings of one parameter."""

    learning_rate_scale: float
    weight_decay: float | None
    """Weight decay; None: the default of a user's own optimizer."""
    is_orthogonalised: bool = False
    """True if Muon updates the parameter."""


class Updater:
    """Optimizer of named parameters.

    Args:
        parameters: parameters of this rank by name.
        rules: settings by name of the parameters that are trained, or may be later.
        train: `[train]` of the job.
        copies: name of a tied copy -> name of its tensor on another stage, which counts and saves it.
        home: offload of the state between updates; it limits the number of parameters updated together.
        own: user's optimizer, instead of `train.optimizer`.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        rules: dict[str, GroupRule],
        train: TrainSection,
        copies: Mapping[str, str] = MappingProxyType({}),
        home: StateHome | None = None,
        own: OwnOptimizer | None = None,
    ):
        self.parameters = {name: parameters[name] for name in rules}
        self._own = own
        self.copies = copies
        self._home = home
        self._updates = 0
        self._left_out: Counter[str] = Counter()
        """Number of updates in which a parameter had no gradient: it was frozen, or took no part."""
        self._reserved: dict[Tensor, tuple[Tensor, Tensor]] = {}
        matrices = [name for name in rules if rules[name].is_orthogonalised]
        others = [name for name in rules if not rules[name].is_orthogonalised]
        self._local = {
            name: nn.Parameter(local_part(self.parameters[name]))
            for name in others
            if isinstance(self.parameters[name], DTensor)
        }
        """Local stand-ins of DTensors, in the same memory.

        All rules but Muon's compute element by element, and torch takes longer to take a hundred DTensors
        apart than to update small ones (Adafactor, which does not, is never split).
        """
        updated = {**self.parameters, **self._local}
        self._names = {id(parameter): name for name, parameter in updated.items()}
        self._optimizers: list[Optimizer] = []
        for names in self._together(matrices):
            groups = _groups(names, updated, rules)
            self._optimizers.append(Muon(groups, lr=train.learning_rate, momentum=train.momentum))
        for names in self._together(others):
            self._optimizers.append(_optimizer(_groups(names, updated, rules), train, own))

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients without those of tied copies: each tensor is counted by one stage."""
        own = (p for name, p in self.parameters.items() if name not in self.copies)
        return [p.grad for p in own if p.grad is not None]

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, learning_rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["learning_rate_scale"]
        self._left_out.update(name for name, one in self.parameters.items() if one.grad is None)
        self._run()
        self._updates += 1

    def reserve_state(self) -> None:
        """Allocate AdamW's moments of trained parameters that have none yet; a first update takes them over.

        Where memory is a heap, moments that are made in the first update would lie scattered over the room of
        the activations, which then find no holes of their size.
        """
        for optimizer in self._optimizers:
            if self._own is None and isinstance(optimizer, AdamW):
                for parameter in self._of(optimizer):
                    owner = self.parameters[self._names[id(parameter)]]
                    if parameter not in optimizer.state and owner.requires_grad:
                        self._reserved[parameter] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def allocate_state(self, saved: Iterable[str]) -> None:
        """Allocate state tensors for a load from a checkpoint, without changing a parameter.

        Args:
            saved: names as in `state_tensors`. A parameter that has had no gradient yet has no state.
        """
        saved = set(saved)
        owners = {name.rpartition(".")[0] for name in saved}
        for name, parameter in self.parameters.items():
            if f"{self.copies.get(name, name)}.{_COUNT}" in saved:
                self._left_out[name] = 1  # until the count itself is loaded
            if self.copies.get(name, name) in owners:
                parameter.grad = torch.zeros_like(parameter)
        before = [[group["lr"] for group in o.param_groups] for o in self._optimizers]
        decays = [[group.get("weight_decay", 0.0) for group in o.param_groups] for o in self._optimizers]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
        self._run()
        for optimizer, rates, decay in zip(self._optimizers, before, decays, strict=True):
            for group, rate, share in zip(optimizer.param_groups, rates, decay, strict=True):
                group["lr"] = rate
                if "weight_decay" in group:
                    group["weight_decay"] = share
        self.zero_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return 'NAME.exp_avg' and so on: state with a shape, and counts that differ from `updates`."""
        found = {}
        for name, key, value in self._entries():
            if key == _COUNT and self._left_out[name] and not isinstance(value, Tensor):
                assert self._own is not None  # torch's count in tensors
                raise WanmaError(
                    f"{name} had no gradient in {self._left_out[name]} steps, and the optimizer "
                    f"{self._own.name} counts in plain numbers, which no checkpoint has",
                    'let it keep state["step"] as a tensor, or freeze the parameter (train.parameter_groups)',
                )
            if isinstance(value, Tensor) and (key != _COUNT or self._left_out[name]):
                found[f"{name}.{key}"] = value
        return found

    def state_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by kind, such as 'exp_avg', and then by parameter name."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.state_tensors().items():
            of_parameter, _, kind = name.rpartition(".")
            kinds.setdefault(kind, {})[of_parameter] = tensor
        return kinds

    @property
    def updates(self) -> int:
        """Number of optimizer steps that changed the weights; the same on a rank that trains none of them."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        """Set the count of all parameters too, except counts of their own, which have been loaded."""
        self._updates = count
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                if _COUNT not in state:
                    continue
                if self._left_out[name]:
                    self._left_out[name] = count - int(state[_COUNT])
                elif isinstance(state[_COUNT], Tensor):
                    state[_COUNT].fill_(count)
                else:
                    state[_COUNT] = count

    def _run(self) -> None:
        for name, local in self._local.items():
            local.data = local_part(self.parameters[name])
            local.grad = local_gradient(self.parameters[name])
        self._hand_out()
        for optimizer in self._optimizers:
            with self._home.visit(optimizer) if self._home is not None else nullcontext():
                optimizer.step() if self._own is None else take_step(self._own.name, optimizer)
        for local in self._local.values():
            local.grad = None

    def _hand_out(self) -> None:
        """Give parameters that have their first gradient the moments that are reserved for them."""
        for optimizer in self._optimizers:
            for parameter in self._of(optimizer):
                if parameter.grad is not None and parameter in self._reserved:
                    first, second = self._reserved.pop(parameter)
                    # As `torch.optim.AdamW` begins; fused, it counts in fp32 beside the parameter.
                    step = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
                    optimizer.state[parameter] = {_COUNT: step, "exp_avg": first, "exp_avg_sq": second}

    @staticmethod
    def _of(optimizer: Optimizer) -> Iterator[Tensor]:
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _together(self, names: list[str]) -> Iterator[list[str]]:
        """Yield names of parameters that are updated together: all, unless their state is offloaded.

        They are the same on every rank: sizes are those of full parameters.
        """
        together: list[str] = []
        size = 0
        for name in names:
            elements = self.parameters[name].numel()
            if self._home is not None and together and size + elements > UPDATED_TOGETHER:
                yield together
                together, size = [], 0
            together.append(name)
            size += elements
        if together:
            yield together

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (parameter name, key, state value); a value shaped as its stand-in becomes a DTensor."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                for key, value in state.items():
                    has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
                    if name in self._local and has_shape and key != _COUNT:
                        yield name, key, placed_as(value, self.parameters[name])
                    else:
                        yield name, key, value


def build_updater(
    parameters: dict[str, nn.Parameter],
    train: TrainSection,
    plan: Plan,
    *,
    roles: Mapping[str, Role],
    trainable: Iterable[str] | None = None,
    copies: Mapping[str, str] = MappingProxyType({}),
    home: StateHome | None = None,
    own: OwnOptimizer | None = None,
) -> Updater:
    """Build the optimizer of `train` over a model's parameters.

    Parameters that only the model itself freezes take part as soon as they have a gradient: their state
    begins then, as that of torch's optimizers does.

    Args:
        parameters: parameters of this rank; of a pipeline stage that is frozen altogether, none are trained.
        train: `[train]` of the job.
        plan: plan of the run.
        roles: roles of the full model's parameters, by name.
        trainable: names of the full model's parameters that are not frozen for good; None: all of
            `parameters` except those that `train` freezes.
        copies: name of a tied copy -> name of its tensor; a copy follows the rule of its tensor.
        home: offload of the state between updates.
        own: user's optimizer, instead of `train.optimizer`.

    Raises:
        JobError: nothing is left to train, or Muon does not know what to do with a matrix.
    """
    if trainable is None:
        trainable = [name for name in parameters if not is_frozen(name, train.parameter_groups)]
    trainable = set(trainable)
    require_trained(trainable)
    if own is None and (error := split_factors(train.optimizer, plan)):
        raise error
    roles = {name: role for name, role in roles.items() if name in trainable}
    by_saved_name = group_rules(roles, train, own is not None)
    rules = {}
    for name, parameter in parameters.items():
        if (rule := by_saved_name.get(copies.get(name, name))) is not None:
            rules[name] = rule
        else:
            parameter.requires_grad_(False)
    return Updater(parameters, rules, train, copies, home, own)


def require_trained(names: Collection[str]) -> None:
    """Refuse a job that freezes all of its model.

    Args:
        names: names of the parameters that are left to train.

    Raises:
        JobError: there is none.
    """
    if not names:
        raise JobError("train.parameter_groups freezes every parameter", "leave at least one to train")


def check_patterns(names: Iterable[str], train: TrainSection) -> None:
    """Refuse a pattern of `train.parameter_groups` that matches no parameter of the full model.

    Raises:
        JobError: names the pattern.
    """
    names = list(names)
    for index, group in enumerate(train.parameter_groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise JobError(
                f"train.parameter_groups[{index}].match = '{group.match}' matches no parameter."
                f"{did_you_mean(group.match, names)}",
                f"parameters are named like '{names[0]}'" if names else "",
            )


def group_rules(roles: Mapping[str, Role], train: TrainSection, is_own: bool = False) -> dict[str, GroupRule]:
    """Return the rule by parameter name: that of the first matching group, else that of the role.

    Args:
        roles: roles of the parameters by name.
        train: `[train]` of the job.
        is_own: true if the optimizer is the user's, with a weight decay of its own where the job sets none.

    Raises:
        JobError: Muon is to update a matrix whose role is not known, or a parameter that is no matrix of a
            hidden layer.
    """
    rules = {}
    says_decay = not is_own or "weight_decay" in train.model_fields_set
    for name, role in roles.items():
        group = group_of(name, train.parameter_groups)
        decay = (train.weight_decay if role.decays else 0.0) if says_decay else None
        scale = 1.0
        if group is not None:
            scale = group.learning_rate_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        orthogonalised = train.optimizer == "muon" and _is_for_muon(name, role, group)
        rules[name] = GroupRule(scale, decay, orthogonalised)
    return rules


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's part of a gradient, placed as the parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def placed_as(local: Tensor, like: nn.Parameter) -> Tensor:
    """Return the DTensor of which `local` is this rank's part, in whatever memory that is."""
    assert isinstance(like, DTensor)
    return DTensor(local, like._spec, requires_grad=False)


def _is_for_muon(name: str, role: Role, group: ParameterGroupSection | None) -> bool:
    """Return whether Muon updates a parameter: hidden matrices only (Jordan et al. 2024).

    Embeddings, heads, norms and biases go to AdamW.
    """
    if group is not None and group.frozen:
        return False
    if group is not None and group.muon is not None:
        if group.muon and not role.is_matrix:
            raise JobError(
                f"train.parameter_groups: muon = true matches {name}, which is no matrix",
                "Muon updates parameters of two dimensions; match only those",
            )
        return group.muon
    if role.is_hidden_matrix is None:
        raise JobError(
            f"train.optimizer = 'muon': {name} is a matrix that its module holds by itself, so that wanma "
            "cannot see whether it is multiplied in a hidden layer (Muon's) or is a table (AdamW's)",
            f'say it: [[train.parameter_groups]] match = "{name}", muon = true or false',
        )
    return role.is_hidden_matrix


def _groups(
    names: list[str], parameters: dict[str, nn.Parameter], rules: dict[str, GroupRule]
) -> list[dict[str, Any]]:
    by_rule: dict[GroupRule, list[nn.Parameter]] = {}
    for name in names:
        by_rule.setdefault(rules[name], []).append(parameters[name])
    return [
        {
            "params": members,
            "learning_rate_scale": rule.learning_rate_scale,
            **({"weight_decay": rule.weight_decay} if rule.weight_decay is not None else {}),
        }
        for rule, members in by_rule.items()
    ]


def _optimizer(groups: list[dict[str, Any]], train: TrainSection, own: OwnOptimizer | None) -> Optimizer:
    rate = train.learning_rate
    if own is not None:
        return own([{**group, "lr": rate} for group in groups], rate)
    if train.optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=train.momentum)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=rate)
    return AdamW(groups, lr=rate, betas=train.betas, eps=train.epsilon, fused=True)
