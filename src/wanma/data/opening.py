"""Opening of a job's data: `prepare` once per node, then `open_data` in every rank.

`prepare` imports no torch and leaves no thread or process behind, so that it may run before workers are
forked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wanma.data.datasets.image_files import find_images, read_images
from wanma.data.sampling.batch_size_schedule import samples_before
from wanma.data.text.corpus import build_token_files, cache_folder, entries, texts_of
from wanma.data.text.documents import starts_threads
from wanma.data.text.preparation_process import prepare_elsewhere
from wanma.data.text.token_file import ensure_token_file
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.sections.data import DataSection
from wanma.job.sections.job import TrainSection

if TYPE_CHECKING:
    from wanma.data.datasets.dataset import Data


def prepare(section: DataSection, progress: Callable[[int, int], None] | None = None) -> None:
    """Prepare the data once for all ranks of a node: find it, and build token files that are missing.

    Args:
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all) while token files are built.

    Raises:
        JobError: the data or the tokenizer does not exist or has an unknown format.
        WanmaError: it cannot be read, is damaged, or the cache cannot be written.
    """
    if section.images:
        find_images(section.images)
    elif section.factory:
        return  # a dataset may import anything, torch and threads included: only ranks open it
    elif any(starts_threads(entry) for entry in entries(section)):
        prepare_elsewhere(section, progress)
    else:
        build_token_files(section, progress)


def open_data(section: DataSection, train: TrainSection, dataset: Any = None) -> Data:
    """Open the data: the same view on every rank.

    Args:
        section: the job's `[data]`.
        train: the job's `[train]`.
        dataset: a user's dataset, or a pair (training, validation); replaces the data of `section`.

    Raises:
        JobError, WanmaError: as `prepare`; and too little data for one sample of training and validation.
    """
    total = samples_before(train, train.steps)
    if dataset is not None or section.factory:
        from wanma.data.datasets.map_dataset import call_factory

        return _open_own(call_factory(section) if dataset is None else dataset, section, train, total)
    if section.images:
        from wanma.data.datasets.image_dataset import ImageData

        images, test = read_images(section.images)
        return ImageData(
            images,
            test,
            validation_fraction=section.validation_fraction,
            seed=train.seed,
            total_samples=total,
        )
    return _open_text(section, train, load_tokenizer(section.tokenizer), total)


def _open_own(dataset: Any, section: DataSection, train: TrainSection, total: int) -> Data:
    """Open a user's dataset, or a pair (training, validation), each map-style or iterable."""
    from wanma.data.datasets.map_dataset import check_dataset, open_dataset
    from wanma.data.datasets.seeded_draws import SeededDraws
    from wanma.data.datasets.stream_dataset import StreamData
    from wanma.data.datasets.stream_reader import first_samples, is_stream

    training, validation = check_dataset(dataset)
    if validation is not None and is_stream(validation):
        draws = SeededDraws(train.seed, one_at_a_time=True)
        validation = first_samples(validation, train.validation_samples, draws)
    if is_stream(training):
        return StreamData(training, validation, section, train, total)
    return open_dataset((training, validation), section, train.seed, total)


def _open_text(section: DataSection, train: TrainSection, tokenizer: Tokenizer, total: int) -> Data:
    from wanma.data.datasets.token_dataset import TextSource, TokenData

    cache = cache_folder(section)
    sources = [
        TextSource(text.name, text.weight, ensure_token_file(text.documents, tokenizer, cache))
        for text in texts_of(section)
    ]
    return TokenData(
        sources,
        tokenizer,
        sequence_length=section.sequence_length,
        validation_fraction=section.validation_fraction,
        masks=section.document_masks,
        seed=train.seed,
        total_samples=total,
    )


def __getattr__(name: str) -> Any:
    """Import `Data` on demand: it needs torch, which `prepare` must not import."""
    if name == "Data":
        from wanma.data.datasets.dataset import Data

        return Data
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
