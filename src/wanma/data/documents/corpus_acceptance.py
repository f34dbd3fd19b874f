"""Acceptance of a corpus: records without the field of the job are refused, or told. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from wanma.data.documents.content_detection import records_without_text_error
from wanma.data.documents.document_groups import (
    DocumentGroup,
    UnusedFormat,
    group_documents,
    is_array_requested,
)
from wanma.data.documents.record_fields import DEFAULT_TEXT_FIELD
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.remote_file import FileOpener
from wanma.job.errors import JobError

log = logging.getLogger("wanma.data")


def accept_documents(
    documents: Sequence[StoredFile],
    text_field: str,
    opener: FileOpener | None = None,
    *,
    is_chat: bool = False,
    format_name: str = "",
) -> tuple[list[DocumentGroup], list[UnusedFormat]]:
    """Group files by their content, without those that only describe others.

    Args:
        text_field: field of records that holds the document.
        is_chat: True if the documents are conversations.
        format_name: format of all files; empty: found by their content.

    Returns:
        The groups, and the formats of files that are left out or read as plain text.

    Raises:
        JobError: records lack the field where the job means records.
        WanmaError: a file cannot be read.
    """
    groups, unused = group_documents(documents, text_field, opener, format_name)
    groups = [group for group in groups if group.kind != "description"]
    if is_chat:
        for group in groups:
            if group.size and (group.kind != "rows" or group.format_name == "megatron"):
                kind = "plain text" if group.kind == "text" else "token ids"
                raise JobError(
                    f"{documents[0].job_key}: {group.url} holds {kind}, no records with the field "
                    f"'{text_field}' of data.columns.messages",
                    "name files of records: JSON lines, Parquet, Arrow, Hugging Face data sets",
                )
    is_given = text_field != DEFAULT_TEXT_FIELD
    if unused and ((is_given and all(group.kind == "text" for group in groups)) or _are_most(unused, groups)):
        raise records_without_text_error(
            documents[0].job_key, "; ".join(one.describe(text_field) for one in unused)
        )
    return groups, unused


def unused_notes(unused: Sequence[UnusedFormat], text_field: str) -> list[str]:
    """Return a sentence for each format without documents."""
    return [f"{one.describe(text_field)}; {one.consequence}" for one in unused]


def report_unused(documents: Sequence[StoredFile], notes: Sequence[str]) -> None:
    """Log the notes on files that are left out or read as plain text."""
    for note in notes:
        log.warning("%s: %s", documents[0].job_key, note)


def entries_identity(documents: Sequence[StoredFile]) -> list[list[Any]]:
    """Return the division of found files into entries of the job; empty: they are of one entry.

    Whether records without the field are refused depends on it, see `group_documents`.
    """
    numbers: dict[str, int] = {}
    found = [document.entry for document in documents if not document.is_named]
    runs = [[numbers.setdefault(entry, len(numbers)), len([*run])] for entry, run in groupby(found)]
    return runs if len(numbers) > 1 else []


def document_key(document: StoredFile) -> list[Any]:
    """Return the identity of a document, by which its token file is found.

    An array that a folder holds is left out, and one that a glob such as '*.npy' names is not.
    """
    is_array = document.url.lower().endswith((".npy", ".npz"))
    is_array_of_glob = is_array and not document.is_named and is_array_requested(document)
    mark = ["array"] if is_array_of_glob else []
    return [document.url, document.size, document.version, document.is_named, *mark]


def _are_most(unused: Sequence[UnusedFormat], groups: Sequence[DocumentGroup]) -> bool:
    """Return True if most files would be read as plain text for lack of the field."""
    count = sum(one.files for one in unused if one.is_read_as_text)
    return 2 * count > sum(len(group.files) for group in groups)
