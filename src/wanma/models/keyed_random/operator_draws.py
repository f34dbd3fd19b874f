"""Random draws of a user's own forward or loss as functions of (seed, sample, draw, position).

Operators that draw from torch's generators are answered with keyed numbers instead: one row per sample where
dim 0 is the batch, one number per optimizer step where it is a single one, as in a plain loop over the
global batch. Other draws are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wanma.job.errors import WanmaError
from wanma.job.user_frames import calling_line
from wanma.models.keyed_random.call_counter import Calls
from wanma.models.keyed_random.distributions import (
    GOLDEN,
    LANES,
    choices,
    elements,
    exponential,
    integers,
    lanes,
    mix,
    mix_scalar,
    normal,
    uniform,
)
from wanma.models.structure.parameter_initialization import stable_hash

Arrangement = Literal["batch first", "batch second", "heads folded in"]
"""Position of the sample dim in the tensors of a torch module."""

_NAME = "draws of the forward"
_SEEDED = torch.Tag.nondeterministic_seeded
_UNTAGGED = ("aten::random_",)


class KeyedDraws(TorchDispatchMode):
    """Dispatch mode that answers every drawing operator with keyed numbers.

    Args:
        seed: the job's.
        step: optimizer step that the forward belongs to.
        samples: (rows,) int64, each row's index in the run's sample order.
        calls: call counter of this forward.
        known: kinds ("sample" or "step") of single numbers by the number of their draw, from forwards of
            several rows; filled here.
        unable: reason why per-sample numbers cannot be keyed; None: they can.
        unable_single: reason why single numbers cannot be keyed; None: they can.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        samples: Tensor,
        calls: Calls,
        known: dict[int, str],
        unable: str | None = None,
        unable_single: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.arrangement: Arrangement = "batch first"
        self.draws = 0
        """Number of draws so far."""
        self._seed, self._step, self._samples = seed, step, samples
        self._calls, self._known = calls, known
        self._unable, self._unable_single = unable, unable_single
        self._issued: set[int] = set()
        """Integers drawn in this step, with which the forward may seed a generator of its own."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = getattr(func, "tags", ())
        if _SEEDED not in tags and getattr(func, "name", str)() not in _UNTAGGED:
            return func(*args, **kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given.update(zip((a.name for a in func._schema.arguments), args, strict=False))
        given.update(kwargs)
        if _draws_nothing(given):
            return func(*args, **kwargs)
        generator: torch.Generator | None = given.get("generator")
        if generator is not None:
            if generator.initial_seed() in self._issued:
                return func(*args, **kwargs)
            raise self._refused(func, "from a generator of its own, whose state depends on the layout")
        if self._calls.is_seeded_by_another:
            return self._seeded_there(func, func(*args, **kwargs))
        answer = _ANSWERS.get(func._schema.name.removeprefix("aten::"))
        if answer is None or "out" in given or isinstance(given.get("high"), Tensor):
            raise self._refused(func, "that wanma cannot key by sample")
        self.draws += 1
        return answer(self, func, given)

    def keys(self, func: Any, shape: torch.Size, device: torch.device) -> Tensor:
        """Return int64 keys of a draw of `shape`.

        Raises:
            WanmaError: `shape` has no dim of samples, or they cannot be keyed here.
        """
        call = self._calls.number(_NAME)
        if self._is_single(func, shape, call):
            return torch.full(shape, self._step_key(call), dtype=torch.int64, device=device)
        made = elements(self._row_keys(call, device), math.prod(shape) // max(len(self._samples), 1))
        if self._is_second(shape):
            return made.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return made.view(shape)

    def keeps(self, func: Any, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """Draw bools of `shape`, true with probability `p`; cheaper than comparing uniform numbers."""
        one_each = shape.numel() <= len(self._samples)
        if one_each or self._is_second(shape) or not 1e-2 <= p <= 1 - 1e-2:
            return uniform(self.keys(func, shape, device), torch.float32) < p
        call = self._calls.number(_NAME)
        self._is_single(func, shape, call)
        rows = len(self._samples)
        drawn = lanes(self._row_keys(call, device), None, torch.Size((rows, shape.numel() // max(rows, 1))))
        return (drawn < round(p * LANES) - LANES // 2).view(shape)

    def issue(self, number: Tensor) -> Tensor:
        """Record a drawn integer, and return it."""
        if number.numel() == 1:
            self._issued.add(int(number))
        return number

    def _row_keys(self, call: int, device: torch.device) -> Tensor:
        return mix(self._samples.to(device) ^ mix_scalar(self._seed ^ stable_hash(f"{_NAME} {call}")))

    def _step_key(self, call: int) -> int:
        return mix_scalar(self._seed ^ stable_hash(_NAME) ^ mix_scalar(self._step * GOLDEN + call))

    def _is_single(self, func: Any, shape: torch.Size, call: int) -> bool:
        """Return True if a draw is one number per step; False if it has numbers of each sample.

        Raises:
            WanmaError: it is neither, or cannot be keyed under this plan.
        """
        rows = len(self._samples)
        if shape.numel() == 1 and rows > 1:
            self._known[call] = "step"
        elif shape.numel() == 1 and shape and call not in self._known:
            raise self._refused(
                func,
                "of which a micro-batch of one row does not say if they are of the sample or of the step",
            )
        if shape.numel() == 1 and self._known.get(call, "step") == "step":
            if self._unable_single is not None:
                raise self._refused(func, f"under {self._unable_single}")
            return True
        is_folded = self.arrangement == "heads folded in" and len(shape) == 3 and not shape[0] % rows
        if not shape or (shape[0] != rows and not is_folded and not self._is_second(shape)):
            raise self._refused(func, f"of shape {tuple(shape)} in a micro-batch of {rows} samples")
        if self._unable is not None:
            raise self._refused(func, f"under {self._unable}")
        if shape.numel() == rows and rows > 1:
            self._known[call] = "sample"
        return False

    def _seeded_there(self, func: Any, result: Any) -> Any:
        """Return a draw from the forward's own seed: the same everywhere, unless rows hold parts of it."""
        rows = len(self._samples)
        if isinstance(result, Tensor) and result.ndim and result.shape[0] == rows > 1:
            raise self._refused(func, "from a seed of its own, of which each sample gets those of its row")
        return result

    def _is_second(self, shape: torch.Size) -> bool:
        return self.arrangement == "batch second" and len(shape) == 3 and shape[1] == len(self._samples)

    def _refused(self, func: Any, why: str) -> WanmaError:
        line = calling_line()
        return WanmaError(
            f"the forward draws random numbers {why} ({func}"
            + (f"; {line})" if line else ")")
            + ": other ranks and micro-batches would draw others, and train another model",
            "draw one row per sample (dim 0 the batch) or one number per step (shape ()), and all else from "
            "torch.Generator(device).manual_seed(int(torch.randint(2**62, ()))), which is alike everywhere; "
            "what training does not use may be drawn after session.step",
        )


