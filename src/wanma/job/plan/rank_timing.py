"""Unequal shares of the global batch: row offsets, equal micro-batch counts, and timing of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wanma.job.plan.plan import Plan


def starts(shares: Sequence[int], global_batch: int) -> list[int]:
    """Return the first row of every data rank, and the total number of rows."""
    whole = sum(shares)
    return [global_batch * before // whole for before in accumulate(shares, initial=0)]


def why_equal_counts(plan: Plan) -> str | None:
    """Return the reason why all data ranks need equally many micro-batches; None if they may differ.

    Their sizes may differ in any case. If data ranks communicate once per step, a rank with a third of the
    rows runs a third of the micro-batches; if they communicate within each, it runs as many smaller ones.
    """
    if plan.ep > 1:
        return "tokens visit the experts of other data ranks within every micro-batch (ep)"
    if plan.pp > 1:
        if plan.virtual_stages > 1 and not plan.computes_with_state:
            return (
                f"under schedule '{plan.schedule}' the stages of a rank are gathered and reduced in an order "
                "that their number decides"
            )
        return None  # torch's schedules gather at the first use in a step, and reduce after the last one
    if plan.shard in ("gradients", "parameters"):
        return f"{plan.shard} that are sharded are exchanged within every micro-batch"
    if plan.shard == "optimizer" and plan.offload_parameters != "nothing":
        return "parameters that are offloaded are gathered within every micro-batch"
    return None


def why_not_timed(plan: Plan) -> str | None:
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
