"""Dropout whose mask is a pure function of (seed, sample, layer, position).

So the mask does not depend on the rank or micro-batch that holds a sample, nor on the device. The
sample is its index in the run's sample order, which never repeats: masks differ every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.models.keyed_random.call_counter import CallCounter
from wanma.models.keyed_random.distributions import (
    PROBABILITY_LEVELS,
    draw_uniform_int16,
    hash_int64,
    hash_scalar,
)
from wanma.models.keyed_random.sample_context import SampleDependentModule
from wanma.models.structure.parameter_initialization import stable_hash
from wanma.torch_internals.modules import registered_children


class KeyedDropout(SampleDependentModule):
    """Dropout layer: zeros elements with probability `p` in training and scales the rest to keep the mean.

    Draws are keyed by (seed, sample, layer, index in dim 1, index in the rest); a module that is called
    several times in one forward draws anew each time. It must see whole samples, except for dim 1, of
    which it may see a part that `bind_samples` states. Under tensor parallelism it therefore belongs
    on activations that are complete in the hidden dim, as the residual branches are.

    Args:
        p: probability of zero, rounded to 1/65536; the scale follows the rounding.
        name: of this module in the whole model; its hash is the layer key.
        drops_channels: drop whole channels (dim 1), as `nn.Dropout2d` does.
    """

    p: float
    inplace: bool
    original_class: ClassVar[type[nn.Module] | None] = None
    """Class that a module had before it became a keyed one; None: it was made as a keyed one."""

    def __init__(self, p: float, name: str, drops_channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.inplace = False
        self._init_keyed(name, drops_channels)

    def _init_keyed(self, name: str, drops_channels: bool) -> None:
        """Set the attributes that torch's own dropout lacks."""
        self.layer_name = name
        self.drops_channels = drops_channels
        self.row_keys: Tensor | None = None
        self.positions: Tensor | None = None
        self.call_count = 0
        self.call_counter: CallCounter | None = None
        """Calls of the forward, for parts that backward recomputes without announcing their samples."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.original_class is None:
            return super().__reduce_ex__(protocol)
        return _new_empty_keyed, (self.original_class,), self.__dict__

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout; dim 0 is the rows whose samples `bind_samples` announced.

        Raises:
            WanmaError: training without announced samples, or with another number of rows.
        """
        if not self.training or self.p == 0:
            return x
        if self.row_keys is None:
            raise WanmaError(
                f"dropout '{self.layer_name}': no sample context is bound",
                "run the forward inside bind_samples(model, seed, sample_indices); for recompute, pass "
                "context_fn=recompute_context_fn(model) to torch.utils.checkpoint",
            )
        if self.row_keys.shape[0] != x.shape[0]:
            raise WanmaError(
                f"dropout '{self.layer_name}' receives {x.shape[0]} rows for {self.row_keys.shape[0]} "
                "samples",
                "keep the batch in dim 0 of every activation",
            )
        drop = round(self.p * PROBABILITY_LEVELS)
        if drop == PROBABILITY_LEVELS:
            return x.zero_() if self.inplace else torch.zeros_like(x)
        if (
            not torch.compiler.is_compiling()
            and self.call_counter is not None
            and not self.call_counter.has_backward_ended
        ):
            self.call_count = self.call_counter.next_index(self.layer_name)
        row_keys = self.row_keys if self.call_count == 0 else hash_int64(self.row_keys + self.call_count)
        self.call_count += 1
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.drops_channels else x.shape
        keep = draw_uniform_int16(row_keys, self.positions, shape) >= drop - PROBABILITY_LEVELS // 2
        if self.inplace:
            return x.mul_(
                torch.where(keep, PROBABILITY_LEVELS / (PROBABILITY_LEVELS - drop), 0.0).to(x.dtype)
            )
        return torch.where(keep, x * (PROBABILITY_LEVELS / (PROBABILITY_LEVELS - drop)), 0.0)

    def build_sample_context(self, seed: int, sample_indices: Tensor, positions: Tensor | None) -> Any:
        """Return row keys, positions, and a call count of zero."""
        # Keys are made here and not in forward: a layer's own number there would make torch.compile
        # compile every block anew.
        return hash_int64(sample_indices ^ hash_scalar(seed ^ stable_hash(self.layer_name))), positions, 0

    @property
    def sample_context(self) -> Any:
        return self.row_keys, self.positions, self.call_count

    @sample_context.setter
    def sample_context(self, state: Any) -> None:
        self.row_keys, self.positions, self.call_count = state

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.layer_name!r}" + (", channels=True" if self.drops_channels else "")


@contextmanager
def bind_samples(
    model: nn.Module,
    seed: int,
    sample_indices: Tensor,
    positions: Tensor | None = None,
    call_counter: CallCounter | None = None,
) -> Iterator[None]:
    """Announce to a model's `SampleDependentModule`s, such as dropout, the samples that the block computes.

    Args:
        model: the model.
        seed: the job's.
        sample_indices: (rows,) int64, each row's index in the run's sample order, on the activations' device.
        positions: (columns,) int64, indices of the columns if this rank holds only a part of dim 1.
        call_counter: calls of this forward, if a backward inside may recompute parts of it.
    """
    contexts = {
        module: module.build_sample_context(seed, sample_indices, positions)
        for module in _sample_dependent_modules(model)
    }
    with _set_sample_contexts(contexts, call_counter):
        yield


