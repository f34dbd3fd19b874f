"""Position of a run in a stream: the same on all ranks, kept in checkpoints."""

from __future__ import annotations

import torch.distributed as dist

from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.stream_dataset import StreamDataset
from wanma.job.errors import AllRanksError
from wanma.training.run.trainer import Trainer


def seek_stream(trainer: Trainer, data: BatchedDataset) -> None:
    """Advance a stream to the run's position; nothing for data with sample indices. Every rank calls it.

    Raises:
        AllRanksError: the stream gives other samples on other ranks.
    """
    if not isinstance(data, StreamDataset):
        return
    prints = [data.fingerprint] * trainer.plan.world_size
    if trainer.plan.world_size > 1:
        dist.all_gather_object(prints, data.fingerprint)
    if offset := next((rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]), None):
        raise AllRanksError(
            f"data: {data.reader.name} gives other samples on rank {offset} than on rank 0",
            "yield all samples on every rank (no split by RANK or node): wanma selects each rank's share",
        )
    state, progress = trainer.state, trainer.worker.supervisor_client.report_progress
    data.reader.every_steps = trainer.job.checkpoint.every_steps
    data.reader.restore_state(state.stream_values)
    state.stream_reader = data.reader
    data.reader.seek(
        state.samples,
        lambda position: progress(
            state.step, f"reading the stream: sample {position:,} of {state.samples:,}"
        ),
    )
