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
from torch.utils.data import get_worker_info

Value = TypeVar("Value")
SeedGenerators = Callable[[int], object]
"""Function that seeds all generators for the sample with a given index."""


class SeededDraws:
    """Reader of batches with random generators that are seeded by sample.

    Args:
        serialize_access: True if batches are read one after the other anyway. Otherwise they are until it is
            seen that the datasets draw nothing from numpy and Python, whose generators threads share.
    """

    def __init__(self, seed: int, serialize_access: bool) -> None:
        self._seed = seed
        self._needs_exclusive_access = serialize_access
        """True if a batch must be read while no other is."""
        self._is_probed = False
        self._condition = threading.Condition()
        self._reader_count = 0
        self._is_exclusive = False

    def read(self, read_batch: Callable[[SeedGenerators], Value]) -> Value:
        """Return the value of `read_batch`, which seeds before each sample.

        It is called again if another batch may have disturbed its first call.
        """
        if not self._acquire():
            saved_states = _generator_states()
            try:
                with _torch_generator() as generator:
                    value = read_batch(lambda number: self._seed_torch(generator, number))
            finally:
                is_same = _equal_generator_states(saved_states, _generator_states())
                self._release(needs_exclusive_access=not is_same)
            if is_same:
                return value
            self._acquire()
        saved_states, uses_global_generators = _generator_states(), True
        try:
            with _torch_generator() as generator:
                value, uses_global_generators = self._read_exclusively(read_batch, generator)
        finally:
            _restore_generator_states(saved_states)
            self._is_probed, self._is_exclusive = True, False
            self._release(needs_exclusive_access=uses_global_generators, readers=0)
        return value

    def _acquire(self) -> bool:
        """Wait for a turn; return True if no other batch is read meanwhile."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_exclusive)
            if self._is_probed and not self._needs_exclusive_access:
                self._reader_count += 1
                return False
            self._condition.wait_for(lambda: not self._is_exclusive and self._reader_count == 0)
            self._is_exclusive = True
            return True

    def _release(self, *, needs_exclusive_access: bool, readers: int = 1) -> None:
        with self._condition:
            self._needs_exclusive_access = self._needs_exclusive_access or needs_exclusive_access
            self._reader_count -= readers
            self._condition.notify_all()

    def _read_exclusively(
        self, read_batch: Callable[[SeedGenerators], Value], generator: torch.Generator
    ) -> tuple[Value, bool]:
        """Read the batch; return it, and True if batches must be read one at a time."""
        seeded_states: list[Any] = []
        uses_global_generators = self._needs_exclusive_access

        def seed(number: int) -> None:
            nonlocal uses_global_generators
            uses_global_generators = uses_global_generators or (
                bool(seeded_states) and not _equal_generator_states(seeded_states[-1], _generator_states())
            )
            words = self._seed_torch(generator, number)
            np.random.seed(words[2])
            random.seed(words[3])
            if not uses_global_generators:
                seeded_states.append(_generator_states())

        value = read_batch(seed)
        return value, uses_global_generators or (
            bool(seeded_states) and not _equal_generator_states(seeded_states[-1], _generator_states())
        )

    def _seed_torch(self, generator: torch.Generator, sample_index: int) -> list[int]:
        """Seed torch's generator; return four words of 32 bits for the sample."""
        keys = [_mix(_mix(self._seed) + 2 * sample_index + offset) for offset in (0, 1)]
        generator.manual_seed(keys[0] >> 1)
        return [keys[0] >> 32, keys[0] & _WORD, keys[1] >> 32, keys[1] & _WORD]


class _GeneratorMode(TorchFunctionMode):
    """Mode in which a thread's draws come from one generator, where they name no other."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if get_worker_info() is not None:  # forked in this mode: torch has seeded the process for itself
            return func(*args, **kwargs)
        if func in _LIKE_FUNCTIONS:
            (tensor, *rest), draw = args, _LIKE_FUNCTIONS[func]
            options = {"dtype": tensor.dtype, "device": tensor.device, **kwargs}
            options.pop("memory_format", None)
            return draw(*rest, tensor.shape, generator=self._generator, **options)
        if func in _DRAWING_FUNCTIONS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


_LIKE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.rand_like: torch.rand,
    torch.randn_like: torch.randn,
    torch.randint_like: torch.randint,
}
_DRAWING_FUNCTIONS = {
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
def _torch_generator() -> Iterator[torch.Generator]:
    generator = torch.Generator()
    with _GeneratorMode(generator):
        yield generator


def _generator_states() -> tuple[Any, Any]:
    return np.random.get_state(), random.getstate()


def _restore_generator_states(state: tuple[Any, Any]) -> None:
    np.random.set_state(state[0])
    random.setstate(state[1])


def _equal_generator_states(first: tuple[Any, Any], second: tuple[Any, Any]) -> bool:
    (_, *numpy_first), (_, *numpy_second) = first[0], second[0]
    is_numpy_equal = all(np.array_equal(a, b) for a, b in zip(numpy_first, numpy_second, strict=True))
    return is_numpy_equal and bool(first[1] == second[1])
