"""Labelled images of a job in stored files of any format: their indexes, fields, classes and transform.

A job has one source of images, or a mixture of several, which share the transform and the classes. No torch
here: a command opens them, too, to find what is wrong before ranks start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.arrays import NumpyArrays
from wanma.data.formats.detection import format_named
from wanma.data.formats.format import BadDataError, Format, Record, UnreadableFileError
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.images.fields import (
    Classes,
    ImageFields,
    bad_sample,
    find_classes,
    find_fields,
    join_classes,
)
from wanma.data.images.image_splits import ImageSplit, SplitFiles, find_image_split
from wanma.data.images.transform import ImageTransform, fit_transform, import_pillow, open_image
from wanma.data.index.build import Progress
from wanma.data.index.records import cache_folder, has_remote, open_index, read_each
from wanma.data.index.sample_index import DamagedFile, SampleIndex
from wanma.data.sampling.mixture_schedule import SourceWeight
from wanma.data.sampling.order import Shuffle
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import EntriesSection

if TYPE_CHECKING:
    from PIL.Image import Image

_SAMPLED = 16
"""Samples that are looked at before the start."""
_HINTED_BYTES = 1 << 30
"""Size of files in a store from which on a wait for all of them comes with its way out."""

log = logging.getLogger("wanma.data")


@dataclass(frozen=True)
class StoredImages:
    """One source of labelled images of a job, in stored files."""

    name: str
    """Name in reports; "images" for the only source of a job."""
    weight: SourceWeight
    train: SampleIndex
    validation: SampleIndex | None
    """Images of a split of their own; None: there is none."""
    fields: ImageFields
    classes: Classes
    transform: ImageTransform
    is_remote: bool
    """True if a file is not in local storage."""
    validation_fields: ImageFields
    """Fields of `validation`."""


@dataclass(frozen=True)
class _OpenSource:
    """Files of one source, with some of their samples."""

    table: str
    """Table of the job that declares it, for messages."""
    source: EntriesSection
    train: SampleIndex
    validation: SampleIndex | None
    fields: ImageFields
    validation_fields: ImageFields
    records: list[Record]
    """Sampled records of training, at least one."""
    is_remote: bool

    @property
    def name(self) -> str:
        return str(getattr(self.source, "name", "images"))

    @property
    def key(self) -> str:
        """Key of the entries, for messages."""
        return f"{self.table}.{self.source.entries_key}"


def open_image_sources(section: DataSection, progress: Progress | None = None) -> list[StoredImages]:
    """Open the images of a job, building indexes that are missing: one source, or those of its mixture.

    Raises:
        JobError: nothing is there, the fields or the size of the images are unclear, or the sources of a
            mixture contradict each other.
        BadDataError, WanmaError: files cannot be read, or have no known format.
    """
    import_pillow()
    folder = cache_folder(section.cache)
    splits = [
        find_image_split(
            source,
            table,
            by_name=bool(section.sources),  # a lone one is read into memory
            retry_seconds=section.store_retry_seconds,
        )
        for table, source in section.located_sources
    ]
    sizes = [split.train.size + split.validation.size for split in splits]
    opened = [
        _open_source(table, source, split, section, folder, progress, sum(sizes[:number]), sum(sizes))
        for number, ((table, source), split) in enumerate(zip(section.located_sources, splits, strict=True))
    ]
    check_file_limit(
        damaged_files(index for one in opened for index in (one.train, one.validation)),
        section.bad_data_limit,
        "images",
    )
    transform = _fit_transform(opened, section)
    skips_damaged = section.bad_data in ("skip", "substitute")
    classes = {
        one.name: find_classes(
            one.train,
            one.fields.label,
            folder,
            skips_damaged=skips_damaged,
            sampled=one.records,
            key=one.key,
            class_names=tuple(getattr(one.source, "class_names", ())),
            progress=progress,
        )
        for one in opened
    }
    joined = join_classes(classes)
    return [
        StoredImages(
            one.name,
            getattr(one.source, "weight", 1.0),
            one.train,
            one.validation,
            one.fields,
            joined[one.name],
            replace(transform, key=one.key),
            one.is_remote,
            one.validation_fields,
        )
        for one in opened
    ]


def damaged_files(indexes: Iterable[SampleIndex | None]) -> list[DamagedFile]:
    """Return the files of indexes that are left out as a whole, each once; None stands for no index."""
    return list(dict.fromkeys(one for index in indexes if index is not None for one in index.damaged))


def check_file_limit(files: Sequence[DamagedFile], limit: int, kind: str) -> None:
    """Refuse more damaged files of a kind, such as "images", than the job allows.

    Raises:
        JobError: they are more; names the first.
    """
    if len(files) > limit:
        raise JobError(
            f"data.bad_data_limit: {len(files):,} files of {kind} cannot be read, more than {limit:,}; "
            f"the first: {files[0].file}: {files[0].cause}",
            "list them with `wanma data verify`, mend them, or raise data.bad_data_limit",
        )


def with_way_out(error: BadDataError) -> BadDataError:
    """Return the error of an image or a file with the key of the job that decides about it.

    It ends a run without a restart, unless the file may be whole another time.
    """
    hint = error.hint or "mend or remove it, or set data.bad_data to skip or substitute"
    code = error.exit_code if isinstance(error, UnreadableFileError) else EXIT_USAGE
    return BadDataError(error.file, error.cause, error.row, hint, code)


def sampled_rows(index: SampleIndex) -> NDArray[np.int64]:
    """Return the samples that are looked at before the start, spread over all."""
    return index.spread_rows(_SAMPLED)


def _named_format(source: EntriesSection) -> Format | None:
    """Return the format that the job names, or arrays of an .npz by their names; None: neither."""
    columns = source.columns
    is_arrays = all(entry.endswith(".npz") for entry in source.entries) and columns.image and columns.target
    if source.format is None and is_arrays:
        return NumpyArrays((str(columns.image), str(columns.target)))
    return format_named(source.format) if source.format else None


def _open_source(
    table: str,
    source: EntriesSection,
    split: ImageSplit,
    section: DataSection,
    folder: Path,
    progress: Progress | None,
    done_bytes: int,
    all_bytes: int,
) -> _OpenSource:
    """Open the files of one source, and find the fields of its samples.

    Args:
        done_bytes: size of the files of the sources before it.
        all_bytes: size of the files of all sources.
    """
    by_file = Shuffle.of_job(section).is_by_file
    is_remote = has_remote([*split.train.files, *split.validation.files])

    def advance_index(done: int, total: int) -> None:
        if not done and is_remote and not by_file and total > _HINTED_BYTES:
            log.warning(
                "%s: %d files in a store (%.1f GiB) are searched for their samples before the first step; "
                "with data.shuffle = 'block', data.block_samples = 'file' a run begins with the first ones",
                f"{table}.{source.entries_key}",
                len(split.train.files),
                total / 2**30,
            )
        if progress is not None:
            progress(min(done_bytes + done, all_bytes), all_bytes)

    def open_part(part: SplitFiles, data_format: Format | None = None) -> SampleIndex:
        nonlocal done_bytes
        try:
            index = open_index(
                part.files,
                folder,
                section.cache_bytes,
                data_format=NumpyArrays(part.arrays) if part.arrays else data_format,
                skip_damaged=section.bad_data in ("skip", "substitute"),
                progress=advance_index,
                retry_seconds=section.store_retry_seconds,
                by_file=by_file and part is split.train,
            )
        except BadDataError as error:
            if isinstance(data_format, NumpyArrays):  # the job names arrays
                raise JobError(f"{table}.columns: {error.message}", error.hint) from error
            raise with_way_out(error) from error
        done_bytes += part.size
        return index

    train = open_part(split.train, _named_format(source))
    validation = open_part(split.validation, train.data_format) if split.validation.files else None
    records = _sample(train, section)
    arrays = [part.arrays for part in (split.train, split.validation)]
    if arrays[0]:
        fields = ImageFields(*arrays[0])
        validation_fields = ImageFields(*arrays[1]) if arrays[1] else fields
    else:
        fields = validation_fields = _find_fields(train, records, source, table)
    return _OpenSource(table, source, train, validation, fields, validation_fields, records, is_remote)


def _sample(index: SampleIndex, section: DataSection) -> list[Record]:
    """Read some samples, at least one: the fields, the size and the channels follow from them."""
    read = read_each(index, sampled_rows(index))
    errors = [one for one in read if isinstance(one, BadDataError)]
    records = [one for one in read if not isinstance(one, BadDataError)]
    if errors and (section.bad_data not in ("skip", "substitute") or not records):
        raise with_way_out(errors[0])
    return records


def _find_fields(
    index: SampleIndex, records: list[Record], source: EntriesSection, table: str
) -> ImageFields:
    label = source.columns.target
    if label is None and isinstance(index.data_format, ImageFolder) and "class" in records[0]:
        label = "class"  # names, so that the numbers of another split's folders do not matter
    return find_fields(
        records,
        source.columns.image,
        label,
        key=f"{table}.{source.entries_key}",
        columns_key=f"{table}.columns",
    )


def _fit_transform(sources: Sequence[_OpenSource], section: DataSection) -> ImageTransform:
    """Return the transform of all sources; they have one size already, or the job resizes them."""
    images = {one.name: _decodable_images(one) for one in sources}
    if section.image_transform.size is None:
        sizes = {name: found[0].size for name, found in images.items()}
        first, *others = sizes
        if different := [name for name in others if sizes[name] != sizes[first]]:
            shown = " x ".join(map(str, sizes[first])), " x ".join(map(str, sizes[different[0]]))
            raise JobError(
                f"data.sources: an image of '{first}' has {shown[0]} pixels, one of '{different[0]}' "
                f"{shown[1]}",
                "set data.image_transform.size, to which all are resized",
            )
    return fit_transform(section.image_transform, [image for found in images.values() for image in found])


def _decodable_images(source: _OpenSource) -> list[Image]:
    """Return the sampled images, at least one."""
    images = []
    causes: list[str] = []
    for record in source.records:
        try:
            images.append(open_image(record[source.fields.image]))
        except (ValueError, KeyError) as error:  # reported with its row when it is read
            is_missing = isinstance(error, KeyError)
            causes.append(f"it has no field {source.fields.image!r}" if is_missing else str(error))
    if not images:
        first = bad_sample(source.train, int(sampled_rows(source.train)[0]), causes[0])
        raise JobError(
            f"{source.key}: none of {len(source.records)} sampled images can be decoded; {first.message}",
            f"set {source.table}.columns.image to the field of the images, or write them again",
        )
    return images
