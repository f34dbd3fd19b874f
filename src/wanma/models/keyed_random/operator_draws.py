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

from wanma.job.errors import WanmaError
from wanma.job.user_frames import calling_frame_text
from wanma.models.keyed_random.call_counter import CallCounter
from wanma.models.keyed_random.distributions import (
    GOLDEN_GAMMA,
    PROBABILITY_LEVELS,
    draw_categorical,
    draw_exponential,
    draw_integers,
    draw_normal,
    draw_uniform,
    draw_uniform_int16,
    element_keys,
    hash_int64,
    hash_scalar,
)
from wanma.models.structure.parameter_initialization import stable_hash
from wanma.torch_internals.dispatch import TorchDispatchMode, operator_schema
from wanma.torch_internals.operators import FUSED_DROPOUT

SampleDimPosition = Literal["batch first", "batch second", "heads folded in"]
"""Position of the sample dim in the tensors of a torch module."""

_DRAW_NAME = "draws of the forward"
_RANDOM_TAG = torch.Tag.nondeterministic_seeded
_UNTAGGED_OPERATORS = ("aten::random_",)


class KeyedDrawMode(TorchDispatchMode):
    """Dispatch mode that answers every drawing operator with keyed numbers.

    Args:
        seed: the job's.
        step: optimizer step that the forward belongs to.
        sample_indices: (rows,) int64, each row's index in the run's sample order.
        call_counter: call counter of this forward.
        single_draw_kinds: kinds ("sample" or "step") of single numbers by the number of their draw, from
            forwards of several rows; filled here.
        per_sample_obstacle: reason why per-sample numbers cannot be keyed; None: they can.
        per_step_obstacle: reason why single numbers cannot be keyed; None: they can.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        sample_indices: Tensor,
        call_counter: CallCounter,
        single_draw_kinds: dict[int, str],
        per_sample_obstacle: str | None = None,
        per_step_obstacle: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.sample_dim_position: SampleDimPosition = "batch first"
        self.draw_count = 0
        """Number of draws so far."""
        self._seed, self._step, self._sample_indices = seed, step, sample_indices
        self._call_counter, self._single_draw_kinds = call_counter, single_draw_kinds
        self._per_sample_obstacle, self._per_step_obstacle = per_sample_obstacle, per_step_obstacle
        self._drawn_seeds: set[int] = set()
        """Integers drawn in this step, with which the forward may seed a generator of its own."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = getattr(func, "tags", ())
        if _RANDOM_TAG not in tags and getattr(func, "name", str)() not in _UNTAGGED_OPERATORS:
            return func(*args, **kwargs)
        schema = operator_schema(func)
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments.update(zip((a.name for a in schema.arguments), args, strict=False))
        arguments.update(kwargs)
        if _draws_nothing(arguments):
            return func(*args, **kwargs)
        generator: torch.Generator | None = arguments.get("generator")
        if generator is not None:
            if generator.initial_seed() in self._drawn_seeds:
                return func(*args, **kwargs)
            raise self._unkeyable_error(
                func, "from a separate generator with a state that depends on the layout"
            )
        if self._call_counter.is_reseeded:
            return self._accept_own_seed(func, func(*args, **kwargs))
        handler = _OPERATOR_HANDLERS.get(schema.name.removeprefix("aten::"))
        if handler is None or "out" in arguments or isinstance(arguments.get("high"), Tensor):
            raise self._unkeyable_error(func, "that wanma cannot key by sample")
        self.draw_count += 1
        return handler(self, func, arguments)

    def draw_keys(self, func: Any, shape: torch.Size, device: torch.device) -> Tensor:
        """Return int64 keys of a draw of `shape`.

        Raises:
            WanmaError: `shape` has no dim of samples, or they cannot be keyed here.
        """
        call = self._call_counter.next_index(_DRAW_NAME)
        if self._is_per_step(func, shape, call):
            return torch.full(shape, self._step_key(call), dtype=torch.int64, device=device)
        keys = element_keys(
            self._row_keys(call, device), math.prod(shape) // max(len(self._sample_indices), 1)
        )
        if self._has_samples_in_dim_1(shape):
            return keys.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
        return keys.view(shape)

    def draw_mask(self, func: Any, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """Draw bools of `shape`, true with probability `p`; cheaper than comparing uniform numbers."""
        one_each = shape.numel() <= len(self._sample_indices)
        if one_each or self._has_samples_in_dim_1(shape) or not 1e-2 <= p <= 1 - 1e-2:
            return draw_uniform(self.draw_keys(func, shape, device), torch.float32) < p
        call = self._call_counter.next_index(_DRAW_NAME)
        self._is_per_step(func, shape, call)
        rows = len(self._sample_indices)
        drawn = draw_uniform_int16(
            self._row_keys(call, device), None, torch.Size((rows, shape.numel() // max(rows, 1)))
        )
        return (drawn < round(p * PROBABILITY_LEVELS) - PROBABILITY_LEVELS // 2).view(shape)

    def record_seed(self, seed: Tensor) -> Tensor:
        """Record a drawn integer, and return it."""
        if seed.numel() == 1:
            self._drawn_seeds.add(int(seed))
        return seed

    def _row_keys(self, call: int, device: torch.device) -> Tensor:
        return hash_int64(
            self._sample_indices.to(device) ^ hash_scalar(self._seed ^ stable_hash(f"{_DRAW_NAME} {call}"))
        )

    def _step_key(self, call: int) -> int:
        return hash_scalar(
            self._seed ^ stable_hash(_DRAW_NAME) ^ hash_scalar(self._step * GOLDEN_GAMMA + call)
        )

    def _is_per_step(self, func: Any, shape: torch.Size, call: int) -> bool:
        """Return True if a draw is one number per step; False if it has numbers of each sample.

        Raises:
            WanmaError: it is neither, or cannot be keyed under this plan.
        """
        rows = len(self._sample_indices)
        if shape.numel() == 1 and rows > 1:
            self._single_draw_kinds[call] = "step"
        elif shape.numel() == 1 and shape and call not in self._single_draw_kinds:
            raise self._unkeyable_error(
                func,
                "that can be per sample or per step, which a micro-batch of one row leaves open",
            )
        if shape.numel() == 1 and self._single_draw_kinds.get(call, "step") == "step":
            if self._per_step_obstacle is not None:
                raise self._unkeyable_error(func, f"under {self._per_step_obstacle}")
            return True
        is_folded = self.sample_dim_position == "heads folded in" and len(shape) == 3 and not shape[0] % rows
        if not shape or (shape[0] != rows and not is_folded and not self._has_samples_in_dim_1(shape)):
            raise self._unkeyable_error(func, f"of shape {tuple(shape)} in a micro-batch of {rows} samples")
        if self._per_sample_obstacle is not None:
            raise self._unkeyable_error(func, f"under {self._per_sample_obstacle}")
        if shape.numel() == rows and rows > 1:
            self._single_draw_kinds[call] = "sample"
        return False

    def _accept_own_seed(self, func: Any, result: Any) -> Any:
        """Return a draw from the forward's own seed: the same everywhere, unless rows hold parts of it."""
        rows = len(self._sample_indices)
        if isinstance(result, Tensor) and result.ndim and result.shape[0] == rows > 1:
            raise self._unkeyable_error(func, "from a fixed seed, which depend on the row of a sample")
        return result

    def _has_samples_in_dim_1(self, shape: torch.Size) -> bool:
        return (
            self.sample_dim_position == "batch second"
            and len(shape) == 3
            and shape[1] == len(self._sample_indices)
        )

    def _unkeyable_error(self, func: Any, reason: str) -> WanmaError:
        line = calling_frame_text()
        return WanmaError(
            f"the forward draws random numbers {reason} ({func}"
            + (f"; {line})" if line else ")")
            + ": they depend on rank and micro-batch",
            "draw one row per sample (batch in dim 0) or one number per step (shape ()); draw all others "
            "from torch.Generator(device).manual_seed(int(torch.randint(2**62, ()))), which is equal on all "
            "ranks; draw numbers that training does not use after session.step",
        )


def _draws_nothing(arguments: dict[str, Any]) -> bool:
    """Return True for fused operators whose dropout is switched off."""
    probability = arguments.get("dropout_p", arguments.get("dropout"))
    if probability is not None:
        return not probability or arguments.get("train") is False
    return arguments.get("training") is False or arguments.get("train") is False


OperatorHandler = Callable[[KeyedDrawMode, Any, dict[str, Any]], Any]
_DrawFunction = Callable[[Tensor, dict[str, Any], torch.dtype], Tensor]
"""Function (keys, the operator's arguments, dtype of the result) -> random numbers."""


def _handle_factory(draw: _DrawFunction, default: torch.dtype | None) -> OperatorHandler:
    """Answer a function that makes a tensor of a given size."""

    def answer(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
        device = torch.device(arguments.get("device") or "cpu")
        keys = mode.draw_keys(func, torch.Size(arguments["size"]), device)
        dtype = arguments.get("dtype")  # the schema's own default is a number
        if not isinstance(dtype, torch.dtype):
            dtype = default or torch.get_default_dtype()
        return draw(keys, arguments, dtype)

    return answer


def _handle_like(draw: _DrawFunction) -> OperatorHandler:
    """Answer a function that makes a tensor like another."""

    def answer(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
        template: Tensor = arguments["self"]
        keys = mode.draw_keys(func, template.shape, torch.device(arguments.get("device") or template.device))
        return draw(keys, arguments, arguments.get("dtype") or template.dtype)

    return answer


def _handle_in_place(draw: _DrawFunction) -> OperatorHandler:
    """Answer a method that fills its tensor."""

    def answer(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
        tensor: Tensor = arguments["self"]
        return tensor.copy_(draw(mode.draw_keys(func, tensor.shape, tensor.device), arguments, tensor.dtype))

    return answer


def _integers(keys: Tensor, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return draw_integers(keys, arguments.get("low", 0), arguments["high"]).to(dtype)


def _randint(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    return mode.record_seed(_handle_factory(_integers, torch.int64)(mode, func, arguments))


def _random(keys: Tensor, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    low, high = arguments.get("from", 0), arguments.get("to")
    if high is None:
        high = torch.iinfo(dtype).max if not dtype.is_floating_point else int(2 / torch.finfo(dtype).eps)
    return draw_integers(keys, low, high).to(dtype)


def _bernoulli(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    tensor: Tensor = arguments["self"]
    p = arguments.get("p", tensor)
    return _draw_bernoulli(mode, func, tensor, p).to(tensor.dtype)


def _fill_bernoulli(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    tensor: Tensor = arguments["self"]
    return tensor.copy_(_draw_bernoulli(mode, func, tensor, arguments["p"]))


def _draw_bernoulli(mode: KeyedDrawMode, func: Any, tensor: Tensor, p: Tensor | float) -> Tensor:
    if not isinstance(p, Tensor):
        return mode.draw_mask(func, tensor.shape, p, tensor.device)
    compute_dtype = torch.promote_types(p.dtype, torch.float32)
    return draw_uniform(mode.draw_keys(func, tensor.shape, tensor.device), compute_dtype) < p.to(
        compute_dtype
    )


def _normal(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    mean, std = arguments["mean"], arguments["std"]
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        draws: Tensor = _handle_factory(_shifted_normal, None)(mode, func, arguments)
        return draws
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    return _shifted_normal(mode.draw_keys(func, shape, tensors[0].device), arguments, tensors[0].dtype)


def _shifted_normal(keys: Tensor, arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    draws: Tensor = arguments["mean"] + arguments["std"] * draw_normal(keys, dtype)
    return draws


def _multinomial(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    weights, count, replacement = arguments["self"], arguments["num_samples"], arguments["replacement"]
    replacement = replacement or count == 1
    shape = torch.Size((*weights.shape[:-1], count if replacement else weights.shape[-1]))
    keys = mode.draw_keys(func, shape, weights.device)
    if weights.ndim == 1:
        return draw_categorical(keys.unsqueeze(0), weights.unsqueeze(0), count, replacement).squeeze(0)
    return draw_categorical(keys, weights, count, replacement)


def _dropout(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x: Tensor = arguments["self"] if "self" in arguments else arguments["input"]
    # The fused one takes the keep probability.
    p = arguments["p"] if operator_schema(func).name == f"aten::{FUSED_DROPOUT}" else 1 - arguments["p"]
    keep_mask = mode.draw_mask(func, x.shape, p, x.device)
    return torch.where(keep_mask, x / p if p else x, 0.0), keep_mask


def _rrelu(mode: KeyedDrawMode, func: Any, arguments: dict[str, Any]) -> Tensor:
    x: Tensor = arguments["self"]
    low, high = arguments["lower"], arguments["upper"]
    slopes = low + (high - low) * draw_uniform(mode.draw_keys(func, x.shape, x.device), x.dtype)
    noise: Tensor = arguments["noise"]
    return x * noise.copy_(torch.where(x <= 0, slopes, 1.0))


_OPERATOR_HANDLERS: dict[str, OperatorHandler] = {
    "rand": _handle_factory(lambda keys, _, dtype: draw_uniform(keys, dtype), None),
    "randn": _handle_factory(lambda keys, _, dtype: draw_normal(keys, dtype), None),
    "randint": _randint,
    "rand_like": _handle_like(lambda keys, _, dtype: draw_uniform(keys, dtype)),
    "randn_like": _handle_like(lambda keys, _, dtype: draw_normal(keys, dtype)),
    "randint_like": _handle_like(_integers),
    "uniform_": _handle_in_place(
        lambda keys, arguments, dtype: (
            arguments["from"] + (arguments["to"] - arguments["from"]) * draw_uniform(keys, dtype)
        )
    ),
    "normal_": _handle_in_place(_shifted_normal),
    "exponential_": _handle_in_place(
        lambda keys, arguments, dtype: draw_exponential(keys, dtype) / arguments["lambd"]
    ),
    "random_": _handle_in_place(_random),
    "bernoulli": _bernoulli,
    "bernoulli_": _fill_bernoulli,
    "normal": _normal,
    "multinomial": _multinomial,
    "native_dropout": _dropout,
    FUSED_DROPOUT: _dropout,
    "rrelu_with_noise": _rrelu,
}
"""Answers by name of the operator."""
