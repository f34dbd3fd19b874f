"""Limits of parameter servers: the jobs and plans that they can train. Pure functions, without torch."""

from __future__ import annotations

from wanma.job.errors import JobError
from wanma.job.node_range import is_elastic
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind

_OPTIMIZERS = ("adamw", "sgd")
"""Optimizers whose rules compute element by element, so that servers can hold parameters by rows."""


def unsupported_servers_error(job: Job, plan: Plan, *, compares_items: bool) -> JobError | None:
    """Return the error for a job or plan that parameter servers cannot train, or None.

    Args:
        job: job of the run.
        plan: plan of the run.
        compares_items: true if the loss compares the items of the global batch.
    """
    if not job.servers.count:
        return None
    if job.servers.mode != "synchronous" and "staleness" not in job.parallel.allow:
        return JobError(
            f"servers.mode = '{job.servers.mode}' applies gradients of parameters that other workers have "
            "updated meanwhile, and the job does not allow it",
            "set parallel.allow = ['staleness'], or servers.mode = 'synchronous'",
        )
    if compares_items and job.servers.mode == "synchronous" and plan.world_size > 1:
        return JobError(
            "in_batch_softmax compares the items of a global batch, which synchronous workers share",
            "set parallel.dp_replicate = 1, or model.recommender.objective = 'sampled_softmax'",
        )
    for key, value, way_out in _limits(job, plan):
        return JobError(f"parameter servers do not support {key} = {value}", way_out)
    return None


def _limits(job: Job, plan: Plan) -> list[tuple[str, object, str]]:
    """Return the settings that parameter servers do not support: key, value and way out."""
    train, parallel = job.train, job.parallel
    found: list[tuple[str, object, str]] = [
        (f"parallel.{axis}", getattr(plan, axis), "workers are replicas: set parallel.dp_replicate alone")
        for axis in MESH_DIMS
        if axis != "dp_replicate" and getattr(plan, axis) > 1
    ]
    if is_elastic(job):
        nodes = f"'{job.cluster.min_nodes}..{job.cluster.nodes}'"
        found.append(("cluster.nodes", nodes, "set cluster.nodes to one number, without cluster.min_nodes"))
    if train.optimizer not in _OPTIMIZERS or train.optimizer_factory is not None:
        found.append(
            (
                "train.optimizer",
                train.optimizer_factory or train.optimizer,
                "set train.optimizer = 'adamw' or 'sgd'",
            )
        )
    if plan.precision not in ("fp32", "bf16"):
        found.append(("train.precision", plan.precision, "set train.precision = 'fp32' or 'bf16'"))
    if job.model.family == "decoder" and (job.model.experts or 0) > 0:
        found.append(("model.experts", job.model.experts, "train it without servers"))
    if any(group.frozen for group in train.parameter_groups) and input_kind(job.model) == "interactions":
        found.append(
            ("train.parameter_groups.frozen", True, "train all parameters, or train without servers")
        )
    wanted = {
        "parallel.embedding": (parallel.embedding, "dense"),
        "train.fp8": (plan.fp8, False),
        "train.weight_average": (train.weight_average, 0.0),
        "train.spike": (train.spike, "ignore"),
        "parallel.compression": (parallel.compression, "none"),
        "parallel.synchronize": (parallel.synchronize, "every_step"),
        "parallel.load_balancing": ("on" if parallel.load_balancing == "on" else "off", "off"),
    }
    found += [
        (key, value, f"set {key} = {default!r}")
        for key, (value, default) in wanted.items()
        if value != default
    ]
    if train.non_finite == "retry":
        found.append(("train.non_finite", "retry", "set train.non_finite = 'stop' or 'skip'"))
    return found
