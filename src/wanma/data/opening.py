"""Opening of a job's data: `prepare_job_data` once per node, then `open_dataset` in every rank.

`prepare_job_data` imports no torch and leaves no thread or process behind, so that it may run before
workers are forked.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.data.cache.prepared_entries import mark_prepared_entries
from wanma.data.documents.text_files import STANDARD_LIBRARY
from wanma.data.images.image_files import read_image_files
from wanma.data.images.image_splits import find_known_images
from wanma.data.images.stored_images import open_image_sources
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.sampling.order import Shuffle
from wanma.data.stores.client import Traffic
from wanma.data.stores.filesystems import is_remote_entry
from wanma.data.text.corpus import (
    build_token_files,
    load_job_tokenizer,
    open_token_file_of,
    preparation_of,
    reads_records,
    reads_remote_storage,
    resolve_text_sources,
)
from wanma.data.text.preparation_process import measure_in_subprocess, prepare_in_subprocess
from wanma.data.text.tokenizer import Tokenizer
from wanma.job.errors import JobError, WanmaError
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

if TYPE_CHECKING:
    from wanma.data.datasets.dataset import BatchedDataset


_MEASURE_SECONDS = 20.0
"""Seconds for which a plan waits for a store that holds the text."""


def prepare_job_data(
    section: DataSection,
    progress: Callable[[int, int], None] | None = None,
    announce: Callable[[TextPreparation], None] | None = None,
) -> Traffic:
    """Prepare the data once for all ranks of a node: find it, and build token files that are missing.

    Args:
        announce: called before token files are built, with what is missing.

    Returns:
        The traffic of child processes with stores; that of this process is `process_traffic`.

    Raises:
        JobError: the data or the tokenizer does not exist or has an unknown format.
        WanmaError: it cannot be read, is damaged, or the cache cannot be written.
    """
    traffic: Traffic = Counter()
    if section.placement == "parts":
        for _, part in part_sections(section):
            traffic += prepare_job_data(part, progress, announce)
    elif section.has_images:
        if find_known_images(section, "data") is None:
            open_image_sources(section, progress)
    elif section.has_table and not section.has_factory:
        from wanma.data.tables.table_dataset import open_tables

        open_tables(section, progress)
    elif section.has_interactions:
        from wanma.data.interactions.log import read_log

        read_log(section, progress)  # builds its index, and names a bad row before ranks start
    elif section.has_factory:
        return traffic  # a dataset may import anything, torch and threads included: only ranks open it
    elif reads_remote_storage(section):
        traffic = prepare_in_subprocess(section, progress, announce)
    else:
        texts, tokenizer = resolve_text_sources(section), load_job_tokenizer(section)
        if reads_records(section, texts, tokenizer):
            traffic = prepare_in_subprocess(section, progress, announce, (texts, tokenizer))
        else:
            if announce is not None:
                announce(preparation_of(section, texts, tokenizer))
            build_token_files(section, texts, tokenizer, progress)
    mark_prepared_entries(section)
    return traffic


def text_preparation(section: DataSection) -> TextPreparation | None:
    """Return the preparation that a job's text needs on this machine; None: there is no text to prepare.

    Text that is not here, or whose store does not answer in time, is unknown and no error: a job may be
    planned on another machine than it runs on.
    """
    entries = [entry for _, source in section.located_sources for entry in source.entries]
    if section.placement == "parts":
        return None  # what this node lacks, others prepare
    is_text = any(entry != STANDARD_LIBRARY for entry in entries)
    if section.has_interactions or section.has_images or section.is_own or not is_text:
        return None
    try:
        if reads_remote_storage(section):
            if not section.probe_store:
                return TextPreparation(0, 0, None, "", 1, is_remote=True, fault="data.probe_store = false")
            return measure_in_subprocess(section, _MEASURE_SECONDS)
        texts, tokenizer = resolve_text_sources(section), load_job_tokenizer(section)
        return preparation_of(section, texts, tokenizer)
    except WanmaError as error:
        return TextPreparation(0, 0, None, "", 1, is_remote=False, fault=error.message)


def open_dataset(
    section: DataSection, train: TrainSection, dataset: Any = None, known_ids: Mapping[str, Any] | None = None
) -> BatchedDataset:
    """Open the data: the same view on every rank.

    Args:
        dataset: a user's dataset, or a pair (training, validation); replaces the data of `section`.
        known_ids: of interactions, ids that have rows already, as of `InteractionDataset`.

    Raises:
        JobError, WanmaError: as `prepare_job_data`; and too little data for one sample of training and
            validation.
    """
    total = samples_consumed_before(train, train.steps)
    if section.placement == "parts":
        if dataset is not None:
            raise JobError(
                "data.placement = 'parts' is not supported for a dataset of your own",
                "name the files in data.path",
            )
        return _open_parts(section, train, total)
    if dataset is not None:
        return _open_user_dataset(dataset, section, train, total)
    if section.factory:
        from wanma.data.datasets.map_dataset import call_dataset_factory

        dataset = call_dataset_factory(section.factory, section.arguments)
        return _open_user_dataset(dataset, section, train, total)
    if section.is_own and section.sources:
        from wanma.data.datasets.dataset_mixture import open_dataset_mixture

        return open_dataset_mixture(section, train.seed, total)
    if section.is_own:
        from wanma.data.datasets.map_dataset import wrap_user_dataset
        from wanma.data.tables.table_dataset import open_tables

        table = open_tables(section)[0]
        data = wrap_user_dataset(table, section, train.seed, total)
        data.take_tables([table])
        return data
    if section.has_images:
        return _open_images(section, train, total)
    if section.has_interactions:
        from wanma.data.interactions.dataset import InteractionDataset

        return InteractionDataset(section, train.seed, total, known_ids or {})
    return _open_token_dataset(section, train, load_job_tokenizer(section), total)


def part_sections(section: DataSection) -> list[tuple[str, DataSection]]:
    """Return the entries of data in parts that this node has, each with the section of its part.

    Raises:
        JobError: it has none of them, or one is read into memory.
    """
    key, entries = section.entries_key, section.entries
    found = [
        entry
        for entry in entries
        if entry == STANDARD_LIBRARY or is_remote_entry(entry) or glob(str(Path(entry).expanduser()))  # noqa: PTH207  # a pattern of a path, perhaps absolute
    ]
    if not found:
        raise JobError(
            f"data.{key}: this node has none of {', '.join(entries)}",
            "paths are relative to where wanma is started",
        )
    sections = [(entry, section.model_copy(update={key: [entry], "placement": "shared"})) for entry in found]
    for entry, part in sections:
        if part.has_images and find_known_images(part, "data") is not None:
            raise JobError(
                f"data.placement = 'parts' is not supported for '{entry}': arrays are normalized by their "
                "own mean",
                "store the images in files (a folder, WebDataset, Parquet), or set data.placement = 'shared'",
            )
    return sections


def _open_parts(section: DataSection, train: TrainSection, total: int) -> BatchedDataset:
    """Open the parts of the data that this node has."""
    from wanma.data.datasets.parted_dataset import PartedDataset

    return PartedDataset(
        [(entry, open_dataset(part, train)) for entry, part in part_sections(section)],
        host=socket.gethostname(),
        shuffle=Shuffle.of_job(section),
        is_interleaved=section.part_order == "interleaved",
        seed=train.seed,
        total_samples=total,
    )


def _open_images(section: DataSection, train: TrainSection, total: int) -> BatchedDataset:
    if find_known_images(section, "data") is None:
        from wanma.data.datasets.stored_image_dataset import StoredImageDataset

        return StoredImageDataset(open_image_sources(section), section, seed=train.seed, total_samples=total)
    from wanma.data.datasets.image_dataset import ImageDataset

    images, test = read_image_files(section.entries[0], f"data.{section.entries_key}")
    return ImageDataset(
        images,
        test,
        validation_fraction=section.validation_fraction,
        shuffle=Shuffle.of_job(section),
        seed=train.seed,
        total_samples=total,
    )


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

    sources = [
        TokenSource(text.name, text.weight, open_token_file_of(text, tokenizer, section))
        for text in resolve_text_sources(section)
    ]
    return TokenDataset(sources, tokenizer, section, seed=train.seed, total_samples=total)
