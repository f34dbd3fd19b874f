"""The text of a job: its sources and documents, and the token files that are built of them, without torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wanma.data.text.documents import STANDARD_LIBRARY, Document, list_documents
from wanma.data.text.token_file import TokenFile, open_or_build_token_file
from wanma.data.text.tokenizer import load_tokenizer
from wanma.data.text.validation_split import split_documents
from wanma.job.sections.data import DataSection

log = logging.getLogger("wanma.data")


def build_token_files(section: DataSection, progress: Callable[[int, int], None] | None = None) -> None:
    """Build the token files of text, and check that they hold enough for the job's sequences."""
    texts = resolve_text_sources(section)
    tokenizer = load_tokenizer(section.tokenizer)
    files: list[TokenFile] = []
    totals = [sum(document.size for document in text.documents) for text in texts]
    for number, text in enumerate(texts):
        text_start = sum(totals[:number])

        def advance(document_bytes: int, _: int, text_start: int = text_start) -> None:
            if progress is not None:
                progress(text_start + document_bytes, sum(totals))

        files.append(
            open_or_build_token_file(text.documents, tokenizer, token_cache_folder(section), advance)
        )
    splits = split_documents(files, section.validation_fraction, section.sequence_length)
    if splits[0].validation_tail_fraction:
        log.warning(
            "too few documents for a validation split by document; the last %.1f%% of each document is used "
            "for validation",
            splits[0].validation_tail_fraction * 100,
        )


def token_cache_folder(section: DataSection) -> Path:
    """Return the folder of token files: `data.cache`, or wanma's folder in the user's cache."""
    if section.cache is not None:
        return Path(section.cache).expanduser()
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "wanma"


def storage_entries(section: DataSection) -> list[str]:
    return [*section.text, *(entry for source in section.sources for entry in source.text), section.tokenizer]


@dataclass(frozen=True)
class TextSource:
    """One text source of a job: name, weight in the mixture, and documents."""

    name: str
    weight: float
    documents: Sequence[Document]


def resolve_text_sources(section: DataSection) -> list[TextSource]:
    """Return the text sources of a job; without any, the standard library's source."""
    if section.sources:
        return [
            TextSource(
                source.name, source.weight, list_documents(source.text, f"data.sources[{number}].text")
            )
            for number, source in enumerate(section.sources)
        ]
    return [TextSource("text", 1.0, list_documents(section.text or [STANDARD_LIBRARY]))]
