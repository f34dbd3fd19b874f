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

from wanma.checkpoint.inspection.replica_hashes import (
    ReplicaHasher,
    ReplicaHashes,
    ReplicaMismatch,
    find_mismatched_groups,
    find_mismatches,
)
from wanma.job.errors import AllRanksError, first_names
from wanma.job.run.worker import WorkerContext
from wanma.training.checkpointing.training_state import TrainingState

_MAX_NAMES_IN_MESSAGE = 3
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
        is_enabled: true if the job wants the check; the same on all ranks.
    """

    def __init__(
        self,
        state: TrainingState,
        worker: WorkerContext,
        *,
        replicas: Sequence[int],
        device: torch.device,
        is_enabled: bool,
    ) -> None:
        self._state, self._worker, self._device = state, worker, device
        self._replica_hasher = ReplicaHasher(replicas)
        # Only what gradients change is the same on all: a module's buffers are its author's affair.
        self._excluded_names = frozenset(f"model.{name}" for name, _ in state.parallel_model.named_buffers())
        self._is_enabled = is_enabled and worker.world_size > 1
        self._compared_step: int | None = None

    def check(self) -> None:
        """Compare the state, once after a step; every rank calls it after the same steps.

        Raises:
            AllRanksError: ranks differ; the same on all ranks.
        """
        step = self._state.step
        if not self._is_enabled or step == self._compared_step:
            return
        tensors = {
            name: tensor
            for name, tensor in self._state.checkpoint_tensors().items()
            if name not in self._excluded_names
        }
        groups = self._replica_hasher.hash_groups(tensors)
        if mismatched := find_mismatched_groups(self._gather_digests(groups)):
            raise replica_mismatch_error(step, *self._gather_differences(groups, mismatched))
        self._compared_step = step

    def _gather_digests(self, groups: Sequence[ReplicaHashes]) -> list[list[int]]:
        """Return every rank's groups and digests, as `find_mismatched_groups` takes them."""
        assert len(groups) <= _GROUPS, "one set of ranks for each set of mesh dimensions without a split"
        row = [number for group in groups for number in (group.group_hash, group.content_hash)]
        local_row = torch.tensor(row + [0] * (2 * _GROUPS - len(row)), dtype=torch.int64, device=self._device)
        gathered = local_row.new_empty(self._worker.world_size, len(local_row))
        dist.all_gather(list(gathered.unbind()), local_row)
        rows: list[list[int]] = gathered.tolist()
        return rows

    def _gather_differences(
        self, groups: Iterable[ReplicaHashes], mismatched: Collection[int]
    ) -> tuple[list[ReplicaMismatch], dict[int, str]]:
        """Return the differences within the groups `mismatched`, equal on all ranks, and each rank's host."""
        local_hashes = {
            group.group_hash: dict(group.hashes) for group in groups if group.group_hash in mismatched
        }
        gathered: list[tuple[str, dict[int, dict[str, int]]]] = [("", {})] * self._worker.world_size
        dist.all_gather_object(gathered, (socket.gethostname(), local_hashes))
        differences = [
            difference
            for number in sorted(mismatched)
            for difference in find_mismatches(
                (rank, hashes_by_group[number])
                for rank, (_, hashes_by_group) in enumerate(gathered)
                if number in hashes_by_group
            )
        ]
        return differences, {rank: host for rank, (host, _) in enumerate(gathered)}


def replica_mismatch_error(
    step: int, differences: Sequence[ReplicaMismatch], hosts: dict[int, str]
) -> AllRanksError:
    """Return the error for replicas that differ after `step`.

    Args:
        step: optimizer steps done.
        differences: tensors that differ, with the ranks that hold each value.
        hosts: host names by rank.
    """

    def named(ranks: Iterable[int]) -> str:
        return ", ".join(f"{rank} ({hosts[rank]})" for rank in sorted(ranks))

    outliers = sorted({rank for difference in differences for rank in difference.outlier_ranks})
    undecided = {
        rank
        for mismatch in differences
        if not mismatch.outlier_ranks
        for ranks in mismatch.ranks_by_content
        for rank in ranks
    }
    names = first_names([mismatch.name for mismatch in differences], _MAX_NAMES_IN_MESSAGE)
    values = f"their values of {names} differ"
    if outliers:
        subject = f"rank{'s' if len(outliers) > 1 else ''} {named(outliers)}"
        verb = "differ" if len(outliers) > 1 else "differs"
        text = f"step {step}: {subject} {verb} from most other replicas: {values}"
    else:
        text = (
            f"step {step}: ranks {named(undecided)} are replicas, but {values}; no majority shows which "
            "rank is wrong"
        )
    return AllRanksError(
        text,
        "possible hardware fault, or arithmetic that differs between devices: test the node, or set "
        "checkpoint.compare_replicas = false to skip this check",
        outlier_ranks=tuple(f"rank {rank} ({hosts[rank]})" for rank in outliers),
    )
