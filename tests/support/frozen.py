"""Frozen weights as earlier versions kept them: in fp32 beside the copies that compute, and averaged."""

from __future__ import annotations

import torch
from torch import nn

from wanma.parallel import parallelize
from wanma.parallel.data_parallel import sharded


def keep_in_fp32() -> None:
    """Let this process keep them so."""

    def nothing(module: nn.Module, dtype: torch.dtype, fixed: object) -> None: ...

    def everything(self: parallelize.ParallelModel) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    parallelize.cast_frozen_weights = nothing
    parallelize.ParallelModel.trainable_parameters = everything  # type: ignore[method-assign]
    sharded.find_gather_free_weights = lambda *_: set()
