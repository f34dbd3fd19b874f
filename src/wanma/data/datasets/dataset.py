"""Base class of the data sets that training reads: text, images or a user's own dataset.

Its core is `batch`: sample indices in, tensors out, a pure function. The subclasses (`token_dataset.py`,
`image_dataset.py`, `map_dataset.py`) read rows; the common part is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, Batch
from wanma.data.sampling.permutation import IndexArray, permute_indices
from wanma.data.text.tokenizer import Tokenizer

InputKind = Literal["tokens", "images", "custom"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class BatchedDataset(ABC):
    """Data set in the order of one seed."""

    input_kind: ClassVar[InputKind]
    seed: int
    targets_per_sample: int
    """Number of targets of a sample; text: the sequence length; otherwise 1."""
    train_samples: int
    """Training samples in one epoch of every source."""
    validation_samples: int
    """Validation samples; 0: there is no validation data."""
    fingerprint: str
    """Hash of the content, equal on all ranks of a run."""
    vocabulary_size: int | None = None
    image_shape: tuple[int, int, int] | None = None
    """Shape of an image: (channels, height, width); None: no images."""
    classes: int | None = None
    tokenizer: Tokenizer | None = None
    padding_has_targets = False
    """Switch that lets padding rows keep a sample's targets, for losses that may not know `IGNORE_INDEX`.

    The training masks such rows anyway.
    """

    def batch(self, sample_indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Return the training samples with these indices, counted from the start of the run over all epochs.

        Empty `sample_indices` give one padding row, see `Batch`.
        """
        index_array = np.asarray(sample_indices, dtype=np.int64)
        return self._train_batch(index_array) if len(index_array) else self._padding_batch()

    def validation_batch(self, indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Return the validation samples with these indices in [0, validation_samples), in shuffled order."""
        index_array = np.asarray(indices, dtype=np.int64)
        if not len(index_array):
            return self._padding_batch()
        rows = permute_indices(index_array, self.validation_samples, self.seed, "validation")
        return self._validation_batch(index_array, rows)

    def sample_name(self, sample_index: int) -> str:
        """Describe the training sample with this index in words by which its owner can find it."""
        return f"sample {sample_index} of the run's order"

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return sizes for the report, as JSON-able values; `epochs`: how often the run reads each source."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode `tokens` to text; only data of kind "tokens" can."""
        if self.tokenizer is None:
            raise TypeError(f"data of kind {self.input_kind!r} has no tokenizer")
        return self.tokenizer.decode(tokens)

    @abstractmethod
    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        """Read training samples, at least one."""

    @abstractmethod
    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        """Read the validation samples at `rows`, whose indices for the caller are `sample_indices`."""

    def _padding_batch(self) -> Batch:
        """Return a batch of one padding row, shaped like a sample."""
        model = self._train_batch(np.zeros(1, np.int64))
        return Batch(
            inputs=model.inputs,
            targets=model.targets if self.padding_has_targets else mask_targets(model.targets),
            samples=torch.full((1,), -1),
            real=torch.zeros(1, dtype=torch.bool),
            keywords=model.keywords,
            named_targets=model.named_targets,
        )


def make_batch(
    inputs: tuple[Tensor, ...],
    targets: Tensor,
    sample_indices: IndexArray,
    keywords: dict[str, Tensor] | None = None,
) -> Batch:
    """Return a batch of real rows."""
    real = torch.ones(len(sample_indices), dtype=torch.bool)
    index_tensor = torch.from_numpy(sample_indices.copy())
    return Batch(inputs, targets, index_tensor, real, keywords or {}, class_range=class_range(targets))


def class_range(targets: Tensor) -> tuple[int, int] | None:
    """Return minimum and maximum of integer targets other than `IGNORE_INDEX`; None if there are none."""
    if targets.dtype not in _INTEGERS or targets.numel() == 0:
        return None
    minimum, maximum = (int(value) for value in torch.aminmax(targets))
    if minimum >= 0:
        return minimum, maximum
    targets_used = targets[targets != IGNORE_INDEX]
    return (int(targets_used.min()), int(targets_used.max())) if len(targets_used) else None


def mask_targets(targets: Tensor) -> Tensor:
    """Return targets of padding rows: `IGNORE_INDEX` for integers, else 0 (`Batch.real` masks the row)."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return torch.zeros_like(targets)
    return torch.full_like(targets, IGNORE_INDEX, dtype=torch.int64)  # bytes have no such number
