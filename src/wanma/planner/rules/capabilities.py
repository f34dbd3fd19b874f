"""Runtime support matrix by device, model and torch version, and permitted approximations.

Search and refusal share it. Other rooms take their limits from here where they have the same
(`FP8_MIN_COMPUTE_CAPABILITY`), and tests/parallel checks the rest against the runtime. A plan with a reason
against it is forecast-only: `auto` never chooses it, `train` refuses it, `wanma plan` shows it with the
reason. Sizes that do not divide are checked by `rules.mesh`. Pure functions, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import rank_timing_obstacle
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.rules.compression import requests_compression, unsupported_compression_error
from wanma.planner.rules.parameter_servers import unsupported_servers_error
from wanma.torch_internals.versions import (
    COMPILED_TENSOR_PARALLEL_RECOMPUTE,
    SPLIT_BACKWARD_OF_REUSED_PARAMETERS,
    Version,
    installed_torch_version,
)

FP8_MIN_COMPUTE_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with matrix products in fp8."""

APPROXIMATIONS = {
    "bf16": "computes in bf16 where the job sets fp32",
    "fp8": "rounds the inputs of matrix products in blocks to 8 bits",
    "compression": "drops or rounds parts of the gradients that ranks exchange",
    "staleness": "applies gradients of parameters that other workers have updated meanwhile",
}
"""Approximations of the mathematics that a plan may use (`Plan.approximate`), with their effect.

A plan uses one only if the job allows it (`parallel.allow`) or asks for it.
"""

SYNCHRONIZATION_APPROXIMATIONS = {
    "local_sgd": ("trains each site independently and averages the weights every `synchronize_every` steps"),
    "diloco": (
        "trains each site independently and applies an outer optimizer step every `synchronize_every` steps"
    ),
    "delayed": "applies gradients `staleness` steps after they are computed",
}
"""Approximations by synchronization between sites; used only if the job asks (`parallel.synchronize`)."""


def unsupported_reason(
    job: Job, plan: Plan, cluster: Cluster, torch_version: Version | None = None
) -> str | None:
    """Return the reason why the runtime cannot run `plan`, or None.

    Args:
        torch_version: version to run with; default: the installed one.
    """
    reason = _first_unsupported(_SupportQuery(job, plan, cluster, torch_version or installed_torch_version()))
    return reason.message if reason is not None else None


def check_supported(job: Job, plan: Plan, cluster: Cluster, torch_version: Version | None = None) -> None:
    """Refuse to train a forecast-only plan.

    Raises:
        JobError: with the reason, and the keys of another plan.
    """
    reason = _first_unsupported(_SupportQuery(job, plan, cluster, torch_version or installed_torch_version()))
    if reason is not None:
        raise JobError(f"wanma cannot train this plan: {reason.message}", reason.hint)


def supports_compiled_recompute(plan: Plan, torch_version: Version) -> bool:
    """Return whether torch compiles blocks under the plan's recompute policy."""
    is_combined = plan.compile and plan.recompute == "full" and plan.tp > 1
    return not (is_combined and COMPILED_TENSOR_PARALLEL_RECOMPUTE.affects(torch_version))


def factored_optimizer_error(optimizer: str, plan: Plan) -> JobError | None:
    """Return the error for an optimizer with factored statistics on parameters that `plan` splits, or None.

    Adafactor keeps sums over whole rows and columns, which a split matrix does not have on one rank.
    """
    if optimizer != "adafactor" or plan.shard_group_size == plan.tp == plan.ep == 1:
        return None
    axes = ("dp_shard", "cp", "tp", "ep") if plan.shard_group_size > 1 else ("tp", "ep")
    split = " and ".join(
        f"parallel.{axis} = {getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1
    )
    return JobError(
        f"train.optimizer = 'adafactor' needs complete rows and columns of each matrix, which are "
        f"split by {split}",
        "use dp_replicate, or train.optimizer = 'adamw'",
    )


def unsupported_fp8_error(plan: Plan, cluster: Cluster) -> JobError | None:
    """Return the error for fp8 on devices, or with a precision, that do not allow it, or None."""
    if not plan.fp8:
        return None
    way_out = "unset train.fp8, or train on GPUs of compute capability 8.9 or higher (L40S, H100, B200)"
    if plan.device == "cpu":
        return JobError("train.fp8: CPUs do not support fp8 matrix products", way_out)
    for node in cluster.nodes:
        for device in node.devices:
            # GPUs of the catalogue have rates, and one for fp8 if they compute in it.
            if device.peak_flops_per_second and "fp8" not in device.peak_flops_per_second:
                return JobError(f"train.fp8: {device.name} does not support fp8 matrix products", way_out)
    if plan.precision != "bf16":
        return JobError(
            f"train.fp8 with train.precision = '{plan.precision}': with fp8, all other operators need bf16",
            "set train.precision = 'bf16'",
        )
    return None


