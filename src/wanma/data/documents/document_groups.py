"""Groups of listed files by the way in which they hold documents: plain text, rows of records, or tokens.

The content decides, not the suffix. A file of plain text is one document. In records each row is one, from
one field. Where no file of a format that was found in a folder or by a glob has that field, the files of this
format are taken as before: JSON and CSV as plain text, binary files are left out. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from wanma.data.documents.content_detection import detect_content
from wanma.data.documents.record_fields import array_field, column_of, first_fields
from wanma.data.formats.detection import best_format, format_named, known_formats, probe_file
from wanma.data.formats.format import BadDataError, Certainty, DataFile, FileGroup, Format, Probe
from wanma.data.formats.megatron import Megatron
from wanma.data.stores.filesystems import is_local, is_shared_memory
from wanma.data.stores.listing import StoredFile
from wanma.data.stores.remote_file import FileOpener, OpenableFile, WholeFilesOnlyError
from wanma.job.errors import JobError

_FORMATS_WITHOUT_TEXT = ("text", "text-lines", "idx", "cifar", "images")
"""Formats of plain text and of images, which are not read as records."""
_TEXT_FORMATS = ("jsonl", "json-list", "csv")
"""Formats of records that are plain text, too."""
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_DESCRIPTIONS = {"state.json": "huggingface"}
"""Names of files that describe others, and the formats of these; besides Megatron's .idx."""
_FIELD_OPTIONS = {
    "parquet": "columns",
    "arrow": "columns",
    "huggingface": "columns",
    "webdataset": "fields",
    "numpy": "arrays",
}
"""Options of formats by which only some fields are read."""
_PROBE_THREADS = 16
_PROBED_THROUGH_CACHE_BYTES = 8 << 20
"""Size up to which a remote file is downloaded into the cache to see its first bytes."""


