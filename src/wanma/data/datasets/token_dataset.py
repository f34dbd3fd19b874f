"""Data set of text: one or more token files, mixed by weight, packed into sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from wanma.data.batch import IGNORE_INDEX, Batch
from wanma.data.datasets.dataset import BatchedDataset, InputKind, make_batch
from wanma.data.sampling.mixture import Mixture
from wanma.data.sampling.permutation import IndexArray, shuffle_indices
from wanma.data.text.sequence_packing import PackedSequences, find_document_boundaries
from wanma.data.text.token_file import TokenFile
from wanma.data.text.tokenizer import Tokenizer
from wanma.data.text.validation_split import split_documents


@dataclass(frozen=True)
class TokenSource:
    """Source of the mixture, with its open token file."""

    name: str
    weight: float
    file: TokenFile


class TokenDataset(BatchedDataset):
    """Data set of token sequences; inputs are (rows, sequence), targets the same shifted by one."""

    input_kind: ClassVar[InputKind] = "tokens"

    def __init__(
        self,
        sources: Sequence[TokenSource],
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        validation_fraction: float,
        document_masks: bool,
        seed: int,
        total_samples: int,
    ) -> None:
        splits = split_documents([source.file for source in sources], validation_fraction, sequence_length)
        self._sources = sources
        self._splits = splits
        self._train = [
            PackedSequences(source.file.tokens, split.train, sequence_length)
            for source, split in zip(sources, splits, strict=True)
        ]
        self._validation = [
            PackedSequences(source.file.tokens, split.validation, sequence_length)
            for source, split in zip(sources, splits, strict=True)
        ]
        self._mixture = Mixture.from_weights([source.weight for source in sources])
        self._document_masks = document_masks
        self._total = total_samples
        self._sequence_length = sequence_length
        self.seed = seed
        self.tokenizer: Tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocabulary_size
        self.targets_per_sample = sequence_length
        self.train_samples = sum(stream.sequence_count for stream in self._train)
        self.validation_samples = sum(stream.sequence_count for stream in self._validation)
        hashes = "".join(source.file.fingerprint for source in sources)
        self.fingerprint = hashlib.sha256(hashes.encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        shares = np.array(self._mixture.source_weights) / sum(self._mixture.source_weights)
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
                    "share": float(share),
                    "documents": source.file.header["documents"],
                    "tokens": source.file.header["tokens"],
                    "skipped": source.file.header["skipped"],
                    "not_utf8": source.file.header["not_utf8"],
                    "train_tokens": train.token_count,
                    "validation_tokens": validation.token_count,
                    "validation_cut": split.validation_tail_fraction,
                    "epochs": float(self._total * share / train.sequence_count),
                    "token_file": str(source.file.folder),
                }
                for source, share, train, validation, split in zip(
                    self._sources, shares, self._train, self._validation, self._splits, strict=True
                )
            ],
        }

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        sources, indices = self._mixture.locate_samples(sample_indices)
        for source in np.unique(sources):
            source_mask = sources == source
            epoch_size = self._train[source].sequence_count
            indices[source_mask] = shuffle_indices(
                indices[source_mask], epoch_size, self.seed, "source", int(source)
            )
        return self._read(self._train, sources, indices, sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        starts = np.cumsum([0] + [stream.sequence_count for stream in self._validation])
        sources = np.searchsorted(starts, rows, side="right") - 1
        return self._read(self._validation, sources, rows - starts[sources], sample_indices)

    def _read(
        self,
        streams: list[PackedSequences],
        sources: IndexArray,
        indices: IndexArray,
        sample_indices: IndexArray,
    ) -> Batch:
        rows = np.empty((len(sample_indices), self._sequence_length + 1), np.int64)
        segment_starts = np.zeros(rows.shape, bool)
        for source in np.unique(sources):
            source_mask = sources == source
            rows[source_mask] = streams[source].read(indices[source_mask])
            if self._document_masks:
                segment_starts[source_mask] = streams[source].segment_starts(indices[source_mask])
        keywords = {}
        targets = rows[:, 1:].copy()
        if self._document_masks:
            documents, positions, crosses_documents = find_document_boundaries(
                rows, segment_starts, self.tokenizer.end_of_document_id
            )
            targets[crosses_documents] = IGNORE_INDEX
            keywords = {"documents": torch.from_numpy(documents), "positions": torch.from_numpy(positions)}
        inputs = torch.from_numpy(rows[:, :-1].copy())
        return make_batch((inputs,), torch.from_numpy(targets), sample_indices, keywords)
