"""Mixture of users' map-style datasets: several, each with a weight, as one dataset in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wanma.data.datasets.fingerprint import dataset_fingerprint, hash_texts
from wanma.data.datasets.joined_datasets import JoinedDatasets
from wanma.data.datasets.map_dataset import UserDataset, call_dataset_factory, check_dataset
from wanma.data.datasets.stream_reader import is_stream
from wanma.data.sampling.holdout import Holdout
from wanma.data.sampling.mixture_schedule import SourceWeight
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.data.tables.table_dataset import open_tables, process_count
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection


@dataclass(frozen=True)
class DatasetSource:
    """One dataset of a mixture."""

    name: str
    weight: SourceWeight
    train: Any
    validation: Any
    """Dataset for validation; None: a share of `train`."""


@dataclass(frozen=True)
class HeldOutRows:
    """Rows of a dataset that are kept for validation, as a dataset."""

    dataset: Any
    holdout: Holdout

    def __len__(self) -> int:
        return self.holdout.validation_rows

    def __getitem__(self, number: int) -> Any:
        return self.dataset[int(self.holdout.validation_row(np.array([number]))[0])]


class UserDatasetMixture(UserDataset):
    """Data set that reads several of a user's datasets in the order of a mixture."""

    def __init__(
        self, sources: Sequence[DatasetSource], section: DataSection, seed: int, total_samples: int
    ) -> None:
        self._sources = sources
        self._holdouts = [
            Holdout.of_share(len(one.train), 0 if one.validation is not None else section.validation_fraction)
            for one in sources
        ]
        for one, holdout in zip(sources, self._holdouts, strict=True):
            if holdout.train_rows < 1:
                raise JobError(
                    f"data.sources: the dataset of '{one.name}' has {holdout.rows} samples, too few for a "
                    "validation split",
                    "add samples, or set data.validation_fraction=0",
                )
        names = [one.name for one in sources]
        held_out = [
            HeldOutRows(one.train, holdout) if one.validation is None else one.validation
            for one, holdout in zip(sources, self._holdouts, strict=True)
        ]
        self._joined = JoinedDatasets(names, [one.train for one in sources])
        super().__init__(
            self._joined,
            JoinedDatasets(names, held_out),
            section,
            seed,
            total_samples,
            worker_processes=process_count(section, [one.train for one in sources]),
        )
        sizes = [holdout.train_rows for holdout in self._holdouts]
        self.train_samples = sum(sizes)
        self.order = SampleOrder.of_mixture(
            sizes, [one.weight for one in sources], Shuffle.of_job(section), seed
        )

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]  # it reads samples, and not every use wants it
        parts = [part for one in self._sources for part in (one.train, one.validation) if part is not None]
        return hash_texts(*(dataset_fingerprint(part, self._read_item) for part in parts))

    def describe(self) -> dict[str, Any]:
        assert self.order is not None
        shares, epochs = self.order.shares(self._total), self.order.epochs(self._total)
        return {
            "kind": self.input_kind,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "sources": [
                {
                    "name": one.name,
                    "share": share,
                    "dataset": type(one.train).__qualname__,
                    "train_samples": holdout.train_rows,
                    "epochs": epoch,
                }
                for one, holdout, share, epoch in zip(
                    self._sources, self._holdouts, shares, epochs, strict=True
                )
            ],
        }

    def _train_rows(self, sample_indices: IndexArray) -> IndexArray:
        """Return the row of each sample index in the joined datasets of training."""
        assert self.order is not None
        sources, rows = self.order.locate(sample_indices)
        for source in np.unique(sources).tolist():
            mask = sources == source
            own = rows[mask]
            if self._sources[source].validation is None:
                ascending = self.order.shuffle.reads_neighbours
                own = self._holdouts[source].train_row(own, ascending=ascending)
            rows[mask] = own + self._joined.starts[source]
        return rows


def open_dataset_mixture(section: DataSection, seed: int, total_samples: int) -> UserDatasetMixture:
    """Open the datasets of `data.sources`, each made by its factory or a stored table.

    Raises:
        JobError: a factory fails, or makes no map-style dataset.
    """
    sources = []
    tables = open_tables(section)
    for number, one in enumerate(section.sources):
        if one.factory is None:
            sources.append(DatasetSource(one.name, one.weight, tables[number], None))
            continue
        made = call_dataset_factory(one.factory, one.arguments, f"data.sources[{number}]")
        train, validation = check_dataset(made)
        if is_stream(train) or (validation is not None and is_stream(validation)):
            raise JobError(
                f"data.sources[{number}].factory = '{one.factory}' makes an iterable dataset, whose order is "
                "its own; only map-style datasets mix",
                "implement `__len__` and `__getitem__`",
            )
        sources.append(DatasetSource(one.name, one.weight, train, validation))
    data = UserDatasetMixture(sources, section, seed, total_samples)
    data.take_tables(tables.values())
    return data