def allowed_approximations(job: Job) -> frozenset[str]:
    """Return the approximations that the job allows (`parallel.allow`) or asks for itself."""
    requested = {"fp8"} if job.train.fp8 else set()
    if requests_compression(job):
        requested.add("compression")
    if job.parallel.synchronize != "every_step":
        requested.add(job.parallel.synchronize)
    return frozenset(requested | set(job.parallel.allow))


@dataclass(frozen=True)
class _SupportQuery:
    job: Job
    plan: Plan
    cluster: Cluster
    torch_version: Version


def _first_unsupported(query: _SupportQuery) -> JobError | None:
    return next((reason for limit in _SUPPORT_CHECKS if (reason := limit(query)) is not None), None)


def _unsupported_device(query: _SupportQuery) -> JobError | None:
    devices = {
        device.name for node in query.cluster.nodes for device in node.devices if device.kind == "other"
    }
    if query.plan.device == "cpu" or not devices:
        return None
    return JobError(
        f"wanma does not support {', '.join(sorted(devices))}",
        "train on CPUs, or on GPUs with torch's device type cuda (NVIDIA, AMD)",
    )


def _placed_replicas(query: _SupportQuery) -> JobError | None:
    if not query.plan.placement:
        return None
    return JobError(
        "replicas on different devices (other stages, other tp) are not supported yet, only their forecast",
        "set batch shares for the different devices (parallel.batch_shares), or train on one kind of device",
    )


def _balance_without_timing(query: _SupportQuery) -> JobError | None:
    """Refuse load balancing where the plan's ranks cannot be timed."""
    reason = rank_timing_obstacle(query.plan) if query.job.parallel.load_balancing == "on" else None
    if reason is None or query.plan.data_parallel_size == 1:
        return None
    return JobError(
        f"parallel.load_balancing = 'on': {reason}",
        "set parallel.load_balancing = 'off' and parallel.batch_shares, or set parallel.shard = 'none' "
        "or 'optimizer'",
    )


def _disallowed_approximation(query: _SupportQuery) -> JobError | None:
    allowed = allowed_approximations(query.job)
    for name in query.plan.approximate:
        if name in SYNCHRONIZATION_APPROXIMATIONS and name not in allowed:
            return JobError(
                f"{name} {SYNCHRONIZATION_APPROXIMATIONS[name]}, and the job does not set it",
                f"set parallel.synchronize = '{name}'",
            )
        if name not in allowed:
            changed = APPROXIMATIONS.get(name, "changes the mathematics")
            return JobError(
                f"{name} {changed}, and the job does not allow it", f"set parallel.allow = ['{name}']"
            )
    return None


def _compiled_recompute(query: _SupportQuery) -> JobError | None:
    if supports_compiled_recompute(query.plan, query.torch_version):
        return None
    return JobError(
        COMPILED_TENSOR_PARALLEL_RECOMPUTE.describe(query.torch_version),
        "set parallel.recompute = 'selective', parallel.compile = false, or parallel.tp = 1; or "
        f"{COMPILED_TENSOR_PARALLEL_RECOMPUTE.update_hint}",
    )


