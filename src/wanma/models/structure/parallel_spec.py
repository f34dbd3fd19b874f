"""Parallel spec: a model's declaration, as pure data, of what a plan may split; `parallel/` splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

TensorParallelStyle = Literal[
    "column", "key_value", "row", "vocabulary", "head", "norm", "head_norm", "gathered"
]
"""Tensor-parallel style of a module (Shoeybi et al. 2019, Korthikanti et al. 2022).

gathered    holds split matrices: its first input must be the whole sequence, which is gathered once
column      a linear, split by outputs; its input is complete
key_value   a column whose outputs are key or value heads; with fewer of them than ranks it is replicated,
            and each rank uses the heads that its query heads attend to
row         a linear, split by inputs; its output is a sum over ranks
vocabulary  an embedding, split by tokens; its output is a sum over ranks
head        a linear to the vocabulary, split by outputs
norm        replicated; acts on the whole hidden dim, and on a part of the sequence
head_norm   replicated, but acts on a rank's own heads: its gradient is a sum over ranks
"""


@dataclass(frozen=True)
class ParallelSpec:
    """Parallel spec of a model. Names are module paths, without the model's own name."""

    blocks: str | None
    """Container of the repeated blocks: units of staging, recompute, compilation and sharding."""
    first_stage_modules: tuple[str, ...] = ()
    """Modules that only the first pipeline stage holds."""
    last_stage_modules: tuple[str, ...] = ()
    """Modules that only the last pipeline stage holds."""
    tensor_parallel_styles: Mapping[str, TensorParallelStyle] = field(default_factory=dict)
    """Style by shell pattern on the module path; the first match counts, without one it is replicated."""
    heads: int = 0
    """Number of query heads, of which a rank takes whole ones; 0: no attention is split."""
    kv_heads: int = 0
    """Number of key and value heads."""
    mask_module: str | None = None
    """Path of the `AttentionMask`; context parallelism replaces it and `attention_cores`."""
    attention_cores: str | None = None
    """Shell pattern of the attention cores, `DotProductAttention` or alike."""
    expert_modules: str | None = None
    """Shell pattern of the modules whose parameters have the routed experts as dim 0."""
    tied_parameters: tuple[tuple[str, str], ...] = ()
    """Weight tying: pairs of parameters that are one tensor under two names; the first one is saved."""


def tie_parameters(model: nn.Module, tied_parameters: tuple[tuple[str, str], ...]) -> None:
    """Make each second parameter the same object as its first, where the model holds both.

    Needed again after anything that replaces parameters one module at a time.
    """
    for source_path, target_path in tied_parameters:
        source, _, source_name = source_path.rpartition(".")
        target, _, target_name = target_path.rpartition(".")
        modules = dict(model.named_modules(remove_duplicate=False))
        if source in modules and target in modules:
            setattr(modules[target], target_name, getattr(modules[source], source_name))


def find_block_container(model: nn.Module) -> str | None:
    """Find the path of a model's repeated blocks by structure.

    They are the list, dict or sequence of at least two children, all of one type, that holds the most
    parameters; the outermost of equals.

    Returns:
        The path, which may be "" for a model that is itself such a sequence; None when there are none.
    """
    from torch import nn

    best, best_size = None, 0
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = list(module.children())
        if len(children) < 2 or len({type(child) for child in children}) > 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best_size:
            best, best_size = path, size
    return best
