"""Frozen weights as earlier versions kept them: in fp32 beside the copies that compute, and averaged."""

from __future__ import annotations

import torch
from torch import nn

from wanma.parallel import parallelize
from wanma.parallel.data_parallel import sharded


def keep_in_fp32() -> None:
    """Let this process keep them so."""

    def nothing(module: nn.Module, dtype: torch.dtype, fixed: object) -> None: ...

    def everything(self: parallelize.Parallel) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    parallelize.round_frozen = nothing
    parallelize.Parallel.trainable = everything  # type: ignore[method-assign]
    sharded.held_once = lambda *_: set()