def _draws_nothing(given: dict[str, Any]) -> bool:
    """Return True for fused operators whose dropout is switched off."""
    probability = given.get("dropout_p", given.get("dropout"))
    if probability is not None:
        return not probability or given.get("train") is False
    return given.get("training") is False or given.get("train") is False


Answer = Callable[[KeyedDraws, Any, dict[str, Any]], Any]
_Draw = Callable[[Tensor, dict[str, Any], torch.dtype], Tensor]
"""Function (keys, the operator's arguments, dtype of the result) -> random numbers."""


def _made(draw: _Draw, default: torch.dtype | None) -> Answer:
    """Answer a function that makes a tensor of a given size."""

    def answer(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
        device = torch.device(given.get("device") or "cpu")
        keys = mode.keys(func, torch.Size(given["size"]), device)
        dtype = given.get("dtype")  # the schema's own default is a number
        if not isinstance(dtype, torch.dtype):
            dtype = default or torch.get_default_dtype()
        return draw(keys, given, dtype)

    return answer


def _like(draw: _Draw) -> Answer:
    """Answer a function that makes a tensor like another."""

    def answer(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
        other: Tensor = given["self"]
        keys = mode.keys(func, other.shape, torch.device(given.get("device") or other.device))
        return draw(keys, given, given.get("dtype") or other.dtype)

    return answer


def _filled(draw: _Draw) -> Answer:
    """Answer a method that fills its tensor."""

    def answer(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
        tensor: Tensor = given["self"]
        return tensor.copy_(draw(mode.keys(func, tensor.shape, tensor.device), given, tensor.dtype))

    return answer


def _integers(keys: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return integers(keys, given.get("low", 0), given["high"]).to(dtype)


def _issued_integers(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    return mode.issue(_made(_integers, torch.int64)(mode, func, given))


def _random(keys: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    low, high = given.get("from", 0), given.get("to")
    if high is None:
        high = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    return integers(keys, low, high).to(dtype)


def _bernoulli(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    tensor: Tensor = given["self"]
    p = given.get("p", tensor)
    return _flips(mode, func, tensor, p).to(tensor.dtype)


def _fill_bernoulli(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    tensor: Tensor = given["self"]
    return tensor.copy_(_flips(mode, func, tensor, given["p"]))


def _flips(mode: KeyedDraws, func: Any, tensor: Tensor, p: Tensor | float) -> Tensor:
    if not isinstance(p, Tensor):
        return mode.keeps(func, tensor.shape, p, tensor.device)
    precise = torch.promote_types(p.dtype, torch.float32)
    return uniform(mode.keys(func, tensor.shape, tensor.device), precise) < p.to(precise)


def _normal(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    mean, std = given["mean"], given["std"]
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        made: Tensor = _made(_shifted_normal, None)(mode, func, given)
        return made
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    return _shifted_normal(mode.keys(func, shape, tensors[0].device), given, tensors[0].dtype)


def _shifted_normal(keys: Tensor, given: dict[str, Any], dtype: torch.dtype) -> Tensor:
    draws: Tensor = given["mean"] + given["std"] * normal(keys, dtype)
    return draws


def _multinomial(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    weights, count, replacement = given["self"], given["num_samples"], given["replacement"]
    replacement = replacement or count == 1
    shape = torch.Size((*weights.shape[:-1], count if replacement else weights.shape[-1]))
    keys = mode.keys(func, shape, weights.device)
    if weights.ndim == 1:
        return choices(keys.unsqueeze(0), weights.unsqueeze(0), count, replacement).squeeze(0)
    return choices(keys, weights, count, replacement)


def _dropout(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x: Tensor = given["self"] if "self" in given else given["input"]
    # `_fused_dropout` takes the keep probability.
    p = given["p"] if func._schema.name == "aten::_fused_dropout" else 1 - given["p"]
    keeps = mode.keeps(func, x.shape, p, x.device)
    return torch.where(keeps, x / p if p else x, 0.0), keeps


def _leaky(mode: KeyedDraws, func: Any, given: dict[str, Any]) -> Tensor:
    x: Tensor = given["self"]
    low, high = given["lower"], given["upper"]
    slopes = low + (high - low) * uniform(mode.keys(func, x.shape, x.device), x.dtype)
    noise: Tensor = given["noise"]
    return x * noise.copy_(torch.where(x <= 0, slopes, 1.0))


_ANSWERS: dict[str, Answer] = {
    "rand": _made(lambda keys, _, dtype: uniform(keys, dtype), None),
    "randn": _made(lambda keys, _, dtype: normal(keys, dtype), None),
    "randint": _issued_integers,
    "rand_like": _like(lambda keys, _, dtype: uniform(keys, dtype)),
    "randn_like": _like(lambda keys, _, dtype: normal(keys, dtype)),
    "randint_like": _like(_integers),
    "uniform_": _filled(
        lambda keys, given, dtype: given["from"] + (given["to"] - given["from"]) * uniform(keys, dtype)
    ),
    "normal_": _filled(_shifted_normal),
    "exponential_": _filled(lambda keys, given, dtype: exponential(keys, dtype) / given["lambd"]),
    "random_": _filled(_random),
    "bernoulli": _bernoulli,
    "bernoulli_": _fill_bernoulli,
    "normal": _normal,
    "multinomial": _multinomial,
    "native_dropout": _dropout,
    "_fused_dropout": _dropout,
    "rrelu_with_noise": _leaky,
}
"""Answers by name of the operator."""
