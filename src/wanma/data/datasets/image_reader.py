"""Reader of stored images: samples by their position, decoded and changed, as a batch.

A row of a batch is a pure function of (seed, sample index): which image it is, how it is cropped, flipped and
changed, and which other image replaces one that cannot be read. A rank reads in threads, or its loader
processes do, each with a copy of the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from wanma.data.batch import IGNORE_INDEX, BadSample, Batch
from wanma.data.datasets.dataset import make_batch, with_bad_samples
from wanma.data.datasets.load_times import OWN_TRANSFORM_PART, STORED_IMAGE_PARTS, LoadTimes
from wanma.data.formats.format import BadDataError, Record
from wanma.data.images.fields import ImageFields, bad_sample, read_label
from wanma.data.images.own_transforms import TransformError
from wanma.data.images.stored_images import StoredImages, with_way_out
from wanma.data.images.transform import uniform_draws
from wanma.data.index.records import read_each
from wanma.data.index.sample_index import SampleIndex
from wanma.data.sampling.permutation import IndexArray
from wanma.data.stores.process_threads import ProcessThreads
from wanma.job.errors import WanmaError

READ_THREADS = 16
"""Files that one process reads from a store at once."""
_MAX_SUBSTITUTES = 32
"""Samples that are tried in place of one that cannot be read."""


@dataclass(frozen=True)
class ImagePart:
    """Samples of training or of validation of one source."""

    images: StoredImages
    index: SampleIndex
    fields: ImageFields
    size: int
    locate: Callable[[IndexArray], IndexArray]
    """Function from positions in [0, `size`) to rows of `index`."""
    is_training: bool


class ImageReader:
    """Reader of the samples of all sources: those of the first source, then those of the second, and so on.

    Args:
        decode_threads: samples decoded at once; 1: by the caller itself.
        is_remote: True if a file is not in local storage: files of a batch are read side by side.
    """

    def __init__(
        self,
        train: Sequence[ImagePart],
        validation: Sequence[ImagePart],
        *,
        bad_data: str,
        seed: int,
        decode_threads: int,
        is_remote: bool,
    ) -> None:
        self._parts = {False: train, True: validation}
        self.starts = {
            is_validation: np.cumsum([0, *(part.size for part in parts)])
            for is_validation, parts in self._parts.items()
        }
        """Position of each source's first sample, then the number of all; by whether they are validation."""
        self._bad_data, self._seed = bad_data, seed
        self._transform = train[0].images.transform
        own_parts = (OWN_TRANSFORM_PART,) if self._transform.own else ()
        self.load_times = LoadTimes((*STORED_IMAGE_PARTS, *own_parts))
        self._decoders = ProcessThreads(decode_threads, "wanma-decode")
        self._readers = ProcessThreads(READ_THREADS if is_remote else 0, "wanma-read")

    def __call__(self, is_validation: bool, positions: IndexArray, sample_indices: IndexArray) -> Batch:
        """Read samples.

        Args:
            positions: their positions, see `starts`.
            sample_indices: sample indices that they have in the run.

        Raises:
            BadDataError: a sample cannot be read, and the job refuses such samples.
            TransformError: a transform of another package fails.
        """
        parts, starts = self._parts[is_validation], self.starts[is_validation]
        sources = np.searchsorted(starts, positions, side="right") - 1
        rows = np.empty_like(positions)
        for number in np.unique(sources).tolist():
            mask = sources == number
            rows[mask] = parts[number].locate(positions[mask] - starts[number])
        with self.load_times.measure("read"):
            records = self._read_records(parts, sources, rows)
        pixels = np.zeros((len(rows), *self._transform.shape), np.float32)
        labels = np.full(len(rows), IGNORE_INDEX, np.int64)

        def decode(place: int) -> BadSample | None:
            part, sample = parts[int(sources[place])], int(sample_indices[place])
            try:
                labels[place] = self._decode(part, int(rows[place]), records[place], sample, pixels[place])
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

        found = [one for one in self._decoders.map(decode, range(len(rows))) if one is not None]
        with self.load_times.measure("collate"):
            batch = make_batch((torch.from_numpy(pixels),), torch.from_numpy(labels), sample_indices)
            return with_bad_samples(batch, found)

    def _read_records(
        self, parts: Sequence[ImagePart], sources: IndexArray, rows: IndexArray
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
        read = self._readers.map(lambda one: read_each(one[0], rows[one[1]]), remote)
        for (_, places), found in zip(remote, read, strict=True):
            _put(records, places, found)
        return records

    def _decode(
        self, part: ImagePart, row: int, record: Record | BadDataError, sample: int, out: NDArray[np.float32]
    ) -> int:
        """Write the pixels of a record to `out`, and return its class.

        Raises:
            BadDataError: it cannot be read.
            TransformError: a transform of another package fails on it.
        """
        if isinstance(record, BadDataError):
            raise record
        transform = part.images.transform
        draws = uniform_draws(self._seed, "augment", sample) if part.is_training else None
        try:
            if part.fields.image not in record:
                raise ValueError(f"it has no field {part.fields.image!r}")
            with self.load_times.measure("decode"):
                values = transform.decode(record[part.fields.image], draws)
                if not transform.own:
                    transform.normalize(values, out)
            if transform.own:
                with self.load_times.measure(OWN_TRANSFORM_PART):
                    transform.normalize(transform.change(values, draws), out)
            return part.images.classes.number(read_label(record, part.fields.label))
        except ValueError as error:
            raise bad_sample(part.index, row, str(error)) from error
        except TransformError as error:
            place = bad_sample(part.index, row, "").place
            raise TransformError(f"{place} (sample {sample:,}): {error.message}", error.hint) from error

    def _substitute(self, part: ImagePart, sample: int, cause: BadDataError, out: NDArray[np.float32]) -> int:
        """Write another sample of the same part to `out`, drawn by (seed, sample), and return its class."""
        draws = uniform_draws(self._seed, "substitute", int(part.is_training), sample)
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
