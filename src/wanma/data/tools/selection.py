"""Data that a command names: files of any store, or the data of a job, opened as sources with an index."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from wanma.data.documents.document_groups import DocumentGroup, group_documents, reading_format
from wanma.data.formats.compression import plain_name
from wanma.data.formats.detection import (
    best_format,
    detect_format,
    format_named,
    known_formats,
    probe_file,
)
from wanma.data.formats.format import BadDataError, DataFile, Format, UnreadableFileError
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.formats.text import TextDocuments
from wanma.data.images.image_splits import ImageSplit, files_by_split, find_image_split
from wanma.data.index.build import Progress, open_or_build_index
from wanma.data.index.records import cache_folder, without_descriptions
from wanma.data.index.sample_index import SampleIndex
from wanma.data.interactions.log_files import first_record, list_log_files, open_log, resolve_columns
from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.listing import StoredFile, expand_entry, list_files, unique_files
from wanma.data.stores.remote_file import OpenableFile
from wanma.data.text.corpus import TextSource, resolve_text_sources
from wanma.job.errors import JobError, WanmaError, did_you_mean
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import (
    SYNTHETIC_LOG,
    ColumnsSection,
    EntriesSection,
    SourceSection,
)
from wanma.job.url_credentials import CREDENTIALS_HINT, has_secret

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Words of Python -> of JSON."""
_PROBED_FILES = 16
"""Files of one suffix whose first bytes are read to find their format."""


def openable(file: StoredFile) -> OpenableFile:
    """Return a file of a command; one that cannot be opened is bad data of that file."""
    return OpenableFile(file, _open_or_bad_data)


def _open_or_bad_data(file: StoredFile) -> ByteSource:
    plain = OpenableFile(file)
    try:
        return plain.open()
    except WanmaError as error:
        cause = error.message.rpartition(f"'{plain.url}'")[2].lstrip(": ") or error.message
        raise UnreadableFileError(plain.url, cause, hint=error.hint) from error


@dataclass(frozen=True)
class DataSource:
    """Files of one format that are read as one list of rows."""

    name: str
    """Name of the source in a job; "data" for files that a command names."""
    data_format: Format
    files: tuple[DataFile, ...]
    field: str = ""
    """Field of the text, the token ids or the messages in a job; empty: found by name."""
    skipped: tuple[str, ...] = ()
    """Files that training leaves out, because they hold no text."""
    is_chat: bool = False
    """True if `field` holds conversations."""
    columns: ColumnsSection | None = None
    """Columns of a job's table or interactions; None: other data."""
    interactions: DataSection | None = None
    """Section of a job's interactions; None: other data."""

    @property
    def size(self) -> int:
        """Size in bytes, as stored."""
        return sum(file.size for file in self.files)

    def open_index(
        self, cache_folder: Path, progress: Progress | None = None, *, skip_damaged: bool = False
    ) -> SampleIndex:
        """Open the index of the files; arguments and errors as of `open_or_build_index`."""
        return open_or_build_index(
            self.files, self.data_format, cache_folder, progress, skip_damaged=skip_damaged
        )


@dataclass(frozen=True)
class DataSelection:
    """Sources that a command works on, with what is known about their use in training."""

    sources: tuple[DataSource, ...]
    cache_folder: Path
    """Folder of indexes, shared with the jobs of this user."""
    tokenizer: str = ""
    """Tokenizer as of `data.tokenizer`; empty: none is known."""
    sequence_length: int = 0
    """Tokens of a training sequence; 0: unknown."""


@dataclass(frozen=True)
class FormatChoice:
    """Format that a command asks for, in place of the detected one.

    Args:
        name: name of the format; empty: detected by content.
    """

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def of(self, files: Sequence[DataFile]) -> Format:
        """Return the format of `files`.

        Raises:
            WanmaError: unknown format or option, a value of another type, or content of no known format.
        """
        chosen = format_named(self.name) if self.name else detect_format(files)
        if not self.options:
            return chosen
        known = [one.name for one in fields(chosen)]  # type: ignore[arg-type]  # formats are dataclasses
        for name in self.options:
            if name not in known:
                raise JobError(
                    f"the format '{chosen.name}' has no option '{name}'.{did_you_mean(name, known)}",
                    f"its options are {', '.join(known)}" if known else "it has no options",
                )
        values = {name: _option_value(chosen, name, value) for name, value in self.options.items()}
        return replace(chosen, **values)  # type: ignore[type-var]


