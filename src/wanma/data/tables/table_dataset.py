"""Map-style dataset of a stored table: numbers of some columns as features, one column as the target.

Rules of types: features are float32. A target is a class (int64, counted from 0) or a number (float32). Where
the job does not say which, floats and texts with a fraction or an exponent are numbers; integers, booleans
and other texts are classes. Torch is imported as rows are read: the supervisor opens tables, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.documents.record_fields import field_value
from wanma.data.formats.arrays import NumpyArrays
from wanma.data.formats.detection import format_named, is_built_in
from wanma.data.formats.format import BadDataError, Record, UnreadableFileError
from wanma.data.images.fields import (
    Classes,
    bad_sample,
    find_classes,
    join_classes,
    only_columns,
    read_label,
)
from wanma.data.images.stored_images import check_file_limit, sampled_rows
from wanma.data.index.build import Progress
from wanma.data.index.records import (
    cache_folder,
    is_in_process_memory,
    open_index,
    read_each,
    without_descriptions,
)
from wanma.data.index.sample_index import SampleIndex
from wanma.data.stores.listing import list_files
from wanma.data.tables.values import feature_names, feature_values, is_float, numbers_of
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import EntriesSection

if TYPE_CHECKING:
    from torch import Tensor

    from wanma.data.batch import BadSample


@dataclass(frozen=True)
class BadRow:
    """Row that cannot be read, in the place of a sample, where the job skips such rows."""

    padding: tuple[Tensor, Tensor | int]
    """Zeros in the form of a sample."""
    error: BadDataError = field(repr=False)


def replace_bad_rows(
    items: Sequence[Any], sample_indices: NDArray[np.int64]
) -> tuple[list[Any], tuple[BadSample, ...]]:
    """Return items with padding in the place of bad rows, and the bad samples."""
    from wanma.data.batch import BadSample

    bad_samples = tuple(
        BadSample(int(number), item.error.place, item.error.cause, is_substituted=False)
        for number, item in zip(sample_indices, items, strict=True)
        if isinstance(item, BadRow)
    )
    return [item.padding if isinstance(item, BadRow) else item for item in items], bad_samples


class TableDataset:
    """Rows of a table as samples (features (count,) float32, target); a copy by pickle opens the files again.

    Args:
        classes: classes of the target; None: it is a number.
    """

    def __init__(
        self,
        section: DataSection,
        number: int,
        index: SampleIndex,
        features: Sequence[str],
        classes: Classes | None,
        feature_count: int,
    ) -> None:
        self._index, self.features, self.classes = index, list(features), classes
        table, source = section.located_sources[number]
        self._target, self._columns_key = source.columns.target or "", f"{table}.columns"
        self._skips, self._feature_count = section.bad_data == "skip", feature_count
        self.damaged = index.damaged

    @property
    def needs_processes(self) -> bool:
        """True if Python of another package reads the rows, from files that other processes can read, too."""
        return not is_built_in(self._index.data_format) and not is_in_process_memory(self._index)

    def __len__(self) -> int:
        return self._index.rows

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor | int] | BadRow:
        """Return the sample of a row; a bad row, if the job skips them.

        Raises:
            BadDataError: the row is damaged, or a value is missing or has the wrong type; names file, row and
                field.
        """
        try:
            return self._read(row)
        except UnreadableFileError:  # another time it may be whole
            raise
        except BadDataError as error:
            if not self._skips:
                raise BadDataError(
                    error.file,
                    error.cause,
                    error.row,
                    "mend or remove the row, set data.bad_data = 'skip', or name other fields in "
                    f"{self._columns_key}",
                    EXIT_USAGE,
                ) from error
            import torch

            padding = torch.zeros(self._feature_count), 0 if self.classes is not None else torch.zeros(())
            return BadRow(padding, error)

    def _read(self, row: int) -> tuple[Tensor, Tensor | int]:
        import torch

        (record,) = self._index.read(np.array([row]))
        try:
            values = feature_values(record, self.features)
            if len(values) != self._feature_count:
                raise ValueError(f"it has {len(values)} features, and other rows {self._feature_count}")
            return torch.tensor(values, dtype=torch.float32), self._read_target(record)
        except ValueError as error:
            raise bad_sample(self._index, row, str(error)) from error

    def _read_target(self, record: Record) -> Tensor | int:
        import torch

        if self.classes is not None:
            return self.classes.number(read_label(record, self._target))
        values = numbers_of(field_value(record, self._target), self._target)
        if len(values) != 1:
            raise ValueError(f"the field '{self._target}' has {len(values)} values; a target is one number")
        return torch.tensor(values[0], dtype=torch.float32)


def process_count(section: DataSection, datasets: Sequence[Any]) -> int:
    """Return the loader processes for map-style datasets; 0: threads read them.

    Where the job leaves it open, processes read tables in formats of other packages. Threads read datasets of
    the user's own, which need not be picklable.
    """
    chosen = section.worker_processes
    if chosen is None:
        tables = [one for one in datasets if isinstance(one, TableDataset)]
        chosen = len(tables) == len(datasets) and any(table.needs_processes for table in tables)
    return section.worker_count if chosen else 0


def open_tables(section: DataSection, progress: Progress | None = None) -> dict[int, TableDataset]:
    """Open the tables of a job by the number of their source; classes of one name are the same in all.

    Args:
        progress: called with (bytes done, bytes in all) of a table while its index is built, and while its
            classes are found.

    Raises:
        JobError: nothing is there, or a column does not exist.
        BadDataError, WanmaError: files cannot be read, or have no known format.
    """
    opened = {
        number: _open_table(section, number, progress)
        for number, (_, source) in enumerate(section.located_sources)
        if source.content == "table"
    }
    found = {str(number): one.classes for number, one in opened.items() if one.classes is not None}
    for number, classes in join_classes(found).items() if found else ():
        table, source = section.located_sources[int(number)]
        if source.columns.target_type is None:
            _refuse_numbers_as_names(classes.names, f"{table}.columns")
        opened[int(number)].classes = classes
    if 0 < len(found) < len(opened):
        raise JobError(
            "data.sources: the target of some tables is a class, and that of others a number",
            "set columns.target_type of the sources",
        )
    return opened


def _open_table(section: DataSection, number: int, progress: Progress | None) -> TableDataset:
    table, source = section.located_sources[number]
    columns, key = source.columns, f"{table}.columns"
    files = without_descriptions(
        list_files(source.entries, f"{table}.{source.entries_key}", section.store_retry_seconds)
    )
    assert columns.target is not None
    names = (*columns.features, columns.target)
    chosen = format_named(source.format) if source.format else None
    if (
        chosen is None
        and all(file.url.endswith(".npz") for file in files)
        and not any("*" in n for n in names)
    ):
        chosen = NumpyArrays(tuple(dict.fromkeys(names)))
    folder = cache_folder(section.cache)
    try:
        index = open_index(
            files,
            folder,
            section.cache_bytes,
            data_format=chosen,
            skip_damaged=section.bad_data == "skip",
            progress=progress,
            retry_seconds=section.store_retry_seconds,
        )
    except BadDataError as error:
        raise JobError(f"{key}: {error.message}", error.hint or "name other files or fields") from error
    check_file_limit(index.damaged, section.bad_data_limit, "tables")
    sampled = read_each(index, sampled_rows(index))
    records = [one for one in sampled if not isinstance(one, BadDataError)]
    errors = [one for one in sampled if isinstance(one, BadDataError)]
    if errors and (section.bad_data != "skip" or not records):
        hint = errors[0].hint or "mend or remove the row, or set data.bad_data = 'skip'"
        raise JobError(f"{key}: {errors[0].message}", hint)
    features = feature_names(records[0], columns)
    if not features:
        raise JobError(
            f"{key}.features: no column matches {', '.join(columns.features)}",
            f"the columns are {', '.join(records[0])}",
        )
    for role, name in (*(("features", one) for one in features), ("target", columns.target)):
        faults = [fault for record in records if (fault := _fault(field_value, record, name))]
        if len(faults) == len(records):
            raise JobError(f"{key}.{role}: {faults[0]} ({index.groups[0].url})", f"correct {key}.{role}")
    index = only_columns(index, (*features, columns.target))
    classes = None
    if not _is_number(source, records):
        try:
            classes = find_classes(
                index,
                columns.target,
                folder,
                skips_damaged=section.bad_data == "skip",
                sampled=records,
                progress=progress,
                key=f"{key}.target",
            )
        except BadDataError as error:
            raise JobError(
                f"{key}.target: {error.message}",
                "mend the row, or set data.bad_data = 'skip'; or set "
                f"{key}.target_type to 'number' if it is one",
            ) from error
    causes = [_fault(feature_values, record, features) for record in records]
    whole = [record for record, cause in zip(records, causes, strict=True) if cause is None]
    if not whole and section.bad_data == "skip":
        raise JobError(f"{key}.features: none of {len(records)} sampled rows can be read; {causes[0]}")
    count = len(feature_values(whole[0], features)) if whole else len(features)
    return TableDataset(section, number, index, features, classes, count)


def _refuse_numbers_as_names(names: Sequence[str], key: str) -> None:
    """Refuse numbers as names of classes, unless they count from 0: a regression would learn their places.

    Args:
        names: names of the classes in their order.
        key: key of the table's columns in the job.

    Raises:
        JobError: it names the ways to say what they are.
    """
    if all(map(is_float, names)) and list(names) != [str(number) for number in range(len(names))]:
        raise JobError(
            f"{key}.target: the values are numbers such as {', '.join(names[:3])}, not classes from 0 on",
            f"set {key}.target_type to 'number' for a regression, or to 'class' if each value is a class",
        )


def _fault(read: Callable[[Record, Any], Any], record: Record, name: Any) -> str | None:
    """Return the message of a reading that fails; None: it does not."""
    try:
        read(record, name)
    except ValueError as error:
        return str(error)
    return None


def _is_number(source: EntriesSection, records: Sequence[Record]) -> bool:
    """Return True if the target is a number; see the rules of the module."""
    columns = source.columns
    if columns.target_type is not None:
        return columns.target_type == "number"
    for record in records:
        if _fault(field_value, record, columns.target):
            continue  # reported with its row when it is read
        value = field_value(record, columns.target or "")
        if isinstance(value, np.ndarray | list) and len(value) == 1:
            value = value[0]
        if isinstance(value, bytes | memoryview):
            value = bytes(value).decode("utf-8", "replace")
        if isinstance(value, str):
            text = value.strip()
            if text.lstrip("+-").isdecimal() or not is_float(text):
                continue
            return True
        if isinstance(value, float | np.floating):
            return True
    return False