def recompute_context_fn(
    model: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Return the `context_fn` for `torch.utils.checkpoint` around `model`, or around any of its parts.

    Backward recomputes the forward after `bind_samples` has ended, and in a pipeline after other
    micro-batches have begun: the samples of the first run are kept and announced again.
    """
    modules = _sample_dependent_modules(model)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _set_sample_contexts({module: module.sample_context for module in modules})

    return contexts


def replace_dropout(model: nn.Module) -> int:
    """Make a model's `nn.Dropout`, `Dropout1d`, `Dropout2d` and `Dropout3d` keyed ones, in place.

    The modules stay the same objects, with their hooks and attributes, and only change their class. A
    subclass keeps its own forward, whose `super().forward` is the keyed one. Those with p = 0 are left alone.

    Returns:
        The number of changed modules.
    """
    keyed_modules: set[nn.Module] = set()
    locations = [
        (parent, name, f"{path}.{name}" if path else name)
        for path, parent in model.named_modules()
        # Not named_children(), which leaves out the second name of a module that has two.
        for name in registered_children(parent)
    ]
    for parent, name, path in locations:
        child = registered_children(parent)[name]
        if not isinstance(child, _DROPOUT_CLASSES) or child.p == 0:
            continue
        if child in keyed_modules:
            # Each place draws masks of its own, whichever pipeline stage has it.
            child = copy.copy(child)
            setattr(parent, name, child)
        elif isinstance(child, KeyedDropout):
            continue
        _make_keyed(child, path)
        keyed_modules.add(child)
    if isinstance(model, _DROPOUT_CLASSES) and model.p != 0 and not isinstance(model, KeyedDropout):
        _make_keyed(model, type(model).__name__)
        keyed_modules.add(model)
    return len(keyed_modules)


def _make_keyed(module: nn.Module, path: str) -> None:
    if not isinstance(module, KeyedDropout):
        module.__class__ = _keyed_class(type(module))  # type: ignore[arg-type]  # a class is hashable
    assert isinstance(module, KeyedDropout)
    module._init_keyed(path, drops_channels=not isinstance(module, nn.Dropout))


@cache
def _keyed_class(kind: type[nn.Module]) -> type[KeyedDropout]:
    """Return a subclass of `kind` whose dropout is the keyed one."""
    (base,) = (torchs for torchs in _DROPOUT_CLASSES if issubclass(kind, torchs))
    bases = (KeyedDropout, kind) if kind is base else (kind, _keyed_class(base))
    return type(f"Keyed{kind.__name__}", bases, {"__module__": kind.__module__, "original_class": kind})


def _new_empty_keyed(kind: type[nn.Module]) -> KeyedDropout:
    """Return a keyed module without content, to be filled by `copy` and `pickle`."""
    keyed = _keyed_class(kind)  # type: ignore[arg-type]  # a class is hashable
    return keyed.__new__(keyed)


def find_unkeyed_random_modules(model: nn.Module) -> list[str]:
    """List the modules that draw from torch's generator in training, which no layout can repeat.

    Only torch's own modules and transformers' attention are found; other calls of `F.dropout` inside a user's
    forward cannot be seen from outside.
    """
    names = []
    for name, module in model.named_modules():
        probability = 0.0
        if isinstance(module, KeyedDropout):
            continue
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout, *_DROPOUT_CLASSES)):
            probability = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            probability = module.dropout
        elif isinstance(module, nn.RReLU):
            probability = 1.0
        elif type(module).__module__.startswith("transformers."):
            probability = _transformers_attention_dropout(module)
        if probability > 0:
            names.append(name or type(module).__name__)
    return names


def _transformers_attention_dropout(module: nn.Module) -> float:
    """Return the dropout probability of transformers' attention, which draws without calling a module."""
    values = (getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout"))
    return max(float(getattr(value, "p", value) or 0.0) for value in values)


_DROPOUT_CLASSES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _sample_dependent_modules(model: nn.Module) -> list[SampleDependentModule]:
    return [module for module in model.modules() if isinstance(module, SampleDependentModule)]


@contextmanager
def _set_sample_contexts(
    sample_contexts: Mapping[SampleDependentModule, Any], call_counter: CallCounter | None = None
) -> Iterator[None]:
    previous_contexts = {module: module.sample_context for module in sample_contexts}
    dropouts = {module: module.call_counter for module in sample_contexts if isinstance(module, KeyedDropout)}
    for module, context in sample_contexts.items():
        module.sample_context = context
    for module in dropouts:
        module.call_counter = call_counter
    try:
        yield
    finally:
        for module, context in previous_contexts.items():
            module.sample_context = context
        for module, previous_counter in dropouts.items():
            module.call_counter = previous_counter
