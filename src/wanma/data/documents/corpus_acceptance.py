"""Acceptance of a corpus: records without the field of the job are refused, or told. No torch here.

A token file is found by its documents, unread. Whether records without the field are refused depends on the
entries of the job, too, and an older version of wanma may have accepted what is refused now. So a token file
notes the entries for which it was accepted; for others the first bytes of its documents are read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from wanma.data.documents.content_detection import records_without_text_error
from wanma.data.documents.document_groups import (
    DocumentGroup,
    UnusedFormat,
    group_documents,
    is_array_requested,
)
from wanma.data.documents.record_fields import DEFAULT_TEXT_FIELD
from wanma.data.stores.data_file import FileOpener
from wanma.data.stores.listing import StoredFile
from wanma.job.errors import JobError
from wanma.job.run.run_directory import write_json

log = logging.getLogger("wanma.data")

_RULES = 1
"""Version of the rules by which records without the field are refused."""
_LATER_ENTRIES = "accepted.json"
"""File in the folder of a token file: entries for which it was accepted after it was built."""

Acceptances = Mapping[str, Sequence[str]]
"""Notes on files that are left out or read as plain text, by `entries_identity`."""


class DocumentRules(Protocol):
    """Keys of a job that decide what its documents are; see `ReadingSettings`."""

    @property
    def text_field(self) -> str:
        """Field of records that holds the document."""

    @property
    def is_chat(self) -> bool:
        """True if the documents are conversations."""

    @property
    def format_name(self) -> str:
        """Format of all files; empty: found by their content."""


def accept_documents(
    documents: Sequence[StoredFile], rules: DocumentRules, opener: FileOpener | None = None
) -> tuple[list[DocumentGroup], list[UnusedFormat]]:
    """Group files by their content, without those that only describe others.

    Args:
        documents: the files of the corpus.
        rules: keys of the job.
        opener: opener of remote files; None: their stores.

    Returns:
        The groups, and the formats of files that are left out or read as plain text.

    Raises:
        JobError: records lack the field where the job means records.
        WanmaError: a file cannot be read.
    """
    text_field = rules.text_field
    groups, unused = group_documents(documents, text_field, opener, rules.format_name)
    groups = [group for group in groups if group.kind != "description"]
    if rules.is_chat:
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


def entries_identity(documents: Sequence[StoredFile]) -> str:
    """Return the hash of the division of files into entries of the job, and of the rules of acceptance."""
    numbers: dict[str, int] = {}
    runs = [
        [numbers.setdefault(entry, len(numbers)), sum(1 for _ in files)]
        for entry, files in groupby(documents, key=lambda document: document.entry)
    ]
    return hashlib.sha256(json.dumps([_RULES, runs]).encode()).hexdigest()[:32]


def document_key(document: StoredFile) -> list[Any]:
    """Return the identity of a document, by which its token file is found.

    An array that a folder holds is left out, and one that a glob such as '*.npy' names is not.
    """
    is_array = document.url.lower().endswith((".npy", ".npz"))
    is_array_of_glob = is_array and not document.is_named and is_array_requested(document)
    mark = ["array"] if is_array_of_glob else []
    return [document.url, document.size, document.version, document.is_named, *mark]


def is_accepted(folder: Path, documents: Sequence[StoredFile]) -> bool:
    """Return True if the token file in `folder` exists, and was accepted for the entries of `documents`."""
    return entries_identity(documents) in acceptances(folder)


def acceptances(folder: Path) -> Acceptances:
    """Return the acceptances of the token file in `folder`; none if it is missing, damaged or older."""
    found: dict[str, Sequence[str]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        found |= json.loads((folder / "header.json").read_text(encoding="utf-8"))["accepted"]
    with suppress(OSError, ValueError, TypeError):
        found |= json.loads((folder / _LATER_ENTRIES).read_text(encoding="utf-8"))
    return found


def note_acceptance(folder: Path, documents: Sequence[StoredFile], notes: Sequence[str]) -> None:
    """Note that a finished token file was accepted for the entries of `documents`."""
    entries = {**acceptances(folder), entries_identity(documents): notes}
    with suppress(OSError):  # a shared cache may be read-only, or full: then each opening looks again
        write_json(folder / _LATER_ENTRIES, entries)


def _are_most(unused: Sequence[UnusedFormat], groups: Sequence[DocumentGroup]) -> bool:
    """Return True if most files would be read as plain text for lack of the field."""
    count = sum(one.files for one in unused if one.is_read_as_text)
    return 2 * count > sum(len(group.files) for group in groups)
