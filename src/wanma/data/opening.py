"""Opening of a job's data: `prepare_job_data` once per node, then `open_dataset` in every rank.

`prepare_job_data` imports no torch and leaves no thread or process behind, so that it may run before
workers are forked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanma.data.datasets.image_files import find_image_files, read_image_files
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.text.corpus import (
    build_token_files,
    resolve_text_sources,
    storage_entries,
    token_cache_folder,
)
from wanma.data.text.documents import uses_async_filesystem
from wanma.data.text.preparation_process import prepare_in_subprocess
from wanma.data.text.token_file import open_or_build_token_file
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

if TYPE_CHECKING:
    from wanma.data.datasets.dataset import BatchedDataset


def prepare_job_data(section: DataSection, progress: Callable[[int, int], None] | None = None) -> None:
    """Prepare the data once for all ranks of a node: find it, and build token files that are missing.

    Args:
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all) while token files are built.

    Raises:
        JobError: the data or the tokenizer does not exist or has an unknown format.
        WanmaError: it cannot be read, is damaged, or the cache cannot be written.
    """
    if section.images:
        find_image_files(section.images)
    elif section.factory:
        return  # a dataset may import anything, torch and threads included: only ranks open it
    elif any(uses_async_filesystem(entry) for entry in storage_entries(section)):
        prepare_in_subprocess(section, progress)
    else:
        build_token_files(section, progress)


def open_dataset(section: DataSection, train: TrainSection, dataset: Any = None) -> BatchedDataset:
    """Open the data: the same view on every rank.

    Args:
        section: the job's `[data]`.
        train: the job's `[train]`.
        dataset: a user's dataset, or a pair (training, validation); replaces the data of `section`.

    Raises:
        JobError, WanmaError: as `prepare_job_data`; and too little data for one sample of training and
            validation.
    """
    total = samples_consumed_before(train, train.steps)
    if dataset is not None or section.factory:
        from wanma.data.datasets.map_dataset import call_dataset_factory

        return _open_user_dataset(
            call_dataset_factory(section) if dataset is None else dataset, section, train, total
        )
    if section.images:
        from wanma.data.datasets.image_dataset import ImageDataset

        images, test = read_image_files(section.images)
        return ImageDataset(
            images,
            test,
            validation_fraction=section.validation_fraction,
            seed=train.seed,
            total_samples=total,
        )
    return _open_token_dataset(section, train, load_tokenizer(section.tokenizer), total)


def _open_user_dataset(dataset: Any, section: DataSection, train: TrainSection, total: int) -> BatchedDataset:
    """Open a user's dataset, or a pair (training, validation), each map-style or iterable."""
    from wanma.data.datasets.map_dataset import check_dataset, wrap_user_dataset
    from wanma.data.datasets.seeded_draws import SeededDraws
    from wanma.data.datasets.stream_dataset import StreamDataset
    from wanma.data.datasets.stream_reader import is_stream, read_first_samples

    training, validation = check_dataset(dataset)
    if validation is not None and is_stream(validation):
        draws = SeededDraws(train.seed, serialize_access=True)
        validation = read_first_samples(validation, train.validation_samples, draws)
    if is_stream(training):
        return StreamDataset(training, validation, section, train, total)
    return wrap_user_dataset((training, validation), section, train.seed, total)


def _open_token_dataset(
    section: DataSection, train: TrainSection, tokenizer: Tokenizer, total: int
) -> BatchedDataset:
    from wanma.data.datasets.token_dataset import TokenDataset, TokenSource

    cache = token_cache_folder(section)
    sources = [
        TokenSource(text.name, text.weight, open_or_build_token_file(text.documents, tokenizer, cache))
        for text in resolve_text_sources(section)
    ]
    return TokenDataset(
        sources,
        tokenizer,
        sequence_length=section.sequence_length,
        validation_fraction=section.validation_fraction,
        document_masks=section.document_masks,
        seed=train.seed,
        total_samples=total,
    )


def __getattr__(name: str) -> Any:
    """Import `BatchedDataset` on demand: it needs torch, which `prepare_job_data` must not import."""
    if name == "BatchedDataset":
        from wanma.data.datasets.dataset import BatchedDataset

        return BatchedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
