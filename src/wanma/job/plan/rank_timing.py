"""Measurability of a rank's own work, apart from its waits for other data ranks."""

from __future__ import annotations

from wanma.job.plan.plan import Plan


def rank_timing_obstacle(plan: Plan) -> str | None:
    """Return the reason why a rank's work cannot be told from waiting for data ranks; None if it can.

    A processor's clock runs while a rank waits, so the waiting is measured and subtracted. A GPU waits within
    its queue, and only a forward without exchanges between data ranks shows its speed.
    """
    if plan.device == "cpu":
        return None
    if plan.ep > 1:
        return "on GPUs, experts that data ranks share (ep) hide which of them the others wait for"
    if plan.shard == "parameters" and plan.pp == 1:
        return "on GPUs, parameters that are gathered around each block hide which rank the others wait for"
    return None