def _option_value(chosen: Format, name: str, value: Any) -> Any:
    """Return the value of an option in the type that the format declares.

    Raises:
        JobError: the value has another type.
    """
    kind: TypeAdapter[Any] = TypeAdapter(get_type_hints(type(chosen))[name])
    try:
        return kind.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise JobError(
            f"--option {name}={json.dumps(value)}: the format '{chosen.name}' takes no such value: "
            f"{error.errors()[0]['msg'][:1].lower()}{error.errors()[0]['msg'][1:]}",
            'write it as JSON: true, false, null, a number, "text" or ["a", "b"]',
        ) from error


def parse_option(text: str) -> tuple[str, Any]:
    """Parse an option of a format, 'NAME=VALUE': JSON, or Python's True, False and None; else it is text.

    Raises:
        JobError: there is no '='.
    """
    name, separator, value = text.partition("=")
    if not separator:
        raise JobError(f"--option {text}: no value", "write it as NAME=VALUE, such as unit=sequence")
    try:
        return name.strip(), json.loads(_PYTHON_WORDS.get(value, value))
    except ValueError:
        return name.strip(), value


def select_entries(entries: Sequence[str], choice: FormatChoice, cache: str | None) -> DataSelection:
    """Return files of entries (files, folders, globs, URLs) as one source, or one for each format or split.

    Folders of images whose first folders name splits, such as `train/` and `val/`, are one source a split.

    Args:
        cache: folder of indexes; None: the user's cache folder.

    Raises:
        JobError: an entry that is missing, matches nothing or holds a password; an unknown format or option.
        WanmaError: storage that cannot be read, or content of no known format.
    """
    for number, entry in enumerate(entries):  # libraries quote addresses in their errors
        if has_secret(entry):
            raise JobError(
                f"DATA[{number}]: the address holds a password, key or signature", CREDENTIALS_HINT
            )
    listed = unique_files(file for entry in entries for file in expand_entry(entry, "DATA"))
    files = without_descriptions(listed) or listed
    folder = cache_folder(cache)
    groups = {} if choice.name or choice.options else _files_by_format(files)
    if len(groups) == 1:
        choice = FormatChoice(next(iter(groups)))
    elif groups:
        sources = [
            source
            for name, stored in groups.items()
            for source in _split_sources(f"data/{name}", stored, FormatChoice(name))
        ]
        return DataSelection(tuple(sources), folder)
    sources = _split_sources("data", files, choice)
    return DataSelection(tuple(sources), folder)


def select_job_data(section: DataSection, choice: FormatChoice, cache: str | None) -> DataSelection:
    """Return the data of a job, one source for each of its sources; arguments as of `select_entries`.

    Raises:
        JobError: the data are a program (`factory`), or as of `select_entries`.
    """
    if section.has_factory:
        raise JobError(
            f"the data of this job are a program, {section.factory_text}, not stored files",
            "name the files that it reads instead of the job",
        )
    folder = cache_folder(section.cache if cache is None else cache)
    if section.has_images:
        return DataSelection(tuple(_image_sources(section, choice)), folder)
    if section.has_interactions:
        return DataSelection((_interactions_source(section, choice, folder),), folder)
    if section.has_table:
        tables = [
            replace(
                _source(
                    getattr(source, "name", "data"),
                    list_files(source.entries, f"{table}.path"),
                    _choice(source, choice),
                ),
                columns=source.columns,
            )
            for table, source in section.located_sources
        ]
        return DataSelection(tuple(tables), folder)
    sources = [source for text in resolve_text_sources(section) for source in _text_sources(text, choice)]
    return DataSelection(tuple(sources), folder, section.tokenizer, section.sequence_length)


def _interactions_source(section: DataSection, choice: FormatChoice, folder: Path) -> DataSource:
    if any(entry.startswith(SYNTHETIC_LOG) for entry in section.path):
        raise JobError(
            f"the data of this job are made by wanma, data.path = {section.path}, and not stored",
            "name files in data.path",
        )
    index = open_log(section.model_copy(update={"bad_data": "skip", "cache": str(folder)}))
    files = tuple(map(openable, list_log_files(section)))
    return DataSource(
        "data",
        choice.of(files) if choice.name or choice.options else index.data_format,
        files,
        columns=resolve_columns(section.columns, section.interactions, first_record(index)),
        interactions=section,
    )


def _source(name: str, stored: Sequence[StoredFile], choice: FormatChoice) -> DataSource:
    files = tuple(map(openable, stored))
    return DataSource(name, choice.of(files), files)


def _split_sources(name: str, files: Sequence[StoredFile], choice: FormatChoice) -> list[DataSource]:
    """Return files of one format as one source, or image folders as one for each split."""
    source = _source(name, files, choice)
    splits = files_by_split(files) if isinstance(source.data_format, ImageFolder) else {}
    prefix = "" if name == "data" else f"{name}/"
    return [_source(f"{prefix}{split}", stored, choice) for split, stored in splits.items()] or [source]


