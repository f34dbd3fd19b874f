"""Assembly of a checkpoint from the parts that a failed run has left on its nodes (`checkpoint.parts`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from wanma.checkpoint.format.manifest import step_folder_name
from wanma.checkpoint.in_memory.flush import flush_to_disk
from wanma.checkpoint.in_memory.flushed_parts import (
    InMemoryCheckpointKey,
    list_flushed_parts,
    remove_flushed_parts,
)
from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.checkpoint.store.fallback_folder import list_flushed
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import WanmaError, ranks_text
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.observe.sinks.jsonl import restore_steps

ASSEMBLY_TIMEOUT_SECONDS = 600.0
"""Seconds that the nodes may take to write their parts into the run directory."""

RanksByCheckpoint = dict[InMemoryCheckpointKey, list[int]]
"""Ranks whose memory files one node has, by moment."""


def assemble_flushed_parts(folder: Path, worker: WorkerContext, min_step: int) -> list[str]:
    """Make a checkpoint in `folder` of the newest state whose parts are all available; every rank calls it.

    Args:
        folder: folder of the checkpoints.
        worker: context of this rank.
        min_step: step up to which a state is of no use.

    Returns:
        messages for the user, on all ranks.

    Raises:
        WanmaError: the parts exist, and cannot be brought together: the run does not go back unasked.
    """
    leads = worker.rank == worker.node_ranks[0]
    memory_files: dict[InMemoryCheckpointKey, dict[int, str]] = {}
    for part in list_flushed_parts(folder) if leads else []:
        files = {rank: str(path) for rank, path in part.memory_files.items()}
        memory_files.setdefault(part.checkpoint_key, {}).update(files)
    saved = max((step for step, _ in [*list_committed(folder), *list_flushed(folder)]), default=-1)
    local_ranks: RanksByCheckpoint = {key: sorted(files) for key, files in memory_files.items()}
    gathered = all_gather_objects((saved, local_ranks), worker.world_size)
    if not any(ranks for _, ranks in gathered):
        return []
    saved = max(min_step, gathered[0][0])
    messages, assembled_step = [], saved
    for key in sorted(
        {key for _, ranks_by_checkpoint in gathered for key in ranks_by_checkpoint}, key=_newest_first
    ):
        if key.step <= saved:
            break
        writers = _writers(key, [ranks_by_checkpoint for _, ranks_by_checkpoint in gathered])
        missing = [rank for rank in range(key.world_size) if rank not in writers]
        if missing:
            messages.append(
                f"the in-memory checkpoint of step {key.step:,} was written to disk in parts, but no "
                f"node has the parts of {ranks_text(missing)}: it is not used, and the run resumes from "
                "an older checkpoint"
            )
            continue
        worker.supervisor_client.report_progress(0, "merging the parts of a checkpoint")
        share = {rank: memory_files[key][rank] for rank, writer in writers.items() if writer == worker.rank}
        _assemble(folder, key, share, worker)
        assembled_step = key.step
        messages.append(
            f"the parts of the in-memory checkpoint of step {key.step:,} are merged into "
            f"{folder / step_folder_name(assembled_step)}"
        )
        break
    if leads:
        remove_flushed_parts(folder, assembled_step)
    return messages


def _assemble(folder: Path, key: InMemoryCheckpointKey, share: dict[int, str], worker: WorkerContext) -> None:
    problem = None
    try:
        if share:
            deadline = time.monotonic() + ASSEMBLY_TIMEOUT_SECONDS
            flush_to_disk(folder, share, key.world_size, f"{worker.generation}-parts", deadline)
        if worker.rank == 0:
            with contextlib.suppress(OSError):  # the checkpoint is there, whatever becomes of the record
                restore_steps(RunDirectory(worker.run_directory), key.step)
    except WanmaError as error:
        problem = error.message
    problems = [text for text in all_gather_objects(problem, worker.world_size) if text is not None]
    if problems:
        raise WanmaError(
            f"the in-memory checkpoint of step {key.step:,} was written to disk in parts on the nodes, "
            f"and the parts cannot be merged: {'; '.join(dict.fromkeys(problems))}",
            f"free space on {folder} and run the same command again, or start a new run with --fresh, "
            "which keeps the parts",
        )


def _writers(key: InMemoryCheckpointKey, gathered: Sequence[RanksByCheckpoint]) -> dict[int, int]:
    """Return the writer of each saved rank's part: saved rank -> rank of this run on its node."""
    writers: dict[int, int] = {}
    for rank, ranks_by_checkpoint in enumerate(gathered):
        for saved_rank in ranks_by_checkpoint.get(key, []):
            writers.setdefault(saved_rank, rank)
    return writers


def _newest_first(key: InMemoryCheckpointKey) -> tuple[int, int, int]:
    return -key.step, -key.generation, key.world_size
