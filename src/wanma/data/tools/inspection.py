"""Inspection of stored data: format, size, fields with their types, lengths, and some rows decoded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wanma.data.chat.encoding import encode_conversation
from wanma.data.documents.record_fields import column_of, field_value
from wanma.data.documents.rows import document_of
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.format import BadDataError, Record
from wanma.data.formats.image_folder import is_image
from wanma.data.index.build import Progress
from wanma.data.index.records import read_each
from wanma.data.index.sample_index import DamagedFile, SampleIndex
from wanma.data.sampling.permutation import permute_indices
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.data.tools.images import is_picture, write_png
from wanma.data.tools.record_content import content_bytes, record_decoder
from wanma.data.tools.row_reading import row_url
from wanma.data.tools.selection import DataSelection, DataSource
from wanma.data.tools.values import image_bytes, is_tokens, text_field, type_name, value_text
from wanma.job.errors import JobError, did_you_mean

MEASURED_ROWS = 1000
"""Rows of a source, drawn at random, of which fields and lengths are measured."""
_TABLE_BLOCKS = 8
_BATCH_ROWS = 128
_MAX_EXACT_ROWS = 50_000_000
"""Rows up to which the lengths of all are held in memory."""


@dataclass(frozen=True)
class FieldFacts:
    """Field of the measured rows."""

    name: str
    types: tuple[str, ...]
    rows: int
    """Number of measured rows that have it, nulls not counted."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of a length over rows."""

    rows: int
    """Number of measured rows."""
    is_exact: bool
    """True if all rows were measured."""
    minimum: int
    median: float
    p95: float
    maximum: int
    total: int
    """Sum over all rows; estimated if not exact."""


@dataclass(frozen=True)
class Packing:
    """Use of rows in sequences of a fixed length, as text is packed for training."""

    sequence_length: int
    longer_share: float
    """Share of rows longer than a sequence: these are cut, and go on in the next sequence."""
    rows_per_sequence: float
    sequences: int
    """Number of sequences; estimated if the lengths are."""


@dataclass(frozen=True)
class ShownRow:
    """Row of a source, decoded for people."""

    file: str
    row: int
    fields: Mapping[str, str]
    fault: str = ""
    """Cause, if the row cannot be read."""


@dataclass(frozen=True)
class SourceInspection:
    """Facts about one source."""

    name: str
    format: str
    files: int
    size: int
    """Stored bytes."""
    rows: int
    measured_rows: int
    fields: tuple[FieldFacts, ...]
    byte_lengths: Lengths | None
    token_lengths: Lengths | None
    packing: Packing | None
    """None, too, for conversations, of which no row holds a part."""
    shown: tuple[ShownRow, ...]
    damaged: tuple[DamagedFile, ...]
    skipped: tuple[str, ...]
    images: tuple[str, ...] = ()
    """Images that were written as PNG."""


@dataclass(frozen=True)
class InspectionOptions:
    """Choices of an inspection."""

    rows: int = 3
    """Rows shown from the beginning of each source."""
    sample: int = 0
    """Rows shown besides, drawn at random."""
    seed: int = 0
    field: str = ""
    """Field of the text whose tokens are counted; empty: found by name."""
    characters: int = 300
    """Characters of a text that are shown."""
    image_folder: Path | None = None
    """Folder for the images of shown rows, as PNG."""


def inspect_data(
    selection: DataSelection, options: InspectionOptions, progress: Progress | None = None
) -> list[SourceInspection]:
    """Inspect each source; files that cannot be read are listed.

    Raises:
        JobError: `field` is no field of the rows.
        WanmaError: a store fails, or the tokenizer or Pillow cannot be used.
    """
    tokenizer = load_tokenizer(selection.tokenizer) if selection.tokenizer else None
    return [
        _inspect_source(
            source,
            source.open_index(selection.cache_folder, progress, skip_damaged=True),
            options,
            tokenizer,
            selection.sequence_length,
        )
        for source in selection.sources
    ]


def _inspect_source(
    source: DataSource,
    index: SampleIndex,
    options: InspectionOptions,
    tokenizer: Tokenizer | None,
    sequence_length: int,
) -> SourceInspection:
    order = np.arange(min(index.rows, max(MEASURED_ROWS, options.sample)))
    if index.rows:
        order = permute_indices(order, index.rows, options.seed, "inspect")
    measured = [
        record for _, record in _read(index, _measured_samples(index, order)) if isinstance(record, dict)
    ]
    fields = _fields(measured)
    known = [one.name for one in fields]
    if options.field and measured and not column_of(options.field, known):
        raise JobError(
            f"--field {options.field}: no row has it.{did_you_mean(options.field, known)}",
            f"the fields are {', '.join(known)}",
        )
    field = options.field or source.field
    is_chat = source.is_chat and not options.field
    if not field and "messages" in known and "text" not in known:  # as a job finds it
        field, is_chat = "messages", True
    lengths = _token_lengths(measured, field, tokenizer, is_chat=is_chat)
    tokens = _lengths(np.array(lengths, np.int64), index.rows) if lengths else None
    chosen = np.unique(np.concatenate([np.arange(min(options.rows, index.rows)), order[: options.sample]]))
    shown = [_shown_row(index, sample, record, tokenizer, options) for sample, record in _read(index, chosen)]
    images = (
        _write_images(index, chosen, source, options.image_folder) if options.image_folder is not None else ()
    )
    return SourceInspection(
        source.name,
        source.data_format.name,
        len(source.files),
        source.size,
        index.rows,
        len(measured),
        fields,
        _byte_lengths(index, measured),
        tokens,
        None if is_chat else _packing(tokens, lengths, sequence_length, index.rows),
        tuple(shown),
        index.damaged,
        source.skipped,
        images,
    )