@dataclass(frozen=True)
class DocumentGroup:
    """Files that are read together."""

    kind: Literal["text", "rows", "array", "description"]
    """Place of the documents.

    "text": plain text, one document a file; "rows": one document a row; "array": one array of tokens is one
    document; "description": none, the file describes others.
    """
    files: tuple[StoredFile, ...]
    format_name: str = ""
    """Name of the format of rows and arrays."""
    column: str = ""
    """Field of the records that holds the document; empty: all fields are read."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    is_compressed: bool = False

    @property
    def size(self) -> int:
        """Size of all files, in bytes as stored."""
        return sum(file.size for file in self.files)

    @property
    def url(self) -> str:
        return self.files[0].url


@dataclass(frozen=True)
class UnusedFormat:
    """Format of files that hold no documents in the field of the job."""

    format_name: str
    example: str
    files: int
    fields: tuple[str, ...]

    @property
    def is_read_as_text(self) -> bool:
        """True if the files are plain text, too; False: they are left out."""
        return self.format_name in _TEXT_FORMATS

    @property
    def consequence(self) -> str:
        return "they are read as plain text" if self.is_read_as_text else "they are left out"

    def describe(self, field: str) -> str:
        """Return the reason in words."""
        if self.format_name == "numpy":
            return f"{self.files} files of the format numpy, such as {self.example}: {self.fields[0]}"
        return (
            f"{self.files} files of the format {self.format_name}, such as {self.example}, have no field "
            f"'{field}'; their fields are {', '.join(self.fields) or 'unknown'}"
        )


def group_documents(
    files: Sequence[StoredFile], field: str = "text", opener: FileOpener | None = None, format_name: str = ""
) -> tuple[list[DocumentGroup], list[UnusedFormat]]:
    """Group files in their order, each by its content.

    Args:
        format_name: format of all files; empty: each file's content tells it.

    Returns:
        The groups, those of descriptions included, and the formats that hold no documents.

    Raises:
        JobError: a file that the job names has records without that field, or files that others describe, as
            those of Megatron, are not all there.
        WanmaError: a file cannot be read.
    """
    looks = _look_at_all(files, field, opener, format_named(format_name) if format_name else None)
    groups = {
        url: _Look(group, _with_field(group, None, field, opener))
        for url, group in _described_groups(files, looks, opener)
    }
    claimed = {file.url for look in groups.values() for file in look.group.files}
    groups |= {url: look for url, look in looks.items() if url not in claimed}
    order = {file.url: number for number, file in enumerate(files)}
    ordered = sorted(groups.values(), key=lambda look: min(order[file.url] for file in look.group.files))
    return _choose_fields(ordered, field, bool(format_name))


def holds_records(files: Sequence[StoredFile]) -> bool:
    """Return True if a local file holds records or tokens, or is compressed, by its first bytes."""
    for file in files:
        if not file.size or is_shared_memory(file.filesystem):
            continue
        probe = probe_file(OpenableFile(file))
        if probe.size < 0 or probe.name in _DESCRIPTIONS or probe.name.endswith(".idx"):
            return True
        if _group_of(file, probe).kind != "text":
            return True
    return False


def reading_format(group: DocumentGroup) -> Format:
    """Return the format of a group, with the option that reads only the field of the document."""
    data_format = known_formats()[group.format_name]
    if group.format_name not in _FIELD_OPTIONS or not group.column:
        return data_format
    kind: Any = type(data_format)
    restricted: Format = kind(**{_FIELD_OPTIONS[group.format_name]: (group.column,)})
    return restricted


def openable_group(group: DocumentGroup, opener: FileOpener | None) -> FileGroup:
    """Return a group as its format reads it."""
    return FileGroup(tuple(OpenableFile(file, opener) for file in group.files), group.facts)


FieldSearch = tuple[DocumentGroup | None, list[str]]
"""Group with the field of its document (None: it has no such field), and the fields of its records."""


@dataclass(frozen=True)
class _Look:
    """Group of a file judged by its first bytes, which are not kept."""

    group: DocumentGroup
    found: FieldSearch
    description: str = ""
    """Name of the format whose files this one describes; empty: none."""


def _look_at_all(
    files: Sequence[StoredFile], field: str, opener: FileOpener | None, chosen: Format | None
) -> dict[str, _Look]:
    """Judge each file alone; those in remote stores side by side."""
    if all(is_local(file.filesystem) or is_shared_memory(file.filesystem) for file in files):
        looks = [_look_at(file, field, opener, chosen) for file in files]
    else:
        with ThreadPoolExecutor(_PROBE_THREADS, thread_name_prefix="wanma-probe") as pool:
            looks = list(pool.map(lambda file: _look_at(file, field, opener, chosen), files))
    return {file.url: look for file, look in zip(files, looks, strict=True)}


def _look_at(file: StoredFile, field: str, opener: FileOpener | None, chosen: Format | None) -> _Look:
    probe = _probe(file, opener) if file.size else None
    group = _group_of(file, probe, chosen)
    name = file.url.rpartition("/")[2]
    described = Megatron.name if name.endswith(".idx") else _DESCRIPTIONS.get(name, "")
    if probe is not None and described and known_formats()[described].detect(probe) is Certainty.SURE:
        return _Look(group, (None, []), described)
    return _Look(group, _with_field(group, probe, field, opener))


def _probe(file: StoredFile, opener: FileOpener | None) -> Probe:
    """Read the first bytes of a file; of a large remote one not the whole block of a cache."""
    if file.size <= _PROBED_THROUGH_CACHE_BYTES:
        return probe_file(OpenableFile(file, opener))
    try:
        return probe_file(OpenableFile(file))
    except WholeFilesOnlyError:
        return probe_file(OpenableFile(file, opener))


def _described_groups(
    files: Sequence[StoredFile], looks: Mapping[str, _Look], opener: FileOpener | None
) -> Iterator[tuple[str, DocumentGroup]]:
    """Yield the groups of files that other files describe: of Megatron and `save_to_disk`."""
    folders: dict[str, list[StoredFile]] = {}
    for file in files:
        folders.setdefault(file.url.rpartition("/")[0], []).append(file)
    for folder, members in folders.items():
        for file in members:
            if not (kind := looks[file.url].description):
                continue
            rest = {one.url: one for one in _described_files(kind, file, members, folder, files)}
            try:
                groups = list(_format_groups(known_formats()[kind], list(rest.values()), opener))
            except BadDataError as error:
                raise JobError(f"{file.job_key}: {error.message}", error.hint) from error
            for group in groups:
                yield group.url, group
                for member in group.files:
                    rest.pop(member.url, None)
            for url, one in rest.items():
                yield url, DocumentGroup("description", (one,))


def _described_files(
    kind: str,
    description: StoredFile,
    members: Sequence[StoredFile],
    folder: str,
    files: Sequence[StoredFile],
) -> list[StoredFile]:
    """Return the files that belong to a description."""
    if kind == "megatron":
        stem = description.url.removesuffix(".idx")
        return [file for file in members if file.url in (description.url, f"{stem}.bin")]
    parent = folder.rpartition("/")[0]
    has_splits = any(file.url == f"{parent}/dataset_dict.json" for file in files)  # one must be named
    found = [file for file in files if file.url.startswith(f"{parent}/")] if has_splits else members
    return [file for file in found if _is_of_saved_data_set(file.url.rpartition("/")[2])]


def _is_of_saved_data_set(name: str) -> bool:
    return name.endswith(".arrow") or name in ("state.json", "dataset_info.json", "dataset_dict.json")


def _format_groups(
    data_format: Format, files: Sequence[StoredFile], opener: FileOpener | None
) -> Iterator[DocumentGroup]:
    stored = {OpenableFile(file).url: file for file in files}
    data_files: list[DataFile] = [OpenableFile(file, opener) for file in files]
    for group in data_format.group(data_files):
        members = tuple(stored[file.url] for file in group.files)
        yield DocumentGroup("rows", members, data_format.name, facts=dict(group.facts))


def _group_of(file: StoredFile, probe: Probe | None, chosen: Format | None = None) -> DocumentGroup:
    """Return the group of a file that no other one describes; `chosen`: format that the job names."""
    found = chosen
    if chosen is None and probe is not None and probe.head:
        formats = [one for name, one in known_formats().items() if name not in _FORMATS_WITHOUT_TEXT]
        found = best_format(probe, (one for one in formats if not isinstance(one, Megatron)))
        found = found if found is not None and _is_certain(found, probe) else None
    if probe is None or found is None or found.name == "text":
        return DocumentGroup("text", (file,))
    return DocumentGroup("rows", (file,), found.name, is_compressed=probe.size < 0)


def _is_certain(found: Format, probe: Probe) -> bool:
    """Return True unless the content is as well plain text that only begins like records."""
    if found.name == "csv":
        return probe.ends_with(*found.suffixes)
    if found.name in _TEXT_FORMATS:
        return detect_content(probe.head)[0] == "records" or probe.ends_with(*_JSON_LINES_SUFFIXES)
    return found.detect(probe) >= Certainty.LIKELY


def _choose_fields(
    looks: Sequence[_Look], field: str, is_format_given: bool
) -> tuple[list[DocumentGroup], list[UnusedFormat]]:
    """Return the groups with the fields of their documents; those without it are plain text or unused."""
    used = _used_formats(looks)
    without_text = _entries_without_text(looks)
    lacking = {look.group.format_name for look in looks if look.found[0] is None}
    chosen: list[DocumentGroup] = []
    without: dict[str, list[_Look]] = {}
    for look in looks:
        found, fields = look.found
        name, is_named = look.group.format_name, look.group.files[0].is_named
        is_meant = is_named or is_format_given or name in used
        if found is None and (is_meant or look.group.files[0].entry in without_text):
            raise _missing_field_error(look.group, field, fields)
        if name in lacking - used and not is_named:
            without.setdefault(name, []).append(look)
            found = DocumentGroup("text", look.group.files)  # looked at as text
        chosen += [found] if found is not None else []
    unused = []
    for name, members in without.items():
        example = next(look for look in members if look.found[0] is None)
        unused.append(UnusedFormat(name, example.group.url, len(members), tuple(example.found[1])))
    return chosen, unused


def _entries_without_text(looks: Sequence[_Look]) -> set[str]:
    """Return the folders and globs of the job that hold nothing but records without the field.

    There the name of the field is wrong: nobody means plain text by nothing but tables and records.
    """
    text, records = set(), set()
    for look in looks:
        group = look.group
        is_other = group.kind == "text" or group.format_name == "numpy"
        if is_other or look.found[0] is not None:
            text.add(group.files[0].entry)
        elif group.kind != "description":
            records.add(group.files[0].entry)
    return records - text - {""}


def _used_formats(looks: Sequence[_Look]) -> set[str]:
    """Return the formats of records that are documents: at least half of their files have the field.

    In a folder of a program's source, a few records with a field of that name are no documents.
    """
    counts: Counter[str] = Counter()
    for look in looks:
        found = look.found[0]
        if not look.group.files[0].is_named and (found is None or _has_field(found)):
            counts[look.group.format_name] += -1 if found is None else 1
            counts[f"{look.group.format_name} found"] += found is not None
    return {name for name, count in counts.items() if count >= 0 and counts[f"{name} found"]}


def _has_field(group: DocumentGroup) -> bool:
    """Return True if the first record was seen to hold the document."""
    return bool(group.column) or group.format_name in (Megatron.name, "numpy")


def _with_field(
    group: DocumentGroup, probe: Probe | None, field: str, opener: FileOpener | None
) -> FieldSearch:
    """Return a group with the field of its document, or None and the fields that it has."""
    if group.kind in ("text", "description"):
        return group, []
    if group.format_name == Megatron.name:
        return replace(group, column="tokens"), []
    data_format, opened = known_formats()[group.format_name], openable_group(group, opener)
    if group.format_name == "numpy":
        if not is_array_requested(group.files[0]):
            return None, ["arrays are read as token ids where the job names them, such as 'tokens/*.npy'"]
        try:
            found = array_field(data_format, opened, field)
        except BadDataError:  # told when it is read
            return group, []
        if isinstance(found, str):
            return None, [found]
        name, dimensions = found
        is_npy = group.files[0].url.lower().rpartition(".")[2] != "npz"
        kind: Literal["array", "rows"] = "array" if dimensions == 1 else "rows"
        return replace(group, kind=kind, column="" if is_npy else name), []
    fields = first_fields(data_format, opened, probe)
    if fields is None:
        return group, []
    column = column_of(field, fields)
    if not column:
        return None, [name for name in fields if not name.startswith("__")]
    return replace(group, column=column), fields


def is_array_requested(file: StoredFile) -> bool:
    """Return True if the job names a file of numpy, or such files by a glob: a folder may hold any array."""
    return file.is_named or file.entry.lower().endswith((".npy", ".npz", ".np[yz]"))


def _missing_field_error(group: DocumentGroup, field: str, fields: Sequence[str]) -> JobError:
    file = OpenableFile(group.files[0])
    if group.format_name == "numpy":
        return JobError(
            f"{group.files[0].job_key}: {file.url}: {fields[0]}",
            "name the array of token ids in data.columns.tokens; it has integers, one document a row",
        )
    return JobError(
        f"{group.files[0].job_key}: the {group.format_name} records of {file.url} have no field '{field}'; "
        f"their fields are {', '.join(fields) or 'none'}",
        "name the one that holds the text, token ids or messages in data.columns; where files have different "
        "ones, list them as [[data.sources]], each with its columns",
    )
