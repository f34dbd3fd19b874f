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
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from wanma.collectives.timing.communication_timer import Stopwatch
from wanma.parallel.data_parallel.gather_order_check import GatherWatch
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parameters.forward_changes import GatheredCopies
from wanma.parallel.parameters.fsdp_units import group_of, units


class UnitOrder:
    """Order in which the units of one model, or of one stage of it, are reduced.

    The first step goes from the last unit to the first. Then the order is the one in which the first rank's
    backward has passed them, so that usual models hold nothing back.

    Args:
        model: module sharded by FSDP2.
        grid: device meshes of the ranks that sum gradients.
        stopwatch: timer of the messages by which ranks agree.
    """

    def __init__(self, model: nn.Module, grid: Grid, stopwatch: Stopwatch) -> None:
        self._stopwatch, self._device = stopwatch, grid.device
        axes = [grid.state[name] for name in ("shard", "replicate")]
        self._shards, self._replicas = [axis.get_group() if axis.size() > 1 else None for axis in axes]
        self._leads = all(axis.get_local_rank() == 0 for axis in axes)
        groups = [(unit, group_of(unit)) for unit in units(model)]
        self._units = [_Unit(unit, group) for unit, group in groups if group is not None]
        self._copies = {unit: GatheredCopies(model, unit.group) for unit in self._units}
        for unit in self._units:
            unit.group.pre_forward = partial(self._pre_forward, unit, unit.group.pre_forward)
            unit.group.post_forward = partial(self._post_forward, unit, unit.group.post_forward)
            unit.group.post_backward = partial(self._post_backward, unit)
        self.watch: GatherWatch | None = None
        """Check of the order in which ranks gather and reduce; None where nothing need be checked."""
        self._order = self._units[::-1]
        self._is_learned = False
        self.reshards = grid.plan.reshards
        """True if parameters are gathered for each use.

        Otherwise they stay unsharded, also between two uses in a last backward: ranks gather only together,
        and may have other uses.
        """
        self._next = 0
        """Index in the order of the next unit to be reduced."""
        self._passed: list[_Unit] = []
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

    def end_backward(self) -> None:
        """Reduce the remaining units after a step's last backward, and drop zeros that stand for no gradient.

        All ranks call it.

        Raises:
            WanmaError: ranks have gathered different units, or the model has changed a weight in its forward.
        """
        self._is_open = True  # torch's pipelines begin none
        self._end_micro_batch()
        told = self._tell()
        late = [unit for unit, tells in zip(self._units, told, strict=True) if tells.waits]
        for unit in late:
            self._reduce(unit)
        if not self._is_learned or not set(late).issubset(self._order):
            self._learn(told)
        for unit, tells in zip(self._units, told, strict=True):
            unit.end_step(tells.had)
            self._copies[unit].end_step()

    def refuse_changes(self) -> None:
        """Check that no forward has changed a weight.

        Raises:
            JobError: a copy of a weight has been written to.
        """
        for copies in self._copies.values():
            copies.end_step()

    def meet(self) -> None:
        """Wait for the ranks that gather from each other, before other communication; all of them call it.

        Raises:
            AgreedError: a rank is about to gather a unit.
        """
        if self.watch is not None and self._shards is not None:
            self.watch.meets(self._shards)

    def _tell(self) -> list[_Tells]:
        """Sum each rank's facts about each unit over the data ranks; positions are those of the first rank.

        Raises:
            AgreedError: a rank is about to gather a unit.
        """
        self.meet()
        place = {unit: at for at, unit in enumerate(self._passed, start=1)} if self._leads else {}
        self._passed = []
        mine = [
            number
            for unit in self._units
            for number in (float(unit.has_gradient()), float(place.get(unit, 0)), *map(float, unit.has_had()))
        ]
        hashed = self.watch.hash if self.watch is not None else 0
        numbers = torch.tensor([hashed, hashed**2, *mine], dtype=torch.float64, device=self._device)
        if self._shards is not None:
            with self._stopwatch.waiting("data"):
                dist.all_reduce(numbers, group=self._shards)
            # Shards of one replica gather from each other; this is 0 where they have done it alike.
            numbers[0] = numbers[1] * self._shards.size() - numbers[0] ** 2
        if self._replicas is not None:
            with self._stopwatch.waiting("data"):
                dist.all_reduce(numbers, group=self._replicas)
        # In a dry run tensors have no values, and all ranks have what one has.
        differs, _, *told = [0, 0, *mine] if is_fake(numbers) or numbers.is_meta else numbers.tolist()
        if self.watch is not None:
            self.watch.end_step(differs > 0)
        given = iter(told)
        return [
            _Tells(next(given) > 0, int(next(given)), [had > 0 for had in islice(given, len(unit.had))])
            for unit in self._units
        ]

    def _learn(self, told: Sequence[_Tells]) -> None:
        """Adopt the first rank's order in the first step; later append units that were never used before."""
        place = {unit: tells.place for unit, tells in zip(self._units, told, strict=True)}
        used = {unit for unit, tells in zip(self._units, told, strict=True) if tells.waits or any(tells.had)}
        if not self._is_learned:
            self._order.sort(key=lambda unit: place[unit] or len(place) + 1)
            self._order = [unit for unit in self._order if unit in used]
        self._order += [unit for unit in self._units if unit in used and unit not in self._order]
        self._is_learned = True

    def _pre_forward(self, unit: _Unit, forward: Any, *arguments: Any) -> Any:
        # A recomputed forward does not count: torch._C has the only test for one, which FSDP2 uses too.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            unit.forwards += 1
        found = forward(*arguments)
        self._copies[unit].begin()
        return found

    def _post_forward(self, unit: _Unit, forward: Any, *arguments: Any) -> Any:
        self._copies[unit].check_values()
        output = forward(*arguments)
        if not self.reshards or not torch.is_grad_enabled():
            return output
        # A change in place of a view would take FSDP2's hook away, which gathers the unit for its backward.
        return tree_map_only(Tensor, lambda one: one.clone() if one._is_view() else one, output)

    def _post_backward(self, unit: _Unit, *_: Any) -> None:
        """Note that backward has passed a use of `unit`; FSDP2 also calls it at the end, for each unit."""
        unit.backwards += 1
        self._copies[unit].check_values()
        # Without a gradient it is not its backward, but a `torch.autograd.grad` within a forward.
        is_passed = (
            unit.group.reduce_grads
            and not unit.is_reduced
            and unit.backwards >= unit.forwards
            and unit.has_gradient()
        )
        if not is_passed:
            unit.hold(reshard=self.reshards)
            return
        unit.is_passed = True
        self._passed.append(unit)
        if self._next == len(self._order) or self._order[self._next] is not unit:
            unit.hold(reshard=self.reshards)
        while self._next < len(self._order) and self._order[self._next].needs_no_waiting:
            self._reduce_next()

    def _end_micro_batch(self) -> None:
        while self._is_open and self._next < len(self._order):
            self._reduce_next()
        self._next, self._is_open = 0, False
        for unit in self._units:
            unit.end_micro_batch()

    def _reduce_next(self) -> None:
        unit = self._order[self._next]
        self._next += 1
        self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        self.meet()
        unit.reduce()


