"""Plan changes that reduce memory, by kind, the smallest change of each kind first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

from wanma.job.file.serialization import toml_value
from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD, blocks_of_stages, plan_stage_cuts
from wanma.planner.search.space import SHARD_LEVELS

MAX_CHANGES_PER_FAMILY = 3
"""Number of doublings of a mesh dimension, and of shares of recompute, that are tried."""

_NOT_SETTINGS = {
    "stage_cuts",
    "threads_per_rank",
    "precision",
    "fp8",
    "device",
    "approximate",
    "placement",
    "synchronization",
}
"""Fields of a plan that are no keys of [parallel], or follow from the others."""


@dataclass(frozen=True)
class PlanChange:
    """Plan change: the settings that lead to another plan, with its forecast."""

    settings: Mapping[str, Any]
    """Values of the changed job keys."""
    plan: Plan
    forecast: Forecast
    saved_bytes: int
    """Bytes that the largest rank saves."""
    slowdown: float | None
    """Extra time per step, as a share of the time before; negative where it is faster.

    None where rates are unknown.
    """

    def __str__(self) -> str:
        """Return the settings as overrides for the command line: 'parallel.recompute=selective'."""
        return " ".join(
            f"{key}={value if isinstance(value, str) else toml_value(value)}"
            for key, value in self.settings.items()
        )


def changed_settings(before: Plan, after: Plan) -> dict[str, Any]:
    """Return the keys of [parallel] that turn `before` into `after`, with their values."""
    return {
        f"parallel.{field.name}": getattr(after, field.name)
        for field in fields(Plan)
        if field.name not in _NOT_SETTINGS and getattr(before, field.name) != getattr(after, field.name)
    }


ChangeFamily = Callable[[Plan], Iterator[Plan]]
"""Function from a plan to smaller plans that differ in one respect, the least different first."""


def change_families(problem: PlanningProblem) -> dict[str, ChangeFamily]:
    """Return the families of plan changes by name.

    Plans that the rules refuse are among theirs; callers filter them by `plan_validity.refusal`. All data
    ranks of their plans have equal shares.
    """
    cut = lru_cache(maxsize=None)(partial(with_stage_cuts, problem))
    families: dict[str, ChangeFamily] = {
        "recompute": partial(_recompute, problem),
        "micro_batch": _micro_batch,
        "shard": _shard,
        "dp_shard": _more_shards,
        "sequence_parallel": _sequence,
        "offload_optimizer": partial(_offload, "offload_optimizer"),
        "offload_activations": partial(_offload, "offload_activations"),
        "offload_parameters": partial(_offload, "offload_parameters"),
    }
    if problem.dimensions is not None:
        families["schedule"] = _schedule
        families |= {axis: partial(_more_ranks, cut, axis) for axis in ("tp", "cp", "pp")}
        if problem.dimensions.experts:
            families["ep"] = _experts
    return families


def _recompute(problem: PlanningProblem, plan: Plan) -> Iterator[Plan]:
    if plan.schedule in SPLIT_BACKWARD and plan.pp > 1:
        return
    layers = problem.dimensions.layers if problem.dimensions is not None else 1
    stage_blocks = max(blocks_of_stages(layers, plan), default=1) if plan.pp > 1 else layers
    kinds: dict[str, tuple[Recompute, ...]] = {"none": ("selective", "full"), "selective": ("full",)}
    if plan.recompute != "none" and plan.recompute_share < 1:
        yield replace(plan, recompute_share=1.0)
    for kind in kinds.get(plan.recompute, ()):
        shares = sorted(
            {
                -(-stage_blocks * part // MAX_CHANGES_PER_FAMILY) / stage_blocks
                for part in range(1, MAX_CHANGES_PER_FAMILY + 1)
            }
        )
        yield from (replace(plan, recompute=kind, recompute_share=share) for share in shares)


def _micro_batch(plan: Plan) -> Iterator[Plan]:
    size = plan.micro_batch
    while size > 1:
        size = (size + 1) // 2
        yield replace(plan, micro_batch=size)


def _shard(plan: Plan) -> Iterator[Plan]:
    """Yield higher shard levels, among all data ranks where nothing was sharded before."""
    if plan.shard == "none" and plan.cp == 1:
        plan = replace(plan, dp_replicate=plan.sites, dp_shard=plan.data_parallel_size // plan.sites)
    yield from (replace(plan, shard=shard) for shard in SHARD_LEVELS[SHARD_LEVELS.index(plan.shard) + 1 :])


def _more_shards(plan: Plan) -> Iterator[Plan]:
    while plan.shard != "none" and plan.dp_replicate // plan.sites % 2 == 0:
        plan = replace(plan, dp_replicate=plan.dp_replicate // 2, dp_shard=plan.dp_shard * 2)
        yield plan


def _sequence(plan: Plan) -> Iterator[Plan]:
    if plan.tp > 1 and not plan.sequence_parallel:
        yield replace(plan, sequence_parallel=True)


def _schedule(plan: Plan) -> Iterator[Plan]:
    if plan.pp > 1 and plan.schedule == "gpipe":
        yield replace(plan, schedule="1f1b")


def _offload(key: str, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with `key` offloaded: to host memory from a GPU, else to disk."""
    if getattr(plan, key) == "none":
        fields: dict[str, Any] = {key: "host" if plan.device == "cuda" else "disk"}
        yield replace(plan, **fields)


def _more_ranks(with_stage_cuts: Callable[[Plan], Plan], mesh_dimension: str, plan: Plan) -> Iterator[Plan]:
    """Yield plans with more ranks on `mesh_dimension`, taken from the data ranks."""
    for _ in range(MAX_CHANGES_PER_FAMILY):
        from_replicas = plan.dp_replicate // plan.sites % 2 == 0
        if not from_replicas and plan.dp_shard % 2:
            return
        fewer = "dp_replicate" if from_replicas else "dp_shard"
        plan = replace(
            plan, **{mesh_dimension: getattr(plan, mesh_dimension) * 2, fewer: getattr(plan, fewer) // 2}
        )
        if plan.shard != "none" and plan.dp_shard * plan.cp == 1:
            plan = replace(plan, shard="none")
        if mesh_dimension == "tp":
            plan = replace(plan, sequence_parallel=True)
        yield with_stage_cuts(plan) if mesh_dimension == "pp" else plan


def with_stage_cuts(problem: PlanningProblem, plan: Plan) -> Plan:
    """Return the plan with stages of equal cost; slow enough that callers cache it."""
    layers = problem.dimensions.layers if problem.dimensions is not None else 0
    return replace(plan, stage_cuts=plan_stage_cuts(problem.workload, plan, layers))


def _experts(plan: Plan) -> Iterator[Plan]:
    sizes = [size for size in plan.valid_ep_sizes() if size > plan.ep]
    yield from (replace(plan, ep=size) for size in sizes[:MAX_CHANGES_PER_FAMILY])
