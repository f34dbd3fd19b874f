"""The best plans of a space: every plan is looked at, or left out by a bound that it cannot beat.

Pure functions, without torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from wanma.job.plan import AXES, Plan
from wanma.planner.candidates import Candidate, Found, pareto_front
from wanma.planner.forecast import forecast, memory
from wanma.planner.problem import Problem
from wanma.planner.space import SHARDS, Space, plans


def search(problem: Problem, space: Space, *, keep: int = 20) -> Found:
    """The fastest plans that fit, and the front of memory and time.

    Args:
        keep: most candidates, each of another layout: sizes of the axes and what is sharded.

    Returns:
        of each layout its fastest plan; of plans that take the same time, the simplest, then the smallest.
    """
    began = time.perf_counter()
    considered, pruned = 0, Counter[str]()
    fitting: list[Candidate] = []
    nearest: Candidate | None = None
    for plan in plans(space, problem.workload):
        considered += 1
        needed = memory(problem, plan)
        if needed.memory_bytes > problem.memory_bytes:
            pruned["memory"] += 1
            if not fitting and (nearest is None or needed.memory_bytes < nearest.memory_bytes):
                nearest = Candidate(plan, needed)
            continue
        fitting.append(Candidate(plan, forecast(problem, plan)))
    if nearest is not None:
        nearest = None if fitting else replace(nearest, forecast=forecast(problem, nearest.plan))
    return Found(
        best_of_layouts(fitting)[:keep],
        pareto_front(fitting),
        nearest,
        considered,
        dict(pruned),
        time.perf_counter() - began,
    )


def best_of_layouts(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Of each layout its fastest plan, the fastest layout first."""
    best: dict[tuple[object, ...], Candidate] = {}
    for one in sorted(candidates, key=rank_of):
        best.setdefault(layout_of(one.plan), one)
    return tuple(best.values())


def layout_of(plan: Plan) -> tuple[object, ...]:
    """What a user would call another layout."""
    return (*(getattr(plan, axis) for axis in AXES), plan.ep, plan.shard)


def rank_of(one: Candidate) -> tuple[object, ...]:
    """The faster plan first; where times are the same, the simpler one, then the smaller."""
    return (round(one.seconds, 12), *complexity(one.plan), one.memory_bytes, str(one.plan.to_json()))


def complexity(plan: Plan) -> tuple[object, ...]:
    """How much a plan asks of the machines and of whoever reads it."""
    split = sum(getattr(plan, axis) > 1 for axis in (*AXES, "ep"))
    extras = (plan.recompute != "none") + plan.sequence + plan.compile + (plan.virtual_stages > 1)
    return plan.world_size, split, extras, SHARDS.index(plan.shard)
