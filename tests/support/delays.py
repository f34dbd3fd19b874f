"""Delays at one place of each step, on all ranks or on rank 1: `run_job(..., patch="support.delays:...")`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.data.step_loader import StepBatches, StepLoader
from wanma.models.architectures.decoder import Block
from wanma.observe.recorder import Recorder
from wanma.parallel.pipeline.timed_stage import BubbleTimer
from wanma.parallel.profiling.compute_timer import ComputeTimer
from wanma.planner.pipeline.operation import Operation, OperationKind
from wanma.planner.pipeline.replay import TimedOperation
from wanma.training.optimizer.named_optimizer import NamedOptimizer

SECONDS = 0.05


def loader() -> None:
    """Loading of a step begins when the loop waits for it, and not beside the step before."""
    asked, advance, load = threading.Semaphore(0), StepLoader.__next__, StepLoader.load

    def ask(self: StepLoader) -> StepBatches:
        asked.release()
        return advance(self)

    def load_late(self: StepLoader, step: int) -> StepBatches:
        assert asked.acquire(timeout=60)
        time.sleep(SECONDS)
        return load(self, step)

    for name, replacement in (("__next__", ask), ("load", load_late)):
        setattr(StepLoader, name, replacement)


def optimizer() -> None:
    _delay(NamedOptimizer, "step")


def records() -> None:
    _delay(Recorder, "step")


def blocks() -> None:
    _delay(Block, "forward")


def even_blocks() -> None:
    """Blocks of a decoder with one in each stage, whose forward takes `SECONDS` by the timers of a pipeline.

    It takes at least as long by the wall, so that stages wait as they should; what other programs add to it,
    and the backward, is in no timer. The stages are even on a machine that is not.
    """
    _delay(Block, "forward")

    @contextmanager
    def time_operation(
        self: BubbleTimer, kind: OperationKind, stage: int, micro_batch: int
    ) -> Iterator[None]:
        yield
        seconds = SECONDS if kind == "forward" else 0.0
        self.operations.append(TimedOperation(Operation(kind, stage, micro_batch), seconds))

    @contextmanager
    def time_loss(_: BubbleTimer) -> Iterator[None]:
        yield

    def stop(self: ComputeTimer, *, is_forward: bool) -> None:
        if self.is_enabled and is_forward:
            self._seconds += SECONDS

    for owner, replacement in ((BubbleTimer, time_operation), (BubbleTimer, time_loss), (ComputeTimer, stop)):
        setattr(owner, replacement.__name__, replacement)


def link() -> None:
    """Rank 1 is late with each collective: the others wait for it as for a slow link."""
    _delay(SharedMemoryProcessGroup, "_submit", rank=1)


def link_of_stages() -> None:
    """Messages of rank 1 to another stage leave late."""
    _delay(SharedMemoryProcessGroup, "send", rank=1)


def _delay(owner: type, name: str, rank: int | None = None) -> None:
    method = getattr(owner, name)

    def late(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if rank is None or dist.get_rank() == rank:
            time.sleep(SECONDS)
        return method(self, *arguments, **keywords)

    setattr(owner, name, late)
