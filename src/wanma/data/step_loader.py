"""Step loader of a data rank: threads load steps ahead while the model trains.

Threads: a step of text is a few memory copies, which numpy makes without the interpreter's lock, and Pillow
decodes images without it. Python of users runs in loader processes, for each of which a thread waits.

At most `prefetch` steps exist ahead of the loop, loaded or being loaded, and no more than fit into
`prefetch_bytes`. A loop that waits may get more steps ahead. Where steps load faster than threads hand them
over, it loads them itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from types import TracebackType
from typing import Literal

from torch import Tensor

from wanma.data.batch import BadSample, Batch, map_batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.sampling.batch_size_schedule import global_batch_size, samples_consumed_before
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import LEAST_STEPS_AHEAD
from wanma.job.sections.job import Job
from wanma.job.sections.train import TrainSection

_HANDOVER_SECONDS = 0.5e-3
"""Time to load a step below which its hand-over between threads takes about as long."""
_DIRECT_STEPS, _MOST_DIRECT_STEPS = 64, 4096
"""Steps that a loop loads itself before the threads get ahead again, if they can: first and most, as it
doubles each time that they cannot."""
_MOST_STEPS_AHEAD = 64
"""Steps up to which a loop that waits gets more of them ahead."""


@dataclass(frozen=True)
class StepBatches:
    """Data of one optimizer step on one data rank."""

    step: int
    """Number of optimizer steps before it."""
    global_batch_size: int
    micro_batches: list[Batch]
    """Micro-batches in order.

    If data ranks communicate within each, all have the same number: a rank with fewer rows gets padding rows
    at the end.
    """

    @property
    def memory_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(
            tensor.nbytes
            for batch in self.micro_batches
            for tensor in (
                *batch.inputs,
                *batch.keywords.values(),
                *(batch.named_targets or {"": batch.targets}).values(),
            )
        )

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples of this rank that cannot be read."""
        return [sample for batch in self.micro_batches for sample in batch.bad_samples]


