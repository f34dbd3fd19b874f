"""Data set around a user's iterable dataset (a stream), in the stream's own order."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from wanma.data.batch import Batch
from wanma.data.datasets.load_times import USER_DATASET_PARTS, LoadTimes
from wanma.data.datasets.map_dataset import UserDataset
from wanma.data.datasets.seeded_draws import SeededDraws
from wanma.data.datasets.stream_reader import StreamReader
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

_MIN_CACHED_SAMPLES = 64
"""Minimum number of samples that are kept for repeated reads."""


class StreamDataset(UserDataset):
    """Data set of a stream, with an optional dataset for validation."""

    can_share_reading = False

    def __init__(
        self, dataset: Any, validation: Any, section: DataSection, train: TrainSection, total_samples: int
    ) -> None:
        """Open the stream.

        Raises:
            JobError: the dataset yields batches, or can be read only once; or a key needs random access.
        """
        if section.worker_count > 1:
            raise JobError(
                f"data.workers = {section.workers} is not supported: {type(dataset).__name__} is an iterable "
                "dataset",
                "remove data.workers, or use a map-style dataset, which can be read by several threads",
            )
        if section.shuffle == "block":
            raise JobError(
                f"data.shuffle = 'block' is not supported: {type(dataset).__name__} is an iterable dataset, "
                "which has an order of its own",
                "remove data.shuffle, or use a map-style dataset",
            )
        if section.worker_processes:
            raise JobError(
                f"data.worker_processes is not supported: {type(dataset).__name__} is an iterable dataset",
                "remove data.worker_processes, or use a map-style dataset",
            )
        self._reported: set[str] = set()
        self.seed = train.seed
        self._train, self._validation, self._total = dataset, validation, total_samples
        self.load_times = LoadTimes(USER_DATASET_PARTS)
        self._draws = SeededDraws(train.seed, serialize_access=True)
        self.reader = StreamReader(
            dataset, self._draws, train, max(_MIN_CACHED_SAMPLES, 2 * train.global_batch)
        )
        self.train_samples = total_samples  # the samples that the run reads: an epoch's number is unknown
        self.validation_samples = len(validation) if validation is not None else 0

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]  # it reads samples, and not every use wants it
        return self.reader.fingerprint()

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.input_kind,
            "dataset": type(self._train).__qualname__,
            "validation_samples": self.validation_samples,
        }

    def sample_name(self, sample_index: int) -> str:
        return f"sample {sample_index} of {type(self._train).__name__}"

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        with self.load_times.measure("dataset"):
            samples = self.reader.read_samples(sample_indices.tolist())
        with self.load_times.measure("collate"):
            return self._collate(samples, self.reader.name, sample_indices, sample_indices)
