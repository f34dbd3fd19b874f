"""Random numbers that a user's dataset draws for one sample, as functions of (seed, sample) alone.

Numpy's and Python's global generators are seeded for each sample and restored after a batch, one batch at a
time. Draws of torch get a generator of their own, because the training thread uses the global one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

Value = TypeVar("Value")
Seed = Callable[[int], object]
"""Function that seeds all generators for the sample with a given index."""


class SeededDraws:
    """Reader of batches with random generators that are seeded by sample.

    Args:
        seed: the job's.
        one_at_a_time: True if batches are read one after the other anyway. Otherwise they are until it is
            seen that the datasets draw nothing from numpy and Python, whose generators threads share.
    """

    def __init__(self, seed: int, one_at_a_time: bool) -> None:
        self._seed = seed
        self._alone = one_at_a_time
        """True if a batch must be read while no other is."""
        self._tried = False
        self._turn = threading.Condition()
        self._reading = 0
        self._is_taken = False

    def read(self, batch: Callable[[Seed], Value]) -> Value:
        """Return the value of `batch`, which seeds before each sample.

        It is called again if another batch may have disturbed its first call.
        """
        if not self._begin():
            before = _state()
            try:
                with _torch_draws() as of_torch:
                    value = batch(lambda number: self._seed_torch(of_torch, number))
            finally:
                is_same = _same(before, _state())
                self._end(alone=not is_same)
            if is_same:
                return value
            self._begin()
        before, drew = _state(), True
        try:
            with _torch_draws() as of_torch:
                value, drew = self._read_alone(batch, of_torch)
        finally:
            _put_back(before)
            self._tried, self._is_taken = True, False
            self._end(alone=drew, readers=0)
        return value

    def _begin(self) -> bool:
        """Wait for a turn; return True if no other batch is read meanwhile."""
        with self._turn:
            self._turn.wait_for(lambda: not self._is_taken)
            if self._tried and not self._alone:
                self._reading += 1
                return False
            self._turn.wait_for(lambda: not self._is_taken and self._reading == 0)
            self._is_taken = True
            return True

    def _end(self, *, alone: bool, readers: int = 1) -> None:
        with self._turn:
            self._alone = self._alone or alone
            self._reading -= readers
            self._turn.notify_all()

    def _read_alone(self, batch: Callable[[Seed], Value], of_torch: torch.Generator) -> tuple[Value, bool]:
        """Read the batch; return it, and True if batches must be read one at a time."""
        fresh: list[Any] = []
        drew = self._alone

        def seed(number: int) -> None:
            nonlocal drew
            drew = drew or (bool(fresh) and not _same(fresh[-1], _state()))
            words = self._seed_torch(of_torch, number)
            np.random.seed(words[2])
            random.seed(words[3])
            if not drew:
                fresh.append(_state())

        value = batch(seed)
        return value, drew or (bool(fresh) and not _same(fresh[-1], _state()))

    def _seed_torch(self, of_torch: torch.Generator, number: int) -> list[int]:
        """Seed torch's generator; return four words of 32 bits for the sample."""
        keys = [_mix(_mix(self._seed) + 2 * number + place) for place in (0, 1)]
        of_torch.manual_seed(keys[0] >> 1)
        return [keys[0] >> 32, keys[0] & _WORD, keys[1] >> 32, keys[1] & _WORD]


class _FromGenerator(TorchFunctionMode):
    """Mode in which a thread's draws come from one generator, where they name no other."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE:
            (like, *more), draw = args, _LIKE[func]
            given = {"dtype": like.dtype, "device": like.device, **kwargs}
            given.pop("memory_format", None)
            return draw(*more, like.shape, generator=self._generator, **given)
        if func in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


_LIKE: dict[Any, Callable[..., Any]] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}
_DRAWING = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
    torch.Tensor.geometric_,
    torch.Tensor.cauchy_,
    torch.Tensor.log_normal_,
    torch.Tensor.multinomial,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
}


_WORD = (1 << 32) - 1


def _mix(x: int) -> int:
    """Return a hash of 64 bits (SplitMix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    x = (x + 1) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


@contextmanager
def _torch_draws() -> Iterator[torch.Generator]:
    generator = torch.Generator()
    with _FromGenerator(generator):
        yield generator


def _state() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _put_back(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (_, *numpy_one), (_, *numpy_other) = one[0], other[0]
    same = all(np.array_equal(a, b) for a, b in zip(numpy_one, numpy_other, strict=True))
    return same and bool(one[1] == other[1])
