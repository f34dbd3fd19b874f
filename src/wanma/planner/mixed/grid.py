"""Plans on unlike machines that the runtime can execute: one grid of equal ranks, with unlike shares of the
batch or with stages cut by what their devices compute.

A placed plan is such a grid where its replicas are alike but for their devices and what they do of the batch,
and where the ranks, in the grid's order, fall on the machines in the order of the cluster. Pure functions,
without torch.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from wanma.job.plan import Plan
from wanma.job.sections import Recompute
from wanma.planner.mixed.best import mixed_forecast, search_mixed
from wanma.planner.mixed.fleet import Fleet
from wanma.planner.mixed.options import MixedSpace
from wanma.planner.mixed.timing import MixedCosts
from wanma.planner.problem import Problem
from wanma.planner.search.candidates import Candidate, Found, pareto_front

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def as_grid(plan: Plan, fleet: Fleet) -> Plan | str:
    """The grid that a placed plan is; or why it is none.

    Micro-batches are as large as the smallest of the replicas' own. Replicas that share the optimizer's state
    with their like share it with all: each device then holds less than was placed.
    """
    unlike = {(tuple(place.tp for place in one.places), one.stage_cuts) for one in plan.placement}
    if len(unlike) > 1:
        return "replicas that differ by their devices (other stages, other tp) are not run yet"
    if len({one.recompute for one in plan.placement}) > 1:
        return "replicas that recompute unlike shares of their blocks are not run yet"
    places = plan.placement[0].places
    if len({place.tp for place in places}) > 1:
        return "stages of unlike tp are not run yet"
    if len(places) > 1 and len(plan.placement) > 1:
        return "several kinds of replicas that each span several devices are not run yet"
    if reason := _misplaced(plan, fleet):
        return reason
    shares = _in_order_of_machines(plan)
    sharded = plan.shard != "nothing" and plan.dp_replicate > 1
    return replace(
        plan,
        placement=(),
        dp_replicate=1 if sharded else plan.dp_replicate,
        dp_shard=plan.dp_replicate if sharded else 1,
        shard=plan.shard if sharded else "nothing",
        micro_batch=min(one.micro_batch for one in plan.placement),
        recompute=plan.placement[0].recompute,
        sequence=plan.sequence and plan.tp > 1,
        stage_cuts=plan.placement[0].stage_cuts,
        batch_shares=shares if len(set(shares)) > 1 else (),
    )


def search_grids(problem: Problem, fleet: Fleet, start: Plan, *, keep: int = 10) -> Found:
    """The best grids over all kinds of a fleet, whose ranks have shares of the batch in proportion to their
    speed.

    Args:
        start: as of `search_mixed`.

    Raises:
        JobError: as of `search_mixed`.
    """
    began = time.perf_counter()
    costs = MixedCosts(problem, fleet, replace(start, sequence=problem.job.parallel.sequence))
    found: list[Candidate] = []
    considered, pruned = 0, Counter[str]()
    for tp in MixedSpace().tp:
        for recompute in RECOMPUTES:
            space = MixedSpace(tp=(tp,), stages=(1,), recompute=(recompute,), shard=("optimizer",))
            of_space = search_mixed(problem, fleet, start, space, keep=keep)
            considered += of_space.considered
            pruned.update(of_space.pruned)
            found += [grid for one in of_space.candidates if (grid := _candidate(costs, one)) is not None]
    found.sort(key=lambda one: one.seconds)
    seconds = time.perf_counter() - began
    return Found(tuple(found[:keep]), pareto_front(found), None, considered, dict(pruned), seconds)


def gridded(found: Found, fleet: Fleet) -> Found:
    """Placed plans of a search, those that are a grid as such."""

    def turned(one: Candidate) -> Candidate:
        grid = as_grid(one.plan, fleet)
        is_same = len({replicas.micro_batch for replicas in one.plan.placement}) == 1
        if isinstance(grid, str) or not is_same:
            return one
        return replace(one, plan=grid, forecast_only=None)

    return replace(
        found, candidates=tuple(map(turned, found.candidates)), pareto=tuple(map(turned, found.pareto))
    )


def _candidate(costs: MixedCosts, placed: Candidate) -> Candidate | None:
    """A placed plan as a grid, forecast as it would run; None where it is none, or stays on one kind."""
    plan = placed.plan
    smallest = min(one.micro_batch for one in plan.placement)
    even = replace(
        plan,
        micro_batch=smallest,
        placement=tuple(replace(one, micro_batch=smallest) for one in plan.placement),
    )
    grid = as_grid(even, costs.fleet)
    if isinstance(grid, str) or len(plan.placement) < 2:
        return None
    return Candidate(grid, mixed_forecast(costs, even, costs.problem.global_batch), None)


def _in_order_of_machines(plan: Plan) -> tuple[int, ...]:
    """Shares of the replicas, those on the cluster's first machines first."""
    first, groups = 0, []
    for one in plan.placement:
        groups.append((one.places[0].node, plan.batch_shares[first : first + one.count]))
        first += one.count
    return tuple(share for _, shares in sorted(groups) for share in shares)


def _misplaced(plan: Plan, fleet: Fleet) -> str | None:
    """Why the grid's ranks do not fall on the machines that they were placed on; None where they do."""
    machines = [
        number for number, kind in enumerate(fleet.kinds) for _ in range(kind.devices // kind.on_each)
    ]
    on_each, odd = divmod(plan.world_size, len(machines))
    is_full = any(on_each > fleet.kinds[kind].on_each for kind in machines)
    if odd or is_full or on_each % plan.tp:
        return f"{plan.world_size} ranks do not fill {len(machines)} machines with as many on each"
    wanted = [
        place.node
        for stage in range(plan.pp)
        for one in sorted(plan.placement, key=lambda one: one.places[0].node)
        for place in [one.places[stage]] * (one.count * plan.tp)
    ]
    if wanted != [kind for kind in machines for _ in range(on_each)]:
        return "its stages follow each other in another order than the machines of the cluster"
    return None
