"""Reduction of FSDP2's units in one order on all ranks, whatever parts of the model each has used.

FSDP2 reduces a unit when backward has passed it, and of its parameters those that have a gradient. Where
ranks use different parts, such as the heads of different tasks, they would add up gradients of different
parameters, or wait for each other forever. Here a unit is reduced when its turn comes, with zeros for missing
gradients; one that is early waits, with unsharded gradients. At the end of a step ranks tell each other which
parameters had a gradient at all. Those of the others stay None: optimizers leave such parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.data_parallel.gather_order_check import GatherOrderCheck
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.forward_changes import GatheredCopyCheck
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.torch_internals.autograd import is_backward_running, is_view
from wanma.torch_internals.dispatch import tree_map_only
from wanma.torch_internals.fake_tensors import is_fake
from wanma.torch_internals.fsdp import (
    FsdpParameter,
    FsdpParameterGroup,
    finish_reductions,
    parameter_group,
    pending_gradient,
    set_training_state,
    set_zero_gradient,
    training_state,
    unify_gradient_dtypes,
    unsharded_or_none,
)


class UnitReducer:
    """Order in which the units of one model, or of one stage of it, are reduced.

    The first step goes from the last unit to the first. Then the order is the one in which the first rank's
    backward has passed them, so that usual models hold nothing back.

    Args:
        model: module sharded by FSDP2.
        parallel_mesh: device meshes of the ranks that sum gradients.
        communication_timer: timer of the messages by which ranks agree.
    """

    def __init__(
        self, model: nn.Module, parallel_mesh: ParallelMesh, communication_timer: CommunicationTimer
    ) -> None:
        self._communication_timer, self._device = communication_timer, parallel_mesh.device
        axes = [parallel_mesh.parameter_mesh[name] for name in ("shard", "replicate")]
        self._shard_group, self._replica_group = [
            axis.get_group() if axis.size() > 1 else None for axis in axes
        ]
        self._is_first_rank = all(axis.get_local_rank() == 0 for axis in axes)
        groups = [(unit, parameter_group(unit)) for unit in fsdp_units(model)]
        self._units = [_Unit(unit, group) for unit, group in groups if group is not None]
        self._gathered_copies = {unit: GatheredCopyCheck(model, unit.group) for unit in self._units}
        for unit in self._units:
            unit.group.pre_forward = partial(self._pre_forward, unit, unit.group.pre_forward)
            unit.group.post_forward = partial(self._post_forward, unit, unit.group.post_forward)
            unit.group.post_backward = partial(self._post_backward, unit)
        self.gather_order_check: GatherOrderCheck | None = None
        """Check of the order in which ranks gather and reduce; None where nothing need be checked."""
        self._reduction_order = self._units[::-1]
        self._has_order = False
        self.reshards = parallel_mesh.plan.reshards_after_forward
        """True if parameters are gathered for each use.

        Otherwise they stay unsharded, also between two uses in a last backward: ranks gather only together,
        and may have other uses.
        """
        self._next = 0
        """Index in the order of the next unit to be reduced."""
        self._backward_order: list[_Unit] = []
        """Units in the order in which backward has passed them, in the last micro-batch that reduces."""
        self._is_open = False
        """Flag of a micro-batch that reduces, from its start until all its reductions have been made."""

    def begin_micro_batch(self, reduces: bool) -> None:
        """End the previous micro-batch, before the forward of the next.

        Args:
            reduces: true if its backward reduces gradients, false if it only accumulates them.
        """
        self._end_micro_batch()
        self._is_open = reduces

    def finalize_gradients(self) -> None:
        """Reduce the remaining units after a step's last backward, and drop zeros that stand for no gradient.

        All ranks call it.

        Raises:
            WanmaError: ranks have gathered different units, or the model has changed a weight in its forward.
        """
        self._is_open = True  # torch's pipelines begin none
        self._end_micro_batch()
        unit_facts = self._exchange_unit_facts()
        pending_units = [
            unit for unit, facts in zip(self._units, unit_facts, strict=True) if facts.is_pending
        ]
        for unit in pending_units:
            self._reduce(unit)
        if not self._has_order or not set(pending_units).issubset(self._reduction_order):
            self._adopt_order(unit_facts)
        for unit, facts in zip(self._units, unit_facts, strict=True):
            unit.end_step(facts.had_gradient)
            self._gathered_copies[unit].end_step()

    def check_weights_unchanged(self) -> None:
        """Check that no forward has changed a weight.

        Raises:
            JobError: a copy of a weight has been written to.
        """
        for copies in self._gathered_copies.values():
            copies.end_step()

    def synchronize_gathers(self) -> None:
        """Wait for the ranks that gather from each other, before other communication; all of them call it.

        Raises:
            AllRanksError: a rank is about to gather a unit.
        """
        if self.gather_order_check is not None and self._shard_group is not None:
            self.gather_order_check.announce_other_communication(self._shard_group)

    def _exchange_unit_facts(self) -> list[_UnitFacts]:
        """Sum each rank's facts about each unit over the data ranks; positions are those of the first rank.

        Raises:
            AllRanksError: a rank is about to gather a unit.
        """
        self.synchronize_gathers()
        positions = (
            {unit: position for position, unit in enumerate(self._backward_order, start=1)}
            if self._is_first_rank
            else {}
        )
        self._backward_order = []
        own_numbers = [
            number
            for unit in self._units
            for number in (
                float(unit.has_gradient()),
                float(positions.get(unit, 0)),
                *map(float, unit.gradient_flags()),
            )
        ]
        hashed = self.gather_order_check.hash if self.gather_order_check is not None else 0
        numbers = torch.tensor([hashed, hashed**2, *own_numbers], dtype=torch.float64, device=self._device)
        if self._shard_group is not None:
            with self._communication_timer.time_blocking_transfer("data"):
                dist.all_reduce(numbers, group=self._shard_group)
            # Shards of one replica gather from each other; this is 0 where they have done it alike.
            numbers[0] = numbers[1] * self._shard_group.size() - numbers[0] ** 2
        if self._replica_group is not None:
            with self._communication_timer.time_blocking_transfer("data"):
                dist.all_reduce(numbers, group=self._replica_group)
        # In a dry run tensors have no values, and all ranks have what one has.
        differs, _, *summed_numbers = (
            [0, 0, *own_numbers] if is_fake(numbers) or numbers.is_meta else numbers.tolist()
        )
        if self.gather_order_check is not None:
            self.gather_order_check.end_step(differs > 0)
        number_iterator = iter(summed_numbers)
        return [
            _UnitFacts(
                next(number_iterator) > 0,
                int(next(number_iterator)),
                [flag > 0 for flag in islice(number_iterator, len(unit.had_gradient))],
            )
            for unit in self._units
        ]

    def _adopt_order(self, unit_facts: Sequence[_UnitFacts]) -> None:
        """Adopt the first rank's order in the first step; later append units that were never used before."""
        positions = {unit: facts.position for unit, facts in zip(self._units, unit_facts, strict=True)}
        used_units = {
            unit
            for unit, facts in zip(self._units, unit_facts, strict=True)
            if facts.is_pending or any(facts.had_gradient)
        }
        if not self._has_order:
            self._reduction_order.sort(key=lambda unit: positions[unit] or len(positions) + 1)
            self._reduction_order = [unit for unit in self._reduction_order if unit in used_units]
        self._reduction_order += [
            unit for unit in self._units if unit in used_units and unit not in self._reduction_order
        ]
        self._has_order = True

    def _pre_forward(self, unit: _Unit, forward: Any, *arguments: Any) -> Any:
        # A recomputed forward, which runs within a backward, does not count.
        if torch.is_grad_enabled() and not is_backward_running():
            unit.forwards += 1
        result = forward(*arguments)
        self._gathered_copies[unit].record_versions()
        return result

    def _post_forward(self, unit: _Unit, forward: Any, *arguments: Any) -> Any:
        self._gathered_copies[unit].check_values()
        output = forward(*arguments)
        if not self.reshards or not torch.is_grad_enabled():
            return output
        # A change in place of a view would take FSDP2's hook away, which gathers the unit for its backward.
        return tree_map_only(Tensor, lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)

    def _post_backward(self, unit: _Unit, *_: Any) -> None:
        """Note that backward has passed a use of `unit`; FSDP2 also calls it at the end, for each unit."""
        unit.backwards += 1
        self._gathered_copies[unit].check_values()
        # Without a gradient it is not its backward, but a `torch.autograd.grad` within a forward.
        is_passed = (
            unit.group.reduce_grads
            and not unit.is_reduced
            and unit.backwards >= unit.forwards
            and unit.has_gradient()
        )
        if not is_passed:
            unit.accumulate(reshard=self.reshards)
            return
        unit.is_backward_done = True
        self._backward_order.append(unit)
        if self._next == len(self._reduction_order) or self._reduction_order[self._next] is not unit:
            unit.accumulate(reshard=self.reshards)
        while self._next < len(self._reduction_order) and self._reduction_order[self._next].is_ready:
            self._reduce_next()

    def _end_micro_batch(self) -> None:
        while self._is_open and self._next < len(self._reduction_order):
            self._reduce_next()
        self._next, self._is_open = 0, False
        for unit in self._units:
            unit.end_micro_batch()

    def _reduce_next(self) -> None:
        unit = self._reduction_order[self._next]
        self._next += 1
        self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        self.synchronize_gathers()
        unit.reduce()


