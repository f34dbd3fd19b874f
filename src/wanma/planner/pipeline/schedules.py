"""Pipeline partition and schedules: stage cuts, allowed micro-batches, bubbles, micro-batches in flight.

Pure functions, without torch. `Plan.stages_of_pipeline_rank` gives the stages of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.plan.stage_order import V_SHAPED_SCHEDULES
from wanma.job.sections.parallel import Recompute, Schedule

DEFAULT_VIRTUAL_STAGES: dict[Schedule, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
"""Default number of stages per rank; all but the interleaved schedules allow no other number."""
INTERLEAVED: tuple[Schedule, ...] = ("interleaved_1f1b", "interleaved_zero_bubble")
SPLIT_BACKWARD: tuple[Schedule, ...] = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules with split backward: they compute a stage's input gradients first and its weight gradients later,
in the bubble."""

SELECTIVE_RECOMPUTE_COST = 0.5
"""Cost of selective recompute over full recompute: every second product."""
RECOMPUTED_FORWARDS: Mapping[Recompute, float] = {
    "none": 0.0,
    "selective": SELECTIVE_RECOMPUTE_COST,
    "full": 1.0,
}
"""Forwards that recompute adds to each block that recomputes."""

_COST_RESOLUTION = 1 << 20
"""Steps into which the largest stage's cost is divided to compare equally good cuts."""


def plan_stage_cuts(workload: Workload | None, plan: Plan, blocks: int) -> tuple[int, ...]:
    """Return the cuts of a model with `blocks` blocks and two end layers, balanced by FLOPs.

    Args:
        workload: layers of the model: before the blocks, the blocks, after them. Where their number of blocks
            differs, or it is None, all blocks count the same.

    Returns:
        Cuts as in `Plan.stage_cuts`; empty where there are too few layers for all stages.
    """
    if plan.stage_count > blocks + 2:
        return ()
    costs, first_cost, last_cost = [1.0] * blocks, 0.0, 0.0
    if workload is not None and sum(layer.count for layer in workload.layers) == blocks + 2:
        first, *middle, last = workload.layers
        # Backward is twice the forward; recompute runs blocks once more, and never the ends.
        recompute = recompute_forwards(plan)
        costs = [(3.0 + recompute) * layer.flops_per_sample for layer in middle for _ in range(layer.count)]
        first_cost, last_cost = 3.0 * first.flops_per_sample, 3.0 * last.flops_per_sample
    return balanced_cuts(costs, plan.stage_count, first_cost, last_cost)


def recompute_forwards(plan: Plan) -> float:
    """Return the forwards that recompute adds to each block, averaged over the blocks."""
    return RECOMPUTED_FORWARDS[plan.recompute] * plan.recompute_share


def balanced_cuts(
    costs: Sequence[float], stages: int, first_cost: float | None, last_cost: float | None
) -> tuple[int, ...]:
    """Return the cuts of a row of blocks into stages with the cheapest largest stage, which sets the pace.

    Among the best cuts the most even one is taken, by the sum of squares; among those, the one that gives
    earlier stages fewer blocks, because they save the activations of more micro-batches.

    Args:
        costs: cost of each block, not negative.
        first_cost: cost of the first stage's layers beside its blocks. None: it has none, and needs a block.
        last_cost: the same for the last stage.

    Returns:
        First block of each stage but the first.

    Raises:
        ValueError: there are more stages than blocks and ends to fill them.
    """
    blocks = len(costs)
    if stages > blocks + (first_cost is not None) + (last_cost is not None) or stages < 1:
        raise ValueError(f"{blocks} blocks cannot be split into {stages} stages")
    totals = np.array([0.0, *accumulate(costs)])
    ends: list[float | None] = [None] * stages
    for stage, extra in ((0, first_cost), (stages - 1, last_cost)):
        if extra is not None:
            ends[stage] = (ends[stage] or 0.0) + extra
    sums_between = totals[None, :] - totals[:, None]  # (start, stop): of the blocks between
    is_run = np.arange(blocks + 1)[:, None] <= np.arange(blocks + 1)
    is_empty = np.eye(blocks + 1, dtype=bool)

    @cache
    def cost(end: float | None) -> npt.NDArray[np.float64]:
        """Return the cost of a stage, by its first block and the next stage's; infinite where it is empty."""
        seconds: npt.NDArray[np.float64] = np.where(is_run, sums_between + (end or 0.0), np.inf)
        return np.where(is_empty, np.inf, seconds) if end is None else seconds

    # limits[start]: largest cost of the stages from `stage` on, if they hold the blocks from `start` on.
    limits = cost(ends[-1])[:, blocks]
    for stage in range(stages - 2, -1, -1):
        limits = np.maximum(cost(ends[stage]), limits).min(axis=1)
    limit = limits[0]

    @cache
    def unevenness(end: float | None) -> npt.NDArray[np.float64]:
        costs_with_end = cost(end)
        squares: npt.NDArray[np.float64] = np.round(costs_with_end / (limit or 1.0) * _COST_RESOLUTION) ** 2
        return np.where(costs_with_end <= limit, squares, np.inf)

    later_costs = unevenness(ends[-1])[:, blocks]
    choices: list[npt.NDArray[np.int64]] = []
    for stage in range(stages - 2, -1, -1):
        sums = unevenness(ends[stage]) + later_costs
        choices.append(sums.argmin(axis=1))
        later_costs = sums.min(axis=1)
    cuts: list[int] = []
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1] if cuts else 0]))
    return tuple(cuts)


