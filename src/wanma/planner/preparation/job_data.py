"""Data of a job, opened with the ids that have rows of tables in the checkpoint that the job starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.job import Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wanma.data.datasets.dataset import BatchedDataset


def open_job_dataset(job: Job, dataset: Any = None) -> BatchedDataset:
    """Open the data of a job, as `open_dataset`.

    Args:
        job: the job.
        dataset: a user's dataset, or a pair (training, validation); replaces the job's.

    Raises:
        JobError, WanmaError: as `open_dataset`; and the ids of tables do not fit to those of
            `checkpoint.start_from`, or cannot be read there.
    """
    has_interactions = dataset is None and job.data.has_interactions
    return open_dataset(job.data, job.train, dataset, _known_ids(job) if has_interactions else {})


def _known_ids(job: Job) -> dict[str, NDArray[np.int64]]:
    """Return by table `AdmittedIds.table` of the checkpoint to start from."""
    from wanma.checkpoint.load.reader import CheckpointReader
    from wanma.data.interactions.admitted_ids import TABLE_IDS

    start, names = job.checkpoint.start_from, job.data.columns.table_names
    if start is None:
        return {}
    admitting = [name for name in names if job.data.interactions.admit_rows_of(name) is not None]
    try:
        reader = CheckpointReader(Path(start).expanduser())
    except WanmaError as error:
        if not admitting:  # a run that has begun no longer needs it, others are refused when they begin
            return {}
        raise JobError(
            f"checkpoint.start_from = '{start}': the ids of table '{admitting[0]}' cannot be read: "
            f"{error.message}",
            "set it to a complete checkpoint; one that admits ids (data.interactions.admit_rows) is needed "
            "as long as the run goes on",
        ) from error
    tables = {name.removesuffix(".weight").rpartition(".tables.of_")[2] for name in reader.tensors}
    for name in names:
        has_ids = TABLE_IDS + name in reader.tensors
        if name in tables and has_ids != (name in admitting):
            owner = "ids that the run gave rows to" if has_ids else "ids of the same numbers"
            raise JobError(
                f"checkpoint.start_from = '{start}': the rows of table '{name}' there belong to {owner}, and "
                "in this job to others",
                f"{'set' if has_ids else 'unset'} data.interactions.admit_rows for '{name}', as in that run",
            )
    return {name: reader.read(TABLE_IDS + name).numpy() for name in admitting if name in tables}
