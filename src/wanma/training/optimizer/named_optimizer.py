"""Optimizers whose parameters and state are addressed by name, and their parameter groups.

An `NamedOptimizer` is one or two torch optimizers over named parameters. Rates are set from the schedule
before each step; state is exposed by parameter name, so that checkpoints do not depend on order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import JobError, WanmaError, did_you_mean
from wanma.job.plan.plan import OPTIMIZER_CHUNK_PARAMETERS, Plan
from wanma.job.sections.train import TrainSection
from wanma.models.structure.parameter_roles import ParameterRole, find_parameter_group, is_frozen
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding, TableGradient
from wanma.parallel.gradients.gradient_norm import local_squared_norm
from wanma.planner.rules.capabilities import factored_optimizer_error
from wanma.torch_internals.dtensor import wrap_like
from wanma.torch_internals.loaded import DTensor
from wanma.torch_internals.uncompiled import step_uncompiled
from wanma.training.optimizer.muon import Muon, is_for_muon
from wanma.training.optimizer.optimizer_attributes import (
    changed_attributes,
    read_attributes,
    reset_attributes,
    write_attributes,
)
from wanma.training.optimizer.optimizer_state_offload import OptimizerStateOffload
from wanma.training.optimizer.table_optimizer import TableOptimizer
from wanma.training.optimizer.user_optimizer import UserOptimizer, step_optimizer

_STEP_KEY = "step"
"""Key under which torch's optimizers count the updates of one parameter."""


@dataclass(frozen=True)
class ParameterRule:
    """Optimizer settings of one parameter."""

    learning_rate_scale: float
    weight_decay: float | None
    """Weight decay; None: the default of a user's own optimizer."""
    is_orthogonalised: bool = False
    """True if Muon updates the parameter."""


