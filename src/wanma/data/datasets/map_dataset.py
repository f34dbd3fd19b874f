"""Data set around a user's map-style dataset: `__len__` and `__getitem__`, as PyTorch has them.

An item is `(input, ..., target)`, a `Sample`, or a dict with a target and the model's keyword arguments.
Items are joined by torch's default collate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import (
    BatchedDataset,
    InputKind,
    log_bad_validation,
    make_batch,
    with_bad_samples,
)
from wanma.data.datasets.fingerprint import dataset_fingerprint, hash_texts
from wanma.data.datasets.joined_datasets import row_name
from wanma.data.datasets.load_times import (
    USER_DATASET_PARTS,
    LoadTimes,
    record_reading,
    recorded_reading,
)
from wanma.data.datasets.seeded_draws import SeededDraws, SeedGenerators
from wanma.data.datasets.stream_reader import check_stream, is_stream
from wanma.data.datasets.worker_processes import WorkerProcesses
from wanma.data.formats.format import BadDataError
from wanma.data.index.records import cache_folder
from wanma.data.sampling.holdout import Holdout
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.data.tables.table_dataset import TableDataset, process_count, replace_bad_rows
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.import_path import import_object
from wanma.job.file.serialization import value_text
from wanma.job.forecast.data_feed import SampleLoading
from wanma.job.sections.data import DataSection

_LABEL_KEYS = ("label", "labels")
"""Keys of targets whose meaning a transformers model defines."""
_TARGET_KEYS = ("target", "targets", *_LABEL_KEYS)
_INPUT_KEYS = ("input", "inputs")


@dataclass(frozen=True)
class Sample:
    """Item of a dataset in explicit form."""

    inputs: tuple[Any, ...]
    """Positional arguments of the model, without the batch dimension."""
    target: Any
    keywords: dict[str, Any] = field(default_factory=dict)


class UserDataset(BatchedDataset):
    """Data set that reads a user's dataset in wanma's order, without its own samplers and batching."""

    input_kind: ClassVar[InputKind] = "custom"
    targets_per_sample = 1
    read_labels: Callable[[Batch], Batch] | None = None
    """Function that prepares batches of samples that give their targets as `labels`; None: none."""
    has_number_targets = False
    """True if the targets are numbers of a table, with the squared error as the default loss."""
    _rates_folder: Path | None = None
    """Folder that keeps the times of reading for forecasts; None: they are not kept."""
    _processes: WorkerProcesses | None = None
    """Processes that read the datasets; None: threads of this one do."""

    def __init__(
        self,
        train: Any,
        validation: Any,
        section: DataSection,
        seed: int,
        total_samples: int,
        *,
        worker_processes: int = 0,
        keeps_rates: bool = False,
    ) -> None:
        """Open the dataset and divide it.

        Args:
            validation: dataset, or None to keep a share of `train`, by a hash of the row, since content is
                unknown.
            worker_processes: processes that read the datasets; 0: threads of this one do.
            keeps_rates: keep the times of reading for forecasts.
        """
        self._reported: set[str] = set()
        self._rates_folder = cache_folder(section.cache) if keeps_rates else None
        self.load_times: LoadTimes = LoadTimes(USER_DATASET_PARTS)
        self.reads_by_processes = worker_processes > 0
        if worker_processes:
            reader = _ProcessReader(train, validation, seed)
            self._processes = WorkerProcesses(reader, worker_processes, type(train).__name__, self.load_times)
        serialize_access = section.worker_count == 1
        # Several threads or processes for a user's dataset: its samples take time.
        self.is_costly_to_read = worker_processes > 0 or not serialize_access
        self._train = train
        self._validation = validation
        self._draws = SeededDraws(seed, serialize_access)
        self._total = total_samples
        self.seed = seed
        size = _length(train)
        fraction = 0 if validation is not None else section.validation_fraction
        self._holdout = Holdout.of_share(size, fraction)
        self.train_samples = self._holdout.train_rows
        if self.train_samples < 1:
            raise JobError(
                f"data: a dataset of {size} samples is too small for a validation split",
                "add samples, or set data.validation_fraction=0",
            )
        self.validation_samples = self._holdout.validation_rows if validation is None else _length(validation)
        self.order = SampleOrder.of_source(self.train_samples, Shuffle.of_job(section), seed)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]  # it reads samples, and not every use wants it
        return hash_texts(*(dataset_fingerprint(part, self._read_item) for part in self.datasets))

    def take_tables(self, tables: Iterable[TableDataset]) -> None:
        """Take over the traits of the tables among the datasets."""
        tables = list(tables)
        self.damaged_files = [file for table in tables for file in table.damaged]
        self.has_number_targets = any(table.classes is None for table in tables)

    @property
    def datasets(self) -> list[Any]:
        """The dataset of training and, if there is one, that of validation."""
        return [part for part in (self._train, self._validation) if part is not None]

    def read_row(self, dataset: Any, row: int) -> Batch:
        """Read a row of one of `datasets` in this thread, with draws that are seeded by its number."""

        def read(seed: SeedGenerators) -> list[Any]:
            seed(row)
            return [self._read_item(dataset, row)]

        rows = np.array([row])
        return self._collate(self._draws.read(read), type(dataset).__name__, rows, rows)

    def sample_name(self, sample_index: int) -> str:
        (row,) = self._train_rows(np.asarray([sample_index])).tolist()
        return row_name(self._train, row)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.input_kind,
            "dataset": type(self._train).__qualname__,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "epochs": self._total / self.train_samples,
        }

    def sample_loading(self) -> SampleLoading | None:
        if self._rates_folder is None:
            return None
        return recorded_reading(self._rates_folder, self._rates_name, self.train_samples)

    def record_rates(self, source: str) -> None:
        if self._rates_folder is not None:
            record_reading(self._rates_folder, self._rates_name, source, self.load_times)

    def _rates_name(self) -> str:
        # Unlike data of a common class, such as torch's TensorDataset, are told by their samples.
        return f"{type(self._train).__qualname__} {self.fingerprint}"

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        return self._read(self._train, self._train_rows(sample_indices), sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        if self._validation is not None:
            batch = self._read(self._validation, rows, sample_indices)
        else:
            batch = self._read(self._train, self._holdout.validation_row(rows), sample_indices)
        log_bad_validation(batch.bad_samples, self._reported)
        return batch

    def _train_rows(self, sample_indices: IndexArray) -> IndexArray:
        """Return the row of each sample index in the dataset of training."""
        assert self.order is not None
        indices = self.order.rows(sample_indices)
        if self._validation is not None:
            return indices
        return self._holdout.train_row(indices, ascending=self.order.shuffle.reads_neighbours)

    def _read(self, dataset: Any, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        if self._processes is not None:
            batch = self._prepare_labels(
                self._processes.read(dataset is not self._train, rows, sample_indices)
            )
        else:
            batch = self._read_here(dataset, rows, sample_indices)
        if not batch.bad_samples:
            return batch
        return with_bad_samples(batch, batch.bad_samples, keeps_targets=self.padding_has_targets)

    def _read_here(self, dataset: Any, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        def read(seed: SeedGenerators) -> list[Any]:
            items = []
            with self.load_times.measure("dataset", len(rows)):
                for row, number in zip(rows.tolist(), sample_indices.tolist(), strict=True):
                    seed(number)
                    items.append(self._read_item(dataset, row))
            return items

        items = self._draws.read(read)
        with self.load_times.measure("collate"):
            return self._collate(items, type(dataset).__name__, rows, sample_indices)

    def _collate(self, items: list[Any], name: str, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        """Join items, read from `rows` of the dataset of that name, into a batch."""
        items, bad_samples = replace_bad_rows(items, sample_indices)
        samples = [_to_sample(item, name) for item in items]
        _check_same_keys(items, samples, name, rows)
        try:
            columns = [
                (
                    tuple(_convert_list(value) for value in sample.inputs),
                    _convert_lists(sample.target),
                    {key: _convert_list(value) for key, value in sample.keywords.items()},
                )
                for sample in samples
            ]
            inputs, target, keywords = default_collate(columns)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise WanmaError(
                f"data: samples {_format_rows(rows)} of {name} cannot be joined into a batch"
                f"{_describe_shape_mismatch(samples, rows)}: {error}",
                "pad or crop the samples in __getitem__: all need the same shapes and keys",
            ) from error
        named_targets = dict(target) if isinstance(target, Mapping) else None
        if named_targets is not None and not named_targets:
            raise WanmaError(f"data: {name} returns an empty dict as the target (sample {rows[0]})")
        targets = (
            {"the target": target}
            if named_targets is None
            else {f"target {k}": v for k, v in named_targets.items()}
        )
        values_by_label = {**targets, **{f"input {n}": value for n, value in enumerate(inputs)}, **keywords}
        for label, value in values_by_label.items():
            if not isinstance(value, Tensor):
                raise WanmaError(
                    f"data: {name} returns {label} that cannot be converted to a tensor (sample {rows[0]})",
                    "return tensors, arrays, numbers or lists of numbers",
                )
        first = target if named_targets is None else next(iter(named_targets.values()))
        batch = make_batch(tuple(inputs), first, sample_indices, dict(keywords))
        batch = replace(
            batch,
            target_key=_target_key(items[0]),
            named_targets=named_targets,
            bad_samples=bad_samples,
        )
        if named_targets is not None:
            return replace(batch, class_range=None)
        return self._prepare_labels(batch)

    def _prepare_labels(self, batch: Batch) -> Batch:
        if self.read_labels is None or batch.named_targets is not None or batch.target_key not in _LABEL_KEYS:
            return batch
        return self.read_labels(batch)

    @staticmethod
    def _read_item(dataset: Any, row: int) -> Any:
        try:
            return dataset[row]
        except BadDataError:  # it names the file and the row
            raise
        except Exception as error:
            place = row_name(dataset, row)
            raise WanmaError(f"data: {place} failed: {type(error).__name__}: {error}") from error


@dataclass
class _ProcessReader:
    """Reader of batches in a loader process."""

    train: Any
    validation: Any
    seed: int

    def __call__(self, is_validation: bool, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        dataset = self.validation if is_validation else self.train
        return self._dataset._read_here(dataset, rows, sample_indices)

    @property
    def load_times(self) -> LoadTimes:
        return self._dataset.load_times

    @cached_property
    def _dataset(self) -> UserDataset:
        section = DataSection(workers=1, validation_fraction=0)
        return UserDataset(self.train, self.validation, section, self.seed, total_samples=1)


def wrap_user_dataset(dataset: Any, section: DataSection, seed: int, total_samples: int) -> UserDataset:
    """Open a dataset, or a pair (training, validation) of them.

    Raises:
        JobError: not a map-style dataset, or an empty one.
    """
    train, validation = check_dataset(dataset)
    processes = process_count(section, [train])
    return UserDataset(
        train, validation, section, seed, total_samples, worker_processes=processes, keeps_rates=True
    )


def check_dataset(dataset: Any) -> tuple[Any, Any]:
    """Return (training, validation) of a dataset or of a pair of them, checked.

    Raises:
        JobError: neither a map-style dataset nor an iterable one, an empty one, or a tensor.
    """
    train, validation = dataset if isinstance(dataset, tuple) and len(dataset) == 2 else (dataset, None)
    for part in (train, validation):
        if isinstance(part, torch.Tensor):
            raise JobError(
                "data: a tensor is no dataset of (input, target); a pair is (training, validation)",
                "pass torch.utils.data.TensorDataset(inputs, targets)",
            )
        if part is not None and is_stream(part):
            check_stream(part)
        elif part is not None:
            _check_map_style(part)
    return train, validation


def call_dataset_factory(name: str, arguments: Mapping[str, Any], key: str = "data") -> Any:
    """Call the factory of a dataset and return its result.

    Args:
        name: its name, 'package.module:function'.
        key: table of the job whose key `factory` names it.

    Raises:
        JobError: it cannot be imported, is no function, or fails.
    """
    factory: Callable[..., Any] = import_object(name, f"{key}.factory")
    if not callable(factory):
        raise JobError(f"{key}.factory = '{name}' is {type(factory).__name__}, not a function")
    try:
        return factory(**arguments)
    except WanmaError:
        raise
    except Exception as error:
        raise JobError(
            f"{key}.factory = '{name}' failed: {type(error).__name__}: {error}",
            f"correct the function, or {key}.arguments = {value_text(arguments)}",
        ) from error


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, type):
        raise JobError(
            f"data: {dataset.__name__} is a class, but an instance is needed",
            f"pass {dataset.__name__}(...), or name the class in data.factory with its data.arguments",
        )
    name = type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise JobError(
            f"data: {name} is neither a map-style dataset (`__len__` and `__getitem__`) nor an iterable one "
            "(`__iter__`)",
            "implement `__len__` and `__getitem__`, or `__iter__`",
        )
    if _length(dataset) == 0:
        raise JobError(f"data: {name} is empty")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:  # an iterable dataset may inherit `__len__` and refuse
        raise JobError(f"data: {type(dataset).__name__} has no length: {error}") from error


def _to_sample(item: Any, name: str) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, Mapping):
        target = _target_key(item)
        if target is None:
            raise WanmaError(
                f"data: a sample of {name} has the keys {', '.join(sorted(map(str, item)))} and no target",
                f"name the target one of {', '.join(_TARGET_KEYS)}; other keys are passed to the model as "
                "keyword arguments",
            )
        input_key = next((key for key in _INPUT_KEYS if key in item), None)
        inputs = () if input_key is None else item[input_key]
        keywords = {key: value for key, value in item.items() if key not in (target, input_key)}
        return Sample(inputs if isinstance(inputs, tuple) else (inputs,), item[target], keywords)
    if isinstance(item, tuple | list) and len(item) >= 2:
        return Sample(tuple(item[:-1]), item[-1])
    raise WanmaError(
        f"data: a sample of {name} has type {type(item).__name__}, which is not supported",
        "return (input, target), a dict with a target, or wanma.data.datasets.map_dataset.Sample",
    )


def _target_key(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return None
    return next((key for key in _TARGET_KEYS if key in item), None)


def _check_same_keys(items: list[Any], samples: list[Sample], name: str, rows: IndexArray) -> None:
    """Refuse samples with different keys: a batch would have those of its first one, and lose others.

    Which one is the first follows from the layout. Datasets of a mixture may differ in their keys.
    """
    first, *others = zip(items, samples, np.asarray(rows).tolist(), strict=True)
    keys = _sample_keys(*first[:2])
    for item, sample, row in others:
        if (own := _sample_keys(item, sample)) != keys:
            shown = [", ".join(sorted(one)) or "none" for one in (keys, own)]
            raise WanmaError(
                f"data: samples {first[2]} and {row} of {name} have different keys: {shown[0]}; {shown[1]}",
                "return the same keys for every sample, in all datasets of data.sources",
            )


def _sample_keys(item: Any, sample: Sample) -> set[str]:
    """Return the keys of a sample: of its target, of targets by name, of keyword arguments."""
    targets = sample.target if isinstance(sample.target, Mapping) else ()
    named = _target_key(item)
    return {*sample.keywords, *(f"target {key}" for key in targets), *(() if named is None else (named,))}


def _convert_list(value: Any) -> Any:
    """Convert a list of numbers to a tensor: the default collate would take its items apart."""
    return torch.tensor(value) if isinstance(value, list) else value


def _describe_shape_mismatch(samples: list[Sample], rows: IndexArray) -> str:
    """Describe the sample whose shapes differ from most; empty if that is not the reason."""
    try:
        shapes = [
            [tuple(np.shape(value)) for value in (*sample.inputs, sample.target, *sample.keywords.values())]
            for sample in samples
        ]
    except ValueError:  # a ragged list has none
        return ""
    usual_shape = max(shapes, key=shapes.count)
    odd = next((index for index, shape in enumerate(shapes) if shape != usual_shape), None)
    if odd is None:
        return ""
    different = [pair for pair in zip(shapes[odd], usual_shape, strict=False) if pair[0] != pair[1]]
    if not different:
        return ""
    return f" (sample {rows[odd]} has shape {different[0][0]}, most others {different[0][1]})"


def _convert_lists(target: Any) -> Any:
    """Convert a target, or each target in a dict of them, as `_convert_list`."""
    if isinstance(target, Mapping):
        return {str(key): _convert_list(value) for key, value in target.items()}
    return _convert_list(target)


def _format_rows(rows: IndexArray) -> str:
    rows_text = ", ".join(str(row) for row in np.asarray(rows)[:5])
    return rows_text + (", ..." if len(rows) > 5 else "")
