"""Data set of images in stored files of any format: read by sample, decoded and changed when a batch is made.

The files are one source, or several that are mixed by weight. A row of a batch is a pure function of (seed,
sample index): which image it is, how it is cropped and flipped, and which other image replaces one that
cannot be read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from wanma.data.batch import IGNORE_INDEX, BadSample, Batch
from wanma.data.datasets.dataset import (
    BatchedDataset,
    InputKind,
    log_bad_validation,
    make_batch,
    with_bad_samples,
)
from wanma.data.datasets.load_times import STORED_IMAGE_PARTS, LoadTimes
from wanma.data.formats.format import BadDataError, Record
from wanma.data.images.fields import ImageFields, bad_sample, read_label
from wanma.data.images.loading_measurement import mean_loading, measure_loading, record_loading
from wanma.data.images.own_transforms import TransformError
from wanma.data.images.stored_images import ImageSource, StoredImages, damaged_files, with_way_out
from wanma.data.images.transform import uniform_draws
from wanma.data.index.records import cache_folder, read_each
from wanma.data.index.sample_index import SampleIndex
from wanma.data.sampling.holdout import Holdout
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError, WanmaError
from wanma.job.forecast.data_feed import SampleLoading
from wanma.job.sections.data import DataSection

Item = TypeVar("Item")
Result = TypeVar("Result")

_REMOTE_LOADER_THREADS = 3
"""Steps that are read at once from a store, so that the link is not idle while one of them is decoded."""
_READ_THREADS = 16
_MAX_SUBSTITUTES = 32
"""Samples that are tried in place of one that cannot be read."""


@dataclass(frozen=True)
class _Part:
    """Samples of training or of validation of one source."""

    images: StoredImages
    index: SampleIndex
    fields: ImageFields
    size: int
    locate: Callable[[IndexArray], IndexArray]
    """Function from positions in [0, `size`) to rows of `index`."""
    is_training: bool


class StoredImageDataset(BatchedDataset):
    """Data set of stored images: inputs (rows, channels, height, width) float32, targets (rows,) int64.

    Args:
        sources: the images, one source or those of a mixture.
        section: the job's `[data]`.
        seed: the job's seed.
        total_samples: samples of the whole run.

    Raises:
        JobError: too few images for a validation split, or classes that only names tell and nobody counted.
    """

    input_kind: ClassVar[InputKind] = "images"
    targets_per_sample = 1
    is_costly_to_read = True

    def __init__(
        self, sources: Sequence[ImageSource], section: DataSection, *, seed: int, total_samples: int
    ) -> None:
        self._sources, self._total = sources, total_samples
        self._is_mixture = bool(section.sources)
        self._cache, self._is_store_probed = cache_folder(section.cache), section.probe_store
        self._bad_data = section.bad_data or "refuse"
        self.damaged_files = damaged_files(
            index for source in sources for index in (source.images.train, source.images.validation)
        )
        is_remote = any(source.images.is_remote for source in sources)
        self._pools = _Pools(section.worker_count, _READ_THREADS if is_remote else 0)
        self._reported: set[str] = set()
        self.load_times: LoadTimes = LoadTimes(STORED_IMAGE_PARTS)
        self.seed = seed
        self._transform = sources[0].images.transform
        self.image_shape = self._transform.shape
        self.classes = sources[0].images.classes.count
        self.loader_threads = _REMOTE_LOADER_THREADS if is_remote else 1
        shuffle = Shuffle.of_job(section)
        parts = [_divide(source, section.validation_fraction, shuffle) for source in sources]
        self._train = [train for train, _ in parts]
        self._validation = [validation for _, validation in parts]
        self._validation_starts = np.cumsum([0, *(part.size for part in self._validation)])
        self.train_samples = sum(part.size for part in self._train)
        self.validation_samples = int(self._validation_starts[-1])
        self.order: SampleOrder = (
            SampleOrder.of_mixture(
                [part.size for part in self._train], [source.weight for source in sources], shuffle, seed
            )
            if self._is_mixture
            else SampleOrder.of_source(self.train_samples, shuffle, seed)
        )
        texts = [text for source in sources for text in _content_texts(source.images)]
        self.fingerprint = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()

    def describe(self) -> dict[str, Any]:
        described = [
            {
                "format": source.images.train.data_format.name,
                "image_field": source.images.fields.image,
                "label_field": source.images.fields.label,
                "train_samples": train.size,
                "validation_samples": validation.size,
                "epochs": epochs,
                "damaged_files": [f"{one.file}: {one.cause}" for one in source.images.train.damaged],
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
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "mean": list(self._transform.mean),
            "standard_deviation": list(self._transform.std),
        }
        if not self._is_mixture:
            return {**facts, **described[0]}
        shares = self.order.shares(self._total)
        return {
            **facts,
            "class_names": list(self._sources[0].images.classes.names),
            "sources": [
                {"name": source.name, "share": share, **one}
                for source, share, one in zip(self._sources, shares, described, strict=True)
            ],
        }

    @property
    def sample_form(self) -> str:
        transform, names = self._transform, self._sources[0].images.classes.names
        labels = f"classes {', '.join(names)}" if names else "numbered classes"
        return f"images of shape {self.image_shape}, mean {transform.mean}, std {transform.std}, {labels}"

    def read_rows(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        parts = self._validation if is_validation else self._train
        return self._read(
            parts, np.zeros_like(rows), rows, sample_indices
        )  # data in parts have one source each

    def sample_loading(self) -> SampleLoading:
        parts = [
            measure_loading(
                source.images,
                read_threads=_READ_THREADS,
                loader_threads=self.loader_threads,
                cache=self._cache,
                is_store_probed=self._is_store_probed,
            )
            for source in self._sources
        ]
        return mean_loading(parts, self.order.shares(self._total))

    def record_rates(self, source: str) -> None:
        samples, core_seconds = self.load_times.decoding
        if self._is_mixture:  # the time of each source is unknown
            samples, core_seconds = 0, 0.0
        for one in self._sources:
            record_loading(one.images, self._cache, source, samples=samples, core_seconds=core_seconds)

    def sample_name(self, sample_index: int) -> str:
        sources, positions = self.order.locate(np.asarray([sample_index]))
        part = self._train[int(sources[0])]
        (row,) = part.locate(positions).tolist()
        return bad_sample(part.index, row, "").place

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        sources, positions = self.order.locate(sample_indices)
        return self._read(self._train, sources, positions, sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        sources = np.searchsorted(self._validation_starts, rows, side="right") - 1
        positions = rows - self._validation_starts[sources]
        return self._read(self._validation, sources, positions, sample_indices)

    def _read(
        self,
        parts: Sequence[_Part],
        sources: IndexArray,
        positions: IndexArray,
        sample_indices: IndexArray,
    ) -> Batch:
        """Read samples: each of one of `parts`, by its number in `sources`, at a position of that part."""
        rows = np.empty_like(positions)
        for number in np.unique(sources).tolist():
            mask = sources == number
            rows[mask] = parts[number].locate(positions[mask])
        with self.load_times.measure("read"):
            records = self._read_records(parts, sources, rows)
        pixels = np.zeros((len(rows), *self._transform.shape), np.float32)
        labels = np.full(len(rows), IGNORE_INDEX, np.int64)

        def decode(place: int) -> BadSample | None:
            part, sample = parts[int(sources[place])], int(sample_indices[place])
            with self.load_times.measure("decode"):
                try:
                    labels[place] = self._decode(
                        part, int(rows[place]), records[place], sample, pixels[place]
                    )
                    return None
                except BadDataError as error:
                    if self._bad_data == "refuse":
                        raise with_way_out(error) from error
                    cause = error
            if self._bad_data == "skip":
                pixels[place] = 0
                return BadSample(sample, cause.place, cause.cause, is_substituted=False)
            labels[place] = self._substitute(part, sample, cause, pixels[place])
            return BadSample(sample, cause.place, cause.cause, is_substituted=True)

        found = [one for one in self._pools.decode(decode, range(len(rows))) if one is not None]
        if parts is self._validation:
            log_bad_validation(found, self._reported)
        with self.load_times.measure("collate"):
            batch = make_batch((torch.from_numpy(pixels),), torch.from_numpy(labels), sample_indices)
            return with_bad_samples(batch, found)

    def _read_records(
        self, parts: Sequence[_Part], sources: IndexArray, rows: IndexArray
    ) -> list[Record | BadDataError]:
        """Read samples; from a store the files of a batch are read side by side."""
        records: list[Record | BadDataError] = [{}] * len(rows)
        remote: list[tuple[SampleIndex, IndexArray]] = []
        for number in np.unique(sources).tolist():
            part, places = parts[number], np.flatnonzero(sources == number)
            if part.images.is_remote:
                remote += [(part.index, group) for group in _files_of_batch(part.index, rows, places)]
            else:
                _put(records, places, read_each(part.index, rows[places]))
        read = self._pools.read(lambda one: read_each(one[0], rows[one[1]]), remote)
        for (_, places), found in zip(remote, read, strict=True):
            _put(records, places, found)
        return records

    def _decode(
        self, part: _Part, row: int, record: Record | BadDataError, sample: int, out: NDArray[np.float32]
    ) -> int:
        """Write the pixels of a record to `out`, and return its class.

        Raises:
            BadDataError: it cannot be read.
            TransformError: a transform of another package fails on it.
        """
        if isinstance(record, BadDataError):
            raise record
        draws = uniform_draws(self.seed, "augment", sample) if part.is_training else None
        try:
            if part.fields.image not in record:
                raise ValueError(f"it has no field {part.fields.image!r}")
            part.images.transform.write(record[part.fields.image], out, draws)
            return part.images.classes.number(read_label(record, part.fields.label))
        except ValueError as error:
            raise bad_sample(part.index, row, str(error)) from error
        except TransformError as error:
            place = bad_sample(part.index, row, "").place
            raise TransformError(f"{place} (sample {sample:,}): {error.message}", error.hint) from error

    def _substitute(self, part: _Part, sample: int, cause: BadDataError, out: NDArray[np.float32]) -> int:
        """Write another sample of the same part to `out`, drawn by (seed, sample), and return its class."""
        draws = uniform_draws(self.seed, "substitute", int(part.is_training), sample)
        for _ in range(_MAX_SUBSTITUTES):
            row = int(part.locate(np.array([int(next(draws) * part.size)]))[0])
            try:
                return self._decode(part, row, read_each(part.index, np.array([row]))[0], sample, out)
            except BadDataError:
                continue
        raise WanmaError(
            f"data.bad_data = 'substitute': {cause.place}: {cause.cause}; none of {_MAX_SUBSTITUTES} other "
            "samples can be read either",
            "mend the data, or check data.columns.image and target",
        ) from cause


class _Pools:
    """Threads of this process that read and decode; a forked process begins with its own.

    Args:
        decode_threads: samples decoded at once; 1: by the caller itself.
        read_threads: files read at once; 0: by the caller itself.
    """

    def __init__(self, decode_threads: int, read_threads: int) -> None:
        self._decode_threads, self._read_threads = decode_threads, read_threads
        self._process_id = 0
        self._lock = threading.Lock()
        self._decode_pool: ThreadPoolExecutor | None = None
        self._read_pool: ThreadPoolExecutor | None = None

    def decode(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `function` with each item, and return the results in order."""
        self._start()
        return _map(self._decode_pool, function, items)

    def read(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `function` with each item, and return the results in order."""
        self._start()
        return _map(self._read_pool, function, items)

    def _start(self) -> None:
        with self._lock:
            if self._process_id == os.getpid():
                return
            if self._decode_threads > 1:
                self._decode_pool = ThreadPoolExecutor(self._decode_threads, "wanma-decode")
            if self._read_threads:
                self._read_pool = ThreadPoolExecutor(self._read_threads, "wanma-read")
            self._process_id = os.getpid()


def _map(
    pool: ThreadPoolExecutor | None, function: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result]:
    if pool is None or len(items) == 1:
        return [function(item) for item in items]
    results: Iterator[Result] = pool.map(function, items)
    return list(results)


def _divide(source: ImageSource, fraction: float, shuffle: Shuffle) -> tuple[_Part, _Part]:
    """Return training and validation: splits of their own, or shares of one by a hash of the row."""
    images = source.images

    def part_of(
        index: SampleIndex, size: int, locate: Callable[[IndexArray], IndexArray], *, is_training: bool
    ) -> _Part:
        fields = images.fields if index is images.train else images.validation_fields
        return _Part(images, index, fields, size, locate, is_training)

    if images.validation is not None:
        return (
            part_of(images.train, images.train.rows, lambda positions: positions, is_training=True),
            part_of(
                images.validation, images.validation.rows, lambda positions: positions, is_training=False
            ),
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


def _content_texts(images: StoredImages) -> list[str]:
    """Return texts that are equal where the content of a source is."""
    texts = [images.train.fingerprint, images.fields.image, images.fields.label, *images.classes.names]
    texts += images.classes.label_names
    return texts + ([images.validation.fingerprint] if images.validation is not None else [])


def _files_of_batch(index: SampleIndex, rows: IndexArray, places: IndexArray) -> list[IndexArray]:
    """Divide the places of a batch that hold samples of `index`: one file a part."""
    if len(places) == 1:
        return [places]
    numbers, _ = index.locate(rows[places])
    # One file at a time, and one sample at a time where each is a file.
    if any(len(index.groups[number].files) > 2 for number in np.unique(numbers).tolist()):
        return [np.array([place]) for place in places]
    return [places[numbers == number] for number in np.unique(numbers)]


def _put(
    records: list[Record | BadDataError], places: IndexArray, found: Sequence[Record | BadDataError]
) -> None:
    for place, record in zip(places.tolist(), found, strict=True):
        records[place] = record
