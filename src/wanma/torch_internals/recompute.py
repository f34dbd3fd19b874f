"""Recompute: dispatch modes of selective checkpointing, and the compiler's setting for it."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

SELECTIVE_RECOMPUTE_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""Dispatch modes in which torch runs a block the first and the second time."""


def skip_side_effects_of_compiled_recompute() -> None:
    """Make the compiler leave out side effects of a recomputed forward, such as counters of calls."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
