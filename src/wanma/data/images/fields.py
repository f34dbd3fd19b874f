"""Fields of records that hold an image and its class, and the classes of a data set. No torch here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wanma.data.documents.record_fields import column_of, field_value
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.format import BadDataError, Record
from wanma.data.formats.image_folder import IMAGE_SUFFIXES, ImageFolder, is_image
from wanma.data.images.transform import unwrap
from wanma.data.index.build import Progress
from wanma.data.index.gradual_index import GradualIndex
from wanma.data.index.layout_file import hash_json
from wanma.data.index.records import read_each
from wanma.data.index.sample_index import SampleIndex
from wanma.data.stores.atomic_file import write_once
from wanma.job.errors import JobError

IMAGE_FIELDS = (
    *("image", "images", "img", *IMAGE_SUFFIXES),
    *("image/encoded", "pixels", "x"),
)
_LABEL_FIELDS = (
    *("label", "labels", "cls", "class", "target", "y", "fine_label", "image/class/label"),
    *("json.label", "json.class"),
)
_SCANNED_BYTES = 1 << 30
"""Largest remote data that is read as a whole to find its classes."""
_SCANNED_ROWS = 256
_SCAN_THREADS = 16
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class ImageFields:
    """Names of the fields of image and class."""

    image: str
    label: str


@dataclass(frozen=True)
class Classes:
    """Classes of a data set."""

    count: int | None
    """Number of classes; None: unknown, because only a reading of all samples would tell."""
    names: tuple[str, ...] = ()
    """Names in the order of their numbers, see `order_names`; empty: the labels are numbers."""
    label_names: tuple[str, ...] = ()
    """Names of the labels that are numbers in the records of a source, in their order; empty: none are."""

    def number(self, label: int | str) -> int:
        """Return the number of a class.

        Raises:
            ValueError: there is no such class.
        """
        if self.label_names and not isinstance(label, str):
            if not 0 <= label < len(self.label_names):
                raise ValueError(f"the label is {label}, and class_names has {len(self.label_names)} names")
            label = self.label_names[label]
        if isinstance(label, str):
            if label not in self.names:
                raise ValueError(f"the class {label!r} is none of the {len(self.names)} of training")
            return self.names.index(label)
        if label < 0 or (self.count is not None and label >= self.count):
            known = "" if self.count is None else f" and end at {self.count - 1}"
            raise ValueError(f"the label is {label}; classes count from 0{known}")
        return label


def find_fields(
    records: Sequence[Record],
    image_field: str | None,
    label_field: str | None,
    *,
    key: str = "data.images",
    columns_key: str = "data.columns",
) -> ImageFields:
    """Find the fields of image and class among sampled records, at least one.

    Raises:
        JobError: a field is missing, or several may hold the image.
    """
    names = ", ".join(sorted({name for record in records for name in record}))
    image = image_field
    if image is None:
        found = list(dict.fromkeys(name for record in records for name in record if _is_image(record[name])))
        known = [name for name in IMAGE_FIELDS if name in found]
        if not found:
            raise JobError(
                f"{key}: no field of the samples holds an image; they have {names}",
                f"set {columns_key}.image, or name files that hold JPEG, PNG, WebP or arrays of pixels",
            )
        if len(found) > 1 and not known:
            raise JobError(
                f"{key}: several fields of the samples hold an image: {', '.join(found)}",
                f"set {columns_key}.image to one of them",
            )
        image = known[0] if known else found[0]
    elif not any(image in record for record in records):
        raise JobError(f"{columns_key}.image = '{image}' is no field of the samples", f"they have {names}")
    candidates = _LABEL_FIELDS if label_field is None else (label_field,)
    label = next((name for name in candidates if any(_has(record, name) for record in records)), None)
    if label is None:
        label_key = f"{columns_key}.target"
        given = f"{label_key} = '{label_field}' is no field" if label_field else "no class is a field"
        raise JobError(
            f"{key}: {given} of the samples; they have {names}",
            f"set {label_key}, such as 'cls' or 'json.label'; in image folders each class is a folder",
        )
    return ImageFields(image, label)


def read_label(record: Record, field: str) -> int | str:
    """Return the class of a record: a number, or the name that it has there.

    Raises:
        ValueError: it is missing or no class.
    """
    value = field_value(record, field)
    if isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value).decode("utf-8").strip()
        try:
            return int(text)
        except ValueError:
            value = text
    if isinstance(value, np.ndarray | list) and len(value) == 1:
        value = value[0]
        if isinstance(value, bytes):
            return read_label({field: value}, field)
    if isinstance(value, np.integer | np.bool_):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"the field {field!r} is no class: {value!r:.60}")


def find_classes(
    index: SampleIndex,
    field: str,
    cache_folder: Path,
    *,
    skips_damaged: bool,
    sampled: Sequence[Record],
    progress: Progress | None = None,
    key: str = "data.images",
    class_names: tuple[str, ...] = (),
) -> Classes:
    """Find the classes of a data set; where only all samples tell them, they are read once and remembered.

    Args:
        skips_damaged: leave samples out that cannot be read; False: refuse them.
        class_names: names of the labels, which are numbers, in their order; empty: none are given.

    Raises:
        BadDataError: a sample cannot be read.
        JobError: some labels are numbers and some are names; or they are names in too much data; or
            `class_names` does not fit them.
    """
    found = _find_own_classes(index, field, cache_folder, skips_damaged, sampled, key, progress)
    if not class_names:
        return found
    if found.names:
        raise JobError(
            f"{key}: class_names names numbers, and the labels are names already: {_shown(found.names)}",
            "remove class_names of this source",
        )
    if found.count is not None and found.count > len(class_names):
        raise JobError(
            f"{key}: class_names has {len(class_names)} names, and a label is {found.count - 1}",
            f"name all {found.count} classes in the order of their numbers, from 0",
        )
    return Classes(len(class_names), order_names(class_names), class_names)


def join_classes(classes: Mapping[str, Classes]) -> dict[str, Classes]:
    """Return the classes of each source of a mixture with the numbers that all sources have in common.

    Classes with names are the same where they have the same name, and get numbers by `order_names` of all
    names. Classes that are numbers are the same where the numbers are.

    Args:
        classes: classes by the name of their source, at least one.

    Raises:
        JobError: the classes of some sources have names, and those of others are numbers.
    """
    if len(classes) == 1:
        return dict(classes)
    named = [name for name, one in classes.items() if one.names]
    if not named:
        counts = [one.count for one in classes.values()]
        count = None if None in counts else max(one for one in counts if one is not None)
        return {name: Classes(count) for name in classes}
    if len(named) < len(classes):
        numbered = next(name for name in classes if name not in named)
        raise JobError(
            f"data.sources: the classes of '{named[0]}' have names, such as "
            f"{_shown(classes[named[0]].names)}, and those of '{numbered}' are numbers",
            f"name them in order, from 0: class_names = [...] in the source '{numbered}'",
        )
    names = order_names({name for one in classes.values() for name in one.names})
    return {name: Classes(len(names), names, one.label_names) for name, one in classes.items()}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


def _find_own_classes(
    index: SampleIndex,
    field: str,
    cache_folder: Path,
    skips_damaged: bool,
    sampled: Sequence[Record],
    key: str,
    progress: Progress | None,
) -> Classes:
    """Find the classes of one source by its samples; arguments and errors as of `find_classes`."""
    if isinstance(index.data_format, ImageFolder) and field == "class":
        names = tuple(index.layout(0).facts["classes"])
        return Classes(len(names), names)
    is_table = isinstance(index.data_format, Parquet | ArrowTables)
    files = [file for group in index.groups for file in group.files]
    is_remote = any("://" in file.url for file in files)
    is_large = is_remote and not is_table and sum(file.size for file in files) > _SCANNED_BYTES
    if is_large or isinstance(index, GradualIndex):
        if any(_is_name(record, field) for record in sampled):
            raise JobError(
                f"{key}: the field {field!r} holds names, and only a reading of all samples would tell "
                "their numbers",
                "write classes as numbers from 0 and set model.classes, or store the data as Parquet and "
                "leave data.block_samples = 'file' out",
            )
        return Classes(None)
    identity = hash_json([index.fingerprint, index.versions, field, skips_damaged])
    path = cache_folder / "index" / "classes" / f"{identity}.json"
    with write_once(path) as file:
        if file is not None:
            narrow = only_columns(index, (field,))
            labels = _all_labels(narrow, field, skips_damaged, progress)
            file.write(json.dumps(sorted(labels, key=lambda label: (isinstance(label, str), label))).encode())
    found: list[int | str] = json.loads(path.read_bytes())
    names = order_names(label for label in found if isinstance(label, str))
    if names and len(names) < len(found):
        raise JobError(
            f"{key}: the field {field!r} holds both numbers and names, such as {found[0]!r} and {names[0]!r}",
            "write all classes as numbers from 0, or all as names",
        )
    if names:
        return Classes(len(names), names)
    return Classes(max((int(label) for label in found), default=-1) + 1 or None)


def order_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of classes in the order of their numbers: by value if all are digits, else as text."""
    texts = sorted(names)
    if all(text.isascii() and text.isdecimal() for text in texts):
        texts.sort(key=int)
    return tuple(texts)


