"""Memory of in-memory checkpoints: bytes on each rank, and fewest steps between two of them."""

from __future__ import annotations

import math
from dataclasses import replace

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.gradient_collectives import error_feedback_bytes
from wanma.planner.cost.offload import keeps_state_on_disk, master_weight_bytes
from wanma.planner.memory.model_states import optimizer_state_elements, weight_bytes

MAX_OVERHEAD_SHARE = 0.01
"""Share of training time that in-memory checkpoints may cost where the job leaves their interval open."""

_COPIES_PER_RANK = 2
"""Number of in-memory checkpoints of one rank, written in turn, so that one of them is always complete."""


def in_memory_checkpoint_bytes(job: Job, workload: Workload, plan: Plan) -> int:
    """Return the bytes of all in-memory checkpoints that one rank stores.

    They are two of its own, and two of another node's rank where nodes are each other's partners. 0 where the
    run has none (`checkpoint_copy_bytes`).
    """
    copies = 2 if has_partner_node(job) else 1
    return int(copies * _COPIES_PER_RANK * checkpoint_copy_bytes(job, workload, plan))


def checkpoint_copy_bytes(job: Job, workload: Workload, plan: Plan) -> float:
    """Return the bytes of one rank's part of one in-memory checkpoint.

    Ranks of one node with equal parts share them. It is 0 where the job wants none, where no restart would
    use them, or where `plan` keeps state on disk, which then has no copy in memory.
    """
    if job.checkpoint.in_memory_every_steps == "off" or job.cluster.max_restarts == 0:
        return 0.0
    if keeps_state_on_disk(plan):
        return 0.0
    element_bytes = master_weight_bytes(plan)
    # Tables lie on all data ranks, once.
    dense = replace(workload, tables=())
    tables = workload.parameters - dense.parameters
    tables_state = optimizer_state_elements(workload, job.train) - optimizer_state_elements(dense, job.train)
    shared = element_bytes * (tables + tables_state) / plan.world_size
    workload = dense
    rounds = job.model.factory is None
    trained = element_bytes * workload.parameters * (workload.trainable_share if rounds else 1.0)
    weights = weight_bytes(workload, plan, casts_frozen_weights=rounds)
    frozen = weights - element_bytes * workload.parameters * workload.trainable_share
    saved = weights - frozen
    saved += element_bytes * optimizer_state_elements(workload, job.train)
    if job.train.weight_average > 0:
        saved += trained
    synchronization = plan.synchronization
    if (
        synchronization is not None and synchronization.has_local_weights
    ):  # each site's own states, and the shared outer ones
        frozen *= synchronization.sites
        saved = synchronization.sites * saved + trained * (1 + (synchronization.momentum > 0))
    elif synchronization is not None:
        saved += synchronization.staleness * trained
    # Ranks of one node that hold equal parts write them once.
    ranks_per_node = plan.world_size // job.cluster.nodes
    parts = max(plan.world_size // plan.replicate_group_size, ranks_per_node, 1)
    traits = FrameworkTraits(
        casts_frozen_weights=rounds,
        shared_memory_nodes=0 if job.parallel.collectives == "gloo" else job.cluster.nodes,
    )
    frozen_parts = (
        max(plan.pp * plan.tp, ranks_per_node, 1) if traits.replicates_frozen_weights(plan) else parts
    )
    rank_parameters = workload.parameters / plan.tp / plan.pp
    feedback = error_feedback_bytes(
        plan, rank_parameters, rank_parameters / plan.shard_group_size
    )  # differs on every rank
    return saved / parts + frozen / frozen_parts + feedback + shared


def has_partner_node(job: Job) -> bool:
    """Return whether each node's in-memory checkpoints also have a copy on a partner node."""
    return job.cluster.nodes > 1 and job.checkpoint.partner is not False


def interval_steps(cost_seconds: float, step_seconds: float) -> int:
    """Return the fewest steps between in-memory checkpoints that cost at most `MAX_OVERHEAD_SHARE`."""
    return max(math.ceil(cost_seconds / (MAX_OVERHEAD_SHARE * step_seconds)), 1)
