"""Comparison of replicated state between ranks before each checkpoint: it finds silent data corruption.

Ranks that hold the same weights and optimizer state compare them before a checkpoint is made, in memory or on
disk. So every checkpoint is of ranks that agreed, and a run that goes back to the newest one drops all
effects of a flipped bit since then: its gradients reached the other ranks, too.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from wanma.checkpoint.inspection.replica_check import Difference, Group, SharedParts, differences, disagreeing
from wanma.job.errors import AgreedError
from wanma.job.run.worker import Worker
from wanma.training.checkpointing.training_state import TrainingState

_NAMED = 3
"""Largest number of tensors named in one message."""
_GROUPS = 32
"""Largest number of groups of equal state that one rank can be in; each takes 16 bytes of its message."""


class ReplicaCheck:
    """Replica check of one rank.

    Args:
        state: training state.
        worker: context of this rank.
        replicas: ranks of this pipeline stage: they hold the same plain tensors.
        device: device of the tensors that collectives exchange.
        is_on: true if the job wants the check; the same on all ranks.
    """

    def __init__(
        self,
        state: TrainingState,
        worker: Worker,
        *,
        replicas: Sequence[int],
        device: torch.device,
        is_on: bool,
    ) -> None:
        self._state, self._worker, self._device = state, worker, device
        self._parts = SharedParts(replicas)
        # Only what gradients change is the same on all: a module's buffers are its author's affair.
        self._left_out = frozenset(f"model.{name}" for name, _ in state.parallel.named_buffers())
        self._is_on = is_on and worker.world_size > 1
        self._compared_step: int | None = None

    def compare(self) -> None:
        """Compare the state, once after a step; every rank calls it after the same steps.

        Raises:
            AgreedError: ranks differ; the same on all ranks.
        """
        step = self._state.step
        if not self._is_on or step == self._compared_step:
            return
        tensors = {name: one for name, one in self._state.tensors().items() if name not in self._left_out}
        groups = self._parts.groups(tensors)
        if wrong := disagreeing(self._exchanged(groups)):
            raise disagreement(step, *self._told(groups, wrong))
        self._compared_step = step

    def _exchanged(self, groups: Sequence[Group]) -> list[list[int]]:
        """Return every rank's groups and digests, as `disagreeing` takes them."""
        assert len(groups) <= _GROUPS, "a set of ranks for each set of axes that is not split"
        row = [number for group in groups for number in (group.number, group.digest)]
        mine = torch.tensor(row + [0] * (2 * _GROUPS - len(row)), dtype=torch.int64, device=self._device)
        everyones = mine.new_empty(self._worker.world_size, len(mine))
        dist.all_gather(list(everyones.unbind()), mine)
        rows: list[list[int]] = everyones.tolist()
        return rows

    def _told(
        self, groups: Iterable[Group], wrong: Collection[int]
    ) -> tuple[list[Difference], dict[int, str]]:
        """Return the differences within the groups `wrong`, the same on all ranks, and every rank's host."""
        mine = {group.number: dict(group.hashes) for group in groups if group.number in wrong}
        everyones: list[tuple[str, dict[int, dict[str, int]]]] = [("", {})] * self._worker.world_size
        dist.all_gather_object(everyones, (socket.gethostname(), mine))
        found = [
            difference
            for number in sorted(wrong)
            for difference in differences(
                (rank, of_groups[number])
                for rank, (_, of_groups) in enumerate(everyones)
                if number in of_groups
            )
        ]
        return found, {rank: host for rank, (host, _) in enumerate(everyones)}


def disagreement(step: int, found: Sequence[Difference], hosts: dict[int, str]) -> AgreedError:
    """Return the error for replicas that differ after `step`.

    Args:
        step: optimizer steps done.
        found: tensors that differ, with the ranks that hold each value.
        hosts: host names by rank.
    """

    def named(ranks: Iterable[int]) -> str:
        return ", ".join(f"{rank} ({hosts[rank]})" for rank in sorted(ranks))

    odd = sorted({rank for difference in found for rank in difference.odd})
    undecided = {rank for one in found if not one.odd for ranks in one.holders for rank in ranks}
    names = ", ".join(one.name for one in found[:_NAMED])
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    what = f"their copies of {names}{more} are not the same"
    if odd:
        who = f"rank{'s' if len(odd) > 1 else ''} {named(odd)}"
        text = f"step {step}: {who} differ{'' if len(odd) > 1 else 's'} from most other replicas: {what}"
    else:
        text = (
            f"step {step}: ranks {named(undecided)} should hold the same, but {what}; "
            "which of them is wrong, no majority can tell"
        )
    return AgreedError(
        text,
        "memory or a processor has erred, or a device computes otherwise than its peers: test the machine; "
        "checkpoint.compare_replicas = false leaves the comparison out",
        odd=tuple(f"rank {rank} ({hosts[rank]})" for rank in odd),
    )
