"""Fields of the records in a file, judged by its first bytes, and the value of a field. No torch here."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanma.data.formats.byte_ranges import BYTE_ORDER_MARK
from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.detection import probe_file
from wanma.data.formats.format import BadDataError, FileGroup, Format, Probe, Record
from wanma.data.formats.json_records import JsonLines, JsonList, parse_object
from wanma.data.formats.tar_samples import TarSamples, split_path
from wanma.data.formats.tfrecord import TFRecord
from wanma.data.stores.byte_source import MemorySource

DEFAULT_TEXT_FIELD = "text"
TOKEN_FIELDS = ("tokens", "input_ids")
"""Usual names of fields that hold tokens."""


def first_fields(data_format: Format, group: FileGroup, probe: Probe | None = None) -> list[str] | None:
    """Return the names of the fields of the first record, without reading the whole file.

    Args:
        probe: first bytes of the first file, if they were read already.

    Returns:
        The names; None: the first bytes do not show them.
    """
    if data_format.name in ("parquet", "arrow", "huggingface"):
        try:
            return list(data_format.scan(group).facts["columns"])
        except BadDataError:
            return None
    peek = _PEEKS.get(data_format.name)
    if peek is None:
        return None
    try:
        return peek((probe or probe_file(group.files[0])).head)
    except (ValueError, RecursionError, BadDataError, tarfile.TarError, EOFError):
        return None


def array_field(data_format: Format, group: FileGroup, field: str) -> tuple[str, int] | str:
    """Find the array of token ids in a file of numpy.

    Returns:
        Name and number of dimensions of the array, or the reason why there is none.

    Raises:
        BadDataError: the file is damaged.
    """
    kind: Any = type(data_format)
    arrays: dict[str, Any] = {}
    reason = "it holds no array"
    for names in ((field,), *((name,) for name in TOKEN_FIELDS), ()):
        try:
            arrays = kind(names).scan(group).facts["arrays"]
            break
        except BadDataError as error:
            if not names:
                raise
            reason = error.cause
    if len(arrays) != 1:
        return f"its arrays are {', '.join(arrays)}; none is '{field}'" if arrays else reason
    ((name, (_, dtype, shape, *_)),) = arrays.items()
    if isinstance(dtype, list) or dtype[1] not in "iu" or len(shape) not in (1, 2):
        return f"its array {name!r} of shape {tuple(shape)} and type {dtype} holds no token ids"
    return name, len(shape)


def column_of(field: str, fields: list[str] | None) -> str:
    """Return the field of a record that holds `field`, which may be a path with dots; empty: unknown."""
    if fields is None:
        return ""
    if field in fields:
        return field
    return next((name for name in _prefixes(field) if name in fields), "")


def field_value(record: Mapping[str, Any], field: str) -> Any:
    """Return a field of a record; 'meta.text' is the field 'text' of the mapping or JSON in 'meta'.

    Raises:
        ValueError: there is no such field; the message lists those that there are.
    """
    if field in record:
        return record[field]
    for name in _prefixes(field):
        if name not in record:
            continue
        value = record[name]
        if isinstance(value, bytes | memoryview | str):
            try:
                value = parse_object(value.encode() if isinstance(value, str) else value)
            except (ValueError, RecursionError):
                break
        if isinstance(value, Mapping):
            return field_value(value, field.removeprefix(f"{name}."))
    fields = [name for name in record if not name.startswith("__")]
    raise ValueError(f"it has no field '{field}'; its fields are {', '.join(fields) or 'none'}")


def _prefixes(field: str) -> list[str]:
    """Return the beginnings of a path with dots, the longest first."""
    parts = field.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _json_line_fields(head: bytes) -> list[str]:
    line = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]
    return list(parse_object(line))


def _json_list_fields(head: bytes) -> list[str]:
    body = head.removeprefix(BYTE_ORDER_MARK).lstrip()[1:].lstrip()
    record = json.JSONDecoder().raw_decode(str(body, "utf-8", "ignore"))[0]
    return list(record) if isinstance(record, dict) else []


def _csv_fields(head: bytes) -> list[str]:
    lines = head.rpartition(b"\n")[0] or head  # the last line may be cut
    source, data_format = MemorySource("", lines), Csv(quoted=b'"' in lines.partition(b"\n")[0])
    try:
        return list(data_format.scan_ranges(source, FileGroup(())).facts["names"])
    except BadDataError:  # a first line of data: without a known name the file is plain text
        return list(replace(data_format, header=True).scan_ranges(source, FileGroup(())).facts["names"])


def _tar_fields(head: bytes) -> list[str]:
    fields: list[str] = []
    first_key = None
    try:
        with tarfile.open(fileobj=io.BytesIO(head)) as archive:
            for member in archive:
                parts = split_path(member.name) if member.isfile() else None
                if parts is None:
                    continue
                if first_key not in (None, parts[0]):
                    break
                first_key = parts[0]
                fields.append(parts[1])
    except (tarfile.TarError, EOFError, OSError):  # the head ends inside a file
        pass
    if not fields:
        raise ValueError("the first file is not in the head")
    return fields


def _tfrecord_fields(head: bytes) -> list[str]:
    end = 16 + int.from_bytes(head[:8], "little")
    if end > len(head):
        raise ValueError("the first record is longer than the head")
    record: Record = TFRecord().parse(head[:end], {})
    return list(record)


_PEEKS = {
    JsonLines.name: _json_line_fields,
    JsonList.name: _json_list_fields,
    Csv.name: _csv_fields,
    TarSamples.name: _tar_fields,
    TFRecord.name: _tfrecord_fields,
}