def _files_by_format(files: Sequence[StoredFile]) -> dict[str, list[StoredFile]]:
    """Divide files by format, each in its order; files with one suffix are to have one format.

    Files that others describe, such as those of a saved data set, belong together: then all are of that
    format. Files of no known format, and empty ones, are with those of the first: that format reports them.
    """
    formats = known_formats()
    marked = [one for one in formats.values() if one.markers]
    for file in files:
        name = file.url.rpartition("/")[2]
        if any(fnmatchcase(name, pattern) for one in marked for pattern in one.markers):
            return {}
    names: dict[str, str] = {}
    probed: Counter[str] = Counter()
    for file in files:
        suffix = _suffix(file)
        if not file.size or suffix in names or probed[suffix] == _PROBED_FILES:
            continue
        probed[suffix] += 1
        with suppress(BadDataError):  # another file may show the format, which then reports this one
            if found := best_format(probe_file(openable(file)), formats.values()):
                names[suffix] = found.name
    first = next(iter(names.values()), "")
    divided: dict[str, list[StoredFile]] = {}
    for file in files:
        divided.setdefault(names.get(_suffix(file)) or first, []).append(file)
    return divided


def _suffix(file: StoredFile) -> str:
    """Return the suffix of a file's name, without that of a compression."""
    name = plain_name(file.url.rpartition("/")[2].lower())
    return name.rpartition(".")[2] if "." in name else ""


def _image_sources(section: DataSection, choice: FormatChoice) -> Iterator[DataSource]:
    """Yield the training set of each source of images and, where there is one, the set for validation."""
    for table, source in section.located_sources:
        own = _choice(source, choice)
        split = find_image_split(source, table, by_name=not own.name)
        yield from _sources_of_split(source.name if isinstance(source, SourceSection) else "", split, own)


def _choice(source: EntriesSection, choice: FormatChoice) -> FormatChoice:
    """Return the format of a source: that of the command, or that of the job."""
    return choice if choice.name or not source.format else FormatChoice(source.format, choice.options)


def _sources_of_split(name: str, split: ImageSplit, choice: FormatChoice) -> Iterator[DataSource]:
    """Yield one source for each part of a split; `name` is that of a source of a mixture, or empty."""
    for part_name, part in (("train", split.train), ("validation", split.validation)):
        if part.files:
            has_one_part = name and not split.validation.files
            full_name = name if has_one_part else "/".join(filter(None, (name, part_name)))
            own = FormatChoice("numpy", {"arrays": list(part.arrays)}) if part.arrays else choice
            yield _source(full_name, part.files, own)


def _text_sources(text: TextSource, choice: FormatChoice) -> Iterator[DataSource]:
    """Yield the files of a source of text, one source for each of their formats, as training reads them."""
    field_name = text.settings.text_field
    if choice.name or choice.options:
        whole = _source(text.name, text.documents, choice)
        yield replace(whole, field=field_name, is_chat=text.settings.is_chat)
        return
    groups, _ = group_documents(text.documents, field_name, format_name=text.settings.format_name)
    files: dict[str, list[StoredFile]] = {}
    options: dict[str, Format] = {}
    for group in groups:
        if group.kind != "description":
            name = "text" if group.kind == "text" else group.format_name
            files.setdefault(name, []).extend(group.files)
            options[name] = TextDocuments() if name == "text" else _whole_format(group)
    for group in groups:
        if group.kind == "description":
            files.get("huggingface", []).extend(group.files)
    for name, stored in files.items():
        kept, skipped = _only_text(stored) if name == "text" else (stored, [])
        if kept:
            yield DataSource(
                text.name if len(files) == 1 else f"{text.name}/{name}",
                options[name],
                tuple(map(openable, kept)),
                field_name,
                tuple(openable(file).url for file in skipped),
                text.settings.is_chat,
            )


def _whole_format(group: DocumentGroup) -> Format:
    """Return the format of a group with all fields; arrays of numpy have lengths of their own."""
    return reading_format(group) if group.format_name == "numpy" else format_named(group.format_name)


def _only_text(files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[StoredFile]]:
    """Divide files into those that hold text and others, which training leaves out unless named."""
    kept: list[StoredFile] = []
    skipped: list[StoredFile] = []
    for file in files:
        is_text = file.is_named or not file.size or bool(TextDocuments().detect(probe_file(openable(file))))
        (kept if is_text else skipped).append(file)
    return kept, skipped
