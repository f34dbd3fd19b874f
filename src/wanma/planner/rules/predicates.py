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
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD, wrong_micro_batches


def split_by_tensor(dimensions: DecoderDimensions) -> dict[str, int]:
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


def tensor_fits(dimensions: DecoderDimensions, tp: int) -> bool:
    """Return whether `tp` divides every size that it splits."""
    return all(size % tp == 0 for size in split_by_tensor(dimensions).values())


def heads_fit(dimensions: DecoderDimensions, plan: Plan) -> bool:
    """Return whether all-to-all gives each context rank an equal share of the heads that `tp` leaves."""
    return plan.cp == 1 or plan.cp_method == "ring" or dimensions.heads % (plan.tp * plan.cp) == 0


def sequence_fits(plan: Plan, length: int) -> bool:
    """Return whether `cp`, and `tp` with sequence parallelism, can cut a sequence of `length` evenly."""
    return length % plan.sequence_unit == 0


def experts_fit(dimensions: DecoderDimensions | None, plan: Plan) -> bool:
    """Return whether `ep` divides the experts and can be cut out of the data ranks."""
    if plan.ep == 1:
        return True
    experts = dimensions.experts if dimensions is not None else 0
    return experts > 0 and experts % plan.ep == 0 and plan.ep in plan.allowed_ep()


def shard_fits(shard: Shard, dp_shard: int, cp: int) -> bool:
    """Return whether the shard level and the number of ranks that shard agree."""
    return dp_shard == 1 if shard == "none" else dp_shard * cp > 1


def takes_backward_apart(plan: Plan) -> str | None:
    """Return the key of [parallel] that a split-backward schedule excludes, or None."""
    if plan.pp == 1 or plan.schedule not in SPLIT_BACKWARD:
        return None
    if plan.compile:
        return "compile"
    return "recompute" if plan.recompute != "none" else None


def micro_batches_fit(plan: Plan, batches: Sequence[int]) -> bool:
    """Return whether the schedule can run every one of these global batches."""
    return plan.pp == 1 or not any(
        wrong_micro_batches(plan.schedule, plan.pp, count)
        for batch in batches
        for count in (set(plan.counts(batch)) if plan.counts_apart else (plan.accumulation(batch),))
    )


def groups_are_whole(plan: Plan, batches: Sequence[int], group: int) -> bool:
    """Return whether every micro-batch of every rank holds whole groups of `group` samples."""
    return group == 1 or all(
        len(run) > 0 and len(run) % group == 0
        for batch in batches
        # Even shares differ by at most one sample, larger first: two ranks represent all.
        for rank in (range(plan.data_ranks) if plan.batch_shares else (0, plan.data_ranks - 1))
        for run in plan.micro_batches(batch, rank)
    )


def micro_batch_sizes(rows: int) -> list[int]:
    """List micro-batch sizes that cut `rows` samples evenly or nearly so, in rising order.

    All divisors of `rows`; and where none lies between a power of two and the next, the size that cuts `rows`
    as evenly as can be into as many micro-batches as that power would. A larger size for the same number of
    micro-batches holds no more samples, and needs more memory.
    """
    sizes = set(divisors(rows))
    for power in range(rows.bit_length()):
        if not any(2**power <= size < 2 ** (power + 1) for size in sizes):
            sizes.add(math.ceil(rows / math.ceil(rows / 2**power)))
    return sorted(sizes)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in rising order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return (*small, *(number // size for size in reversed(small) if size * size != number))