def invalid_cuts_reason(
    cuts: Sequence[int], blocks: int, stages: int, has_pre_block: bool, has_post_block: bool
) -> str | None:
    """Return the fault of the cuts of a model of `blocks` blocks; None when they are right.

    Args:
        has_pre_block: the first stage holds a layer beside blocks, and so needs none.
        has_post_block: the same for the last stage.
    """
    if stages > blocks + has_pre_block + has_post_block:
        return f"{blocks} blocks cannot be split into {stages} stages"
    if len(cuts) != stages - 1:
        return f"{stages} stages need {stages - 1} cuts, not {len(cuts)}"
    bounds = (0, *cuts, blocks)
    if any(not 0 <= cut <= blocks for cut in cuts):
        return f"cuts must lie between 0 and {blocks}, the number of blocks"
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if start > stop:
            return f"cuts must increase: {stop} comes after {start}"
        if (
            start == stop
            and not (has_pre_block and stage == 0)
            and not (has_post_block and stage == stages - 1)
        ):
            return f"stage {stage} of {stages} would be empty"
    return None


def invalid_virtual_stages_reason(schedule: Schedule, virtual_stages: int) -> str | None:
    """Return the reason that `schedule` cannot have so many stages per rank; None when it can."""
    required = DEFAULT_VIRTUAL_STAGES[schedule]
    if schedule in INTERLEAVED or virtual_stages == required:
        return None
    return f"schedule '{schedule}' has {required} stage{('s' if required > 1 else '')} per rank"


def invalid_micro_batches_reason(schedule: Schedule, pp: int, micro_batches: int) -> str | None:
    """Return the reason that `schedule` cannot run so many micro-batches on `pp` ranks; None when it can.

    The rules are those of torch's own classes, 2.11 to 2.13. Violations that are not refused before a run
    raise in one rank or another, or make ranks wait for each other.
    """
    if accepts_micro_batches(schedule, pp, micro_batches):
        return None
    if schedule == "1f1b":
        return f"schedule '1f1b' needs at least {pp}, the number of stages"
    if schedule == "dualpipev":
        return f"schedule 'dualpipev' needs at least {2 * pp}, the number of stages"
    return (
        f"schedule '{schedule}' runs them in rounds of {pp} or more, "
        f"and {micro_batches} do not divide into {max(micro_batches // pp, 1)} equal rounds"
    )


def accepts_micro_batches(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Return whether `schedule` can run so many micro-batches on `pp` ranks."""
    if schedule == "1f1b":
        return micro_batches >= pp
    if schedule == "dualpipev":
        return micro_batches >= 2 * pp
    return schedule not in INTERLEAVED or micro_batches % max(micro_batches // pp, 1) == 0


@lru_cache(maxsize=65536)
def in_flight_by_stage(
    schedule: Schedule, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[int, ...]:
    """Return the in-flight micro-batches of each stage of one pipeline rank, in the order of the model.

    A looped schedule has run its first stages more often than its last ones.
    """
    if schedule in V_SHAPED_SCHEDULES:
        down = 2 * pp - rank - (schedule == "zbv")
        return min(down, micro_batches), min(rank + 1, micro_batches)
    if schedule in ("gpipe", "1f1b"):
        return (min(micro_batches, pp - rank if schedule == "1f1b" else micro_batches),)
    round_size = micro_batches // max(micro_batches // pp, 1)
    warm_up = pp if schedule == "interleaved_zero_bubble" else 2 * (pp - 1 - rank) + 1
    total = min((virtual_stages - 1) * round_size + warm_up, virtual_stages * micro_batches)
    rounds, partial = divmod(total, virtual_stages * round_size)
    return tuple(
        rounds * round_size + min(max(partial - turn * round_size, 0), round_size)
        for turn in range(virtual_stages)
    )


def blocks_of_stages(blocks: int, plan: Plan) -> list[int]:
    """Return the number of blocks of each stage: by the plan's cuts, else evenly.

    The first and the last stage then have fewer, because of the end layers.
    """
    if plan.stage_cuts:
        return [stop - start for start, stop in pairwise((0, *plan.stage_cuts, blocks))]
    stages = plan.stage_count
    if blocks % stages == 0:
        return [blocks // stages] * stages
    if (blocks + 2) % stages == 0 and stages > 1:
        size = (blocks + 2) // stages
        return [size - 1, *[size] * (stages - 2), size - 1]
    base, extra = divmod(blocks, stages)
    # The first ones of the middle have one more.
    order = [*range(1, stages), 0]
    larger_stages = set(order[:extra])
    return [base + (stage in larger_stages) for stage in range(stages)]


def block_counts_of_stages(block_counts: Sequence[int], plan: Plan) -> list[tuple[int, ...]]:
    """Return the number of blocks of each kind in every stage; `block_counts`: those of the model."""
    bounds = accumulate(blocks_of_stages(sum(block_counts), plan), initial=0)
    return [block_counts_between(block_counts, start, stop) for start, stop in pairwise(bounds)]


def block_counts_between(block_counts: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return the number of blocks of each kind among the model's blocks from `start` to `stop`."""
    return tuple(
        max(min(stop, end) - max(start, end - count), 0)
        for count, end in zip(block_counts, accumulate(block_counts), strict=True)
    )
