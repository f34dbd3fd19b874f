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
from wanma.data.datasets.seeded_draws import Seed, SeededDraws
from wanma.data.sampling.batch_size_schedule import samples_before, step_of
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.job import TrainSection

_LOOKED_AT = 4
"""Number of samples from the beginning that identify a stream."""
_STATES = 16
"""Maximum number of the dataset's states that are kept: the loader is a few steps ahead of the loop."""
_STATE_BYTES = 4 << 20
"""Maximum size in bytes of a state that goes into checkpoints."""
_TELL = 1_000
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
            f"data: {name} gives batches, which wanma makes itself, for every rank its share",
            "give its dataset, or a loader with batch_size=None, which gives samples",
        )
    if iter(dataset) is dataset:
        raise JobError(
            f"data: {name} can be read once only, and a run that carries on reads from the beginning",
            "give an object whose __iter__ begins anew",
        )


def first_samples(dataset: Any, count: int, draws: SeededDraws) -> list[Any]:
    """Read the first samples of a new iteration, fewer if the stream is shorter.

    Raises:
        WanmaError: the dataset fails, or is empty.
    """

    def read(seed: Seed) -> list[Any]:
        found: list[Any] = []
        iterator = _iterate(dataset, 0)
        for number in range(count):
            seed(number)
            found += islice(iterator, 1)
        return found

    name = type(dataset).__name__
    try:
        found = draws.read(read)
    except WanmaError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise WanmaError(
            f"data: the first samples of {name} failed: {type(error).__name__}: {error}"
        ) from error
    if not found:
        raise JobError(f"data: {name} gives no sample")
    return found


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
        dataset: the iterable dataset.
        draws: generators that are seeded by sample.
        train: the job's `[train]`.
        keep: number of the latest samples read that are kept for repeated reads.
    """

    def __init__(self, dataset: Any, draws: SeededDraws, train: TrainSection, keep: int) -> None:
        check_stream(dataset)
        self._dataset, self._draws, self._keep = dataset, draws, keep
        self.name = type(dataset).__name__
        self._train = train
        self.every_steps = 0
        """Interval in steps at which the dataset's state is stored for a checkpoint; 0: never."""
        self._lock = threading.Lock()
        self._zero: list[Any] = []
        """Sample 0, as a list of at most one: the template of padding rows."""
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._states: OrderedDict[int, _State] = OrderedDict()
        self._start = _State(0, 0, None)
        self._has_states = False
        self._begin(self._start)

    def items(self, numbers: Sequence[int]) -> list[Any]:
        """Read the samples with these indices.

        Raises:
            WanmaError: the dataset fails, or is empty.
        """
        with self._lock:
            return self._draws.read(lambda seed: [self._item(number, seed) for number in numbers])

    def seek(self, position: int, told: Callable[[int], None]) -> None:
        """Read on to a position, without keeping anything.

        Args:
            position: sample index.
            told: called with the position from time to time.
        """
        while self._position < position:
            end = min(self._position + _TELL, position)
            with self._lock:
                self._draws.read(partial(self._read_to, end))
            told(self._position)

    def at(self, position: int) -> dict[str, Any]:
        """Return the newest state at or before `position`, as JSON; empty: the beginning."""
        with self._lock:
            known = [state for state in self._states.values() if state.position <= position]
        newest = known[-1] if known else self._start
        return {} if newest.state is None else {**vars(newest)}

    def resume(self, values: dict[str, Any]) -> None:
        """Continue at a state that `at` returned."""
        with self._lock:
            if values and self._has_states:
                self._start = _State(values["position"], values["epoch"], values["state"])
                self._kept.clear()
                self._begin(self._start)

    def fingerprint(self) -> str:
        """Return a hash of the first samples; test, too, if the dataset's own states can be trusted.

        Raises:
            JobError: a second iteration gives different samples.
        """
        first, second = (first_samples(self._dataset, _LOOKED_AT, self._draws) for _ in range(2))
        one, other = (dataset_fingerprint(part, lambda rows, row: rows[row]) for part in (first, second))
        if one != other:
            raise JobError(
                f"data: {self.name} gives other samples when it is iterated over again, so that ranks, and a "
                "run that carries on, would train on others",
                "let __iter__ follow from a seed of its own, or from numpy's, Python's or torch's generators",
            )
        self._zero = first[:1]
        self._has_states = self._can_go_on(first)
        self._begin(self._start)
        return one

    # ---------------------------------------------------------------- inside

    def _begin(self, at: _State) -> None:
        self._position, self._epoch = at.position, at.epoch
        dataset = self._dataset
        if at.state is not None:
            dataset = copy.deepcopy(dataset)  # the next epoch must start from the beginning
            dataset.load_state_dict(at.state)
        self._reading = dataset
        self._iterator = _iterate(dataset, self._epoch)

    def _item(self, number: int, seed: Seed) -> Any:
        if number == 0 and self._zero:
            return self._zero[0]
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        if number < self._position:
            known = [s for s in (self._start, *self._states.values()) if s.position <= number]
            self._begin(known[-1] if known else _State(0, 0, None))
        self._read_to(number, seed)
        item = self._kept[number] = self._next(seed)
        self._zero = [item] if number == 0 else self._zero
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return item

    def _read_to(self, position: int, seed: Seed) -> None:
        while self._position < position:
            self._next(seed)

    def _next(self, seed: Seed) -> Any:
        if self._has_states:
            self._note()
        seed(self._position)
        for _ in range(2):
            try:
                item = next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._reading = self._dataset
                self._iterator = _iterate(self._dataset, self._epoch)
            except Exception as error:  # whatever the user's code raises
                raise WanmaError(
                    f"data: sample {self._position} of {self.name} failed: {type(error).__name__}: {error}"
                ) from error
            else:
                self._position += 1
                return item
        raise WanmaError(f"data: {self.name} gives no sample in epoch {self._epoch}")

    def _note(self) -> None:
        """Store the dataset's state at a position where a checkpoint will be."""
        position = self._position
        if self.every_steps == 0 or position == 0 or position in self._states or not self._is_mark(position):
            return
        state = self._reading.state_dict()
        if len(json.dumps(state)) <= _STATE_BYTES:
            self._states[position] = _State(position, self._epoch, copy.deepcopy(state))
        while len(self._states) > _STATES:
            self._states.popitem(last=False)

    def _is_mark(self, position: int) -> bool:
        """Return True if a step that is saved ends at `position`."""
        step = step_of(self._train, position)
        return samples_before(self._train, step) == position and step % self.every_steps == 0

    def _can_go_on(self, first: list[Any]) -> bool:
        """Return True if an iteration from the dataset's own state yields the samples that come next.

        A shuffle buffer, for one, is often not in the state: then the stream is read from the beginning.
        """
        if not (hasattr(self._dataset, "state_dict") and hasattr(self._dataset, "load_state_dict")):
            return False
        half = len(first) // 2

        def read(seed: Seed) -> list[Any]:
            seed(0)
            whole = copy.deepcopy(self._dataset)
            iterator = _iterate(whole, 0)
            for number in range(half):
                seed(number)
                next(iterator)
            state = json.loads(json.dumps(whole.state_dict()))
            if state != whole.state_dict():
                return []
            again = copy.deepcopy(self._dataset)
            again.load_state_dict(state)
            found: list[Any] = []
            iterator = _iterate(again, 0)
            for number in range(half, len(first)):
                seed(number)
                found += islice(iterator, 1)
            return found

        try:
            rest = self._draws.read(read)
        except Exception:  # whatever the user's code raises: its states are not used
            return False
        one, other = (dataset_fingerprint(part, lambda rows, row: rows[row]) for part in (first[half:], rest))
        return bool(rest) and one == other


def _iterate(dataset: Any, epoch: int) -> Iterator[Any]:
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)
    return iter(dataset)
