"""Position of a run in its data, which are the same on all ranks; streams are advanced to it."""

from __future__ import annotations

from wanma.collectives.object_all_gather import all_gather_objects
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.map_dataset import UserDataset
from wanma.data.datasets.stream_dataset import StreamDataset
from wanma.job.errors import AllRanksError
from wanma.training.checks.repeated_reads import refuse_unlike_reads
from wanma.training.run.trainer import Trainer


def seek_data(trainer: Trainer, data: BatchedDataset) -> None:
    """Check that all ranks have the same data at each read, and advance a stream to the run's position.

    Every rank calls it.

    Raises:
        AllRanksError: a rank has other data, or the same in another order.
        JobError: a sample is another one when it is read again.
    """
    rank = _first_unlike_rank(data, trainer.plan.world_size)
    if not isinstance(data, StreamDataset):
        if rank is not None:
            raise AllRanksError(
                f"data: rank {rank} has other data than rank 0",
                "give all nodes the same files, and all ranks the same dataset (no split by RANK, no draw "
                "without a seed): wanma selects each rank's share",
            )
        section = trainer.job.data
        if isinstance(data, UserDataset) and section.check_reads:
            refuse_unlike_reads(data, 0 if data.reads_by_processes else section.worker_count)
        return
    if rank is not None:
        raise AllRanksError(
            f"data: {data.reader.name} gives other samples on rank {rank} than on rank 0",
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


def _first_unlike_rank(data: BatchedDataset, world_size: int) -> int | None:
    """Return the first rank whose data or order differ from those of rank 0; None: all have the same."""
    found = all_gather_objects(f"{data.fingerprint} {data.order_identity}", world_size)
    return next((rank for rank, one in enumerate(found) if one != found[0]), None)
