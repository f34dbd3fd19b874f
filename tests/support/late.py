"""A rank that is late at a moment at which the others might go on without it: `run_job(..., patch=...)`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from wanma.parallel import parallelize
from wanma.parallel.data_parallel.shared_memory_weights import SharedMemoryWeights
from wanma.training.optimizer.named_optimizer import NamedOptimizer
from wanma.training.step.forward_backward import ForwardBackward

SECONDS = 0.4


def with_its_update() -> None:
    step = NamedOptimizer.step

    def late(self: Any, *arguments: Any) -> None:
        _wait()
        step(self, *arguments)

    NamedOptimizer.step = late  # type: ignore[method-assign]


def with_an_evaluation() -> None:
    losses = ForwardBackward._forward

    def late(self: Any, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            _wait()
        return losses(self, *arguments)

    ForwardBackward._forward = late  # type: ignore[method-assign]


def with_its_update_and_nobody_waits() -> None:
    with_its_update()
    SharedMemoryWeights._barrier = lambda _: None  # type: ignore[method-assign]


def nothing_is_common() -> None:
    parallelize.share_weights_in_memory = lambda *_: None


def _wait() -> None:
    if dist.get_rank() == 1:
        time.sleep(SECONDS)