def _measured_samples(index: SampleIndex, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the samples to measure: drawn one by one, but in blocks from tables, which decode row groups."""
    if not isinstance(index.data_format, Parquet | ArrowTables) or index.rows <= MEASURED_ROWS:
        return np.sort(order[:MEASURED_ROWS])
    size = MEASURED_ROWS // _TABLE_BLOCKS
    blocks = np.unique(order[:_TABLE_BLOCKS] // size) * size
    samples = (blocks[:, None] + np.arange(size)).reshape(-1)
    return np.asarray(samples[samples < index.rows])


def _read(index: SampleIndex, samples: NDArray[np.int64]) -> list[tuple[int, Record | str]]:
    """Read samples, many at once; of a damaged one the cause."""
    decode = record_decoder(index.data_format)
    found: list[tuple[int, Record | str]] = []
    for start in range(0, len(samples), _BATCH_ROWS):
        batch = samples[start : start + _BATCH_ROWS]
        for sample, record in zip(batch.tolist(), read_each(index, batch), strict=True):
            try:
                content = record.cause if isinstance(record, BadDataError) else decode(record)
            except ValueError as error:
                content = str(error)
            found.append((sample, content))
    return found


def _fields(records: Sequence[Record]) -> tuple[FieldFacts, ...]:
    types: dict[str, dict[str, None]] = {}
    counts: dict[str, int] = {}
    for record in records:
        for name, value in record.items():
            types.setdefault(name, {})
            counts.setdefault(name, 0)
            if value is not None:
                types[name][type_name(value)] = None
                counts[name] += 1
    return tuple(FieldFacts(name, tuple(types[name]) or ("null",), counts[name]) for name in types)


def _byte_lengths(index: SampleIndex, measured: Sequence[Record]) -> Lengths | None:
    """Return the stored lengths of all rows where the format knows them, else the sizes of measured ones."""
    parts = [
        index.layout(number).byte_lengths
        for number in range(len(index.groups))
        if index.row_starts[number + 1] > index.row_starts[number]
    ]
    known = [part for part in parts if part is not None]
    if known and len(known) == len(parts) and index.rows <= _MAX_EXACT_ROWS:
        return _lengths(np.concatenate(known), index.rows)
    return _lengths(np.array([content_bytes(record) for record in measured], np.int64), index.rows)


def _lengths(values: NDArray[np.int64], rows: int) -> Lengths | None:
    if not len(values):
        return None
    is_exact = len(values) == rows
    total = int(values.sum()) if is_exact else round(float(values.mean()) * rows)
    median, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    return Lengths(len(values), is_exact, int(values.min()), median, p95, int(values.max()), total)


def _token_lengths(
    records: Sequence[Record], field: str, tokenizer: Tokenizer | None, *, is_chat: bool
) -> list[int]:
    """Return the number of tokens of each record, the end of its document included if it is text.

    Args:
        field: field of the text, the tokens or the messages; empty: found by name.
        tokenizer: tokenizer of texts; None: only tokens are counted.
        is_chat: True if the field holds conversations, which a chat template renders.
    """
    if is_chat and (tokenizer is None or tokenizer.chat is None):
        return []
    lengths = []
    for record in records:
        own = next((name for name, value in record.items() if is_tokens(name, value)), None)
        name = field or own or text_field(record)
        count = None if name is None else _token_count(record, name, tokenizer, is_chat)
        if count is not None:
            lengths.append(count)
    return lengths


def _token_count(record: Record, field: str, tokenizer: Tokenizer | None, is_chat: bool) -> int | None:
    """Return the number of tokens in a field, which may be a path; None: it holds none that are known."""
    for name in (field, field.removeprefix("json.")):  # fields of a `.json` file stand in the record itself
        with suppress(ValueError):
            if is_chat and tokenizer is not None:
                return len(encode_conversation(field_value(record, name), tokenizer))
            document = document_of(record, name)
            if not isinstance(document, bytes):
                return len(document)
            return None if tokenizer is None else len(tokenizer.encode(document)) + 1
    return None


def _packing(
    tokens: Lengths | None, lengths: Sequence[int], sequence_length: int, rows: int
) -> Packing | None:
    if tokens is None or not sequence_length:
        return None
    longer = float(np.mean(np.array(lengths) > sequence_length))
    sequences = max((tokens.total - 1) // sequence_length, 0)
    return Packing(sequence_length, longer, rows / max(sequences, 1), sequences)


def _shown_row(
    index: SampleIndex,
    sample: int,
    record: Record | str,
    tokenizer: Tokenizer | None,
    options: InspectionOptions,
) -> ShownRow:
    groups, rows = index.locate(np.array([sample], np.int64))
    group, row = int(groups[0]), int(rows[0])
    url = row_url(index, group, row)
    if isinstance(record, str):
        return ShownRow(url, row, {}, record)
    texts = {name: value_text(name, value, tokenizer, options.characters) for name, value in record.items()}
    return ShownRow(url, row, texts)


def _write_images(
    index: SampleIndex, samples: NDArray[np.int64], source: DataSource, folder: Path
) -> tuple[str, ...]:
    """Write the images of samples as 'SOURCE-SAMPLE-FIELD.png', and return the names."""
    written = []
    for sample, record in _read(index, samples):
        for name, value in record.items() if isinstance(record, dict) else ():
            content = image_bytes(value)
            if is_picture(value) or (content is not None and is_image(content)):
                label = f"{source.name}-{sample:08d}-{name}"
                path = folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', label)}.png"
                write_png(value if content is None else content, path)
                written.append(str(path))
    return tuple(written)
