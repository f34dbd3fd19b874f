"""Reader of iterable datasets as indexed samples: sample n is the n-th item of the iteration.

Every rank iterates over the whole stream, in the stream's own order, and keeps its share: so the
order is the same on any number of ranks. A resumed run reads on to its position, or begins at a state
that the dataset gave (`state_dict`, `load_state_dict`) if a test shows that this works.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch.utils.data

from wanma.data.datasets.fingerprint import dataset_fingerprint
from wanma.data.datasets.seeded_draws import SeededDraws, SeedGenerators
from wanma.data.sampling.batch_size_schedule import samples_consumed_before, step_of_sample
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.train import TrainSection
from wanma.torch_internals.pickling import drop_persistent_workers

_FINGERPRINT_SAMPLES = 4
"""Number of samples from the beginning that identify a stream."""
_MAX_STATES = 16
"""Maximum number of the dataset's states that are kept: the loader is a few steps ahead of the loop."""
_MAX_STATE_BYTES = 4 << 20
"""Maximum size in bytes of a state that goes into checkpoints."""
_PROGRESS_INTERVAL = 1_000
"""Samples between two progress reports while a stream is read on to its position."""


def is_stream(dataset: object) -> bool:
    """Return True if a dataset can only be iterated over."""
    if isinstance(dataset, torch.utils.data.IterableDataset | torch.utils.data.DataLoader):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def check_stream(dataset: Any) -> None:
    """Reject a dataset that yields batches, or that can be read only once.

    Raises:
        JobError: names the reason.
    """
    name = type(dataset).__name__
    if isinstance(dataset, torch.utils.data.DataLoader) and dataset.batch_size is not None:
        raise JobError(
            f"data: {name} yields batches, but wanma needs single samples: it builds the batches of each "
            "rank itself",
            "pass its dataset, or a loader with batch_size=None",
        )
    if not getattr(dataset, "in_order", True):
        raise JobError(
            f"data: {name} with in_order=False yields samples in the order in which its workers end, "
            "but all ranks, and a resumed run, need one order",
            "leave in_order=False out",
        )
    # A loader's `iter` starts processes, and other datasets draw in it: only an iterator's is harmless.
    if hasattr(dataset, "__next__") and iter(dataset) is dataset:
        raise JobError(
            f"data: {name} can be iterated only once, but a resumed run reads it again from the beginning",
            "pass an object with an __iter__ that returns a new iterator",
        )


def read_first_samples(dataset: Any, count: int, draws: SeededDraws) -> list[Any]:
    """Read the first samples of a new iteration, fewer if the stream is shorter.

    Raises:
        WanmaError: the dataset fails, or is empty.
    """
    name = type(dataset).__name__
    try:
        samples = draws.read(partial(_take_samples, dataset, range(count)))
    except WanmaError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise WanmaError(
            f"data: the first samples of {name} failed: {type(error).__name__}: {error}"
        ) from error
    if not samples:
        raise JobError(f"data: {name} yields no samples")
    return samples


@dataclass(frozen=True)
class _State:
    """Position of an iteration."""

    position: int
    """Samples read, over all epochs."""
    epoch: int
    state: Any
    """State of the dataset itself; None: its beginning."""


