"""Kind of the samples of a path, found by its content where the job leaves it open; formats that a job names.

No torch here: commands ask before they plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from wanma.data.documents.record_fields import TOKEN_FIELDS, first_fields
from wanma.data.documents.text_files import STANDARD_LIBRARY
from wanma.data.formats.detection import best_format, detect_format, format_named, known_formats, probe_file
from wanma.data.formats.format import BadDataError, FileGroup, Format
from wanma.data.images.fields import IMAGE_FIELDS
from wanma.data.images.image_files import find_image_files
from wanma.data.images.image_splits import only_entry
from wanma.data.index.records import is_description
from wanma.data.stores.data_file import OpenableFile
from wanma.data.stores.listing import StoredFile, list_files
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import EntriesSection, SourceSection
from wanma.job.sections.job import Job

_IMAGE_FORMATS = ("images", "idx", "cifar")
_TEXT_FORMATS = ("text", "text-lines", "megatron")
_TEXT_OR_RECORDS = ("jsonl", "json-list", "csv")
"""Formats of records in whose folders other text may lie."""
_PROBED_FILES = 8

Source = TypeVar("Source", bound=EntriesSection)


def with_data_kinds(job: Job) -> Job:
    """Return the job with the kind of each path of its data; the job itself where nothing is open.

    A path that is not here, or whose store does not answer, stays open: a job may be planned on another
    machine than it runs on, and reading it says what is wrong.

    Raises:
        JobError: a format is unknown or contradicts the content; the content does not tell the kind; or the
            sources of a mixture have different kinds.
    """
    section = job.data
    if not any(source.is_open_kind or source.format for _, source in section.located_sources):
        return job
    if section.sources:
        sources = [_resolve(source, f"data.sources[{n}]") for n, source in enumerate(section.sources)]
        resolved = section.model_copy(update={"sources": sources})
        try:
            resolved.check_one_kind()
        except ValueError as error:
            raise JobError(f"data.sources: {error}", "set kind or columns of the sources") from error
    else:
        resolved = _resolve(section, "data")
    return job if resolved == section else job.model_copy(update={"data": resolved})


def chosen_format(source: EntriesSection) -> Format | None:
    """Return the format that the job names; None: the content tells it."""
    return format_named(source.format) if source.format else None


def read_in_memory_by_name(source: EntriesSection) -> bool:
    """Return True if files of images may be known by their names (MNIST, CIFAR-10, .npz)."""
    return not (source.format or source.columns.image or source.columns.target)


def _resolve(source: Source, table: str) -> Source:
    if source.format and source.format not in known_formats():
        error = _unknown_format(source.format)
        raise JobError(f"{table}.format: {error.message}", error.hint)
    if not source.is_open_kind and not source.format:
        return source
    key = f"{table}.{source.entries_key}"
    try:
        listed = list_files([one for one in source.entries if one != STANDARD_LIBRARY], key)
        files = [file for file in listed if file.is_named or not is_description(file.url)]
        if source.format:
            _check_format(source, files, table)
        return _find_kind(source, files, table) if source.is_open_kind else source
    except _ContentError:
        raise
    except WanmaError:  # missing or damaged, which reading says with its cause
        return source


class _ContentError(JobError):
    """Error: the content contradicts the job, or does not tell the kind of the samples."""


def _unknown_format(name: str) -> WanmaError:
    try:
        format_named(name)
    except WanmaError as error:
        return error
    raise AssertionError(name)


def _check_format(source: EntriesSection, files: Sequence[StoredFile], table: str) -> None:
    kinds = {**dict.fromkeys(_IMAGE_FORMATS, "images"), **dict.fromkeys(_TEXT_FORMATS, "text")}
    kind = kinds.get(source.format or "")
    if kind and not source.is_open_kind and kind != source.content:
        raise _ContentError(
            f"{table}.format = '{source.format}' holds {kind}, and the job reads {source.content}",
            f"remove {table}.format, or name the fields of {kind} in {table}.columns",
        )
    filled = [OpenableFile(file) for file in files if file.size][:_PROBED_FILES]
    probes = [probe_file(file) for file in filled]
    if probes and not any(format_named(source.format or "").detect(probe) for probe in probes):
        found = best_format(probes[0], known_formats().values())
        raise _ContentError(
            f"{table}.format = '{source.format}' contradicts the content of {filled[0].url}"
            + (f", whose format is {found.name}" if found else ""),
            f"remove {table}.format, or name files of this format",
        )


def _find_kind(source: Source, files: Sequence[StoredFile], table: str) -> Source:
    """Return a source with the kind that its first file tells."""

    def of_kind(kind: str, **columns: str) -> Source:
        named = source.columns.model_copy(update=columns)
        return source.model_copy(update={"kind": kind, **({"columns": named} if columns else {})})

    if read_in_memory_by_name(source) and _is_known_by_name(source):
        return of_kind("images")
    openable = [OpenableFile(file) for file in files]
    try:
        data_format = chosen_format(source) or detect_format(openable)
        groups = data_format.group(openable)
    except BadDataError:  # text of any kind, or nothing that is known: reading it tells
        return of_kind("text")
    if data_format.name in _IMAGE_FORMATS:
        return of_kind("images")
    if data_format.name in _TEXT_FORMATS:
        return of_kind("text")
    fields = first_fields(data_format, _first_filled(groups)) or []
    own_field = source.text_field if isinstance(source, SourceSection | DataSection) else None
    if "text" in fields or own_field in fields:
        return of_kind("text")
    if "messages" in fields:
        return of_kind("text", messages="messages")
    if tokens := next((name for name in TOKEN_FIELDS if name in fields), None):
        return of_kind("text", tokens=tokens)
    if source.columns.target or (set(IMAGE_FIELDS) - {"x"}) & set(fields):
        return of_kind("images")
    if not fields or (data_format.name in _TEXT_OR_RECORDS and not files[0].is_named):
        return of_kind("text")
    raise _ContentError(
        f"{table}.path: the content of {groups[0].url} ({data_format.name}) does not tell what a sample is; "
        f"its fields are {', '.join(fields)}",
        f"name them by their use in {table}.columns: text, tokens, messages, image, or features and target",
    )


def _first_filled(groups: Sequence[FileGroup]) -> FileGroup:
    return next((group for group in groups if any(file.size for file in group.files)), groups[0])


def _is_known_by_name(source: EntriesSection) -> bool:
    path = only_entry(source.entries)
    try:
        return path is not None and bool(find_image_files(path).train)
    except WanmaError:
        return False
