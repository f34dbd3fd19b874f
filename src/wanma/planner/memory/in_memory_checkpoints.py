"""Snapshots for recovery: what they take of the machines' own memory, and how often they are made."""

from __future__ import annotations

import math

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.cost.gradient_collectives import error_bytes
from wanma.planner.memory.model_states import state_elements, weight_bytes

COST_SHARE = 0.01
"""Of the time of training, what snapshots may cost where the job leaves their interval open."""

_IMAGES = 2
"""Written in turn, so that one of them is always whole."""


def snapshot_bytes(job: Job, workload: Workload, plan: Plan) -> int:
    """Of one rank, all that it holds of them: two images, and as many of a guest where machines are each
    other's partners. 0 where there are none (`image_bytes`)."""
    copies = 2 if has_partner(job) else 1
    return int(copies * _IMAGES * image_bytes(job, workload, plan))


def image_bytes(job: Job, workload: Workload, plan: Plan) -> float:
    """Of one rank's part of one snapshot; ranks of one machine that hold the same share it.

    0 where the job wants none, where nobody would recover from them, or where `plan` keeps state on disk,
    which then has no copy in memory.
    """
    on_disk = "disk" in (plan.offload_parameters, plan.offload_optimizer)
    if job.checkpoint.snapshots == "off" or job.cluster.retries == 0 or on_disk:
        return 0.0
    element_bytes = 8 if plan.precision == "fp64" else 4
    rounds = job.model.factory is None
    trained = element_bytes * workload.parameters * (workload.trained_share if rounds else 1.0)
    weights = weight_bytes(workload, plan, rounds_frozen=rounds)
    frozen = weights - element_bytes * workload.parameters * workload.trained_share
    saved = weights - frozen
    saved += element_bytes * state_elements(workload, job.train)
    if job.train.weight_average > 0:
        saved += trained
    seldom = plan.synchronization
    if seldom is not None and seldom.is_local:  # each site's own, and what all share
        frozen *= seldom.sites
        saved = seldom.sites * saved + trained * (1 + (seldom.momentum > 0))
    elif seldom is not None:
        saved += seldom.staleness * trained
    # Ranks of one machine that hold the same write it once.
    here = plan.world_size // job.cluster.nodes
    parts = max(plan.world_size // plan.replicas, here, 1)
    habits = Software(
        rounds_frozen=rounds, sharing_machines=0 if job.parallel.collectives == "gloo" else job.cluster.nodes
    )
    frozen_parts = max(plan.pp * plan.tp, here, 1) if habits.holds_frozen_whole(plan) else parts
    whole = workload.parameters / plan.tp / plan.pp
    kept = error_bytes(plan, whole, whole / plan.shard_ranks)  # which no two ranks hold alike
    return saved / parts + frozen / frozen_parts + kept


def has_partner(job: Job) -> bool:
    """Whether another machine keeps a copy of each one's snapshots."""
    return job.cluster.nodes > 1 and job.checkpoint.partner is not False


def steps_between(cost_seconds: float, step_seconds: float) -> int:
    """Fewest steps from one snapshot to the next with which they cost no more than `COST_SHARE`."""
    return max(math.ceil(cost_seconds / (COST_SHARE * step_seconds)), 1)
