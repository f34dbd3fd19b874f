"""Dropout whose mask is a pure function of (seed, sample, layer, position).

So the numbers do not depend on which rank or micro-batch holds a sample, nor on the device. The
sample is its position in the run's sample order, which never comes twice: masks differ every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.models.initialize import stable_hash
from wanma.models.samples import SampleAware

_LANES = 1 << 16
"""Each draw is 16 bits of a hash, so a probability is rounded to 1/65536; the scale follows the rounding."""


class KeyedDropout(SampleAware):
    """Zero elements with probability `p` while training and scale the rest, so that the mean stays.

    Draws are keyed by (seed, sample, layer, index in dim 1, index in the rest); a module that is called
    several times in one forward draws anew each time. It must see whole samples, but for dim 1, of
    which it may see a part when `keyed_samples` says which. Under tensor parallel it therefore belongs
    on activations that are whole in the hidden dim, as the residual branches are.

    Args:
        p: probability of zero.
        name: of this module in the whole model; its hash is the layer key.
        channels: drop whole channels (dim 1), as `nn.Dropout2d` does.
    """

    def __init__(self, p: float, name: str, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.name = name
        self.channels = channels
        self.row_keys: Tensor | None = None
        self.positions: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; dim 0 is the rows whose samples `keyed_samples` announced.

        Raises:
            WanmaError: training without announced samples, or with another number of rows.
        """
        if not self.training or self.p == 0:
            return x
        if self.row_keys is None:
            raise WanmaError(
                f"dropout '{self.name}' does not know its samples",
                "run the forward inside keyed_samples(model, seed, samples); where backward runs it again, "
                "give torch.utils.checkpoint the context_fn of recompute_context(model)",
            )
        if self.row_keys.shape[0] != x.shape[0]:
            raise WanmaError(
                f"dropout '{self.name}' sees {x.shape[0]} rows of {self.row_keys.shape[0]} samples",
                "keep dim 0 of every activation the batch",
            )
        drop = round(self.p * _LANES)
        if drop == _LANES:
            return torch.zeros_like(x)
        row_keys = self.row_keys if self.calls == 0 else _mix(self.row_keys + self.calls)
        self.calls += 1
        shape = x.shape[:2] + (1,) * (x.ndim - 2) if self.channels else x.shape
        keep = _lanes(row_keys, self.positions, shape) >= drop - _LANES // 2
        return torch.where(keep, x * (_LANES / (_LANES - drop)), 0.0)

    def announcement(self, seed: int, samples: Tensor, positions: Tensor | None) -> Any:
        """Row keys, positions, and no call yet."""
        # Keys are made here and not in forward: a layer's own number there would make torch.compile
        # compile every block anew.
        return _mix(samples ^ _mix_scalar(seed ^ stable_hash(self.name))), positions, 0

    @property
    def announced(self) -> Any:
        return self.row_keys, self.positions, self.calls

    @announced.setter
    def announced(self, state: Any) -> None:
        self.row_keys, self.positions, self.calls = state

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}" + (", channels=True" if self.channels else "")


@contextmanager
def keyed_samples(
    model: nn.Module, seed: int, samples: Tensor, positions: Tensor | None = None
) -> Iterator[None]:
    """Tell a model's dropout, and what else is `SampleAware`, which samples the forward inside computes.

    Args:
        seed: the job's.
        samples: (rows,) int64, each row's position in the run's sample order, on the activations' device.
        positions: (columns,) int64, where this rank holds only a part of dim 1: which part.
    """
    told = {module: module.announcement(seed, samples, positions) for module in _aware_modules(model)}
    with _announced(told):
        yield


def recompute_context(
    model: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """The `context_fn` for `torch.utils.checkpoint` around `model`, or around any of its parts.

    Backward runs the forward again after `keyed_samples` has ended, and in a pipeline after other
    micro-batches have begun: the samples of the first run are kept and announced again.
    """
    modules = _aware_modules(model)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _announced({module: module.announced for module in modules})

    return contexts


def replace_dropout(model: nn.Module) -> int:
    """Swap a model's `nn.Dropout`, `Dropout1d`, `Dropout2d` and `Dropout3d` for keyed ones, in place.

    Those with p = 0 are left alone.

    Returns:
        how many were replaced.
    """
    count = 0
    for parent_name, parent in list(model.named_modules()):
        # Not named_children(), which leaves out the second name of a module that has two.
        for name, child in list(parent._modules.items()):
            if type(child) not in _REPLACED or child.p == 0:  # a subclass may do something else
                continue
            path = f"{parent_name}.{name}" if parent_name else name
            keyed = KeyedDropout(child.p, path, channels=type(child) is not nn.Dropout)
            keyed.train(child.training)
            setattr(parent, name, keyed)
            count += 1
    return count


def unkeyed_randomness(model: nn.Module) -> list[str]:
    """Names of modules that draw from torch's generator while training, which no layout can repeat.

    Found are torch's own modules and transformers' attention; other calls of `F.dropout` inside a user's
    forward cannot be seen from outside.
    """
    drawing = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    found = []
    for name, module in model.named_modules():
        probability = 0.0
        if isinstance(module, drawing):
            probability = module.p
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            probability = module.dropout
        elif isinstance(module, nn.RReLU):
            probability = 1.0
        elif type(module).__module__.startswith("transformers."):
            probability = _of_transformers_attention(module)
        if probability > 0:
            found.append(name or type(module).__name__)
    return found


def _of_transformers_attention(module: nn.Module) -> float:
    """It draws by itself, with the probability of an attribute or of a module that it never calls."""
    given = (getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout"))
    return max(float(getattr(value, "p", value) or 0.0) for value in given)


_REPLACED = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _aware_modules(model: nn.Module) -> list[SampleAware]:
    return [module for module in model.modules() if isinstance(module, SampleAware)]


@contextmanager
def _announced(told: Mapping[SampleAware, Any]) -> Iterator[None]:
    before = {module: module.announced for module in told}
    for module, announced in told.items():
        module.announced = announced
    try:
        yield
    finally:
        for module, announced in before.items():
            module.announced = announced


def _lanes(row_keys: Tensor, positions: Tensor | None, shape: torch.Size) -> Tensor:
    """Uniform int16 for every element of `shape` = (rows, columns, ...) or (rows, features)."""
    columns, rest = (shape[1], shape[2:].numel()) if len(shape) > 2 else (1, shape[1:].numel())
    if positions is None or len(shape) <= 2:
        positions = torch.arange(columns, device=row_keys.device)
    keys = _mix(row_keys.unsqueeze(1) + positions * _GOLDEN)  # (rows, columns)
    quads = torch.arange(-(-rest // 4), device=keys.device) * _GOLDEN
    hashes = _mix(keys.unsqueeze(2) + quads)  # (rows, columns, rest / 4)
    return hashes.view(torch.int16)[..., :rest].reshape(shape)


# SplitMix64 (Steele et al. 2014): a counter times the golden ratio, then a finaliser of full avalanche.
# Integer products wrap alike on every device; torch's >> keeps the sign, so the upper bits are masked.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    """Hash int64 to int64, element by element."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_scalar(x: int) -> int:
    """`_mix` of one Python integer, as a signed 64-bit one."""
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ (x >> 30)) * (_FIRST & mask) & mask
    x = (x ^ (x >> 27)) * (_SECOND & mask) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
