"""Conversion of one shard: rows read, prepared, written, read back and compared, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from wanma.data.documents.record_fields import TOKEN_FIELDS
from wanma.data.documents.rows import document_of
from wanma.data.formats.arrow_tables import Parquet
from wanma.data.formats.format import BadDataError, FileGroup, Format, Record
from wanma.data.formats.json_records import JsonLines
from wanma.data.formats.mds import Mds
from wanma.data.formats.megatron import Megatron
from wanma.data.formats.tar_samples import TarSamples
from wanma.data.index.sample_index import SampleIndex
from wanma.data.stores.atomic_file import sync_to_disk
from wanma.data.stores.listing import list_files
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.data.tools.mds_writer import MdsWriter, choose_columns, find_kinds, join_kinds, shard_facts
from wanma.data.tools.record_content import (
    KEY_FIELD,
    ContentFingerprint,
    content_hash,
    decode_tar_record,
    record_decoder,
)
from wanma.data.tools.row_reading import Damage, RowTask, read_rows, row_url, shown_path
from wanma.data.tools.selection import openable
from wanma.data.tools.shard_writers import (
    JsonLinesWriter,
    MegatronWriter,
    ParquetWriter,
    ShardWriter,
    TarWriter,
    join_schemas,
    table_schema,
    without_image_mappings,
)
from wanma.data.tools.values import text_field
from wanma.job.errors import WanmaError

FILE_NAMES = {
    "jsonl": ("part-{:05d}.jsonl",),
    "parquet": ("part-{:05d}.parquet",),
    "webdataset": ("part-{:05d}.tar",),
    "megatron": ("part-{:05d}.bin", "part-{:05d}.idx"),
    "mds": ("shard.{:05d}.mds",),
}
"""Names of the files of a shard with its number, by format."""
_COMPRESSION_SUFFIXES = {"": "", "gzip": ".gz", "zstd": ".zst"}
_READ_BACK: dict[str, Format] = {
    "jsonl": JsonLines(),
    "parquet": Parquet(),
    "webdataset": TarSamples(),
    "megatron": Megatron(),
    "mds": Mds(),
}
_MEGATRON_MAX_UINT16 = 65500
"""Vocabulary from which Megatron stores int32 (`DType.optimal_dtype`)."""
_BATCH_ROWS = 1024
_FORMAT_HINT = "write another format, or leave fields out with --exclude"


@dataclass(frozen=True)
class ConversionOptions:
    """Format of the output, and what is written."""

    format: str
    """Key of `FILE_NAMES`."""
    compression: str = ""
    """Compression of JSON lines ("", "gzip" or "zstd") or of MDS ("" or "zstd")."""
    fields: tuple[str, ...] = ()
    """Fields that are written; none: all."""
    excluded: tuple[str, ...] = ()
    """Fields that are not written."""
    tokenizer: str = ""
    """Tokenizer for Megatron's format; empty: rows hold tokens."""
    text_field: str = ""
    """Field of the text, or of the tokens; empty: found by name."""
    end_of_document: bool = True
    """True to end each tokenized document with the tokenizer's token for it."""
    skip_damaged: bool = False
    """True to leave out damaged rows and files, and list them."""


@dataclass(frozen=True)
class ShardTask:
    """Samples [start, end) of a source, which become one shard."""

    number: int
    source: int
    start: int
    end: int
    size: int
    """Bytes in the source, about."""


@dataclass(frozen=True)
class ShardWork:
    """Facts that all shards of a conversion have in common."""

    options: ConversionOptions
    folder: str
    names: tuple[str, ...]
    """Name of each source."""
    schema: Any
    """Schema of a table (pyarrow), columns of MDS; else None."""


