"""Runtime support matrix by device, model and torch version, and permitted approximations.

Search and refusal share it. Other rooms take their limits from here where they have the same
(`FP8_LEAST_CAPABILITY`), and tests/parallel checks the rest against the runtime. A plan with a reason against
it is forecast-only: `auto` never chooses it, `train` refuses it, `wanma plan` shows it with the reason. Sizes
that do not divide are checked by `rules.mesh`. Pure functions, without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.plan.rank_timing import why_not_timed
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import Schedule
from wanma.models.config.resolution import model_kind
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.planner.rules.compression import compresses, not_compressible

SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
"""Pipeline schedules that the runtime supports; torch has each of them from 2.11 on."""

FP8_LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with matrix products in fp8."""

APPROXIMATIONS = {
    "bf16": "computes in 16 bits what the job has in fp32",
    "fp8": "rounds what the blocks' products take to 8 bits",
    "compression": "leaves out or rounds parts of gradients where ranks exchange them",
}
"""Approximations of the mathematics that a plan may use (`Plan.approximate`), with their effect.

A plan uses one only if the job allows it (`parallel.allow`) or asks for it.
"""

BETWEEN_SITES = {
    "local_sgd": "lets sites go on by themselves and averages their weights now and then",
    "diloco": "lets sites go on by themselves and makes an outer update of what they have moved now and then",
    "delayed": "applies gradients some steps late",
}
"""Approximations by synchronization between sites; used only if the job asks (`parallel.synchronize`)."""

Version = tuple[int, int]
"""Version of torch, (major, minor): (2, 13)."""


def not_runnable(job: Job, plan: Plan, cluster: Cluster, torch: Version | None = None) -> str | None:
    """Return the reason why the runtime cannot run `plan`, or None.

    Args:
        torch: version to run with; default: the installed one.
    """
    reason = _first(_Asked(job, plan, cluster, torch or installed_torch()))
    return reason.text if reason is not None else None


def check_runnable(job: Job, plan: Plan, cluster: Cluster, torch: Version | None = None) -> None:
    """Refuse to train a forecast-only plan.

    Raises:
        JobError: with the reason, and the keys of another plan.
    """
    reason = _first(_Asked(job, plan, cluster, torch or installed_torch()))
    if reason is not None:
        raise JobError(f"wanma cannot train this plan: {reason.text}", reason.way_out)


def can_compile_again(plan: Plan, torch: Version) -> bool:
    """Return whether torch compiles blocks under the plan's recompute policy.

    The compiler of torch 2.13 puts the mesh of split parameters among the tensors that a block saves for its
    recompute, and stops at that; 2.11's does not. Torch 2.12 is untested and counts as 2.13.
    """
    return torch < (2, 12) or not (plan.compile and plan.recompute == "full" and plan.tp > 1)


def split_factors(optimizer: str, plan: Plan) -> JobError | None:
    """Return the error for an optimizer with factored statistics on parameters that `plan` splits, or None.

    Adafactor keeps sums over whole rows and columns, which a split matrix does not have on one rank.
    """
    if optimizer != "adafactor" or plan.shard_ranks == plan.tp == plan.ep == 1:
        return None
    axes = ("dp_shard", "cp", "tp", "ep") if plan.shard_ranks > 1 else ("tp", "ep")
    split = " and ".join(
        f"parallel.{axis} = {getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1
    )
    return JobError(
        f"train.optimizer = 'adafactor' needs whole rows and columns, which {split} would split",
        "use dp_replicate, or train.optimizer = 'adamw'",
    )


def allowed_approximations(job: Job) -> frozenset[str]:
    """Return the approximations that the job allows (`parallel.allow`) or asks for itself."""
    asked = {"fp8"} if job.train.fp8 else set()
    if compresses(job):
        asked.add("compression")
    if job.parallel.synchronize != "every_step":
        asked.add(job.parallel.synchronize)
    return frozenset(asked | set(job.parallel.allow))


@cache
def installed_torch() -> Version:
    """Return the version of the installed torch, without importing it."""
    found = re.match(r"(\d+)\.(\d+)", version("torch"))
    assert found is not None, "torch has a version"
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class _Asked:
    job: Job
    plan: Plan
    cluster: Cluster
    torch: Version


@dataclass(frozen=True)
class _Reason:
    text: str
    way_out: str


def _first(asked: _Asked) -> _Reason | None:
    return next((reason for limit in _LIMITS if (reason := limit(asked)) is not None), None)


