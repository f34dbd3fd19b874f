"""Conversion of stored data to another format: in shards, each read back and compared, resumable, atomic.

Shards are written to OUT.partial, which gets the name OUT when all are there. Each is complete or absent, and
has a note beside it, so that an interrupted conversion goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.index.sample_index import SampleIndex
from wanma.data.text.tokenizer import load_tokenizer
from wanma.data.tools.mds_writer import write_index
from wanma.data.tools.record_content import ContentFingerprint
from wanma.data.tools.row_reading import Damage, plan_tasks, shown_path
from wanma.data.tools.selection import DataSelection, Progress
from wanma.data.tools.shard_conversion import (
    ConversionOptions,
    ShardResult,
    ShardTask,
    ShardWork,
    convert_shard,
    find_schema,
    join_found_schemas,
    needs_schema,
)
from wanma.data.tools.task_processes import ProcessCrash, Work, useful_processes
from wanma.data.tools.work_folder import locked_folder
from wanma.job.errors import JobError, WanmaError

NOTE_FILE = ".wanma-conversion.json"
"""File in the output with the facts of its conversion; readers of data leave out names with a dot."""


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion."""

    folder: str
    format: str
    shards: int
    resumed_shards: int
    """Shards that an interrupted conversion had written before."""
    rows: int
    size: int
    """Bytes written."""
    fingerprint: str
    """Hash of the content of all rows; the output, read back, had the same."""
    damages: tuple[Damage, ...]
    """Rows and files that were left out."""