@dataclass(frozen=True)
class _Tells:
    """Facts about one unit after a step, agreed on by all ranks."""

    waits: bool
    """True if some rank has a gradient that has not been reduced."""
    place: int
    """Position in the order of rank 0's backward, counted from 1; 0: never passed."""
    had: list[bool]
    """Flag by parameter: some rank had a gradient."""


class _Unit:
    """FSDP2 unit and the progress of backward in it."""

    def __init__(self, module: FSDPModule, group: Any) -> None:
        self._module, self.group = module, group
        self._idle, self._finish = group._training_state, group.post_backward
        self.had = [False] * len(group.fsdp_params)
        """Parameters that had a gradient in this step, on this rank."""
        self.end_micro_batch()

    @property
    def needs_no_waiting(self) -> bool:
        return self.is_passed or not any(self._trained())

    def end_micro_batch(self) -> None:
        self.forwards = self.backwards = 0
        """Number of uses of the unit in this micro-batch, and how many of them backward has passed."""
        self.is_passed = self.is_reduced = False

    def has_gradient(self) -> bool:
        """Return whether this rank has a gradient that has not been reduced."""
        return any(_gradient(shard) is not None for shard in self._trained())

    def has_had(self) -> list[bool]:
        """Return a flag by parameter: this rank has had a gradient in this step, reduced or not."""
        shards = zip(self.had, self.group.fsdp_params, strict=True)
        return [had or (_is_trained(shard) and _gradient(shard) is not None) for had, shard in shards]

    def hold(self, *, reshard: bool) -> None:
        """Accumulate unsharded gradients without a reduction."""
        group = self.group
        if not all(hasattr(shard, "_unsharded_param") for shard in group.fsdp_params):
            return  # it has never been used
        were = group.reduce_grads, group.reshard_after_backward
        group.reduce_grads, group.reshard_after_backward = False, reshard and were[1]
        self._finish()
        group.reduce_grads, group.reshard_after_backward = were

    def reduce(self) -> None:
        """Sum the gradients of all trained parameters over the ranks; all ranks of the unit call it."""
        self.is_reduced = True
        if not (trained := list(self._trained())):
            return
        self.had = self.has_had()
        missing = [shard for shard in trained if _gradient(shard) is None]
        if any(not hasattr(shard, "_unsharded_param") for shard in missing):
            self._module.unshard()
        for shard in missing:
            shard.unsharded_param.grad = torch.zeros_like(shard.unsharded_param)
        if any(shard.unsharded_accumulated_grad is not None for shard in trained):
            for shard in trained:  # FSDP2 reduces gradients of one precision
                shard.accumulate_unsharded_grad_if_needed()
                shard.to_accumulated_grad_if_needed()
        reduces, self.group.reduce_grads = self.group.reduce_grads, True
        self._finish()
        self.group.reduce_grads = reduces

    def end_step(self, had: Sequence[bool]) -> None:
        """Remove the zeros of parameters of which no rank had a gradient.

        Args:
            had: flag by parameter, as in `_Tells`.
        """
        if self.group.device.type != "cpu":
            self.group.finalize_backward()  # waits for what was reduced after FSDP2 has
        self.group._training_state = self._idle
        if self.group.reshard_after_backward:
            self.group.reshard()
        for shard, is_real in zip(self.group.fsdp_params, had, strict=True):
            if not is_real:
                shard.sharded_param.grad = None
        self.had = [False] * len(self.had)

    def _trained(self) -> Iterator[Any]:
        return (shard for shard in self.group.fsdp_params if _is_trained(shard))


def _is_trained(shard: Any) -> bool:
    return bool(shard.sharded_param.requires_grad)


def _gradient(shard: Any) -> Tensor | None:
    """Return the gradient of one of FSDP2's parameters that has not been reduced."""
    if (accumulated := shard.unsharded_accumulated_grad) is not None:
        return accumulated  # type: ignore[no-any-return]
    return shard.unsharded_param.grad if hasattr(shard, "_unsharded_param") else None
