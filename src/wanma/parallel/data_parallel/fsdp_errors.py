"""Clear errors in place of torch's messages about models that FSDP2's units cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan


def to_job_error(error: Exception, plan: Plan) -> JobError | None:
    """Return the error for users; None for an error of another kind."""
    text = str(error)
    if "mixed torch.Tensor and DTensor" in text and plan.reshards_after_forward:
        return JobError(
            f"parallel.shard = '{plan.shard}': the model or the loss reads parameters of a block outside "
            "the forward pass of the block, where they are sharded",
            "read them in the block's own forward, or set parallel.shard = 'gradients' and unset "
            "parallel.offload_parameters",
        )
    if "RegisterPostBackwardFunction" in text and "modified inplace" in text:
        out = "optimizer" if plan.device == "cpu" else "none"
        return JobError(
            f"parallel.shard = '{plan.shard}': a block changes its input in place, but the input of a "
            "sharded block is a view",
            f"make its first operation out of place (inplace=False), or set parallel.shard = '{out}'",
        )
    return None


@contextmanager
def translate_fsdp_errors(plan: Plan) -> Iterator[None]:
    """Replace torch's errors by those of `to_job_error`, within the context."""
    try:
        yield
    except RuntimeError as error:
        if (reason := to_job_error(error, plan)) is None:
            raise
        raise reason from error
