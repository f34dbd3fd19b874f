"""Step loader of a data rank: threads load steps ahead while the model trains.

Threads and not processes: a step of text is a few memory copies, which numpy makes without the interpreter's
lock. At most `prefetch` steps exist ahead of the loop, loaded or being loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

from torch import Tensor

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import Data
from wanma.data.sampling.batch_size_schedule import global_batch, samples_before
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import TrainSection


@dataclass(frozen=True)
class Step:
    """Data of one optimizer step on one data rank."""

    step: int
    """Number of optimizer steps before it."""
    samples_before: int
    """Samples consumed by the steps before it, over all ranks."""
    global_batch: int
    micro_batches: list[Batch]
    """Micro-batches in order.

    If data ranks communicate within each, all have the same number: a rank with fewer rows gets padding rows
    at the end.
    """


class Loader:
    """Iterator over the steps from `start_step` to the end of the job, and its own context manager."""

    def __init__(
        self,
        data: Data,
        plan: Plan,
        train: TrainSection,
        data_rank: int,
        start_step: int,
        prefetch: int,
        threads: int = 1,
        pin_memory: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            data: the data set.
            plan: the plan that divides the global batch.
            train: the job's `[train]`.
            data_rank: index of this rank among those that read different samples.
            start_step: the first step to yield.
            prefetch: maximum number of steps in memory ahead of the loop.
            threads: number of steps loaded at once; more than 1 calls a user's dataset concurrently.
            pin_memory: page-locked tensors, which copy to a CUDA device without blocking.
        """
        self._data = data
        self._plan = plan
        self._train = train
        self._data_rank = data_rank
        self._next = start_step
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._ahead: deque[Future[Step]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="wanma-loader")

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Return the next step.

        Raises:
            StopIteration: the job's last step has been returned.
            Exception: whatever loading the step raised, with the traceback of the thread.
        """
        self._fill()
        if not self._ahead:
            raise StopIteration
        step = self._ahead.popleft().result()
        self._fill()
        return step

    def follow(self, plan: Plan) -> None:
        """Switch to another plan for the steps to come.

        Steps that were loaded ahead by the last one are dropped, and loaded again.
        """
        if plan is self._plan:
            return
        self._plan = plan
        self._next -= len(self._ahead)
        for ahead in self._ahead:
            ahead.cancel()
        self._ahead.clear()

    def load(self, step: int) -> Step:
        """Load one step in the calling thread: a pure function of the step's number."""
        size = global_batch(self._train, step)
        before = samples_before(self._train, step)
        micro_batches = [
            self._data.batch(range(before + rows.start, before + rows.stop))
            for rows in self._plan.micro_batches(size, self._data_rank)
        ]
        if self._pin_memory:
            micro_batches = [_pinned(batch) for batch in micro_batches]
        return Step(step, before, size, micro_batches)

    def close(self) -> None:
        """Stop loading and wait for the threads; steps that were loaded are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._next = self._train.steps

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self) -> None:
        while len(self._ahead) < self._prefetch and self._next < self._train.steps:
            self._ahead.append(self._pool.submit(self.load, self._next))
            self._next += 1


def _pinned(batch: Batch) -> Batch:
    def pin(tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    return replace(
        batch,
        inputs=tuple(pin(tensor) for tensor in batch.inputs),
        targets=pin(batch.targets),
        samples=pin(batch.samples),
        real=pin(batch.real),
        keywords={name: pin(tensor) for name, tensor in batch.keywords.items()},
    )
