"""Compressed all-reduce of replicated gradients: bucket by bucket, after the last backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.gradients.gradient_compression import GradientCompression
from wanma.parallel.gradients.gradient_reducer import Bucket
from wanma.torch_internals.fake_tensors import is_fake


def all_reduce_compressed(
    gradients: Mapping[int, Tensor],
    bucket_layout: Sequence[Bucket],
    names: Mapping[int, str],
    compression: GradientCompression,
    group: dist.ProcessGroup,
    communication_timer: CommunicationTimer,
) -> dict[int, Tensor]:
    """Sum gradients over `group` in place; every rank calls it.

    Which parameters have a gradient may differ between ranks: a rank without one gives zeros where another
    has one. Where no rank has one there is no sum, and what was left out of earlier gradients stays.

    Args:
        gradients: gradients by parameter index, plain and contiguous.
        bucket_layout: buckets of all trained parameters, the same on all ranks.
        names: names of these parameters by index.
        compression: compressed exchanges of this rank.
        group: ranks that sum.
        communication_timer: timer of the communication.
    """
    sizes = [size for bucket in bucket_layout for size in bucket.specs]
    if not sizes:
        return {}
    device = next((index.device for index in gradients.values()), torch.device("cpu"))
    with communication_timer.time_blocking_transfer("data"):
        gradient_counts = torch.tensor(
            [float(size.parameter_index in gradients) for size in sizes], device=device
        )
        dist.all_reduce(gradient_counts, group=group)
        # In a dry run tensors have no values, and all ranks have what one has.
        ranks = [1.0] * len(sizes) if is_fake(gradient_counts) else gradient_counts.tolist()
        sums: dict[int, Tensor] = {}
        for size, number in zip(sizes, ranks, strict=True):
            if number:
                gradient = gradients.get(size.parameter_index)
                if gradient is None:
                    gradient = torch.zeros(size.shape, dtype=size.dtype, device=device)
                sums[size.parameter_index] = gradient
        indices_by_bucket = (
            [size.parameter_index for size in bucket.specs if size.parameter_index in sums]
            for bucket in bucket_layout
        )
        buckets = (
            [(names[index], sums[index].view(1, -1), None) for index in indices]
            for indices in indices_by_bucket
            if indices
        )
        compression.reduce(buckets, group)
    return sums
