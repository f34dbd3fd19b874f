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
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.sampling.batch_size_schedule import global_batch_size, samples_consumed_before
from wanma.job.plan.plan import Plan
from wanma.job.sections.train import TrainSection


@dataclass(frozen=True)
class StepBatches:
    """Data of one optimizer step on one data rank."""

    step: int
    """Number of optimizer steps before it."""
    samples_consumed_before: int
    """Samples consumed by the steps before it, over all ranks."""
    global_batch_size: int
    micro_batches: list[Batch]
    """Micro-batches in order.

    If data ranks communicate within each, all have the same number: a rank with fewer rows gets padding rows
    at the end.
    """


class StepLoader:
    """Iterator over the steps from `start_step` to the end of the job, and its own context manager."""

    def __init__(
        self,
        dataset: BatchedDataset,
        plan: Plan,
        train: TrainSection,
        data_parallel_rank: int,
        start_step: int,
        prefetch: int,
        threads: int = 1,
        pin_memory: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            dataset: the data set.
            plan: the plan that divides the global batch.
            train: the job's `[train]`.
            data_parallel_rank: index of this rank among those that read different samples.
            start_step: the first step to yield.
            prefetch: maximum number of steps in memory ahead of the loop.
            threads: number of steps loaded at once; more than 1 calls a user's dataset concurrently.
            pin_memory: page-locked tensors, which copy to a CUDA device without blocking.
        """
        self._dataset = dataset
        self._plan = plan
        self._train = train
        self._data_parallel_rank = data_parallel_rank
        self._next_step = start_step
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._prefetched: deque[Future[StepBatches]] = deque()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="wanma-loader")

    def __iter__(self) -> Iterator[StepBatches]:
        return self

    def __next__(self) -> StepBatches:
        """Return the next step.

        Raises:
            StopIteration: the job's last step has been returned.
            Exception: whatever loading the step raised, with the traceback of the thread.
        """
        self._prefetch_steps()
        if not self._prefetched:
            raise StopIteration
        step = self._prefetched.popleft().result()
        self._prefetch_steps()
        return step

    def switch_plan(self, plan: Plan) -> None:
        """Switch to another plan for the steps to come.

        Steps that were loaded ahead by the last one are dropped, and loaded again.
        """
        if plan is self._plan:
            return
        self._plan = plan
        self._next_step -= len(self._prefetched)
        for future in self._prefetched:
            future.cancel()
        self._prefetched.clear()

    def load(self, step: int) -> StepBatches:
        """Load one step in the calling thread: a pure function of the step's number."""
        size = global_batch_size(self._train, step)
        first_sample = samples_consumed_before(self._train, step)
        micro_batches = [
            self._dataset.batch(range(first_sample + rows.start, first_sample + rows.stop))
            for rows in self._plan.micro_batches(size, self._data_parallel_rank)
        ]
        if self._pin_memory:
            micro_batches = [_pin_batch(batch) for batch in micro_batches]
        return StepBatches(step, first_sample, size, micro_batches)

    def close(self) -> None:
        """Stop loading and wait for the threads; steps that were loaded are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._prefetched.clear()
        self._next_step = self._train.steps

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefetch_steps(self) -> None:
        while len(self._prefetched) < self._prefetch and self._next_step < self._train.steps:
            self._prefetched.append(self._pool.submit(self.load, self._next_step))
            self._next_step += 1


def _pin_batch(batch: Batch) -> Batch:
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
