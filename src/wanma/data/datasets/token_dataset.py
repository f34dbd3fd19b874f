"""Data set of text: one or more token files, mixed by weight, packed into sequences."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from wanma.data.batch import IGNORE_INDEX, Batch
from wanma.data.chat.encoding import NO_TARGET
from wanma.data.datasets.dataset import BatchedDataset, InputKind, make_batch
from wanma.data.datasets.load_times import TEXT_PARTS, LoadTimes
from wanma.data.sampling.mixture_schedule import SourceWeight
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.data.text.encoding_task import describe_bad_rows
from wanma.data.text.sequence_packing import (
    PackedSequences,
    Stream,
    divide_corpus,
    find_document_boundaries,
)
from wanma.data.text.token_file import TokenFile
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.sections.data import DataSection

_DESCRIBED_BAD_ROWS = 20
_SAMPLES, _MOST_SAMPLES = 512, 4096
"""Samples computed at once: first, and most, as they double while samples follow each other.

Few cost no more where many data ranks each need some of a large batch.
"""

Locate = Callable[[IndexArray], tuple[IndexArray, ...]]
"""Function (sample indices) -> arrays with an element for each of them."""


@dataclass(frozen=True)
class _Window:
    samples: IndexArray
    located: tuple[IndexArray, ...]


class OrderWindow:
    """Function of sample indices whose last results are kept; safe from several threads at once.

    Results for consecutive samples are computed for many at once: numpy takes as long for 16 as for
    hundreds.

    Args:
        locate: the function, such as `SampleOrder.locate`.
    """

    def __init__(self, locate: Locate) -> None:
        self._locate = locate
        self._last: _Window | None = None

    def locate(self, sample_indices: IndexArray) -> tuple[IndexArray, ...]:
        """Return what the function does; parts of larger arrays where samples follow each other."""
        count, window = len(sample_indices), self._last
        if not count:
            return self._locate(sample_indices)
        first, size = int(sample_indices[0]), _SAMPLES
        if window is not None:
            start = first - int(window.samples[0])
            kept = slice(start, start + count)
            # Bytes are compared in a fraction of the time that numpy takes for small arrays.
            if start >= 0 and window.samples[kept].tobytes() == sample_indices.tobytes():
                return tuple([one[kept] for one in window.located])
            if 0 <= start < len(window.samples) + _SAMPLES:
                size = min(2 * len(window.samples), _MOST_SAMPLES)
        if count >= _SAMPLES or not (np.diff(sample_indices) == 1).all():
            return self._locate(sample_indices)
        samples = np.arange(first, first + size)
        located = self._locate(samples)
        self._last = _Window(samples, located)
        return tuple([one[:count] for one in located])


@dataclass(frozen=True)
class TokenSource:
    """Source of the mixture, with its open token file."""

    name: str
    weight: SourceWeight
    file: TokenFile


class TokenDataset(BatchedDataset):
    """Data set of token sequences; inputs are (rows, sequence), targets the same shifted by one.

    Targets that no answer of a conversation holds are `IGNORE_INDEX`.
    """

    input_kind: ClassVar[InputKind] = "tokens"
    copies_from_memory: ClassVar[bool] = True

    def __init__(
        self,
        sources: Sequence[TokenSource],
        tokenizer: Tokenizer,
        section: DataSection,
        *,
        seed: int,
        total_samples: int,
    ) -> None:
        self._sides = divide_corpus([source.file for source in sources], section)
        self._sources = sources
        self._train = [side.train for side in self._sides]
        self._validation = [side.validation for side in self._sides]
        self._has_chats = any(source.file.is_chat for source in sources)
        self.order: SampleOrder = SampleOrder.of_mixture(
            [stream.sequence_count for stream in self._train],
            [source.weight for source in sources],
            Shuffle.of_job(section),
            seed,
        )
        self._order_window = OrderWindow(self._locate)
        self._stored_type = np.result_type(*{source.file.tokens.dtype for source in sources})
        self._document_masks = section.document_masks
        self._total = total_samples
        self._sequence_length = section.sequence_length
        self.seed = seed
        self.load_times: LoadTimes = LoadTimes(TEXT_PARTS)
        self.tokenizer: Tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocabulary_size
        self.targets_per_sample = section.sequence_length
        self.train_samples = sum(stream.sequence_count for stream in self._train)
        self.validation_samples = sum(stream.sequence_count for stream in self._validation)
        hashes = "".join(source.file.fingerprint for source in sources)
        self.fingerprint = hashlib.sha256(hashes.encode()).hexdigest()

    @property
    def bad_data_note(self) -> str:
        return "; ".join(
            f"{source.file.bad_row_count} bad rows or files of the source '{source.name}' were left out: "
            f"{describe_bad_rows(source.file.bad_rows)}; they are listed in "
            f"{source.file.folder / 'header.json'}"
            for source in self._sources
            if source.file.bad_row_count
        )

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.input_kind,
            "fingerprint": self.fingerprint,
            "vocabulary": self.vocabulary_size,
            "sequence_length": self._sequence_length,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "documents": sum(source.file.header["documents"] for source in self._sources),
            "tokens": sum(source.file.header["tokens"] for source in self._sources),
            "sources": [
                {
                    "name": source.name,
                    "share": share,
                    "documents": source.file.header["documents"],
                    "tokens": source.file.header["tokens"],
                    "skipped": source.file.header["skipped"],
                    "not_utf8": source.file.header["not_utf8"],
                    "bad_rows": {
                        "count": source.file.bad_row_count,
                        "listed": source.file.bad_rows[:_DESCRIBED_BAD_ROWS],
                    },
                    "train_tokens": train.token_count,
                    "validation_tokens": validation.token_count,
                    "validation_cut": side.validation_tail_fraction,
                    "epochs": epochs,
                    "token_file": str(source.file.folder),
                    **_chat_facts(source.file, side.too_long),
                }
                for source, share, epochs, train, validation, side in zip(
                    self._sources,
                    self.order.shares(self._total),
                    self.order.epochs(self._total),
                    self._train,
                    self._validation,
                    self._sides,
                    strict=True,
                )
            ],
        }

    @property
    def sample_form(self) -> str:
        tokenizer = f"{self.tokenizer.fingerprint:.12} of {self.vocabulary_size} tokens"
        return f"{self._sequence_length} tokens, tokenizer {tokenizer}"

    def read_rows(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        """Read rows of one text; see `BatchedDataset.read_rows`."""
        streams = self._validation if is_validation else self._train
        return self._read(streams[:1], np.zeros_like(rows), rows, streams[0].find(rows), sample_indices)

    def unread_batch(self, sample_indices: IndexArray) -> Batch | None:
        if self._document_masks:
            return None
        tokens = torch.zeros(1, 1, dtype=torch.int64).expand(len(sample_indices), self._sequence_length)
        return make_batch((tokens,), tokens, sample_indices, classes=(0, 0))

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        sources, rows, places = self._order_window.locate(sample_indices)
        return self._read(self._train, sources, rows, places, sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        starts = np.cumsum([0] + [stream.sequence_count for stream in self._validation])
        sources = np.searchsorted(starts, rows, side="right") - 1
        indices = rows - starts[sources]
        places = _find(self._validation, sources, indices)
        return self._read(self._validation, sources, indices, places, sample_indices)

    def _locate(self, sample_indices: IndexArray) -> tuple[IndexArray, ...]:
        """Return the source, the row and the place of each training sample."""
        sources, rows = self.order.locate(sample_indices)
        return sources, rows, _find(self._train, sources, rows)

    def _read(
        self,
        streams: list[Stream],
        sources: IndexArray,
        indices: IndexArray,
        places: IndexArray,
        sample_indices: IndexArray,
    ) -> Batch:
        began = time.perf_counter()
        rows, segment_starts = self._read_rows(streams, sources, indices, places)
        read = time.perf_counter()
        batch = self._join(rows, segment_starts, sample_indices)
        self.load_times.add({"read": read - began, "collate": time.perf_counter() - read})
        return batch

    def _join(
        self, rows: NDArray[Any], segment_starts: NDArray[np.bool_], sample_indices: IndexArray
    ) -> Batch:
        is_trained = None
        if self._has_chats:
            is_trained = rows[:, 1:] < NO_TARGET
            rows = rows.astype(np.int64) & (NO_TARGET - 1)
        stored = rows[:, 1:]
        shape = stored.shape
        inputs, targets = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
        inputs.numpy()[:], targets.numpy()[:] = rows[:, :-1], stored
        if is_trained is not None:
            targets.numpy()[~is_trained] = IGNORE_INDEX
        if not self._document_masks:
            if is_trained is not None:
                return make_batch((inputs,), targets, sample_indices)
            lowest = np.minimum.reduce(stored, axis=None)  # of two bytes each, not of eight
            highest = np.maximum.reduce(stored, axis=None)
            return make_batch((inputs,), targets, sample_indices, classes=(int(lowest), int(highest)))
        documents, positions, crosses_documents = find_document_boundaries(
            rows, segment_starts, -1 if self._has_chats else self.tokenizer.end_of_document_id
        )
        targets.numpy()[crosses_documents] = IGNORE_INDEX
        keywords = {"documents": torch.from_numpy(documents), "positions": torch.from_numpy(positions)}
        return make_batch((inputs,), targets, sample_indices, keywords)

    def _read_rows(
        self, streams: list[Stream], sources: IndexArray, indices: IndexArray, places: IndexArray
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return tokens (rows, sequence + 1) as stored, and a mask of the starts of segments among them."""
        for source in self._sources:
            source.file.watch.check()
        first = int(sources[0])
        if len(streams) == 1 or (sources == first).all():
            rows = streams[first].read(places)
            return rows, self._segment_starts(streams[first], indices, rows)
        rows = np.empty((len(indices), self._sequence_length + 1), self._stored_type)
        starts = np.zeros(rows.shape, bool)
        for number in np.unique(sources).tolist():
            mask = sources == number
            rows[mask] = streams[number].read(places[mask])
            if self._document_masks:
                starts[mask] = self._segment_starts(streams[number], indices[mask], rows[mask])
        return rows, starts

    def _segment_starts(self, stream: Stream, indices: IndexArray, rows: NDArray[Any]) -> NDArray[np.bool_]:
        if not self._document_masks:
            return np.zeros((), bool)
        starts = stream.segment_starts(indices)
        if self._has_chats and isinstance(stream, PackedSequences):
            # The end of a turn in a conversation may be the same token: there it ends no document.
            starts[:, 1:] |= rows[:, :-1] == self.tokenizer.end_of_document_id
        return starts


def _find(streams: Sequence[Stream], sources: IndexArray, rows: IndexArray) -> IndexArray:
    """Return the place of each row in the token file of its source, as `PackedSequences.read` takes it."""
    places = np.empty_like(rows)
    for source in np.unique(sources).tolist():
        mask = sources == source
        places[mask] = streams[source].find(rows[mask])
    return places


def _chat_facts(file: TokenFile, too_long: int) -> dict[str, Any]:
    """Return facts of a source of conversations; none of text."""
    return {"targets": file.header["targets"], "conversations_too_long": too_long} if file.is_chat else {}
