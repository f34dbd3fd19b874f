"""Check that all ranks gather and reduce FSDP2's units in the same order.

FSDP2 gathers a unit when the model first uses it. Of ranks that use different units at one time, or a
different number of them, one would compute with parameters of another unit, or wait forever. So each rank
tells the others what it is about to gather or to reduce, and all refuse to go on where that differs. On GPUs,
where the host does not wait for messages, it does so in the first steps. Later the ranks compare the order of
their gathers at the end of a step, before its gradients are applied.

Where parameters stay unsharded once they are gathered, nothing need be refused: all are gathered, in one
order, before the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from wanma.collectives.fsdp.point_to_point_collectives import PointToPointAllGather
from wanma.job.errors import AllRanksError
from wanma.job.plan.plan import Plan
from wanma.parallel.data_parallel.shared_memory_weights import gathers_from_other_ranks
from wanma.parallel.parameters.fsdp_units import fsdp_units
from wanma.torch_internals.distributed import has_backend_for
from wanma.torch_internals.fake_tensors import is_fake
from wanma.torch_internals.fsdp import AllGather, all_gather_of, parameter_group

_TAG = 2
"""Tag of the messages that announce a gather: no other message has it."""
_CHECKED_STEPS = 3
_CPU = torch.device("cpu")
"""Device of the messages: process groups of GPUs may have a backend for it or not."""
_HASHES = 1 << 16
"""Number of hash values: few enough that sums of squares over the ranks are exact in fp64."""


def install_gather_order_check(
    model: nn.Module, plan: Plan, *, stays_unsharded: bool
) -> GatherOrderCheck | None:
    """Watch over the units of `model`, after `share_weights_in_memory`.

    Args:
        stays_unsharded: true where parameters stay unsharded from their first use in a step to its last.

    Returns:
        None where only the model as one unit is gathered from other ranks, or all of it in one order.
    """
    if plan.device == "cpu" and stays_unsharded:
        model.register_forward_pre_hook(
            _UnshardAll([unit for unit in fsdp_units(model) if parameter_group(unit)])
        )
        return None
    names = {id(module): name for name, module in model.named_modules()}
    gathered = [
        (unit, group)
        for unit in fsdp_units(model)
        if (group := parameter_group(unit)) is not None and gathers_from_other_ranks(group)
    ]
    if {id(unit) for unit, _ in gathered} <= {id(model)}:
        return None
    watch = GatherOrderCheck(plan, [names[id(unit)] or "the rest of the model" for unit, _ in gathered])
    for number, (unit, group) in enumerate(gathered):
        unit.set_custom_all_gather(_CheckedGather(watch, number, all_gather_of(group)))
    return watch


class GatherOrderCheck:
    """Comparison of this rank's gathers and reductions with those of the others.

    Args:
        plan: plan of the run.
        names: names of the units.
    """

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self._plan, self._names = plan, names
        self.steps = 0
        """Number of completed steps."""
        self.hash = 0
        """Hash of the order of gathers since the last step ended."""

    def announce_gather(self, unit_index: int, group: dist.ProcessGroup) -> Callable[[], None]:
        """Announce the gather of unit `unit_index` to the ranks of `group`.

        Returns:
            function to call before one waits for the gather. It raises an `AllRanksError` where ranks are
            about
                to do something else.
        """
        self.hash = (self.hash * 31 + unit_index + 1) % _HASHES
        return self._compare(unit_index, group)

    def announce_other_communication(self, group: dist.ProcessGroup) -> None:
        """Announce that the ranks of `group` communicate in another way next, such as to reduce gradients.

        Raises:
            AllRanksError: a rank is about to gather a unit.
        """
        self._compare(len(self._names), group)()

    def end_step(self, has_mismatch: bool) -> None:
        """Begin the next step, after the ranks' hashes have been compared.

        Raises:
            AllRanksError: their gathers came in different orders.
        """
        self.steps += 1
        self.hash = 0
        if has_mismatch:
            raise self._order_error("ranks gathered parts of the model in different orders")

    def _compare(self, number: int, group: dist.ProcessGroup) -> Callable[[], None]:
        if self._plan.device != "cpu" and (self.steps >= _CHECKED_STEPS or not has_backend_for(group, _CPU)):
            return _no_check
        own_number, rank = torch.tensor([number]), group.rank()
        unit_numbers = [
            own_number if peer == rank else torch.empty_like(own_number) for peer in range(group.size())
        ]
        other_ranks = [peer for peer in range(group.size()) if peer != rank]
        works = [group.recv([unit_numbers[peer]], peer, _TAG) for peer in other_ranks]
        works += [group.send([own_number], peer, _TAG) for peer in other_ranks]

        def check() -> None:
            for work in works:
                work.wait()
            if is_fake(own_number):  # a dry run has no other ranks
                return
            numbers = [int(unit_number) for unit_number in unit_numbers]
            other_rank = next((peer for peer in other_ranks if numbers[peer] != number), None)
            if other_rank is None:
                return
            first, second = sorted((rank, other_rank))
            ranks = dist.get_process_group_ranks(group)
            raise self._order_error(
                f"rank {ranks[first]} {self._describe_action(numbers[first])} while "
                f"rank {ranks[second]} {self._describe_action(numbers[second])}"
            )

        return check

    def _describe_action(self, number: int) -> str:
        return f"gathers {self._names[number]}" if number < len(self._names) else "has finished its gathers"

    def _order_error(self, problem: str) -> AllRanksError:
        alternative = "gradients" if self._plan.device == "cpu" else "none"
        return AllRanksError(
            f"parallel.shard = '{self._plan.shard}': {problem}, but a gather needs all ranks",
            f"set parallel.shard = '{alternative}', or use the same modules in the same order for every "
            "batch: "
            "the modules that the model uses depend on the samples",
        )


class _CheckedGather(AllGather):
    """Gather of one unit that announces itself to `order_check`."""

    def __init__(self, order_check: GatherOrderCheck, number: int, inner: AllGather) -> None:
        self._order_check, self._number, self._inner = order_check, number, inner

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        check = self._order_check.announce_gather(self._number, group)
        # Before the first step a refusal may be caught: nothing may be left under way by then.
        if (
            not isinstance(self._inner, PointToPointAllGather)
            or not self._inner.prefetch
            or self._order_check.steps == 0
        ):
            check()
            return self._inner(output_tensor, input_tensor, group, async_op)
        work = self._inner(output_tensor, input_tensor, group, async_op)
        assert work is not None
        return _CheckedWork(check, work)


class _CheckedWork(dist.Work):
    """Gather in progress that is checked against the other ranks' announcements before it is waited for."""

    def __init__(self, check: Callable[[], None], work: dist.Work) -> None:
        super().__init__()
        self._check, self._work = check, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        check, self._check = self._check, _no_check
        check()
        return self._work.wait(timeout) if timeout is not None else self._work.wait()


def _no_check() -> None:
    """No-op check of a gather that needs none."""


class _UnshardAll:
    """Forward hook that unshards all units; they stay so."""

    def __init__(self, gathered_units: Sequence[FSDPModule]) -> None:
        self._gathered_units = gathered_units

    def __call__(self, *_: Any) -> None:
        for unit in self._gathered_units:
            if (group := parameter_group(unit)) is not None and group.is_sharded:
                unit.unshard()