def convert_data(
    selection: DataSelection,
    options: ConversionOptions,
    out: Path,
    *,
    shard_bytes: int,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Write all rows of the sources, one source after the other, to shards in the folder `out`.

    Args:
        selection: the sources.
        options: the format, and what is written.
        out: folder that the conversion makes; it must not exist, unless the same conversion has made it.
        shard_bytes: bytes of a shard, about, measured on the source.
        processes: processes that write at once; default: by the size, up to the usable cores.
        progress: called with (bytes done, bytes in all) of the source.

    Raises:
        JobError: `out` exists, the sources are splits or have several formats, or a choice does not fit the
            format.
        BadDataError: a row is damaged, or the format cannot hold it; shards that are done stay.
        WanmaError: a store fails, the disk is full, or a shard does not read back as it was written.
    """
    if "://" in str(out) or ":/" in str(out):
        raise JobError(f"{out} is no local folder", "convert to a local folder, and copy it to the store")
    if selection.division:
        raise _division_error(selection)
    indexes = [
        source.open_index(selection.cache_folder, progress, skip_damaged=options.skip_damaged)
        for source in selection.sources
    ]
    shards = [
        ShardTask(number, source, start, end, size)
        for number, (source, start, end, size) in enumerate(_cut(indexes, shard_bytes))
    ]
    if not shards:
        raise JobError("there is no row to convert", "see the files with `wanma data inspect`")
    key = _identity(selection, options, shards)
    if _is_written(out):
        return _earlier_conversion(out, key)
    partial = out.with_name(f"{out.name}.partial")
    hint = f"free space, or choose another output; the same command goes on with {partial}"
    with locked_folder(partial, f"converts to {out}", hint):
        if _is_written(out):  # another process has finished since
            shutil.rmtree(partial)
            return _earlier_conversion(out, key)
        _check_partial(partial, key)
        work = _plan_work(selection, options, indexes, partial, processes)
        results = _write_shards(work, shards, _processes(selection, shards, processes), progress)
        done = _conclude(selection, indexes, options, out, shards, results)
        if options.format == "mds":
            write_index(partial, [one.entry for one in results])
        _keep_note(partial, key, done)
        if out.exists():
            out.rmdir()  # it is empty
        partial.rename(out)
        (out / ".lock").unlink()
    return done


def _division_error(selection: DataSelection) -> JobError:
    """Return the error about sources that are no one list of rows."""
    names = ", ".join(source.name.removeprefix("data/") for source in selection.sources)
    if selection.division == "splits":
        return JobError(
            f"the data are splits ({names}), which one output would join",
            "convert the files of each by itself",
        )
    return JobError(
        f"the files have several formats ({names})",
        "convert the files of each by themselves, named by a glob, or choose one with --format",
    )


def _cut(indexes: Sequence[SampleIndex], shard_bytes: int) -> list[tuple[int, int, int, int]]:
    """Return (source, first sample, end, bytes) of shards of about equal size, without an empty one."""
    cuts = []
    for source, index in enumerate(indexes):
        samples, sizes = [0], [0]
        for task in plan_tasks(index, source, max(shard_bytes // 64, 1)):
            samples.append(int(index.row_starts[task.group]) + task.end)
            sizes.append(sizes[-1] + task.size)
        count = max(round(sizes[-1] / shard_bytes), 1)
        targets = np.linspace(0, sizes[-1], count + 1)
        places = np.unique(np.interp(targets, sizes, samples).astype(np.int64)).tolist() if index.rows else []
        cuts += [
            (source, int(start), int(end), sizes[-1] * int(end - start) // index.rows)
            for start, end in pairwise(places)
        ]
    return cuts


def _identity(selection: DataSelection, options: ConversionOptions, shards: Sequence[ShardTask]) -> str:
    """Return the hash of everything that determines the output."""
    files = [
        [source.name, source.data_format.name, source.data_format.options, file.url, file.size, file.version]
        for source in selection.sources
        for file in source.files
    ]
    tokenizer = load_tokenizer(options.tokenizer, "--tokenizer").fingerprint if options.tokenizer else ""
    text = json.dumps([files, asdict(options), tokenizer, [asdict(shard) for shard in shards]])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _is_written(out: Path) -> bool:
    """Return True unless there is nothing, or an empty folder."""
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _earlier_conversion(out: Path, key: str) -> Conversion:
    """Return the result of an earlier, complete conversion of the same data."""
    try:
        note = json.loads((out / NOTE_FILE).read_text(encoding="utf-8"))
        if note["key"] == key:
            damages = tuple(Damage(**one) for one in note["conversion"].pop("damages"))
            facts = {**note["conversion"], "damages": damages}
            return Conversion(**{**facts, "resumed_shards": facts["shards"]})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise JobError(f"{out} exists already", "choose another output, or remove it")


def _check_partial(partial: Path, key: str) -> None:
    """Check that shards in the folder are of the same conversion.

    Raises:
        JobError: they are of another one.
    """
    mark = partial / ".key"
    if not mark.exists():
        mark.write_text(key, encoding="utf-8")
    elif mark.read_text(encoding="utf-8") != key:
        raise JobError(
            f"{partial} holds an unfinished conversion of other data, or with other options",
            "remove it, or finish that conversion first",
        )


def _plan_work(
    selection: DataSelection,
    options: ConversionOptions,
    indexes: Sequence[SampleIndex],
    folder: Path,
    limit: int | None,
) -> Work[ShardTask, ShardResult]:
    """Return the work of writing shards; a table and MDS get the columns of all rows, read for it."""
    schema = None
    if needs_schema(options):
        tasks = [task for number, index in enumerate(indexes) for task in plan_tasks(index, number)]
        finding = Work(find_schema, indexes, options)
        processes = _processes(selection, tasks, limit)
        schemas = []
        for task, found in finding.run(tasks, processes):
            if isinstance(found, ProcessCrash):
                raise _crash_error(indexes[task.source].groups[task.group].url)
            schemas.append(found)
        try:
            schema = join_found_schemas(schemas, options)
        except ValueError as error:
            raise WanmaError(f"{options.format} cannot hold these rows: {error}", _SCHEMA_HINT) from error
    names = tuple(source.name for source in selection.sources)
    return Work(convert_shard, indexes, ShardWork(options, str(folder.absolute()), names, schema))


_SCHEMA_HINT = "leave the field out with --exclude, or write JSON lines"


def _processes(selection: DataSelection, tasks: Sequence[Any], limit: int | None) -> int:
    is_shared = not any(source.is_in_memory for source in selection.sources)
    return useful_processes(sum(task.size for task in tasks), limit, is_shared=is_shared)


def _write_shards(
    work: Work[ShardTask, ShardResult],
    shards: Sequence[ShardTask],
    processes: int,
    progress: Progress | None,
) -> list[ShardResult]:
    total, done = sum(shard.size for shard in shards), 0
    results: dict[int, ShardResult] = {}
    for shard, result in work.run(shards, processes):
        if isinstance(result, ProcessCrash):
            raise _crash_error(f"shard {shard.number}")
        results[shard.number] = result
        done += shard.size
        if progress is not None:
            progress(done, total)
    return [results[shard.number] for shard in shards]


def _crash_error(place: str) -> WanmaError:
    return WanmaError(f"{place}: reading it ends the process", "find damaged rows with `wanma data verify`")


def _conclude(
    selection: DataSelection,
    indexes: Sequence[SampleIndex],
    options: ConversionOptions,
    out: Path,
    shards: Sequence[ShardTask],
    results: Sequence[ShardResult],
) -> Conversion:
    fingerprint = reduce(
        lambda left, right: left + right, (one.fingerprint for one in results), ContentFingerprint()
    )
    damages = [
        Damage(source.name, shown_path(one.file), None, one.cause)
        for source, index in zip(selection.sources, indexes, strict=True)
        for one in index.damaged
    ]
    damages += [damage for one in results for damage in one.damages]
    return Conversion(
        str(out),
        options.format,
        len(shards),
        sum(one.is_resumed for one in results),
        fingerprint.rows,
        sum(one.size for one in results),
        str(fingerprint),
        tuple(damages),
    )


def _keep_note(partial: Path, key: str, done: Conversion) -> None:
    """Write the note of the whole conversion, and remove those of its parts."""
    note = {"key": key, "conversion": asdict(done)}
    (partial / NOTE_FILE).write_text(json.dumps(note, indent=2), encoding="utf-8")
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name.startswith(".") and path.name not in (NOTE_FILE, ".lock"):
            path.unlink()
