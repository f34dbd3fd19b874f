"""The text of a job: its sources and documents, and the token files that are built of them, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from wanma.data.chat.encoding import chat_template_of
from wanma.data.documents.corpus_acceptance import report_unused
from wanma.data.documents.document_groups import holds_records
from wanma.data.documents.record_fields import DEFAULT_TEXT_FIELD
from wanma.data.documents.text_files import STANDARD_LIBRARY, list_documents
from wanma.data.index.build import Progress
from wanma.data.index.records import cache_folder
from wanma.data.sampling.mixture_schedule import SourceWeight
from wanma.data.stores.filesystems import is_remote_entry
from wanma.data.stores.listing import StoredFile
from wanma.data.text.encoding_task import ReadingSettings
from wanma.data.text.preparation_measurement import measure_preparation
from wanma.data.text.sequence_packing import divide_corpus
from wanma.data.text.token_file import TokenFile, open_or_build_token_file, token_folder
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import EntriesSection, SourceSection

log = logging.getLogger("wanma.data")


def build_token_files(
    section: DataSection, texts: Sequence[TextSource], tokenizer: Tokenizer, progress: Progress | None = None
) -> None:
    """Build the token files of text, and check that they hold enough for the job's sequences."""
    files: list[TokenFile] = []
    totals = [sum(document.size for document in text.documents) for text in texts]
    for number, text in enumerate(texts):
        text_start = sum(totals[:number])

        def advance(document_bytes: int, _: int, text_start: int = text_start) -> None:
            if progress is not None:
                progress(text_start + document_bytes, sum(totals))

        is_built = _is_built(text, tokenizer, section)
        files.append(open_token_file_of(text, tokenizer, section, advance))
        if is_built:  # a build tells it before its long work
            report_unused(text.documents, files[-1].header.get("notes", ()))
    sides = divide_corpus(files, section)
    if tail := max(side.validation_tail_fraction for side in sides):
        log.warning(
            "too few documents for a validation split by document; the last %.1f%% of each document is used "
            "for validation",
            tail * 100,
        )
    for text, file, side in zip(texts, files, sides, strict=True):
        if side.too_long:
            log.warning(
                "source '%s': %s of %s conversations are longer than a row and are %s (data.chat.too_long)",
                *(text.name, side.too_long, len(file.lengths)),
                "cut" if section.chat.too_long == "cut" else "left out",
            )


def load_job_tokenizer(section: DataSection) -> Tokenizer:
    """Load the tokenizer of a job; of conversations it must have a chat template.

    Raises:
        JobError: as of `load_tokenizer`, or there is no chat template.
    """
    tokenizer = load_tokenizer(section.tokenizer)
    if any(source.columns.messages for _, source in section.located_sources):
        chat_template_of(tokenizer)
    return tokenizer


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
    missing = [text for text in texts if not _is_built(text, tokenizer, section)]
    documents = [(document, text.settings.text_field) for text in missing for document in text.documents]
    size = sum(document.size for text in texts for document in text.documents)
    return measure_preparation(section, size, documents, tokenizer)


def reads_records(section: DataSection, texts: Sequence[TextSource], tokenizer: Tokenizer) -> bool:
    """Return True if token files are to be built of more than plain text, by libraries that start threads."""
    return any(not _is_built(text, tokenizer, section) and holds_records(text.documents) for text in texts)


def _is_built(text: TextSource, tokenizer: Tokenizer, section: DataSection) -> bool:
    return token_folder(text.documents, tokenizer, cache_folder(section.cache), text.settings).is_dir()


def reads_remote_storage(section: DataSection) -> bool:
    """Return True if text or tokenizer are in remote storage, whose libraries start threads."""
    entries = [entry for _, source in section.located_sources for entry in source.entries]
    entries.append(section.tokenizer)
    return any(is_remote_entry(entry) for entry in entries)


@dataclass(frozen=True)
class TextSource:
    """One text source of a job: name, weight in the mixture, and files with documents."""

    name: str
    weight: SourceWeight
    documents: Sequence[StoredFile]
    settings: ReadingSettings = field(default_factory=ReadingSettings)


def resolve_text_sources(section: DataSection) -> list[TextSource]:
    """Return the text sources of a job; without any, the standard library's source."""
    return [
        TextSource(
            source.name if isinstance(source, SourceSection) else "text",
            source.weight if isinstance(source, SourceSection) else 1.0,
            list_documents(
                source.entries or [STANDARD_LIBRARY],
                f"{table}.{source.entries_key}",
                section.store_retry_seconds,
            ),
            _settings(section, source),
        )
        for table, source in section.located_sources
    ]


def _settings(section: DataSection, source: EntriesSection) -> ReadingSettings:
    columns = source.columns
    return ReadingSettings(
        columns.messages or columns.text or columns.tokens or DEFAULT_TEXT_FIELD,
        is_chat=columns.messages is not None,
        format_name=source.format or "",
        bad_data=section.bad_data,
        bad_data_limit=section.bad_data_limit,
        cache_bytes=section.cache_bytes,
        retry_seconds=section.store_retry_seconds,
    )
