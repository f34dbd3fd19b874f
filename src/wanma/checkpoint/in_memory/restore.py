"""Restoration after the loss of a node: transfer of missing memory files from nodes that have them."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from wanma.checkpoint.in_memory.file_transfer import receive_memory_file, run_transfers, send_memory_file
from wanma.checkpoint.in_memory.memory_file import MemoryFileWriter, read_header
from wanma.checkpoint.in_memory.partner_ring import node_of, node_rank_ranges, plan_restore
from wanma.job.errors import WanmaError
from wanma.job.run.worker import MemoryFilePaths, WorkerContext


def restore_lost_files(
    memory_files: MemoryFilePaths, step: int, worker: WorkerContext
) -> tuple[MemoryFilePaths, list[str], int]:
    """Give every node the memory files of its own ranks at `step`; every rank calls it.

    A missing one is written into its rank's own file that is overwritten last.

    Args:
        memory_files: paths of this rank's memory files.
        step: the step of the in-memory checkpoint.
        worker: this rank's context.

    Returns:
        `memory_files`, where `found` has this node's ranks, wherever their files were; the problems, a
        sentence each; and the number of memory files transferred on all nodes.

    Raises:
        WanmaError: another rank is gone, or this rank's file cannot be opened.
    """
    local_world_sizes = worker.local_world_sizes
    if len(local_world_sizes) < 2:
        return memory_files, [], 0
    local_paths = {
        owner: path
        for owner, paths in memory_files.restore_paths.items()
        for path in paths
        if _is_complete_file_of(path, owner, step)
    }
    owners_by_rank = [(sorted(local_paths), memory_files.own_paths[1])] * worker.world_size
    dist.all_gather_object(owners_by_rank, (sorted(local_paths), memory_files.own_paths[1]))
    available_owners = {
        node: set(owners_by_rank[span.start][0])
        for node, span in enumerate(node_rank_ranges(local_world_sizes))
    }
    transfers, missing = plan_restore(available_owners, local_world_sizes)
    problems = [_lost_text(owner, step, local_world_sizes) for owner in missing]
    own_paths = {
        owner: paths for owner, paths in memory_files.restore_paths.items() if owner in worker.node_ranks
    }
    if not transfers or missing:
        return replace(memory_files, restore_paths=own_paths), problems, 0

    file = None
    steps = []
    for transfer in transfers:
        if transfer.source == worker.rank:
            steps.append(send_memory_file(local_paths[transfer.owner], transfer.owner, transfer.owner))
        if transfer.owner == worker.rank:
            try:
                file = MemoryFileWriter(memory_files.own_paths[1])
            except OSError as error:
                raise WanmaError(
                    f"rank {worker.rank} cannot open its memory file for in-memory checkpoints: {error}"
                ) from error
            steps.append(receive_memory_file(file, transfer.owner, transfer.source))
    try:
        problems = run_transfers(steps)
    except RuntimeError as error:
        raise WanmaError(
            f"an in-memory checkpoint could not be received from another node: {error}"
        ) from error
    finally:
        if file is not None:
            file.close()
    dist.barrier()  # files received by other ranks of this node are complete from here on
    received_paths = {
        transfer.owner: (owners_by_rank[transfer.owner][1],)
        for transfer in transfers
        if transfer.owner in worker.node_ranks
    }
    return replace(memory_files, restore_paths={**own_paths, **received_paths}), problems, len(transfers)


def _is_complete_file_of(path: str, owner: int, step: int) -> bool:
    try:
        head = read_header(path)
    except OSError:
        return False
    return head is not None and head.is_complete and (head.rank, head.step) == (owner, step)


def _lost_text(owner: int, step: int, local_world_sizes: tuple[int, ...]) -> str:
    node = node_of(owner, local_world_sizes)
    partner = (node + 1) % len(local_world_sizes)
    return (
        f"the memory file of step {step}, rank {owner}, is missing on node {node} and on its "
        f"partner, node {partner}"
    )
