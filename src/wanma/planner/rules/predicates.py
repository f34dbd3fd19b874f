"""Boolean compatibility predicates of plan settings, shared by validation and search space.

`rules.mesh` refuses by them, `search.space` enumerates by them; none of them raises. Pure functions, without
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD, invalid_micro_batches_reason


def tensor_parallel_sizes(dimensions: DecoderConfig) -> dict[str, int]:
    """Return the sizes of a decoder that `tp` must divide, by key of [model].

    Key and value heads need not divide: where they do not, each rank computes those that its heads attend to.
    """
    sizes = {"heads": dimensions.heads}
    if dimensions.experts == 0 or dimensions.dense_layers:
        sizes["feed_forward"] = dimensions.feed_forward
    if dimensions.experts:
        sizes["expert_feed_forward"] = dimensions.expert_width
    if dimensions.vocabulary is not None:
        sizes["vocabulary"] = dimensions.vocabulary
    return sizes


def tp_divides_model(dimensions: DecoderConfig, tp: int) -> bool:
    """Return whether `tp` divides every size that it splits."""
    return all(size % tp == 0 for size in tensor_parallel_sizes(dimensions).values())


def cp_divides_heads(dimensions: DecoderConfig, plan: Plan) -> bool:
    """Return whether all-to-all gives each context rank an equal share of the heads that `tp` leaves."""
    return plan.cp == 1 or plan.cp_method == "ring" or dimensions.heads % (plan.tp * plan.cp) == 0


def mesh_divides_sequence(plan: Plan, sequence_length: int) -> bool:
    """Return whether `cp`, and `tp` with sequence parallelism, divide a sequence of `sequence_length`."""
    return sequence_length % plan.sequence_length_multiple == 0


def ep_divides_experts(dimensions: DecoderConfig | None, plan: Plan) -> bool:
    """Return whether `ep` divides the experts and can be cut out of the data ranks."""
    if plan.ep == 1:
        return True
    experts = dimensions.experts if dimensions is not None else 0
    return experts > 0 and experts % plan.ep == 0 and plan.ep in plan.valid_ep_sizes()


def shard_matches_ranks(shard: Shard, dp_shard: int, cp: int) -> bool:
    """Return whether the shard level and the number of ranks that shard agree."""
    return dp_shard == 1 if shard == "none" else dp_shard * cp > 1


def split_backward_conflict(plan: Plan) -> str | None:
    """Return the key of [parallel] that a split-backward schedule excludes, or None."""
    if plan.pp == 1 or plan.schedule not in SPLIT_BACKWARD:
        return None
    if plan.compile:
        return "compile"
    return "recompute" if plan.recompute != "none" else None


def schedule_accepts_batches(plan: Plan, global_batches: Sequence[int]) -> bool:
    """Return whether the schedule can run every one of these global batches."""
    return plan.pp == 1 or not any(
        invalid_micro_batches_reason(plan.schedule, plan.pp, count)
        for batch in global_batches
        for count in (
            set(plan.micro_batch_counts(batch))
            if plan.has_uneven_micro_batch_counts
            else (plan.gradient_accumulation_steps(batch),)
        )
    )


def keeps_sample_groups(plan: Plan, global_batches: Sequence[int], group_size: int) -> bool:
    """Return whether every micro-batch of every rank holds whole groups of `group_size` samples."""
    return group_size == 1 or all(
        len(run) > 0 and len(run) % group_size == 0
        for batch in global_batches
        # Even shares differ by at most one sample, larger first: two ranks represent all.
        for rank in (
            range(plan.data_parallel_size) if plan.batch_shares else (0, plan.data_parallel_size - 1)
        )
        for run in plan.micro_batches(batch, rank)
    )


def candidate_micro_batch_sizes(samples: int) -> list[int]:
    """List micro-batch sizes that cut `samples` samples evenly or nearly so, in rising order.

    All divisors of `samples`; and where none lies between a power of two and the next, the size that cuts
    `samples` as evenly as can be into as many micro-batches as that power would. A larger size for the same
    number of micro-batches holds no more samples, and needs more memory.
    """
    sizes = set(divisors(samples))
    for power in range(samples.bit_length()):
        if not any(2**power <= size < 2 ** (power + 1) for size in sizes):
            sizes.add(math.ceil(samples / math.ceil(samples / 2**power)))
    return sorted(sizes)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in rising order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))