def _all_labels(
    index: SampleIndex, field: str, skips_damaged: bool, progress: Progress | None
) -> set[int | str]:
    """Read the labels of all samples, several parts at once: a store answers them side by side."""
    size = sum(file.size for group in index.groups for file in group.files)
    starts = range(0, index.rows, _SCANNED_ROWS)
    labels: set[int | str] = set()
    pool = ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="wanma-classes")
    pending: deque[Future[set[int | str]]] = deque()
    try:
        for number, start in enumerate(starts, 1):
            pending.append(pool.submit(_labels_of, index, field, skips_damaged, start))
            # Not all at once: 10^9 samples would fill the memory.
            while len(pending) > (2 * _SCAN_THREADS if number < len(starts) else 0):
                labels |= pending.popleft().result()
                if progress is not None:
                    progress(size * (number - len(pending)) // len(starts), size)
    finally:
        pool.shutdown(cancel_futures=True)
    return labels


def _labels_of(index: SampleIndex, field: str, skips_damaged: bool, start: int) -> set[int | str]:
    """Return the labels of `_SCANNED_ROWS` samples from `start` on."""
    labels: set[int | str] = set()
    rows = np.arange(start, min(start + _SCANNED_ROWS, index.rows), dtype=np.int64)
    for row, record in zip(rows.tolist(), read_each(index, rows), strict=True):
        try:
            if isinstance(record, BadDataError):
                raise record
            label = read_label(record, field)
            if not isinstance(label, str) and label < 0:
                raise ValueError(f"the label is {label}; classes count from 0")
            labels.add(label)
        except BadDataError:
            if not skips_damaged:
                raise
        except ValueError as error:
            if not skips_damaged:
                raise bad_sample(index, row, str(error)) from error
    return labels


def bad_sample(index: SampleIndex, row: int, cause: str) -> BadDataError:
    """Return the error for a sample whose content is no image with a class; names its file and row."""
    numbers, rows = index.locate(np.array([row]))
    group = index.groups[int(numbers[0])]
    local = int(rows[0])
    is_file_of_its_own = isinstance(index.data_format, ImageFolder)
    file = group.files[local].url if is_file_of_its_own else group.url
    hint = "mend or remove it, or set data.bad_data to skip or substitute"
    return BadDataError(file, cause, None if is_file_of_its_own else local, hint)


def only_columns(index: SampleIndex, fields: Sequence[str]) -> SampleIndex:
    """Return an index that reads only some columns of its tables; of other formats the index itself."""
    if not isinstance(index.data_format, Parquet | ArrowTables):
        return index
    first = int(np.flatnonzero(np.diff(index.row_starts))[0])  # a damaged file counts as empty
    known = list(index.layout(first).facts["columns"])
    names = tuple(dict.fromkeys(column_of(field, known) for field in fields))
    return replace(index, data_format=replace(index.data_format, columns=names))


def _has(record: Record, field: str) -> bool:
    try:
        field_value(record, field)
    except ValueError:
        return False
    return True


def _is_name(record: Record, field: str) -> bool:
    try:
        return isinstance(read_label(record, field), str)
    except ValueError:
        return False


def _is_image(value: Any) -> bool:
    try:
        value = unwrap(value)
    except ValueError:
        return False
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim in (2, 3) and min(value.shape[:2]) > 0
    return isinstance(value, bytes | bytearray | memoryview) and is_image(bytes(value[:16]))
