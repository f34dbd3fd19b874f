"""The text of a job: its sources and documents, and the token files that are built of them, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from wanma.data.documents.corpus_acceptance import (
    acceptances,
    entries_identity,
    is_accepted,
    report_unused,
)
from wanma.data.documents.document_groups import holds_records
from wanma.data.documents.text_files import STANDARD_LIBRARY, list_documents
from wanma.data.index.records import cache_folder
from wanma.data.sampling.mixture_schedule import SourceWeight
from wanma.data.stores.filesystems import is_remote_entry
from wanma.data.stores.listing import StoredFile
from wanma.data.text.encoding_task import ReadingSettings
from wanma.data.text.preparation_measurement import measure_preparation
from wanma.data.text.token_file import TokenFile, open_or_build_token_file, token_folder
from wanma.data.text.tokenization import Progress
from wanma.data.text.tokenizer import Tokenizer
from wanma.data.text.validation_split import split_documents
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.sections.data import DataSection

log = logging.getLogger("wanma.data")


def build_token_files(
    section: DataSection, texts: Sequence[TextSource], tokenizer: Tokenizer, progress: Progress | None = None
) -> None:
    """Build the token files of text, and check that they hold enough for the job's sequences.

    Args:
        section: the job's `[data]`.
        texts: its sources, see `resolve_text_sources`.
        tokenizer: its tokenizer.
        progress: called with (bytes done, bytes in all).
    """
    files: list[TokenFile] = []
    totals = [sum(document.size for document in text.documents) for text in texts]
    for number, text in enumerate(texts):
        text_start = sum(totals[:number])

        def advance(document_bytes: int, _: int, text_start: int = text_start) -> None:
            if progress is not None:
                progress(text_start + document_bytes, sum(totals))

        folder = token_folder(text.documents, tokenizer, cache_folder(section.cache), text.settings)
        is_built = folder.is_dir()
        files.append(open_token_file_of(text, tokenizer, section, advance))
        if is_built:  # a build tells it before its long work
            notes = acceptances(folder).get(entries_identity(text.documents), ())
            report_unused(text.documents, notes)
    splits = split_documents(files, section.validation_fraction, section.sequence_length)
    if splits[0].validation_tail_fraction:
        log.warning(
            "too few documents for a validation split by document; the last %.1f%% of each document is used "
            "for validation",
            splits[0].validation_tail_fraction * 100,
        )


def open_token_file_of(
    text: TextSource, tokenizer: Tokenizer, section: DataSection, progress: Progress | None = None
) -> TokenFile:
    """Open the token file of a source, or build it; see `open_or_build_token_file`."""
    return open_or_build_token_file(
        text.documents, tokenizer, cache_folder(section.cache), progress, settings=text.settings
    )


def preparation_of(
    section: DataSection, texts: Sequence[TextSource], tokenizer: Tokenizer
) -> TextPreparation:
    """Return the preparation that the text of a job needs on this machine; see `measure_preparation`."""
    cache = cache_folder(section.cache)
    missing = [
        document
        for text in texts
        if not token_folder(text.documents, tokenizer, cache, text.settings).is_dir()
        for document in text.documents
    ]
    size = sum(document.size for text in texts for document in text.documents)
    return measure_preparation(section, size, missing, tokenizer)


def reads_records(section: DataSection, texts: Sequence[TextSource], tokenizer: Tokenizer) -> bool:
    """Return True if token files are to be built of more than plain text, by libraries that start threads."""
    cache = cache_folder(section.cache)
    return any(
        not is_accepted(token_folder(text.documents, tokenizer, cache, text.settings), text.documents)
        and holds_records(text.documents)
        for text in texts
    )


def reads_remote_storage(section: DataSection) -> bool:
    """Return True if text or tokenizer are in remote storage, whose libraries start threads."""
    entries = [
        *section.text,
        *(entry for source in section.sources for entry in source.text),
        section.tokenizer,
    ]
    return any(is_remote_entry(entry) for entry in entries)


@dataclass(frozen=True)
class TextSource:
    """One text source of a job: name, weight in the mixture, and files with documents."""

    name: str
    weight: SourceWeight
    documents: Sequence[StoredFile]
    settings: ReadingSettings = field(default_factory=ReadingSettings)


def resolve_text_sources(section: DataSection) -> list[TextSource]:
    """Return the text sources of a job; without any, the standard library's source.

    Args:
        section: the job's `[data]`.
    """
    if not section.sources:
        documents = list_documents(section.text or [STANDARD_LIBRARY])
        return [TextSource("text", 1.0, documents, _settings(section, None))]
    return [
        TextSource(
            source.name,
            source.weight,
            list_documents(source.text, f"data.sources[{number}].text"),
            _settings(section, source.text_field),
        )
        for number, source in enumerate(section.sources)
    ]


def _settings(section: DataSection, text_field: str | None) -> ReadingSettings:
    return ReadingSettings(
        text_field or section.text_field,
        section.bad_data,
        section.bad_data_limit,
        section.cache_bytes,
    )