@dataclass(frozen=True)
class _UnitFacts:
    """Facts about one unit after a step, agreed on by all ranks."""

    is_pending: bool
    """True if some rank has a gradient that has not been reduced."""
    position: int
    """Position in the order of rank 0's backward, counted from 1; 0: never passed."""
    had_gradient: list[bool]
    """Flag by parameter: some rank had a gradient."""


class _Unit:
    """FSDP2 unit and the progress of backward in it."""

    def __init__(self, module: FSDPModule, group: FsdpParameterGroup) -> None:
        self._module, self.group = module, group
        self._idle_state, self._fsdp_post_backward = training_state(group), group.post_backward
        self.had_gradient = [False] * len(group.fsdp_params)
        """Parameters that had a gradient in this step, on this rank."""
        self.end_micro_batch()

    @property
    def is_ready(self) -> bool:
        return self.is_backward_done or not any(self._trained())

    def end_micro_batch(self) -> None:
        self.forwards = self.backwards = 0
        """Number of uses of the unit in this micro-batch, and how many of them backward has passed."""
        self.is_backward_done = self.is_reduced = False

    def has_gradient(self) -> bool:
        """Return whether this rank has a gradient that has not been reduced."""
        return any(pending_gradient(shard) is not None for shard in self._trained())

    def gradient_flags(self) -> list[bool]:
        """Return a flag by parameter: this rank has had a gradient in this step, reduced or not."""
        shards = zip(self.had_gradient, self.group.fsdp_params, strict=True)
        return [
            had_gradient or (_is_trained(shard) and pending_gradient(shard) is not None)
            for had_gradient, shard in shards
        ]

    def accumulate(self, *, reshard: bool) -> None:
        """Accumulate unsharded gradients without a reduction."""
        group = self.group
        if any(unsharded_or_none(shard) is None for shard in group.fsdp_params):
            return  # it has never been used
        saved_settings = group.reduce_grads, group.reshard_after_backward
        group.reduce_grads, group.reshard_after_backward = False, reshard and saved_settings[1]
        self._fsdp_post_backward()
        group.reduce_grads, group.reshard_after_backward = saved_settings

    def reduce(self) -> None:
        """Sum the gradients of all trained parameters over the ranks; all ranks of the unit call it."""
        self.is_reduced = True
        if not (trained := list(self._trained())):
            return
        self.had_gradient = self.gradient_flags()
        missing = [shard for shard in trained if pending_gradient(shard) is None]
        if any(unsharded_or_none(shard) is None for shard in missing):
            self._module.unshard()
        for shard in missing:
            set_zero_gradient(shard)
        unify_gradient_dtypes(trained)
        reduces, self.group.reduce_grads = self.group.reduce_grads, True
        self._fsdp_post_backward()
        self.group.reduce_grads = reduces

    def end_step(self, had_gradient: Sequence[bool]) -> None:
        """Remove the zeros of parameters of which no rank had a gradient.

        Args:
            had_gradient: flag by parameter, as in `_UnitFacts`.
        """
        if self.group.device.type != "cpu":
            finish_reductions(self.group)  # those after FSDP2's own end
        set_training_state(self.group, self._idle_state)
        if self.group.reshard_after_backward:
            self.group.reshard()
        for shard, is_real in zip(self.group.fsdp_params, had_gradient, strict=True):
            if not is_real:
                shard.sharded_param.grad = None
        self.had_gradient = [False] * len(self.had_gradient)

    def _trained(self) -> Iterator[FsdpParameter]:
        return (shard for shard in self.group.fsdp_params if _is_trained(shard))


def _is_trained(shard: FsdpParameter) -> bool:
    return bool(shard.sharded_param.requires_grad)
