"""Batch-size schedule: step, samples consumed and global batch size as functions of each other.

A step is numbered by the optimizer steps before it, so the first is 0. `train.batch_ramp` gives the batch
size from a step on; before its first entry `train.global_batch` holds. The job's
validator guarantees that the ramp's steps rise.
"""

from __future__ import annotations

from wanma.job.sections.train import TrainSection


def global_batch_size(train: TrainSection, step: int) -> int:
    """Return the global batch size of `step`, in samples."""
    return next(batch for first, batch in reversed(_constant_stages(train)) if first <= step)


def samples_consumed_before(train: TrainSection, step: int) -> int:
    """Return the samples consumed by the steps before `step`: its start position in the data."""
    pieces = _constant_stages(train)
    ends = [first for first, _ in pieces[1:]] + [step]
    return sum(
        (min(end, step) - first) * batch
        for (first, batch), end in zip(pieces, ends, strict=True)
        if first < step
    )


def step_of_sample(train: TrainSection, sample_index: int) -> int:
    """Return the step that consumes the sample with index `sample_index`."""
    first_step, batch_size, start = 0, 0, 0
    for next_first_step, next_batch_size in _constant_stages(train):
        end = start + (next_first_step - first_step) * batch_size
        if sample_index < end:
            break
        first_step, batch_size, start = next_first_step, next_batch_size, end
    return first_step + (sample_index - start) // batch_size


def _constant_stages(train: TrainSection) -> list[tuple[int, int]]:
    """List (first step, global batch) of every run of steps with equal batch size, from step 0 on."""
    ramp = list(train.batch_ramp)
    return ramp if ramp and ramp[0][0] == 0 else [(0, train.global_batch), *ramp]
