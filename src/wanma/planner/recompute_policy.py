"""Selection of the cheapest recompute policy with which a plan fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD, recompute_forwards


def choose_recompute(plan: Plan, workload: Workload, fits: Callable[[Plan], bool]) -> tuple[Plan, str]:
    """Return `plan` with the cheapest recompute under which it fits, or the most thorough if none does.

    Returns:
        the plan, and the reason in words.
    """
    if plan.schedule in SPLIT_BACKWARD:
        return plan, (
            f"recompute none: schedule {plan.schedule} would recompute a block once for each gradient"
        )
    blocks = sum(layer.count for layer in workload.layers if layer.count > 1 or layer.is_block)
    in_stage = max(-(-blocks // plan.stage_count), 1)
    options = [replace(plan, recompute="none", recompute_share=1.0)]
    for number in range(1, in_stage + 1):
        share = number / in_stage
        options.append(replace(plan, recompute="selective", recompute_share=share))
        options.append(replace(plan, recompute="full", recompute_share=share))
    chosen = next((option for option in sorted(options, key=recompute_forwards) if fits(option)), options[-1])
    if chosen.recompute == "none":
        return chosen, "recompute none: all activations fit"
    count = len(chosen.recomputed_blocks(in_stage))
    return chosen, f"recompute {chosen.recompute} of {count} of {in_stage} blocks: the least that fits"
