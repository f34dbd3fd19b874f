"""Unlike shares of the global batch: where each begins, whether their micro-batches may differ in number, and
whether they can follow the ranks' times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wanma.job.plan.plan import Plan


def starts(shares: Sequence[int], global_batch: int) -> list[int]:
    """First row of every data rank, and the end."""
    whole = sum(shares)
    return [global_batch * before // whole for before in accumulate(shares, initial=0)]


def why_equal_counts(plan: Plan) -> str | None:
    """Why every data rank needs as many micro-batches as the others, whatever its share; None where it does
    not.

    Their sizes may differ in any case. Where what data ranks do together is done once per step, a rank with
    a third of the rows runs a third of the micro-batches; where it is done within each, as many smaller ones.
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
    """Why a rank's own work cannot be told from its waiting for other data ranks; None where it can.

    A processor's clock runs while a rank waits and so the waiting is measured and left out. A GPU waits
    within what is queued on it, and only a forward without exchanges between data ranks tells its pace.
    """
    if plan.device == "cpu":
        return None
    if plan.ep > 1:
        return "on GPUs, experts that data ranks share (ep) hide which of them the others wait for"
    if plan.shard == "parameters" and plan.pp == 1:
        return "on GPUs, parameters that are gathered around each block hide which rank the others wait for"
    return None
