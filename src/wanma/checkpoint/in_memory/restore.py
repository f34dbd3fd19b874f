"""Restoration after the loss of a node: transfer of missing memory files from nodes that have them."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from wanma.checkpoint.in_memory.file_transfer import converse, receive_image, send_image
from wanma.checkpoint.in_memory.memory_file import ImageFile, read_head
from wanma.checkpoint.in_memory.partner_ring import node_of, node_spans, plan_fetches
from wanma.job.errors import WanmaError
from wanma.job.run.worker import Images, Worker


def fetch(images: Images, step: int, worker: Worker) -> tuple[Images, list[str], int]:
    """Give every node the memory files of its own ranks at `step`; every rank calls it.

    A missing one is written into its rank's own file that is overwritten last.

    Args:
        images: paths of this rank's memory files.
        step: the step of the in-memory checkpoint.
        worker: this rank's context.

    Returns:
        `images`, where `found` has this node's ranks, wherever their files were; the problems, a sentence
        each; and the number of memory files transferred on all nodes.

    Raises:
        WanmaError: another rank is gone, or this rank's file cannot be opened.
    """
    by_node = worker.ranks_by_node
    if len(by_node) < 2:
        return images, [], 0
    here = {
        owner: path for owner, paths in images.found.items() for path in paths if _is_of(path, owner, step)
    }
    told = [(sorted(here), images.mine[1])] * worker.world_size
    dist.all_gather_object(told, (sorted(here), images.mine[1]))
    held = {node: set(told[span.start][0]) for node, span in enumerate(node_spans(by_node))}
    fetches, lost = plan_fetches(held, by_node)
    problems = [_lost_text(owner, step, by_node) for owner in lost]
    own = {owner: paths for owner, paths in images.found.items() if owner in worker.node_ranks}
    if not fetches or lost:
        return replace(images, found=own), problems, 0

    file = None
    talks = []
    for one in fetches:
        if one.source == worker.rank:
            talks.append(send_image(here[one.owner], one.owner, one.owner))
        if one.owner == worker.rank:
            try:
                file = ImageFile(images.mine[1])
            except OSError as error:
                raise WanmaError(
                    f"rank {worker.rank} cannot open the memory for snapshots: {error}"
                ) from error
            talks.append(receive_image(file, one.owner, one.source))
    try:
        problems = converse(talks)
    except RuntimeError as error:
        raise WanmaError(f"a snapshot could not be fetched from another node: {error}") from error
    finally:
        if file is not None:
            file.close()
    dist.barrier()  # files received by other ranks of this node are complete from here on
    fetched = {one.owner: (told[one.owner][1],) for one in fetches if one.owner in worker.node_ranks}
    return replace(images, found={**own, **fetched}), problems, len(fetches)


def _is_of(path: str, owner: int, step: int) -> bool:
    try:
        head = read_head(path)
    except OSError:
        return False
    return head is not None and head.complete and (head.rank, head.step) == (owner, step)


def _lost_text(owner: int, step: int, by_node: tuple[int, ...]) -> str:
    node = node_of(owner, by_node)
    return (
        f"nobody has rank {owner}'s snapshot of step {step}: node {node} has lost it, and its partner, "
        f"node {(node + 1) % len(by_node)}, has no copy"
    )
