"""Base class of the data sets that training reads: text, images or a user's own dataset.

Its core is `batch`: sample indices in, tensors out, a pure function. The subclasses (`token_dataset.py`,
`image_dataset.py`, `map_dataset.py`) read rows; the common part is here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, BadSample, Batch, widen_integers
from wanma.data.datasets.load_times import LoadTimes
from wanma.data.handover.sample_reading import SampleReading
from wanma.data.index.sample_index import DamagedFile
from wanma.data.sampling.order import SampleOrder
from wanma.data.sampling.permutation import IndexArray, permute_indices
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.forecast.data_feed import SampleLoading
from wanma.job.plan.plan import Plan
from wanma.job.sections.recommender import InteractionSizes

log = logging.getLogger("wanma.data")

_SHOWN_DAMAGED_FILES = 3

InputKind = Literal["tokens", "images", "interactions", "custom"]


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
    order: SampleOrder | None = None
    """Order of the training samples; None: the data's own."""
    vocabulary_size: int | None = None
    image_shape: tuple[int, int, int] | None = None
    """Shape of an image: (channels, height, width); None: no images."""
    classes: int | None = None
    interaction_sizes: InteractionSizes | None = None
    """Sizes of an interaction log; None: other data."""
    table_ids: Mapping[str, Tensor] = MappingProxyType({})
    """Ids of the rows of embedding tables, by table, that checkpoints hold; as of `AdmittedIds.table`."""
    reassigned_rows: Mapping[str, IndexArray] = MappingProxyType({})
    """Rows by table that had another id in the checkpoint to start from."""
    tokenizer: Tokenizer | None = None
    loader_threads: int = 1
    """Least number of steps that are worth loading at once; of a store, so that its link is never idle."""
    copies_from_memory: ClassVar[bool] = False
    """True if a batch is copied from arrays in memory or mapped files, which any thread may do."""
    load_times: LoadTimes | None = None
    """Seconds by part of loading; None: not measured."""
    sample_source: SampleReading | None = None
    """Source of batches, while ranks that need the same samples share their reading; None: this process."""
    can_share_reading: bool = True
    """True if a process can read any samples for others; False: it reads all in their order."""
    reads_by_processes: bool = False
    """True if loader processes read, each with a copy of the data; False: threads of this process."""
    is_costly_to_read: bool = False
    """True if reading a sample costs more than its hand-over from another process."""
    damaged_files: Sequence[DamagedFile] = ()
    """Stored files that were left out as a whole."""
    padding_has_targets = False
    """Switch that lets padding rows keep a sample's targets, for losses that may not know `IGNORE_INDEX`.

    The training masks such rows anyway.
    """

    def batch(self, sample_indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Return the training samples with these indices, counted from the start of the run over all epochs.

        Empty `sample_indices` give one padding row, see `Batch`.
        """
        index_array = np.asarray(sample_indices, dtype=np.int64)
        return self._take(False, index_array) if len(index_array) else self._padding_batch()

    def validation_batch(self, indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Return the validation samples with these indices in [0, validation_samples), in shuffled order."""
        index_array = np.asarray(indices, dtype=np.int64)
        return self._take(True, index_array) if len(index_array) else self._padding_batch()

    def read_rows(  # of text and stored images
        self,
        is_validation: bool,  # noqa: ARG002
        rows: IndexArray,  # noqa: ARG002
        sample_indices: IndexArray,  # noqa: ARG002
    ) -> Batch:
        """Read stored rows, whatever the order of the run is; only text and stored images can.

        Args:
            sample_indices: sample indices that the rows have in the run.
        """
        raise TypeError(f"data of kind {self.input_kind!r} cannot lie in parts")

    @property
    def sample_form(self) -> str:
        """Describe the form of a sample, which all parts of the data have alike."""
        return ""

    def close(self) -> None:  # noqa: B027  # most data have nothing to close
        """End the reading of the data, also for other nodes."""

    def read_samples(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        """Read samples, at least one, of training or of validation in this process."""
        if not is_validation:
            return self._train_batch(sample_indices)
        rows = permute_indices(sample_indices, self.validation_samples, self.seed, "validation")
        return self._validation_batch(sample_indices, rows)

    def step_samples(self, first_sample: int, plan: Plan, size: int) -> IndexArray:  # noqa: ARG002
        """Return the sample indices of a step, those of each data rank at its rows of the plan.

        Args:
            first_sample: samples consumed by the steps before it.
        """
        return np.arange(first_sample, first_sample + size)

    def unread_batch(self, sample_indices: IndexArray) -> Batch | None:  # noqa: ARG002
        """Return a batch of rows without content, for pipeline stages that need neither inputs nor targets.

        Returns:
            the batch; None: what those stages need must be read.
        """
        return None

    def _take(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        if self.sample_source is not None:
            return self.sample_source.take(is_validation, sample_indices)
        return self.read_samples(is_validation, sample_indices)

    @property
    def order_identity(self) -> str:
        """Return the order as a checkpoint keeps it; empty: the data's own."""
        return "" if self.order is None else self.order.identity()

    def sample_name(self, sample_index: int) -> str:
        """Describe the training sample with this index in words by which its owner can find it."""
        return f"sample {sample_index} of the run's order"

    @property
    def bad_file_count(self) -> int:
        """Number of stored files that were left out as a whole, each of which counts as bad data."""
        return len(self.damaged_files)

    @property
    def bad_data_note(self) -> str:
        """Sentence about stored data that was left out as bad, for the run's records; empty: none was."""
        damaged = self.damaged_files
        if not damaged:
            return ""
        shown = "; ".join(f"{one.file}: {one.cause}" for one in damaged[:_SHOWN_DAMAGED_FILES])
        more = len(damaged) - _SHOWN_DAMAGED_FILES
        return (
            f"damaged files of the data were left out as a whole, {len(damaged):,} in all: {shown}"
            + (f"; and {more:,} more" if more > 0 else "")
            + "; `wanma data verify` lists all damage"
        )

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return sizes for the report, as JSON-able values; `epochs`: how often the run reads each source."""

    def sample_loading(self) -> SampleLoading | None:
        """Return the loading cost of a sample, measured on some; None: not that of stored files."""
        return None

    def record_rates(self, source: str) -> None:
        """Keep the rates that this process has measured while it loaded, for later forecasts.

        Args:
            source: the run, as 'run NAME'.
        """
        del source  # data without rates of their own

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
        model = self._take(False, np.zeros(1, np.int64))
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
    classes: tuple[int, int] | None = None,
) -> Batch:
    """Return a batch of real rows; `classes` is the range of `targets`, found from them if it is None."""
    real = torch.ones(len(sample_indices), dtype=torch.bool)
    index_tensor = torch.from_numpy(sample_indices.copy())
    return Batch(
        inputs, targets, index_tensor, real, keywords or {}, class_range=classes or class_range(targets)
    )


def class_range(targets: Tensor) -> tuple[int, int] | None:
    """Return minimum and maximum of integer targets other than `IGNORE_INDEX`; None if there are none."""
    targets = widen_integers(targets)
    if targets.dtype != torch.int64 or targets.numel() == 0:
        return None
    minimum, maximum = (int(value) for value in torch.aminmax(targets))
    if minimum >= 0:
        return minimum, maximum
    targets_used = targets[targets != IGNORE_INDEX]
    return (int(targets_used.min()), int(targets_used.max())) if len(targets_used) else None


def with_bad_samples(batch: Batch, bad_samples: Sequence[BadSample], *, keeps_targets: bool = False) -> Batch:
    """Return a batch with its bad samples; the rows of those that are skipped become padding.

    Args:
        keeps_targets: leave the targets of padding as they are, see `BatchedDataset.padding_has_targets`.
    """
    skipped = [one.sample for one in bad_samples if not one.is_substituted]
    if skipped:
        real = torch.from_numpy(~np.isin(batch.samples.numpy(), skipped))
        targets = batch.targets
        if not keeps_targets:
            rows = real.reshape(-1, *[1] * (targets.ndim - 1))
            targets = torch.where(rows, widen_integers(targets), mask_targets(targets))
        batch = replace(
            batch,
            real=real,
            samples=torch.where(real, batch.samples, -1),
            targets=targets,
            class_range=class_range(targets),
        )
    return replace(batch, bad_samples=tuple(bad_samples))


def log_bad_validation(bad_samples: Sequence[BadSample], reported: set[str]) -> None:
    """Log samples of validation that cannot be read, each once; those of training a run lists.

    Args:
        reported: places that were logged before; the new ones are added.
    """
    for one in bad_samples:
        if one.place not in reported:
            reported.add(one.place)
            action = "another one is read instead" if one.is_substituted else "it is skipped"
            log.warning("validation: %s: %s; %s", one.place, one.cause, action)


def mask_targets(targets: Tensor) -> Tensor:
    """Return targets of padding rows: `IGNORE_INDEX` for integers, else 0 (`Batch.real` masks the row)."""
    targets = widen_integers(targets)
    return torch.full_like(targets, IGNORE_INDEX if targets.dtype == torch.int64 else 0)