@dataclass(frozen=True)
class ShardResult:
    """Facts about one shard."""

    fingerprint: ContentFingerprint
    size: int
    """Bytes written."""
    damages: tuple[Damage, ...]
    """Rows that were left out."""
    is_resumed: bool = False
    """True if the shard was there."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """Entry of the shard in the index.json of MDS; else empty."""


def convert_shard(indexes: Sequence[SampleIndex], work: ShardWork, task: ShardTask) -> ShardResult:
    """Write one shard unless it is there.

    Raises:
        BadDataError: a row is damaged, or the format cannot hold it.
        WanmaError: the shard does not read back as it was written.
    """
    options, folder = work.options, Path(work.folder)
    names = _file_names(task.number, options)
    note = folder / f".{names[0]}.json"
    earlier = _read_note(note)
    if earlier is not None and all((folder / name).exists() for name in names):
        return earlier
    temporary = [folder / f".new-{name}" for name in names]
    fingerprint, damages, entry = _write_shard(indexes[task.source], work, task, temporary)
    _compare(options, temporary, fingerprint, entry)
    for path, name in zip(temporary, names, strict=True):
        sync_to_disk(path)
        path.rename(folder / name)
    size = sum((folder / name).stat().st_size for name in names)
    result = ShardResult(fingerprint, size, tuple(damages), entry=entry)
    _write_note(note, result)
    return result


def _file_names(number: int, options: ConversionOptions) -> list[str]:
    suffix = _COMPRESSION_SUFFIXES[options.compression]
    if options.format == "mds" and suffix:
        suffix = f".{options.compression}"
    return [name.format(number) + suffix for name in FILE_NAMES[options.format]]


def _write_shard(
    index: SampleIndex, work: ShardWork, task: ShardTask, paths: Sequence[Path]
) -> tuple[ContentFingerprint, list[Damage], Mapping[str, Any]]:
    """Write the rows of a shard.

    Returns:
        The hash of what was written, the rows that were left out, and the entry in the index.json of MDS.
    """
    options = work.options
    prepare, normalize = record_preparer(index, options), _normalizer(index, options)
    fingerprint, damages = ContentFingerprint(), []
    with _open_writer(index, work, task, paths) as writer:
        for group, row, count, found in _read(index, task, options):
            if isinstance(found, BadDataError):
                if not options.skip_damaged:
                    hint = found.hint or "leave out damaged rows with --skip-damaged"
                    raise BadDataError(found.file, found.cause, row, hint)
                damages.append(
                    Damage(work.names[task.source], shown_path(found.file), row, found.cause, count)
                )
                continue
            try:
                record = prepare(found)
                writer.write(record)
            except (ValueError, OverflowError) as error:
                cause = f"{options.format} cannot hold it: {error}"
                raise BadDataError(row_url(index, group, row), cause, row, _FORMAT_HINT) from error
            fingerprint = fingerprint.add(content_hash(normalize(record)))
        try:
            writer.close()
        except ValueError as error:
            raise BadDataError(paths[0].name, str(error), hint=_FORMAT_HINT) from error
    return fingerprint, damages, writer.entry if isinstance(writer, MdsWriter) else {}


def find_schema(indexes: Sequence[SampleIndex], options: ConversionOptions, task: RowTask) -> Any:
    """Return the schema (pyarrow) of the rows of a task, or `FieldKinds` of MDS.

    Damaged rows are left to the conversion.

    Raises:
        BadDataError: values of one field have types that no column holds together.
    """
    index = indexes[task.source]
    prepare = record_preparer(index, options)
    find, join = _SCHEMA_FUNCTIONS[options.format]
    schemas: list[Any] = []
    batch: list[Record] = []
    try:
        for _, _, found in read_rows(index, task, _decoder(index, options)):
            if not isinstance(found, BadDataError):
                batch.append(prepare(found))
            if len(batch) == _BATCH_ROWS:
                schemas.append(find(batch))
                batch = []
        return join([*schemas, find(batch)])
    except ValueError as error:
        raise BadDataError(
            index.groups[task.group].url,
            str(error),
            hint="leave the field out with --exclude, or write JSON lines",
        ) from error


_SCHEMA_FUNCTIONS: dict[str, tuple[Callable[[Sequence[Record]], Any], Callable[[Sequence[Any]], Any]]] = {
    "parquet": (table_schema, join_schemas),
    "mds": (find_kinds, join_kinds),
}
"""Functions that find what some records need, and join it, of formats that read all rows first."""


def join_found_schemas(schemas: Sequence[Any], options: ConversionOptions) -> Any:
    """Return the schema of a table, or the columns of MDS, that hold the rows of all tasks.

    Raises:
        ValueError: values of one field that no column holds together.
    """
    joined = _SCHEMA_FUNCTIONS[options.format][1](schemas)
    return choose_columns(joined) if options.format == "mds" else joined


def needs_schema(options: ConversionOptions) -> bool:
    """Return True if all rows are read before the first is written."""
    return options.format in _SCHEMA_FUNCTIONS


def record_preparer(index: SampleIndex, options: ConversionOptions) -> Callable[[Record], Record]:
    """Return the function that makes of a row the record that is written.

    It raises `ValueError` for a row that lacks what the format needs.
    """
    if options.format == "megatron":
        tokenizer = _tokenizer(options.tokenizer) if options.tokenizer else None
        return lambda record: {"tokens": _tokens(record, tokenizer, options)}

    def choose(record: Record) -> Record:
        return {
            name: value
            for name, value in record.items()
            if name not in options.excluded
            and (not options.fields or name in options.fields or name == KEY_FIELD)
        }

    if options.format in ("webdataset", "mds") and not _keeps_files(index, options):
        return lambda record: without_image_mappings(choose(record))
    return choose


@cache
def _tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(name, "--tokenizer")


def _tokens(record: Record, tokenizer: Tokenizer | None, options: ConversionOptions) -> Any:
    """Return the tokens of a record: those of its text, or those that it holds.

    Raises:
        ValueError: it holds neither.
    """
    field = options.text_field or next((name for name in TOKEN_FIELDS if name in record), None)
    field = field or text_field(record)
    if field is None:
        raise ValueError(f"which of its fields is the text? name it with --field ({', '.join(record)})")
    document = document_of(record, field)
    if not isinstance(document, bytes):
        return document
    if tokenizer is None:
        raise ValueError(f"its field '{field}' is text; give --tokenizer to make tokens of it")
    tokens = tokenizer.encode(document)
    if not options.end_of_document:
        return tokens
    return np.append(tokens, tokens.dtype.type(tokenizer.end_of_document_id))


def _keeps_files(index: SampleIndex, options: ConversionOptions) -> bool:
    """Return True if samples of WebDataset are written as such, so that their files stay as they are."""
    return options.format == "webdataset" and isinstance(index.data_format, TarSamples)


def _decoder(index: SampleIndex, options: ConversionOptions) -> Callable[[Record], Record]:
    return dict if _keeps_files(index, options) else record_decoder(index.data_format)


def _read(
    index: SampleIndex, task: ShardTask, options: ConversionOptions
) -> Iterator[tuple[int, int, int, Record | BadDataError]]:
    """Yield group, row, number of rows, and record or error, for the samples of a shard."""
    first, last = np.searchsorted(index.row_starts, [task.start, task.end - 1], side="right") - 1
    for group in range(int(first), int(last) + 1):
        begin, end = int(index.row_starts[group]), int(index.row_starts[group + 1])
        start, stop = max(task.start, begin) - begin, min(task.end, end) - begin
        if start < stop:
            rows = RowTask(task.source, group, start, stop, 0)
            for row, count, found in read_rows(index, rows, _decoder(index, options)):
                yield group, row, count, found


def _open_writer(index: SampleIndex, work: ShardWork, task: ShardTask, paths: Sequence[Path]) -> ShardWriter:
    options = work.options
    if options.format == "jsonl":
        return JsonLinesWriter(paths[0], options.compression)
    if options.format == "parquet":
        return ParquetWriter(paths[0], work.schema)
    if options.format == "webdataset":
        return TarWriter(paths[0], task.start, is_raw=_keeps_files(index, options))
    if options.format == "mds":
        return MdsWriter(paths[0], work.schema, options.compression, FILE_NAMES["mds"][0].format(task.number))
    return MegatronWriter(paths[0], paths[1], _token_dtype(index, options))


def _token_dtype(index: SampleIndex, options: ConversionOptions) -> str:
    """Return the type of the tokens: by the vocabulary, else the one of the first row."""
    if options.tokenizer:
        vocabulary = _tokenizer(options.tokenizer).vocabulary_size
        return "uint16" if vocabulary < _MEGATRON_MAX_UINT16 else "int32"
    try:
        record = record_preparer(index, options)(index.read(np.zeros(1, np.int64))[0])
    except (ValueError, BadDataError):  # reported with its row when it is written
        return "int32"
    return "uint16" if record["tokens"].dtype == np.uint16 else "int32"


def _normalizer(index: SampleIndex, options: ConversionOptions) -> Callable[[Record], Record]:
    """Return the function that gives a written record as it is read back."""
    return decode_tar_record if _keeps_files(index, options) else dict


def _compare(
    options: ConversionOptions,
    paths: Sequence[Path],
    expected: ContentFingerprint,
    entry: Mapping[str, Any],
) -> None:
    """Read a shard back, and compare its content with what was to be written."""
    data_format = _READ_BACK[options.format]
    files = tuple(map(openable, list_files([str(path) for path in paths], "output")))
    with TemporaryDirectory(dir=paths[0].parent, prefix=".scratch-") as scratch:
        group = FileGroup(files, shard_facts(entry) if entry else {}, Path(scratch))
        layout = data_format.scan(group)
        reader, decode = data_format.open(group, layout), record_decoder(data_format)
        found = ContentFingerprint()
        for start in range(0, reader.rows, _BATCH_ROWS):
            for record in reader.read_range(start, min(start + _BATCH_ROWS, reader.rows)):
                found = found.add(content_hash(decode(record)))
    if found != expected:
        raise WanmaError(
            f"{paths[0]} does not read back as it was written: {found}, not {expected}",
            f"{options.format} changes these values: write another format, or leave out fields (--exclude)",
        )


def _write_note(note: Path, result: ShardResult) -> None:
    temporary = note.with_name(f"{note.name}.new")
    temporary.write_text(json.dumps(asdict(result)), encoding="utf-8")
    temporary.rename(note)


def _read_note(note: Path) -> ShardResult | None:
    """Return the result of a shard that is done; None: there is no note, or a failing node has cut it."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        damages = tuple(Damage(**one) for one in facts["damages"])
        fingerprint = ContentFingerprint(**facts["fingerprint"])
        return ShardResult(fingerprint, facts["size"], damages, True, facts["entry"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
