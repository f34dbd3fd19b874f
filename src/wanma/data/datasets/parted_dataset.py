"""Data set that lies in parts on nodes: one order over all parts, each read where it lies.

A part is what one entry of `data.text` or `data.images` finds on a node. Parts are known by a hash of their
content, so that the order does not depend on the node that has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.handover.part_rows import RowClients
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import AllRanksError
from wanma.job.plan.plan import Plan

_REQUEST_THREADS = 16
_FORECAST_STEPS = 16
_LOADER_THREADS = 3
"""Steps loaded at once, so that some are under way between nodes while another is joined."""


@dataclass(frozen=True)
class DataPart:
    """Part of the data, as all ranks know it."""

    fingerprint: str
    train_samples: int
    validation_samples: int
    entry: str
    """Entry of the job that finds it."""
    host: str
    form: str
    """Form of its samples, which all parts have alike."""
    classes: int | None = None
    """Number of classes of its own labels."""
    bad_data_note: str = ""
    bad_file_count: int = 0


class PartedDataset(BatchedDataset):
    """Data set of parts, of which this node has some.

    Args:
        local: data sets of this node's parts, each with its entry; at least one.
        shuffle: order of the rows of all parts in an epoch, or of each part.
        is_interleaved: true if each part is in an order of its own, in proportion to its size; then the
            samples of a step are computed, as far as possible, where they lie.
    """

    def __init__(
        self,
        local: Sequence[tuple[str, BatchedDataset]],
        *,
        host: str,
        shuffle: Shuffle,
        is_interleaved: bool,
        seed: int,
        total_samples: int,
    ) -> None:
        self.is_interleaved, self.is_spread = is_interleaved, False
        self.keeps_row_order = True
        """True if the rows of a step are in the order of the samples, because the model or loss couples them;
        False: those of each data rank are where they lie, as far as possible."""
        self.data_rank_parts: tuple[frozenset[str], ...] = ()
        """Fingerprints of the parts on the node of each data rank; empty: all are here."""
        self._local = {dataset.fingerprint: dataset for _, dataset in local}
        self.local_entries = tuple(entry for entry, _ in local)
        """Entries of the job that this node has, also those whose content another one has, too."""
        self._shuffle, self._total = shuffle, total_samples
        self._remote: RowClients | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.seed = seed
        first = local[0][1]
        self.input_kind = first.input_kind  # type: ignore[misc]  # here it is that of the parts
        self.targets_per_sample, self.vocabulary_size = first.targets_per_sample, first.vocabulary_size
        self.image_shape, self.tokenizer = first.image_shape, first.tokenizer
        self.load_times = first.load_times
        self.is_costly_to_read = any(dataset.is_costly_to_read for _, dataset in local)
        self.loader_threads = max(dataset.loader_threads for _, dataset in local)
        self._set_parts([_part_of(dataset, entry, host) for entry, dataset in local])

    @property
    def local_parts(self) -> list[DataPart]:
        """Parts of this node."""
        return [part for part in self.parts if part.fingerprint in self._local]

    def join(self, parts: Iterable[DataPart], remote: RowClients, *, is_spread: bool) -> None:
        """Make the parts of all nodes one data set; before any sample is read.

        Args:
            parts: parts of all nodes.
            is_spread: true if a node has not all of them; the same on all ranks.

        Raises:
            AllRanksError: samples of two parts have different forms.
        """
        self._set_parts([*parts])
        self._remote, self.is_spread = remote, is_spread
        if is_spread:
            self._pool = ThreadPoolExecutor(_REQUEST_THREADS, "wanma-parts")
            self.loader_threads = max(self.loader_threads, _LOADER_THREADS)
            self.is_costly_to_read = True

    def close(self) -> None:
        """End the hand-over with other nodes; no thread reads any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._remote is not None:
            self._remote.close()

    @property
    def bad_data_note(self) -> str:
        return "; ".join(part.bad_data_note for part in self.parts if part.bad_data_note)

    @property
    def bad_file_count(self) -> int:
        return sum(part.bad_file_count for part in self.parts)

    def describe(self) -> dict[str, Any]:
        [first, *_] = self._local.values()
        described = first.describe()
        kept = ("kind", "vocabulary", "sequence_length", "image_shape", "classes")
        return {
            **{key: described[key] for key in kept if key in described},
            "fingerprint": self.fingerprint,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "epochs": self._total / self.train_samples,
            "parts": [
                {
                    "entry": part.entry,
                    "host": part.host,
                    "train_samples": part.train_samples,
                    "validation_samples": part.validation_samples,
                    "is_local": part.fingerprint in self._local,
                }
                for part in self.parts
            ],
        }

    def sample_name(self, sample_index: int) -> str:
        [part_number], [row] = self._locate_samples(np.asarray([sample_index]))
        part = self.parts[part_number]
        return f"row {row} of {part.entry} on {part.host}"

    def unread_batch(self, sample_indices: IndexArray) -> Batch | None:
        [first, *_] = self._local.values()
        return first.unread_batch(sample_indices)

    def step_samples(self, first_sample: int, plan: Plan, size: int) -> IndexArray:
        """Return the samples of a step by data rank, those of an interleaved order where they lie.

        Which samples a step has does not depend on the nodes.
        """
        samples = super().step_samples(first_sample, plan, size)
        if not self.is_interleaved or not self.is_spread or self.keeps_row_order:
            return samples
        part_numbers, _ = self._locate_samples(samples)
        slots = [plan.batch_rows(size, data_rank) for data_rank in range(plan.data_parallel_size)]
        chosen: list[IndexArray] = []
        is_free = np.ones(size, bool)
        for rows, owned in zip(slots, self.data_rank_parts, strict=True):
            is_owned = np.array([part.fingerprint in owned for part in self.parts])[part_numbers]
            chosen.append(np.flatnonzero(is_owned & is_free)[: len(rows)])
            is_free[chosen[-1]] = False
        for data_rank, rows in enumerate(slots):
            missing = np.flatnonzero(is_free)[: len(rows) - len(chosen[data_rank])]
            is_free[missing] = False
            chosen[data_rank] = np.sort(np.concatenate([chosen[data_rank], missing]))
        return samples[np.concatenate(chosen)]

    def describe_placement(self, plan: Plan, size: int) -> str:
        """Describe where the parts lie, and the forecast traffic between nodes in steps of `size` samples."""
        parts = ", ".join(
            f"{part.train_samples:,} samples of {part.entry} on {part.host}" for part in self.parts
        )
        text = f"data: {len(self.parts)} parts ({parts}) in one order"
        if not self.is_spread:
            return f"{text}, all on each node"
        row = np.zeros(1, np.int64)
        sample = self.read_local_rows(next(iter(self._local)), False, row, row)
        tensors = (*sample.inputs, sample.targets, *sample.keywords.values())
        remote_rows = self.forecast_remote_rows(plan, size)
        traffic = remote_rows * sum(tensor.nbytes for tensor in tensors)
        reason = ""
        if self.is_interleaved and self.keeps_row_order:
            reason = " (the model, the loss or a loop of your own may couple neighbouring samples)"
        return (
            f"{text}; about {remote_rows / size:.0%} of the samples are handed over between nodes, "
            f"{traffic / 1e6:.3g} MB a step{reason}"
        )

    def forecast_remote_rows(self, plan: Plan, size: int) -> float:
        """Return the mean number of samples of a step that are handed over between nodes."""
        if self.is_interleaved:
            steps = [self.step_samples(step * size, plan, size) for step in range(_FORECAST_STEPS)]
            return sum(self._count_remote(samples, plan, size) for samples in steps) / _FORECAST_STEPS
        sizes = {part.fingerprint: part.train_samples for part in self.parts}
        rows = plan.rows_per_data_rank(size)
        return sum(
            count * (1 - sum(sizes[part] for part in owned) / self.train_samples)
            for count, owned in zip(rows, self.data_rank_parts, strict=True)
        )

    def _count_remote(self, samples: IndexArray, plan: Plan, size: int) -> int:
        part_numbers, _ = self._locate_samples(samples)
        fingerprints = [self.parts[number].fingerprint for number in part_numbers]
        return sum(
            fingerprints[row] not in owned
            for data_rank, owned in enumerate(self.data_rank_parts)
            for row in plan.batch_rows(size, data_rank)
        )

    def read_rows(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        """Read rows of all parts, each where it lies."""
        return self._read_parts(is_validation, *self._locate(is_validation, rows), sample_indices)

    def _read_parts(
        self,
        is_validation: bool,
        part_numbers: IndexArray,
        part_rows: IndexArray,
        sample_indices: IndexArray,
    ) -> Batch:
        places = [np.flatnonzero(part_numbers == number) for number in np.unique(part_numbers)]
        tasks: list[Callable[[], Batch]] = []
        for chosen in places:
            part = self.parts[part_numbers[chosen[0]]]
            tasks.append(self._start_reading(part, is_validation, part_rows[chosen], sample_indices[chosen]))
        return join_rows([task() for task in tasks], places)

    def read_local_rows(
        self, part: str, is_validation: bool, rows: IndexArray, sample_indices: IndexArray
    ) -> Batch:
        """Read rows of the part with this fingerprint, which this node has."""
        return self._local[part].read_rows(is_validation, rows, sample_indices)

    def _start_reading(
        self, part: DataPart, is_validation: bool, rows: IndexArray, sample_indices: IndexArray
    ) -> Callable[[], Batch]:
        """Return a function that returns the rows of a part; what another node has is under way by then."""
        if part.fingerprint in self._local:
            return lambda: self.read_local_rows(part.fingerprint, is_validation, rows, sample_indices)
        assert self._pool is not None
        assert self._remote is not None
        task: Future[Batch] = self._pool.submit(
            self._remote.read_rows, part.fingerprint, is_validation, rows, sample_indices
        )
        return task.result

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        return self._read_parts(False, *self._locate_samples(sample_indices), sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        return self.read_rows(True, rows, sample_indices)

    def _set_parts(self, parts: Sequence[DataPart]) -> None:
        unique = {part.fingerprint: part for part in reversed(parts)}
        self.parts = tuple(unique[fingerprint] for fingerprint in sorted(unique))
        _check_forms(self.parts)
        counts = [part.classes for part in self.parts if part.classes is not None]
        self.classes = max(counts) if len(counts) == len(self.parts) else None
        self._ends = {
            False: np.cumsum([part.train_samples for part in self.parts]),
            True: np.cumsum([part.validation_samples for part in self.parts]),
        }
        self.train_samples, self.validation_samples = int(self._ends[False][-1]), int(self._ends[True][-1])
        sizes = [part.train_samples for part in self.parts]
        self.order = (
            SampleOrder.of_mixture(sizes, [float(size) for size in sizes], self._shuffle, self.seed)
            if self.is_interleaved
            else SampleOrder.of_source(self.train_samples, self._shuffle, self.seed)
        )
        self.fingerprint = hashlib.sha256("".join(sorted(unique)).encode()).hexdigest()

    def _locate_samples(self, sample_indices: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the number of the part of each sample of training, and its row in that part."""
        assert self.order is not None
        if self.is_interleaved:
            return self.order.locate(sample_indices)
        return self._locate(False, self.order.rows(sample_indices))

    def _locate(self, is_validation: bool, rows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the number of the part of each row, and the row in that part."""
        ends = self._ends[is_validation]
        numbers = np.searchsorted(ends, rows, side="right")
        return numbers, rows - np.concatenate([[0], ends])[numbers]


def join_rows(batches: Sequence[Batch], places: Sequence[IndexArray]) -> Batch:
    """Join batches of the same data into one, in which the rows of each have their places."""
    if len(batches) == 1:
        return batches[0]
    count = sum(len(chosen) for chosen in places)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        result = tensors[0].new_empty((count, *tensors[0].shape[1:]))
        for tensor, chosen in zip(tensors, places, strict=True):
            result[torch.from_numpy(chosen)] = tensor
        return result

    def joined_maps(maps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: joined([one[name] for one in maps]) for name in maps[0]}

    ranges = [batch.class_range for batch in batches if batch.class_range is not None]
    return replace(
        batches[0],
        inputs=tuple(joined(tensors) for tensors in zip(*(batch.inputs for batch in batches), strict=True)),
        targets=joined([batch.targets for batch in batches]),
        samples=joined([batch.samples for batch in batches]),
        real=joined([batch.real for batch in batches]),
        keywords=joined_maps([batch.keywords for batch in batches]),
        class_range=(min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None,
        bad_samples=tuple(
            sorted((one for batch in batches for one in batch.bad_samples), key=lambda one: one.sample)
        ),
    )


def _part_of(dataset: BatchedDataset, entry: str, host: str) -> DataPart:
    return DataPart(
        dataset.fingerprint,
        dataset.train_samples,
        dataset.validation_samples,
        entry,
        host,
        dataset.sample_form,
        dataset.classes,
        dataset.bad_data_note,
        dataset.bad_file_count,
    )


def _check_forms(parts: Sequence[DataPart]) -> None:
    for part in parts[1:]:
        if part.form != parts[0].form:
            raise AllRanksError(
                f"data.placement = 'parts': the samples of {part.entry} on {part.host} ({part.form}) are of "
                f"another form than those of {parts[0].entry} on {parts[0].host} ({parts[0].form})",
                "give all nodes the same tokenizer file; of images, give all parts the same classes, image "
                "size and channels (data.image_transform)",
            )