def _undeclared_model_layout(query: _SupportQuery) -> JobError | None:
    """Refuse mesh dimensions that split a model without a declaration of how to split it."""
    kind, plan = input_kind(query.job.model), query.plan
    if kind == "tokens":
        return None
    axes = [axis for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    if kind != "custom" and plan.pp > 1:
        axes.insert(0, "pp")
    if not axes:
        return None
    model = query.job.model
    name = model.factory or model.preset or model.family
    return JobError(
        f"{name} does not declare how to split it over {' and '.join(axes)}",
        f"set {' = '.join(f'parallel.{axis}' for axis in axes)} = 1; dp_replicate and dp_shard work "
        "with any module",
    )


def _in_batch_negatives(query: _SupportQuery) -> JobError | None:
    """Refuse several micro-batches of a rank where a loss compares all items of the global batch."""
    plan, samples = query.plan, query.job.train.global_batch
    if not _compares_items_of_batch(query.job):
        return None
    if plan.gradient_accumulation_steps(samples) == 1:
        return None
    return JobError(
        f"in_batch_softmax needs the global batch of {samples} samples at once, and micro_batch = "
        f"{plan.micro_batch} cuts it",
        f"set parallel.micro_batch = {plan.max_rows_per_data_rank(samples)}",
    )


def _embedding_tables(query: _SupportQuery) -> JobError | None:
    """Refuse embedding tables that ranks share beside settings that know nothing of them."""
    job, plan = query.job, query.plan
    has_tables = input_kind(job.model) == "interactions"
    if plan.embedding == "dense":
        are_on_servers = job.servers.count > 0 and has_tables
        if plan.embedding_memory_bytes is not None and not (are_on_servers and job.train.embedding_optimizer):
            return JobError(
                "parallel.embedding_memory_bytes is for tables that parallel.embedding places, or that "
                "parameter servers update by train.embedding_optimizer, and there are none",
                "set parallel.embedding = 'auto', or train.embedding_optimizer beside servers.count, or "
                "unset parallel.embedding_memory_bytes",
            )
        if job.train.embedding_optimizer is None or are_on_servers:
            return None
        return JobError(
            f"train.embedding_optimizer = '{job.train.embedding_optimizer}' updates tables that "
            "parallel.embedding places or parameter servers hold, and there are none",
            "set parallel.embedding = 'auto' or servers.count, or unset train.embedding_optimizer",
        )
    key = f"parallel.embedding = '{plan.embedding}'"
    if not has_tables:
        return JobError(
            f"{key}: only wanma's recommenders have embedding tables that it places",
            "set parallel.embedding = 'dense', or use model.family = 'recommender'",
        )
    if job.train.embedding_optimizer is None:
        return JobError(
            f"{key} needs an optimizer that leaves rows alone that a step does not use, and "
            "train.embedding_optimizer is not set",
            "set train.embedding_optimizer = 'rowwise_adagrad', 'adagrad', 'adam' or 'sgd'",
        )
    settings = {
        "parallel.compile": plan.compile,
        "parallel.synchronize": plan.synchronization is not None,
        "parallel.offload_parameters": plan.offload_parameters != "none",
        "parallel.offload_optimizer": plan.offload_optimizer != "none",
        "train.weight_average": job.train.weight_average > 0,
    }
    if plan.embedding_memory_bytes is not None:
        key = f"parallel.embedding_memory_bytes = {plan.embedding_memory_bytes}"
    if (other := next((name for name, is_set in settings.items() if is_set), None)) is None:
        return None
    return JobError(f"{key} is not supported with {other}", f"unset {other}, or {key.partition(' =')[0]}")


def _compares_items_of_batch(job: Job) -> bool:
    """Return whether the loss is the softmax over the items of the global batch."""
    keys, objective = job.data.interactions, job.model.recommender.objective
    is_default = job.model.kind == "two_tower" and keys.target == "click" and not keys.negatives
    return objective == "in_batch_softmax" or (objective is None and is_default)


def _split_backward(query: _SupportQuery) -> JobError | None:
    plan = query.plan
    splits_backward = plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    problem = SPLIT_BACKWARD_OF_REUSED_PARAMETERS
    if (
        not splits_backward
        or not problem.affects(query.torch_version)
        or input_kind(query.job.model) != "custom"
    ):
        return None
    return JobError(
        f"with schedule '{plan.schedule}', {problem.describe(query.torch_version)}, which a custom module "
        "may do",
        f"set parallel.schedule = 'interleaved_1f1b', or {problem.update_hint}",
    )


_SUPPORT_CHECKS: tuple[Callable[[_SupportQuery], JobError | None], ...] = (
    _unsupported_device,
    lambda query: unsupported_servers_error(
        query.job, query.plan, compares_items=_compares_items_of_batch(query.job)
    ),
    _placed_replicas,
    _balance_without_timing,
    _undeclared_model_layout,
    _in_batch_negatives,
    _embedding_tables,
    _disallowed_approximation,
    lambda query: unsupported_compression_error(query.plan, query.cluster),
    lambda query: unsupported_fp8_error(query.plan, query.cluster),
    _compiled_recompute,
    lambda query: factored_optimizer_error(query.job.train.optimizer, query.plan),
    _split_backward,
)