def _foreign_device(asked: _Asked) -> _Reason | None:
    devices = {one.name for node in asked.cluster.nodes for one in node.devices if one.kind == "other"}
    if asked.plan.device == "cpu" or not devices:
        return None
    return _Reason(
        f"wanma does not run on {', '.join(sorted(devices))}",
        "train on CPUs or on GPUs that torch calls cuda (NVIDIA, AMD)",
    )


def _placed(asked: _Asked) -> _Reason | None:
    if not asked.plan.placement:
        return None
    return _Reason(
        "replicas that differ by their devices (other stages, other tp) are planned for and not run yet",
        "give unlike devices unlike shares of the batch (parallel.batch_shares), or train on one kind",
    )


def _untimed(asked: _Asked) -> _Reason | None:
    """Refuse load balancing where the plan's ranks cannot be timed."""
    reason = why_not_timed(asked.plan) if asked.job.parallel.load_balancing == "on" else None
    if reason is None or asked.plan.data_ranks == 1:
        return None
    return _Reason(
        f"parallel.load_balancing = 'on': {reason}",
        "set parallel.load_balancing = 'off' and parallel.batch_shares by hand, or parallel.shard to 'none' "
        "or 'optimizer'",
    )


def _approximate(asked: _Asked) -> _Reason | None:
    allowed = allowed_approximations(asked.job)
    for name in asked.plan.approximate:
        if name in BETWEEN_SITES and name not in allowed:
            return _Reason(
                f"{name} {BETWEEN_SITES[name]}, and the job does not ask for it",
                f"set parallel.synchronize = '{name}'",
            )
        if name not in allowed:
            changed = APPROXIMATIONS.get(name, "changes the numbers")
            return _Reason(
                f"{name} {changed}, and the job does not allow it", f"set parallel.allow = ['{name}']"
            )
    return None


def _compressed(asked: _Asked) -> _Reason | None:
    error = not_compressible(asked.plan, asked.cluster)
    return None if error is None else _Reason(error.message, error.hint)


def _fp8(asked: _Asked) -> _Reason | None:
    if not asked.plan.fp8:
        return None
    way_out = "leave train.fp8 out, or train on GPUs of compute capability 8.9 or more (L40S, H100, B200)"
    if asked.plan.device == "cpu":
        return _Reason("there are no matrix products in fp8 on CPUs", way_out)
    for node in asked.cluster.nodes:
        for device in node.devices:
            # GPUs of the catalogue have rates, and one for fp8 if they compute in it.
            if device.peak_flops_per_second and "fp8" not in device.peak_flops_per_second:
                return _Reason(f"{device.name} computes no matrix products in fp8", way_out)
    if asked.plan.precision != "bf16":
        return _Reason(
            f"between products in fp8 is bf16, and the plan's precision is {asked.plan.precision}",
            "set train.precision = 'bf16'",
        )
    return None


def _compiled_again(asked: _Asked) -> _Reason | None:
    if can_compile_again(asked.plan, asked.torch):
        return None
    return _Reason(
        f"torch {'.'.join(map(str, asked.torch))} does not compile blocks that recompute in full where tp "
        "splits their matrices",
        "set parallel.recompute = 'selective', parallel.compile = false, or parallel.tp = 1",
    )


def _unsplit_model(asked: _Asked) -> _Reason | None:
    """Refuse mesh dimensions that split a model without a declaration of how to split it."""
    kind, plan = model_kind(asked.job.model), asked.plan
    if kind == "tokens":
        return None
    axes = [axis for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    if kind == "images" and plan.pp > 1:
        axes.insert(0, "pp")
    if not axes:
        return None
    model = asked.job.model
    name = model.factory or model.preset or model.family
    return _Reason(
        f"{name} does not declare what {' and '.join(axes)} would split",
        f"set {' = '.join(f'parallel.{axis}' for axis in axes)} = 1; data-parallel axes (dp_replicate, "
        "dp_shard) work with any module",
    )


def _split_factors(asked: _Asked) -> _Reason | None:
    error = split_factors(asked.job.train.optimizer, asked.plan)
    return None if error is None else _Reason(error.message, error.hint)


def _split_backward(asked: _Asked) -> _Reason | None:
    plan = asked.plan
    apart = plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    if not apart or asked.torch >= (2, 13) or model_kind(asked.job.model) != "custom":
        return None
    return _Reason(
        f"under schedule '{plan.schedule}' torch {'.'.join(map(str, asked.torch))} computes wrong gradients "
        "for parameters that a forward uses several times, as one's own module may",
        "set parallel.schedule = 'interleaved_1f1b', or install torch 2.13",
    )


_LIMITS = (
    _foreign_device,
    _placed,
    _untimed,
    _unsplit_model,
    _approximate,
    _compressed,
    _fp8,
    _compiled_again,
    _split_factors,
    _split_backward,
)