class NamedOptimizer:
    """Optimizer of named parameters.

    Args:
        parameters: parameters of this rank by name.
        rules: settings by name of the parameters that are trained, or may be later.
        train: `[train]` of the job.
        tied_copies: name of a tied copy -> name of its tensor on another stage, which counts and saves it.
        state_offload: offload of the state between updates; it limits the number of parameters updated
            together.
        user_optimizer: user's optimizer, instead of `train.optimizer`.
        table_optimizers: optimizers of embedding tables that data ranks share, which are not in `parameters`.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        rules: dict[str, ParameterRule],
        train: TrainSection,
        tied_copies: Mapping[str, str] = MappingProxyType({}),
        state_offload: OptimizerStateOffload | None = None,
        user_optimizer: UserOptimizer | None = None,
        table_optimizers: Sequence[TableOptimizer] = (),
    ):
        self.parameters = {name: parameters[name] for name in rules}
        self._user_optimizer = user_optimizer
        self.table_optimizers = table_optimizers
        self.tied_copies = tied_copies
        self._state_offload = state_offload
        self._update_count = 0
        self.missed_updates: Counter[str] = Counter()
        """Number of updates in which a parameter had no gradient: it was frozen, or took no part."""
        self._preallocated: dict[Tensor, tuple[Tensor, Tensor]] = {}
        matrices = [name for name in rules if rules[name].is_orthogonalised]
        elementwise_names = [name for name in rules if not rules[name].is_orthogonalised]
        self._local_parameters = {
            name: nn.Parameter(local_tensor(self.parameters[name]))
            for name in elementwise_names
            if isinstance(self.parameters[name], DTensor)
        }
        """Local stand-ins of DTensors, in the same memory.

        All rules but Muon's compute element by element, and torch takes longer to take a hundred DTensors
        apart than to update small ones (Adafactor, which does not, is never split).
        """
        updated = {**self.parameters, **self._local_parameters}
        self._names = {id(parameter): name for name, parameter in updated.items()}
        self._optimizers: list[Optimizer] = []
        for names in self._update_chunks(matrices):
            groups = _parameter_groups(names, updated, rules)
            self._optimizers.append(Muon(groups, lr=train.learning_rate, momentum=train.momentum))
        for names in self._update_chunks(elementwise_names):
            self._optimizers.append(
                _new_optimizer(_parameter_groups(names, updated, rules), train, user_optimizer)
            )

        self._initial_attributes = self._read_attributes()

    def gradients(self) -> list[Tensor]:
        """Return the gradients, in whose memory they may be changed; of a table those of the used rows."""
        dense = [p.grad for p in self.parameters.values() if p.grad is not None]
        return [*dense, *(gradient.values for gradient in self._table_gradients())]

    def squared_norm(self, plan: Plan) -> Tensor:
        """Return this rank's share of the gradients' squared norm, as of `local_squared_norm`.

        Tied copies are left out: each tensor is counted by one stage.
        """
        owned_parameters = (p for name, p in self.parameters.items() if name not in self.tied_copies)
        owned = [p.grad for p in owned_parameters if p.grad is not None]
        tables = self._table_gradients()
        replicated = [gradient.replicated for gradient in tables]
        return local_squared_norm([*owned, *replicated], plan, [gradient.shared for gradient in tables])

    def zero_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for table_optimizer in self.table_optimizers:
            table_optimizer.embedding.reset_gradients()

    def _table_gradients(self) -> list[TableGradient]:
        gradients = [table_optimizer.embedding.gradient for table_optimizer in self.table_optimizers]
        return [gradient for gradient in gradients if gradient is not None]

    def step(self, learning_rate: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["learning_rate_scale"]
        self.missed_updates.update(
            name for name, parameter in self.parameters.items() if parameter.grad is None
        )
        self._step_optimizers()
        self._update_count += 1
        for table_optimizer in self.table_optimizers:
            table_optimizer.step(learning_rate, self._update_count)

    def preallocate_state(self) -> None:
        """Allocate AdamW's moments of trained parameters that have none yet; a first update takes them over.

        Where memory is a heap, moments that are made in the first update would lie scattered over the room of
        the activations, which then find no holes of their size.
        """
        for optimizer in self._optimizers:
            if self._user_optimizer is None and isinstance(optimizer, AdamW):
                for parameter in self._parameters_of(optimizer):
                    owner = self.parameters[self._names[id(parameter)]]
                    if parameter not in optimizer.state and owner.requires_grad:
                        self._preallocated[parameter] = (
                            torch.zeros_like(parameter),
                            torch.zeros_like(parameter),
                        )

    def allocate_state(self, saved_names: Iterable[str]) -> None:
        """Allocate state tensors for a load from a checkpoint, without changing a parameter.

        Args:
            saved_names: names as in `state_tensors`. A parameter that has had no gradient yet has no state.
        """
        saved_names = set(saved_names)
        owners = {name.rpartition(".")[0] for name in saved_names}
        for name, parameter in self.parameters.items():
            if f"{self.tied_copies.get(name, name)}.{_STEP_KEY}" in saved_names:
                self.missed_updates[name] = 1  # until the count itself is loaded
            if self.tied_copies.get(name, name) in owners:
                parameter.grad = torch.zeros_like(parameter)
        attributes = self._read_attributes()
        before = [[group["lr"] for group in o.param_groups] for o in self._optimizers]
        decays = [[group.get("weight_decay", 0.0) for group in o.param_groups] for o in self._optimizers]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
        self._step_optimizers()
        for optimizer, rates, decay in zip(self._optimizers, before, decays, strict=True):
            for group, rate, share in zip(optimizer.param_groups, rates, decay, strict=True):
                group["lr"] = rate
                if "weight_decay" in group:
                    group["weight_decay"] = share
        for optimizer, earlier in zip(self._optimizers, attributes, strict=False):
            reset_attributes(optimizer, earlier)
        self.zero_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return 'NAME.exp_avg' and so on: state with a shape, and counts that differ from `update_count`.

        A count that is all the state of a parameter is included: it tells a load to make the state.
        """
        tensors = {}
        entries = Counter(name for name, _, _ in self.state_entries())
        for name, key, value in self.state_entries():
            if key == _STEP_KEY and self.missed_updates[name] and not isinstance(value, Tensor):
                assert self._user_optimizer is not None  # torch's count in tensors
                raise WanmaError(
                    f"{name} had no gradient in {self.missed_updates[name]} steps, but the optimizer "
                    f"{self._user_optimizer.name} counts steps in a plain number, which checkpoints do "
                    "not include",
                    'keep state["step"] as a tensor, or freeze the parameter (train.parameter_groups)',
                )
            is_implied = key == _STEP_KEY and not self.missed_updates[name] and entries[name] > 1
            if isinstance(value, Tensor) and not is_implied:
                tensors[f"{name}.{key}"] = value
        return tensors

    def attribute_state(self) -> list[dict[str, Any]]:
        """Return what has changed beside the state of parameters, of each of the user's optimizers.

        It is the same on every rank: where there is any, each rank has the complete model (`UpdateScope`).

        Returns:
            JSON values by path, as of `read_attributes`.
        """
        pairs = zip(self._initial_attributes, self._read_attributes(), strict=True)
        return [changed_attributes(before, now) for before, now in pairs]

    def restore_attribute_state(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `attribute_state` returned.

        Raises:
            WanmaError: it is of an optimizer with more groups.
        """
        for optimizer, values in zip(self._optimizers, saved, strict=False):
            write_attributes(optimizer, values)

    def _read_attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of each of the user's optimizers; of torch's own they are constant."""
        return [] if self._user_optimizer is None else [read_attributes(one) for one in self._optimizers]

    def state_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by kind, such as 'exp_avg', and then by parameter name."""
        kinds: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.state_tensors().items():
            parameter_name, _, kind = name.rpartition(".")
            kinds.setdefault(kind, {})[parameter_name] = tensor
        return kinds

    @property
    def update_count(self) -> int:
        """Number of optimizer steps that changed the weights; the same on a rank that trains none of them."""
        return self._update_count

    @update_count.setter
    def update_count(self, count: int) -> None:
        """Set the count of all parameters too, except counts of their own, which have been loaded."""
        self._update_count = count
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                if _STEP_KEY not in state:
                    continue
                if self.missed_updates[name]:
                    self.missed_updates[name] = count - int(state[_STEP_KEY])
                elif isinstance(state[_STEP_KEY], Tensor):
                    state[_STEP_KEY].fill_(count)
                else:
                    state[_STEP_KEY] = count

    def _step_optimizers(self) -> None:
        for name, local in self._local_parameters.items():
            local.data = local_tensor(self.parameters[name])
            local.grad = local_gradient(self.parameters[name])
        self._assign_preallocated()
        for optimizer in self._optimizers:
            with (
                self._state_offload.on_device(optimizer) if self._state_offload is not None else nullcontext()
            ):
                if self._user_optimizer is None:
                    step_uncompiled(optimizer)
                else:
                    step_optimizer(self._user_optimizer.name, optimizer)
        for local in self._local_parameters.values():
            local.grad = None

    def _assign_preallocated(self) -> None:
        """Give parameters that have their first gradient the moments that are reserved for them."""
        for optimizer in self._optimizers:
            for parameter in self._parameters_of(optimizer):
                if parameter.grad is not None and parameter in self._preallocated:
                    first, second = self._preallocated.pop(parameter)
                    # As `torch.optim.AdamW` begins; fused, it counts in fp32 beside the parameter.
                    step = torch.zeros((), dtype=torch.float32, device=local_tensor(parameter).device)
                    optimizer.state[parameter] = {_STEP_KEY: step, "exp_avg": first, "exp_avg_sq": second}

    @staticmethod
    def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
        return (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _update_chunks(self, names: list[str]) -> Iterator[list[str]]:
        """Yield names of parameters that are updated together: all, unless their state is offloaded.

        They are the same on every rank: sizes are those of full parameters.
        """
        chunk: list[str] = []
        size = 0
        for name in names:
            elements = self.parameters[name].numel()
            if self._state_offload is not None and chunk and size + elements > OPTIMIZER_CHUNK_PARAMETERS:
                yield chunk
                chunk, size = [], 0
            chunk.append(name)
            size += elements
        if chunk:
            yield chunk

    def state_entries(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (parameter name, key, state value); a value shaped as its stand-in becomes a DTensor."""
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                name = self._names[id(parameter)]
                for key, value in state.items():
                    has_shape = isinstance(value, Tensor) and value.shape == parameter.shape
                    if name in self._local_parameters and has_shape and key != _STEP_KEY:
                        yield name, key, wrap_local(value, self.parameters[name])
                    else:
                        yield name, key, value
        for table_optimizer in self.table_optimizers:
            yield from table_optimizer.state_entries()


def build_optimizer(
    parameters: dict[str, nn.Parameter],
    train: TrainSection,
    plan: Plan,
    *,
    roles: Mapping[str, ParameterRole],
    trainable: Iterable[str] | None = None,
    tied_copies: Mapping[str, str] = MappingProxyType({}),
    state_offload: OptimizerStateOffload | None = None,
    user_optimizer: UserOptimizer | None = None,
    embeddings: Sequence[ShardedEmbedding] = (),
) -> NamedOptimizer:
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
        tied_copies: name of a tied copy -> name of its tensor; a copy follows the rule of its tensor.
        state_offload: offload of the state between updates.
        user_optimizer: user's optimizer, instead of `train.optimizer`.
        embeddings: embedding tables that data ranks share; `train.embedding_optimizer` updates them.

    Raises:
        JobError: nothing is left to train, or Muon does not know what to do with a matrix.
    """
    if trainable is None:
        trainable = [name for name in parameters if not is_frozen(name, train.parameter_groups)]
    trainable = set(trainable)
    require_trainable(trainable)
    if user_optimizer is None and (error := factored_optimizer_error(train.optimizer, plan)):
        raise error
    table_optimizers = [TableOptimizer(embedding, train) for embedding in embeddings]
    table_names = {name for embedding in embeddings for name in embedding.parameter_names.values()}
    parameters = {name: p for name, p in parameters.items() if name not in table_names}
    roles = {name: role for name, role in roles.items() if name in trainable and name not in table_names}
    by_saved_name = parameter_rules(roles, train, user_optimizer is not None)
    rules = {}
    for name, parameter in parameters.items():
        if (rule := by_saved_name.get(tied_copies.get(name, name))) is not None:
            rules[name] = rule
        else:
            parameter.requires_grad_(False)
    return NamedOptimizer(
        parameters, rules, train, tied_copies, state_offload, user_optimizer, table_optimizers
    )


def require_trainable(names: Collection[str]) -> None:
    """Refuse a job that freezes all of its model.

    Args:
        names: names of the parameters that are left to train.

    Raises:
        JobError: there is none.
    """
    if not names:
        raise JobError(
            "train.parameter_groups freezes every parameter", "leave at least one parameter trainable"
        )


def check_parameter_patterns(names: Iterable[str], train: TrainSection) -> None:
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


def parameter_rules(
    roles: Mapping[str, ParameterRole], train: TrainSection, is_user_optimizer: bool = False
) -> dict[str, ParameterRule]:
    """Return the rule by parameter name: that of the first matching group, else that of the role.

    Args:
        roles: roles of the parameters by name.
        train: `[train]` of the job.
        is_user_optimizer: true if the optimizer is the user's, with a weight decay of its own where the job
            sets none.

    Raises:
        JobError: Muon is to update a matrix whose role is not known, or a parameter that is no matrix of a
            hidden layer.
    """
    rules = {}
    says_decay = not is_user_optimizer or "weight_decay" in train.model_fields_set
    for name, role in roles.items():
        group = find_parameter_group(name, train.parameter_groups)
        decay = (train.weight_decay if role.has_weight_decay else 0.0) if says_decay else None
        scale = 1.0
        if group is not None:
            scale = group.learning_rate_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        orthogonalised = train.optimizer == "muon" and is_for_muon(name, role, group)
        rules[name] = ParameterRule(scale, decay, orthogonalised)
    return rules


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's part of a gradient, placed as the parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def wrap_local(local: Tensor, like: nn.Parameter) -> Tensor:
    """Return the tensor, placed as a parameter, of which `local` is this rank's part, in whatever memory."""
    return wrap_like(local, like) if isinstance(like, DTensor) else local


def _parameter_groups(
    names: list[str], parameters: dict[str, nn.Parameter], rules: dict[str, ParameterRule]
) -> list[dict[str, Any]]:
    by_rule: dict[ParameterRule, list[nn.Parameter]] = {}
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


def _new_optimizer(
    groups: list[dict[str, Any]], train: TrainSection, user_optimizer: UserOptimizer | None
) -> Optimizer:
    rate = train.learning_rate
    if user_optimizer is not None:
        return user_optimizer([{**group, "lr": rate} for group in groups], rate)
    if train.optimizer == "sgd":
        return SGD(groups, lr=rate, momentum=train.momentum)
    if train.optimizer == "adafactor":
        return Adafactor(groups, lr=rate)
    return AdamW(groups, lr=rate, betas=train.betas, eps=train.epsilon, fused=True)
