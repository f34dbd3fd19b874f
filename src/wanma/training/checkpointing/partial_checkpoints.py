"""Assembly of a checkpoint from the parts that a failed run has left on its nodes (`checkpoint.parts`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from wanma.checkpoint.format.manifest import step_name
from wanma.checkpoint.in_memory.flush import rescue
from wanma.checkpoint.in_memory.partial_checkpoints import Moment, parts, ranks_text, remove_parts
from wanma.checkpoint.store.checkpoint_folder import committed
from wanma.checkpoint.store.fallback_folder import rescued
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Worker
from wanma.observe.sinks.jsonl import restore_steps

BRING_HOME_SECONDS = 600.0
"""Seconds that the nodes may take to write their parts into the run directory."""

Value = TypeVar("Value")
Found = dict[Moment, list[int]]
"""Ranks whose memory files one node has, by moment."""


def bring_parts_home(folder: Path, worker: Worker, after: int) -> list[str]:
    """Make a checkpoint in `folder` of the newest state whose parts are all available; every rank calls it.

    Args:
        folder: folder of the checkpoints.
        worker: context of this rank.
        after: step up to which a state is of no use.

    Returns:
        messages for the user, on all ranks.

    Raises:
        WanmaError: the parts exist, and cannot be brought together: the run does not go back unasked.
    """
    leads = worker.rank == worker.node_ranks[0]
    images: dict[Moment, dict[int, str]] = {}
    for part in parts(folder) if leads else []:
        files = {rank: str(path) for rank, path in part.images.items()}
        images.setdefault(part.moment, {}).update(files)
    saved = max((step for step, _ in [*committed(folder), *rescued(folder)]), default=-1)
    mine: Found = {moment: sorted(files) for moment, files in images.items()}
    everyones = _gathered((saved, mine), worker)
    if not any(found for _, found in everyones):
        return []
    saved = max(after, everyones[0][0])
    messages, home = [], saved
    for moment in sorted({one for _, found in everyones for one in found}, key=_newest_first):
        if moment.step <= saved:
            break
        writers = _writers(moment, [found for _, found in everyones])
        missing = [rank for rank in range(moment.world_size) if rank not in writers]
        if missing:
            messages.append(
                f"a copy of step {moment.step:,} was saved in parts, and of {ranks_text(missing)} none is on "
                "these machines: it stays where it is, and the run goes on from what is older"
            )
            continue
        worker.control.progress(0, "bringing the parts of a copy together")
        share = {rank: images[moment][rank] for rank, writer in writers.items() if writer == worker.rank}
        _bring(folder, moment, share, worker)
        home = moment.step
        messages.append(
            f"the copy of step {moment.step:,} that was saved in parts is now {folder / step_name(home)}"
        )
        break
    if leads:
        remove_parts(folder, home)
    return messages


def _bring(folder: Path, moment: Moment, share: dict[int, str], worker: Worker) -> None:
    problem = None
    try:
        if share:
            deadline = time.monotonic() + BRING_HOME_SECONDS
            rescue(folder, share, moment.world_size, f"{worker.generation}-parts", deadline)
        if worker.rank == 0:
            with contextlib.suppress(OSError):  # the checkpoint is there, whatever becomes of the record
                restore_steps(RunDirectory(worker.run_directory), moment.step)
    except WanmaError as error:
        problem = error.message
    problems = [one for one in _gathered(problem, worker) if one is not None]
    if problems:
        raise WanmaError(
            f"the copy of step {moment.step:,} that was saved in parts on the machines of the run cannot be "
            f"brought together: {'; '.join(dict.fromkeys(problems))}",
            f"free space on {folder} and give the same command again, or begin anew with --fresh, which "
            "keeps the parts beside the new ones",
        )


def _writers(moment: Moment, founds: Sequence[Found]) -> dict[int, int]:
    """Return the writer of each saved rank's part: saved rank -> rank of this run on its node."""
    writers: dict[int, int] = {}
    for rank, found in enumerate(founds):
        for one in found.get(moment, []):
            writers.setdefault(one, rank)
    return writers


def _newest_first(moment: Moment) -> tuple[int, int, int]:
    return -moment.step, -moment.generation, moment.world_size


def _gathered(mine: Value, worker: Worker) -> list[Value]:
    everyones: list[Value] = [mine] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(everyones, mine)
    return everyones