class StepLoader:
    """Iterator over the steps from `start_step` to the end of the job, or others that `follow` names.

    It is its own context manager.
    """

    @classmethod
    def of_job(
        cls, job: Job, dataset: BatchedDataset, plan: Plan, data_parallel_rank: int, start_step: int
    ) -> StepLoader:
        """Return the loader of a run of a job; arguments as of the constructor."""
        return cls(
            dataset,
            plan,
            job.train,
            data_parallel_rank,
            start_step,
            prefetch=job.data.prefetch,
            threads=job.data.worker_count,
            pin_memory=plan.device == "cuda",
            prefetch_bytes=job.data.prefetch_bytes,
        )

    def __init__(
        self,
        dataset: BatchedDataset,
        plan: Plan,
        train: TrainSection,
        data_parallel_rank: int,
        start_step: int,
        prefetch: int | Literal["auto"],
        threads: int = 1,
        pin_memory: bool = False,
        prefetch_bytes: int | None = None,
    ) -> None:
        """Start the threads.

        Args:
            data_parallel_rank: index of this rank among those that read different samples.
            prefetch: maximum number of steps in memory ahead of the loop; auto: at least 4 and one for each
                thread, doubled when the loop waits for a step that was begun before, up to 64.
            threads: number of steps loaded at once; more than 1 calls a user's dataset concurrently. A data
                set may ask for more (`BatchedDataset.loader_threads`).
            pin_memory: page-locked tensors, which copy to a CUDA device without blocking.
            prefetch_bytes: maximum size of the steps ahead of the loop; one step is loaded whatever its
                size. None: no limit.
        """
        self._dataset = dataset
        self._train = train
        self._data_parallel_rank = data_parallel_rank
        self._use_plan(plan)
        self._steps: Sequence[int] = range(start_step, train.steps)
        """Steps that `next` has not returned, in order."""
        self._begun = 0
        """Number of steps, from the first of those on, that are loaded or being loaded."""
        self._is_deepened = prefetch == "auto"
        self._prefetch = prefetch if isinstance(prefetch, int) else max(LEAST_STEPS_AHEAD, threads)
        self._prefetch_bytes = prefetch_bytes
        self._sample_bytes: float | None = None
        """Largest size of a sample in the steps that threads have loaded; None: they have loaded none."""
        self._load_seconds: float | None = None
        """Time that the last loaded step took; None: none is loaded.

        It is at most twice that of the step before: one pause of the machine says nothing.
        """
        self._direct_steps = 0
        """Steps that the loop still loads itself; 0: threads load."""
        self._next_direct_steps = _DIRECT_STEPS
        """Steps that the loop will load itself when it next waits for the threads."""
        self._steps_ahead_in_time = 0
        """Steps in a row that threads had loaded before the loop asked for them."""
        self._pin_memory = pin_memory
        self._prefetched: deque[Future[StepBatches]] = deque()
        self._peeked: StepBatches | None = None
        """Step that `peek` has returned, and `next` will."""
        self._threads = max(threads, dataset.loader_threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="wanma-loader")

    def __iter__(self) -> Iterator[StepBatches]:
        return self

    def __next__(self) -> StepBatches:
        """Return the next step.

        Raises:
            StopIteration: the job's last step has been returned.
            Exception: whatever loading the step raised, with the traceback of the thread.
        """
        step = self._take() if self._peeked is None else self._peeked
        self._peeked = None
        self._steps, self._begun = self._steps[1:], self._begun - 1
        return step

    def _take(self) -> StepBatches:
        """Return the first step that no thread and no call has taken; raise as `next`."""
        had_time = bool(self._prefetched)
        self._prefetch_steps()
        if not self._prefetched:
            return self._load_directly()
        future = self._prefetched[0]
        if future.done():
            self._steps_ahead_in_time += 1
            if self._steps_ahead_in_time > _DIRECT_STEPS:
                self._next_direct_steps = _DIRECT_STEPS
        elif had_time and not self._direct_steps:
            self._steps_ahead_in_time = 0
            if self._loads_quickly:
                self._direct_steps = self._next_direct_steps
                self._next_direct_steps = min(2 * self._next_direct_steps, _MOST_DIRECT_STEPS)
            elif self._is_deepened:
                self._prefetch = max(self._prefetch, min(2 * self._prefetch, _MOST_STEPS_AHEAD))
        step = future.result()
        self._prefetched.popleft()
        self._prefetch_steps()
        return step

    def peek(self) -> StepBatches | None:
        """Return the step that `next` will return, once it is loaded; None after the job's last step.

        Raises:
            Exception: as `next`.
        """
        if self._peeked is None and self._steps:
            self._peeked = self._take()
        return self._peeked

    def follow(self, steps: Sequence[int]) -> None:
        """Load these steps next, in their order; steps that were loaded ahead stay as far as they agree."""
        equal = takewhile(
            lambda pair: pair[0] == pair[1], zip(self._steps[: self._begun], steps, strict=False)
        )
        self._drop_after(len(list(equal)))
        self._steps = steps

    def switch_plan(self, plan: Plan) -> None:
        """Switch to another plan for the steps to come.

        Steps that were loaded ahead by the last one are dropped, and loaded again.
        """
        if plan is self._plan:
            return
        self._use_plan(plan)
        self._drop_after(0)
        if self._dataset.sample_source is not None:
            self._dataset.sample_source.discard()

    def load(self, step: int) -> StepBatches:
        """Load one step in the calling thread: a pure function of the step's number."""
        size = global_batch_size(self._train, step)
        first_sample = samples_consumed_before(self._train, step)
        samples = self._dataset.step_samples(first_sample, self._plan, size)
        micro_batches = [
            self._dataset.batch(samples[rows.start : rows.stop]) for rows in self._micro_batches(size)
        ]
        if self._pin_memory:
            micro_batches = [map_batch(batch, Tensor.pin_memory) for batch in micro_batches]
        return StepBatches(step, size, micro_batches)

    def close(self) -> None:
        """Stop loading and wait for the threads; steps that were loaded are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._drop_after(0)
        self._steps = ()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _use_plan(self, plan: Plan) -> None:
        self._plan = plan
        rows_of = partial(plan.micro_batches, data_parallel_rank=self._data_parallel_rank)
        self._micro_batches = lru_cache(rows_of)
        """Function from the size of a step to the rows of each micro-batch of this rank."""

    def _load_ahead(self, step: int) -> StepBatches:
        loaded = self._load_timed(step)
        sample_bytes = loaded.memory_bytes / loaded.global_batch_size
        self._sample_bytes = max(self._sample_bytes or 0.0, sample_bytes)
        return loaded

    def _load_timed(self, step: int) -> StepBatches:
        began = time.perf_counter()
        loaded = self.load(step)
        seconds = time.perf_counter() - began
        self._load_seconds = min(seconds, 2.0 * (self._load_seconds or seconds))
        return loaded

    @property
    def _loads_quickly(self) -> bool:
        """Return True if any thread may load a step, and the last one took less time than a hand-over."""
        is_quick = self._load_seconds is not None and self._load_seconds < _HANDOVER_SECONDS
        return self._dataset.copies_from_memory and is_quick

    def _load_directly(self) -> StepBatches:
        """Load the next step in the calling thread; threads go on after the last direct step, or a slow one.

        Raises:
            StopIteration: the job's last step has been returned.
        """
        if self._begun == len(self._steps):
            raise StopIteration
        step = self._load_timed(self._steps[self._begun])
        self._begun += 1
        self._direct_steps = self._direct_steps - 1 if self._loads_quickly else 0
        self._prefetch_steps()
        return step

    def _prefetch_steps(self) -> None:
        if self._direct_steps:
            return
        while len(self._prefetched) < self._prefetch and self._begun < len(self._steps):
            if self._prefetched and not self._has_room():
                return
            self._prefetched.append(self._pool.submit(self._load_ahead, self._steps[self._begun]))
            self._begun += 1

    def _drop_after(self, count: int) -> None:
        """Drop the steps that were loaded ahead, but for the first `count`."""
        if count == 0:
            self._peeked = None
        while self._begun > count and self._prefetched:
            self._prefetched.pop().cancel()
            self._begun -= 1
        self._begun = min(self._begun, count)

    def _has_room(self) -> bool:
        """Return True if the next step fits beside those ahead of the loop.

        Before the first step is loaded its size is unknown: then one step a thread is loaded.
        """
        if self._prefetch_bytes is None:
            return True
        if self._sample_bytes is None:
            return len(self._prefetched) < self._threads
        ahead = self._steps[self._begun - len(self._prefetched) : self._begun + 1]
        samples = sum(global_batch_size(self._train, step) for step in ahead)
        return samples * self._sample_bytes <= self._prefetch_bytes
