"""Data set of images in stored files of any format: read by sample, decoded and changed when a batch is made.

The files are one source, or several that are mixed by weight. Threads of the rank read, or loader processes:
where the job asks for them, and where Python of other packages works on the samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset, InputKind, log_bad_validation
from wanma.data.datasets.image_reader import READ_THREADS, ImagePart, ImageReader
from wanma.data.datasets.load_times import LoadTimes
from wanma.data.datasets.worker_processes import WorkerProcesses
from wanma.data.formats.detection import is_built_in
from wanma.data.formats.format import BadDataError
from wanma.data.images.fields import bad_sample
from wanma.data.images.loading_measurement import mean_loading, measure_loading
from wanma.data.images.stored_images import StoredImages, damaged_files, with_way_out
from wanma.data.index.gradual_index import GradualIndex
from wanma.data.index.records import cache_folder, is_in_process_memory
from wanma.data.index.sample_index import SampleIndex
from wanma.data.sampling.file_order import FileOrder
from wanma.data.sampling.holdout import Holdout
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError
from wanma.job.forecast.data_feed import SampleLoading
from wanma.job.sections.data import DataSection

_REMOTE_LOADER_THREADS = 3
"""Steps that are read at once from a store, so that the link is not idle while one of them is decoded."""


class StoredImageDataset(BatchedDataset):
    """Data set of stored images: inputs (rows, channels, height, width) float32, targets (rows,) int64.

    Raises:
        JobError: too few images for a validation split, or classes that only names tell and nobody counted.
    """

    input_kind: ClassVar[InputKind] = "images"
    targets_per_sample = 1
    is_costly_to_read = True

    def __init__(
        self, sources: Sequence[StoredImages], section: DataSection, *, seed: int, total_samples: int
    ) -> None:
        self._sources, self._total = sources, total_samples
        self._is_mixture = bool(section.sources)
        self._cache, self._is_store_probed = cache_folder(section.cache), section.probe_store
        indexes = [index for one in sources for index in (one.train, one.validation) if index is not None]
        self.damaged_files = damaged_files(indexes)
        is_remote = any(source.is_remote for source in sources)
        self._reported: set[str] = set()
        self.seed = seed
        self._transform = sources[0].transform
        self.image_shape = self._transform.shape
        self.classes = sources[0].classes.count
        self.loader_threads = _REMOTE_LOADER_THREADS if is_remote else 1
        shuffle = Shuffle.of_job(section)
        parts = [_divide(source, section.validation_fraction, shuffle) for source in sources]
        self._train = [train for train, _ in parts]
        self._validation = [validation for _, validation in parts]
        self.reads_by_processes = _needs_processes(section, indexes, has_own=bool(self._transform.own))
        self._reader = ImageReader(
            self._train,
            self._validation,
            bad_data=section.bad_data or "refuse",
            seed=seed,
            decode_threads=1 if self.reads_by_processes else section.worker_count,
            is_remote=is_remote,
        )
        self.load_times: LoadTimes = self._reader.load_times
        self._processes: WorkerProcesses | None = None
        if self.reads_by_processes:
            count = max(section.worker_count, self.loader_threads)
            self._processes = WorkerProcesses(self._reader, count, "images", self.load_times)
        self.train_samples, self.validation_samples = (
            int(self._reader.starts[is_validation][-1]) for is_validation in (False, True)
        )
        if any(map(_is_gradual, self._train)):
            self.train_samples = total_samples  # the samples that the run reads: an epoch's number is unknown
        self.order: SampleOrder = (
            SampleOrder.of_mixture(
                [part.size for part in self._train], [source.weight for source in sources], shuffle, seed
            )
            if self._is_mixture
            else SampleOrder.of_source(self._train[0].size, shuffle, seed)
        )
        if shuffle.is_by_file:
            key = ("source",) if self._is_mixture else ()
            orders = [
                _order_files(part.index, shuffle.window_blocks, seed, *key, number)
                for number, part in enumerate(self._train)
            ]
            self.order = replace(self.order, file_orders=tuple(orders))
        texts = [text for source in sources for text in _content_texts(source)]
        self.fingerprint = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()

    def describe(self) -> dict[str, Any]:
        described = [
            {
                "format": source.train.data_format.name,
                "image_field": source.fields.image,
                "label_field": source.fields.label,
                "validation_samples": validation.size,
                **({} if _is_gradual(train) else {"train_samples": train.size, "epochs": epochs}),
                "damaged_files": [f"{one.file}: {one.cause}" for one in source.train.damaged],
            }
            for source, train, validation, epochs in zip(
                self._sources, self._train, self._validation, self.order.epochs(self._total), strict=True
            )
        ]
        facts = {
            "kind": self.input_kind,
            "fingerprint": self.fingerprint,
            "image_shape": self.image_shape,
            "classes": self.classes,
            **({} if any(map(_is_gradual, self._train)) else {"train_samples": self.train_samples}),
            "validation_samples": self.validation_samples,
            "mean": list(self._transform.mean),
            "standard_deviation": list(self._transform.std),
        }
        if not self._is_mixture:
            return {**facts, **described[0]}
        shares = self.order.shares(self._total)
        return {
            **facts,
            "class_names": list(self._sources[0].classes.names),
            "sources": [
                {"name": source.name, "share": share, **one}
                for source, share, one in zip(self._sources, shares, described, strict=True)
            ],
        }

    @property
    def sample_form(self) -> str:
        transform, names = self._transform, self._sources[0].classes.names
        labels = f"classes {', '.join(names)}" if names else "numbered classes"
        return f"images of shape {self.image_shape}, mean {transform.mean}, std {transform.std}, {labels}"

    def read_rows(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        return self._read(is_validation, rows, sample_indices)  # data in parts have one source each

    def sample_loading(self) -> SampleLoading:
        parts = [
            measure_loading(
                source,
                read_threads=READ_THREADS,
                loader_threads=self.loader_threads,
                by_processes=self.reads_by_processes,
                cache=self._cache,
                is_store_probed=self._is_store_probed,
            )
            for source in self._sources
        ]
        return mean_loading(parts, self.order.shares(self._total))

    def sample_name(self, sample_index: int) -> str:
        sources, positions = self.order.locate(np.asarray([sample_index]))
        part = self._train[int(sources[0])]
        (row,) = part.locate(positions).tolist()
        return bad_sample(part.index, row, "").place

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        sources, positions = self.order.locate(sample_indices)
        return self._read(False, self._reader.starts[False][sources] + positions, sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        return self._read(True, rows, sample_indices)

    def _read(self, is_validation: bool, positions: IndexArray, sample_indices: IndexArray) -> Batch:
        """Read samples by their positions, see `ImageReader`."""
        read = self._reader if self._processes is None else self._processes.read
        batch = read(is_validation, positions, sample_indices)
        if is_validation:
            log_bad_validation(batch.bad_samples, self._reported)
        return batch


def _needs_processes(section: DataSection, indexes: Sequence[SampleIndex], *, has_own: bool) -> bool:
    """Return True if loader processes read: by the job, or for transforms or formats of other packages."""
    if section.worker_processes is not None:
        return section.worker_processes
    has_foreign_code = has_own or not all(is_built_in(index.data_format) for index in indexes)
    return has_foreign_code and not any(map(is_in_process_memory, indexes))


def _divide(images: StoredImages, fraction: float, shuffle: Shuffle) -> tuple[ImagePart, ImagePart]:
    """Return training and validation: splits of their own, or shares of one by a hash of the row."""

    def part_of(
        index: SampleIndex, size: int, locate: Callable[[IndexArray], IndexArray], *, is_training: bool
    ) -> ImagePart:
        fields = images.fields if index is images.train else images.validation_fields
        return ImagePart(images, index, fields, size, locate, is_training)

    if images.validation is not None:
        return (
            part_of(images.train, images.train.rows, lambda positions: positions, is_training=True),
            part_of(
                images.validation, images.validation.rows, lambda positions: positions, is_training=False
            ),
        )
    if fraction and shuffle.is_by_file:
        raise JobError(
            "data.validation_fraction needs the number of all samples, which is unknown before the first "
            "pass with data.block_samples = 'file'",
            "set data.validation_fraction = 0, or give the data a validation split of its own",
        )
    holdout = Holdout.of_share(images.train.rows, fraction)
    if holdout.train_rows < 1:
        raise JobError(
            f"{images.transform.key}: {holdout.rows} images are too few for a validation split",
            "add images, or set data.validation_fraction=0",
        )

    def locate(positions: IndexArray) -> IndexArray:
        return holdout.train_row(positions, ascending=shuffle.reads_neighbours)

    return (
        part_of(images.train, holdout.train_rows, locate, is_training=True),
        part_of(images.train, holdout.validation_rows, holdout.validation_row, is_training=False),
    )


def _is_gradual(part: ImagePart) -> bool:
    return isinstance(part.index, GradualIndex)


def _order_files(index: SampleIndex, window_files: int, *key: int | str) -> FileOrder:
    """Return the order of samples by files, whose scans begin with the first window."""

    def row_counts(files: IndexArray) -> IndexArray:
        try:
            return index.row_counts(files)
        except BadDataError as error:
            raise with_way_out(error) from error

    order = FileOrder(index.row_starts, window_files, row_counts, *key)
    if isinstance(index, GradualIndex):
        index.scan_ahead(order.files(0), order.first_window_files)
    return order


def _content_texts(images: StoredImages) -> list[str]:
    """Return texts that are equal where the content of a source is."""
    texts = [images.train.fingerprint, images.fields.image, images.fields.label, *images.classes.names]
    texts += images.classes.label_names
    return texts + ([images.validation.fingerprint] if images.validation is not None else [])
