"""Kind of the samples of a path, found by its content where the job leaves it open; formats that a job names.

No torch here: commands ask before they plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from wanma.data.documents.record_fields import TOKEN_FIELDS, first_fields
from wanma.data.documents.text_files import STANDARD_LIBRARY
from wanma.data.formats.detection import best_format, detect_format, format_named, known_formats, probe_file
from wanma.data.formats.format import BadDataError
from wanma.data.images.fields import IMAGE_FIELDS
from wanma.data.images.image_splits import find_known_images
from wanma.data.index.records import without_descriptions
from wanma.data.stores.listing import list_files
from wanma.data.stores.remote_file import OpenableFile
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data_sources import EntriesSection
from wanma.job.sections.job import Job

_KIND_OF_FORMAT = {
    **dict.fromkeys(("images", "idx", "cifar"), "images"),
    **dict.fromkeys(("text", "text-lines", "megatron"), "text"),
}
"""Kinds of formats that hold samples of one kind alone."""
_TEXT_OR_RECORDS = ("jsonl", "json-list", "csv")
"""Formats of records in whose folders other text may lie."""
_PROBED_FILES = 8

Source = TypeVar("Source", bound=EntriesSection)


def with_data_kinds(job: Job) -> Job:
    """Return the job with the kind of each path of its data; the job itself where nothing is open.

    A path that is not here, or whose store does not answer, stays open: a job may be planned on another
    machine than it runs on, and reading it says what is wrong.

    Raises:
        JobError: a format is unknown or contradicts the content; the content does not tell the kind; the
            sources of a mixture have different kinds; or the kind does not lie in parts.
    """
    section = job.data
    if section.is_open_kind and job.model.family == "recommender":
        section = section.model_copy(update={"kind": "interactions"})
    if not section.sources:
        section = _resolve(section, "data")
        if section.is_open_kind and section.placement == "parts":  # other nodes have the rest
            parts = [_resolve(section.model_copy(update={"path": [one]}), "data") for one in section.path]
            if known := [part for part in parts if not part.is_open_kind]:
                section = known[0].model_copy(update={"path": section.path})
    elif any(source.is_open_kind or source.format for source in section.sources):
        sources = [_resolve(source, f"data.sources[{n}]") for n, source in enumerate(section.sources)]
        section = section.model_copy(update={"sources": sources})
        try:
            section.check_one_kind()
        except ValueError as error:
            raise JobError(f"data.sources: {error}", "set kind or columns of the sources") from error
    if section.placement == "parts" and section.has_interactions:
        raise JobError(
            "data.placement = 'parts' is not supported for interactions", "set data.placement = 'shared'"
        )
    return job if section is job.data else job.model_copy(update={"data": section})


class _ContentError(JobError):
    """Error: the content contradicts the job, or does not tell the kind of the samples."""


def _resolve(source: Source, table: str) -> Source:
    if not source.is_open_kind and not source.format:
        return source
    if source.format and source.format not in known_formats():
        try:
            format_named(source.format)
        except WanmaError as error:
            raise JobError(f"{table}.format: {error.message}", error.hint) from error
    try:
        if STANDARD_LIBRARY in source.entries:
            return source.model_copy(update={"kind": "text"}) if source.is_open_kind else source
        listed = list_files(source.entries, f"{table}.{source.entries_key}")
        files = [OpenableFile(file) for file in without_descriptions(listed)]
        _check_format(source, files, table)
        return _find_kind(source, files, table, listed[0].is_named) if source.is_open_kind else source
    except _ContentError:
        raise
    except WanmaError:  # missing or damaged, which reading says with its cause
        return source


def _check_format(source: EntriesSection, files: Sequence[OpenableFile], table: str) -> None:
    if not source.format:
        return
    kind = _KIND_OF_FORMAT.get(source.format)
    if kind and not source.is_open_kind and kind != source.content:
        raise _ContentError(
            f"{table}.format = '{source.format}' holds {kind}, and the job reads {source.content}",
            f"remove {table}.format, or name the fields of {kind} in {table}.columns",
        )
    filled = [file for file in files if file.size][:_PROBED_FILES]
    probes = [probe_file(file) for file in filled]
    if probes and not any(format_named(source.format).detect(probe) for probe in probes):
        found = best_format(probes[0], known_formats().values())
        raise _ContentError(
            f"{table}.format = '{source.format}' contradicts the content of {filled[0].url}"
            + (f", whose format is {found.name}" if found else ""),
            f"remove {table}.format, or name files of this format",
        )


def _find_kind(source: Source, files: Sequence[OpenableFile], table: str, is_named: bool) -> Source:
    """Return a source with the kind that its first file tells."""

    def of_kind(kind: str, **columns: str) -> Source:
        named = source.columns.model_copy(update=columns)
        return source.model_copy(update={"kind": kind, **({"columns": named} if columns else {})})

    with suppress(WanmaError):  # other images say what is wrong when they are read
        if find_known_images(source, table) is not None:
            return of_kind("images")
    try:
        data_format = format_named(source.format) if source.format else detect_format(files)
        groups = data_format.group(files)
    except BadDataError:  # text of any kind, or nothing that is known: reading it tells
        return of_kind("text")
    if kind := _KIND_OF_FORMAT.get(data_format.name):
        return of_kind(kind)
    first = next((group for group in groups if any(file.size for file in group.files)), groups[0])
    fields = first_fields(data_format, first) or []
    if "text" in fields:
        return of_kind("text")
    if {"user", "item"} <= set(fields):
        return of_kind("interactions")
    if "messages" in fields:
        return of_kind("text", messages="messages")
    if tokens := next((name for name in TOKEN_FIELDS if name in fields), None):
        return of_kind("text", tokens=tokens)
    if source.columns.target or (set(IMAGE_FIELDS) - {"x"}) & set(fields):
        return of_kind("images")
    if not fields or (data_format.name in _TEXT_OR_RECORDS and not is_named):
        return of_kind("text")
    raise _ContentError(
        f"{table}.path: the content of {first.url} ({data_format.name}) does not tell what a sample is; its "
        f"fields are {', '.join(fields)}",
        f"name them by their use in {table}.columns: text, tokens, messages, image, user and item, or "
        "features and target",
    )