class StreamReader:
    """Reader of indexed samples of a stream.

    Args:
        draws: generators that are seeded by sample.
        cache_size: number of the latest samples read that are kept for repeated reads.
    """

    def __init__(self, dataset: Any, draws: SeededDraws, train: TrainSection, cache_size: int) -> None:
        self._dataset, self._draws, self._cache_size = dataset, draws, cache_size
        self.name = type(dataset).__name__
        self._train = train
        self.every_steps = 0
        """Interval in steps at which the dataset's state is stored for a checkpoint; 0: never."""
        self._lock = threading.Lock()
        self._first_sample: list[Any] = []
        """Sample 0, as a list of at most one: the template of padding rows."""
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._states: OrderedDict[int, _State] = OrderedDict()
        self._start = _State(0, 0, None)
        self._has_states = False
        self._iterator: Iterator[Any] | None = None
        """Iterator of the epoch; None: the next read makes it, in its seeded section."""
        self._start_iteration(self._start)

    def read_samples(self, sample_indices: Sequence[int]) -> list[Any]:
        """Read the samples with these indices.

        Raises:
            WanmaError: the dataset fails, or is empty.
        """
        with self._lock:
            return self._draws.read(
                lambda seed: [self._read_sample(number, seed) for number in sample_indices]
            )

    def seek(self, position: int, on_progress: Callable[[int], None]) -> None:
        """Read on to a position, without keeping anything."""
        while self._position < position:
            end = min(self._position + _PROGRESS_INTERVAL, position)
            with self._lock:
                self._draws.read(partial(self._read_to, end))
            on_progress(self._position)

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the newest state at or before `position`, as JSON; empty: the beginning."""
        with self._lock:
            earlier_states = [state for state in self._states.values() if state.position <= position]
        newest = earlier_states[-1] if earlier_states else self._start
        return {} if newest.state is None else {**vars(newest)}

    def restore_state(self, values: dict[str, Any]) -> None:
        """Continue at a state that `state_at` returned."""
        with self._lock:
            if values and self._has_states:
                self._start = _State(values["position"], values["epoch"], values["state"])
                self._cache.clear()
                self._start_iteration(self._start)

    def fingerprint(self) -> str:
        """Return a hash of the first samples; test, too, if the dataset's own states can be trusted.

        Raises:
            JobError: a second iteration gives different samples.
        """
        first, second = (
            read_first_samples(self._dataset, _FINGERPRINT_SAMPLES, self._draws) for _ in range(2)
        )
        first_hash, second_hash = (
            dataset_fingerprint(part, lambda rows, row: rows[row]) for part in (first, second)
        )
        if first_hash != second_hash:
            raise JobError(
                f"data: {self.name} yields different samples in each iteration; all ranks, and a resumed "
                "run, need the same ones",
                "draw in __iter__ from a fixed seed, or from the global generators of numpy, Python or torch",
            )
        self._first_sample = first[:1]
        self._has_states = self._can_resume_from_state(first)
        self._start_iteration(self._start)
        return first_hash

    # ---------------------------------------------------------------- inside

    def _start_iteration(self, state: _State) -> None:
        self._position, self._epoch = state.position, state.epoch
        dataset = self._dataset
        if state.state is not None:
            dataset = copy.deepcopy(dataset)  # the next epoch must start from the beginning
            dataset.load_state_dict(state.state)
        self._current_dataset = dataset
        self._iterator = None

    def _read_sample(self, sample_index: int, seed: SeedGenerators) -> Any:
        if sample_index == 0 and self._first_sample:
            return self._first_sample[0]
        if sample_index in self._cache:
            self._cache.move_to_end(sample_index)
            return self._cache[sample_index]
        if sample_index < self._position:
            earlier_states = [s for s in (self._start, *self._states.values()) if s.position <= sample_index]
            self._start_iteration(earlier_states[-1] if earlier_states else _State(0, 0, None))
        self._read_to(sample_index, seed)
        item = self._cache[sample_index] = self._read_next(seed)
        self._first_sample = [item] if sample_index == 0 else self._first_sample
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return item

    def _read_to(self, position: int, seed: SeedGenerators) -> None:
        while self._position < position:
            self._read_next(seed)

    def _read_next(self, seed: SeedGenerators) -> Any:
        for _ in range(2):
            try:
                if self._iterator is None:
                    self._iterator = _new_iterator(self._current_dataset, self._epoch, seed)
                if self._has_states:
                    self._store_state()
                seed(self._position)
                item = next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._current_dataset, self._iterator = self._dataset, None
            except Exception as error:  # whatever the user's code raises
                raise WanmaError(
                    f"data: sample {self._position} of {self.name} failed: {type(error).__name__}: {error}"
                ) from error
            else:
                self._position += 1
                return item
        raise WanmaError(f"data: {self.name} yields no samples in epoch {self._epoch}")

    def _store_state(self) -> None:
        """Store the dataset's state at a position where a checkpoint will be."""
        position = self._position
        if (
            self.every_steps == 0
            or position == 0
            or position in self._states
            or not self._is_checkpoint_position(position)
        ):
            return
        state = self._current_dataset.state_dict()
        if len(json.dumps(state)) <= _MAX_STATE_BYTES:
            self._states[position] = _State(position, self._epoch, copy.deepcopy(state))
        while len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)

    def _is_checkpoint_position(self, position: int) -> bool:
        """Return True if a step that is saved ends at `position`."""
        step = step_of_sample(self._train, position)
        return samples_consumed_before(self._train, step) == position and step % self.every_steps == 0

    def _can_resume_from_state(self, first_samples: list[Any]) -> bool:
        """Return True if an iteration from the dataset's own state yields the samples that come next.

        A shuffle buffer, for one, is often not in the state: then the stream is read from the beginning.
        """
        if not (hasattr(self._dataset, "state_dict") and hasattr(self._dataset, "load_state_dict")):
            return False
        half = len(first_samples) // 2

        def read(seed: SeedGenerators) -> list[Any]:
            original = copy.deepcopy(self._dataset)
            iterator = _new_iterator(original, 0, seed)
            for number in range(half):
                seed(number)
                next(iterator)
            state = json.loads(json.dumps(original.state_dict()))
            if state != original.state_dict():
                return []
            resumed = copy.deepcopy(self._dataset)
            resumed.load_state_dict(state)
            return _take_samples(resumed, range(half, len(first_samples)), seed)

        try:
            resumed_samples = self._draws.read(read)
        except Exception:  # whatever the user's code raises: its states are not used
            return False
        expected_hash, resumed_hash = (
            dataset_fingerprint(part, lambda rows, row: rows[row])
            for part in (first_samples[half:], resumed_samples)
        )
        return bool(resumed_samples) and expected_hash == resumed_hash


def _take_samples(dataset: Any, numbers: range, seed: SeedGenerators) -> list[Any]:
    """Begin an iteration and return a sample for each number, fewer if it is shorter."""
    iterator, samples = _new_iterator(dataset, 0, seed), list[Any]()
    for number in numbers:
        seed(number)
        samples += islice(iterator, 1)
    return samples


def _new_iterator(dataset: Any, epoch: int, seed: SeedGenerators) -> Iterator[Any]:
    """Begin an epoch; what is drawn at `iter()`, such as its order, depends on (seed, epoch) alone."""
    seed(-1 - epoch)  # samples have the numbers from 0 on
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    if isinstance(dataset, torch.utils.data.DataLoader):
        drop_persistent_workers(dataset)
    return iter(dataset)
