"""Mesh plans of a heterogeneous cluster: one device mesh with uneven batch shares or uneven stages.

The runtime executes them. A placed plan is a mesh plan where its replicas differ only in their devices and
batch shares, and where the ranks, in the order of the mesh, fall on the nodes in the order of the cluster.
Pure functions, without torch.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace

from wanma.job.plan.plan import Plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware
from wanma.planner.heterogeneous.placement_search import search_placements
from wanma.planner.heterogeneous.replica_shapes import HeterogeneousSpace
from wanma.planner.search.result import Candidate, SearchResult, build_pareto_front


def as_mesh_plan(plan: Plan, hardware: HeterogeneousHardware) -> Plan | str:
    """Return the mesh plan that equals a placed plan, or the reason that there is none.

    Replicas that shard the optimizer state within their group then shard it over all groups: each device
    holds less than was placed.
    """
    shapes = {
        (tuple(place.tp for place in replicas.places), replicas.stage_cuts) for replicas in plan.placement
    }
    if len(shapes) > 1:
        return "replicas with different stages or tp are not supported yet"
    if len({(replicas.micro_batch, replicas.recompute) for replicas in plan.placement}) > 1:
        return "replicas with different micro-batches or recompute are not supported yet"
    places = plan.placement[0].places
    if len({place.tp for place in places}) > 1:
        return "stages with different tp are not supported yet"
    if len(places) > 1 and len(plan.placement) > 1:
        return "several kinds of replicas that each span several devices are not supported yet"
    if reason := _rank_order_mismatch_reason(plan, hardware):
        return reason
    shares = _shares_in_node_order(plan)
    sharded = plan.shard != "none" and plan.dp_replicate > 1
    return replace(
        plan,
        placement=(),
        dp_replicate=1 if sharded else plan.dp_replicate,
        dp_shard=plan.dp_replicate if sharded else 1,
        shard=plan.shard if sharded else "none",
        micro_batch=plan.placement[0].micro_batch,
        recompute=plan.placement[0].recompute,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        stage_cuts=plan.placement[0].stage_cuts,
        batch_shares=shares if len(set(shares)) > 1 else (),
    )


def search_mesh_plans(
    problem: PlanningProblem, hardware: HeterogeneousHardware, base_plan: Plan, *, keep: int = 10
) -> SearchResult:
    """Return the best mesh plans over all pools of a cluster, with batch shares in proportion to speed.

    Args:
        base_plan: settings of every replica, as in `search_placements`.

    Raises:
        JobError: as in `search_placements`.
    """
    began = time.perf_counter()
    candidates: list[Candidate] = []
    considered, pruned, options = 0, Counter[str](), HeterogeneousSpace()
    # One value of each at a time: the search would choose different ones by kind, which no mesh allows.
    for tp, micro_batch, recompute in itertools.product(options.tp, options.micro_batch, options.recompute):
        space = HeterogeneousSpace((tp,), (1,), (micro_batch,), (recompute,), ("optimizer",))
        search_result = search_placements(problem, hardware, base_plan, space, keep=keep)
        considered += search_result.plan_count
        pruned.update(search_result.pruned)
        for candidate in search_result.candidates:
            grid = as_mesh_plan(candidate.plan, hardware)
            if len(candidate.plan.placement) > 1 and not isinstance(grid, str):
                candidates.append(Candidate(grid, candidate.forecast))
    candidates.sort(key=lambda candidate: candidate.seconds)
    seconds = time.perf_counter() - began
    return SearchResult(
        tuple(candidates[:keep]), build_pareto_front(candidates), None, considered, dict(pruned), seconds
    )


def with_mesh_plans(search_result: SearchResult, hardware: HeterogeneousHardware) -> SearchResult:
    """Return the plans of a search, with placed plans converted to mesh plans where possible."""

    def convert(candidate: Candidate) -> Candidate:
        grid = as_mesh_plan(candidate.plan, hardware)
        return candidate if isinstance(grid, str) else replace(candidate, plan=grid, unsupported_reason=None)

    return replace(
        search_result,
        candidates=tuple(map(convert, search_result.candidates)),
        pareto_front=tuple(map(convert, search_result.pareto_front)),
    )


def _shares_in_node_order(plan: Plan) -> tuple[int, ...]:
    """Return the batch shares of the replicas, those on the cluster's first nodes first."""
    first, groups = 0, []
    for replicas in plan.placement:
        groups.append((replicas.places[0].node, plan.batch_shares[first : first + replicas.count]))
        first += replicas.count
    return tuple(share for _, shares in sorted(groups) for share in shares)


def _rank_order_mismatch_reason(plan: Plan, hardware: HeterogeneousHardware) -> str | None:
    """Return the reason that the mesh's ranks fall on other nodes than placed; None if they do not."""
    machines = [
        number
        for number, kind in enumerate(hardware.pools)
        for _ in range(kind.device_count // kind.devices_per_node)
    ]
    ranks_per_node, remainder = divmod(plan.world_size, len(machines))
    is_full = any(ranks_per_node > hardware.pools[kind].devices_per_node for kind in machines)
    if remainder or is_full or ranks_per_node % plan.tp:
        return f"{plan.world_size} ranks do not fill {len(machines)} nodes with equally many ranks each"
    placed_kinds = [
        place.node
        for stage in range(plan.pp)
        for replicas in sorted(plan.placement, key=lambda replicas: replicas.places[0].node)
        for place in [replicas.places[stage]] * (replicas.count * plan.tp)
    ]
    if placed_kinds != [kind for kind in machines for _ in range(ranks_per_node)]:
        return "its stages are in another order than the nodes of the cluster"
    return None
