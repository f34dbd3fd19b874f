"""Number of loader threads of a rank where the job leaves it open (`data.workers = "auto"`).

The number never changes a sample or its order: those follow from the seed and the position alone. Pure
functions, without torch.
"""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.planner.forecast.data_loading import LoadCost, load_cost, most_workers
from wanma.planner.forecast.problem import PlanningProblem

HEADROOM = 1.25
"""Factor by which loading is to be faster than the device: samples differ in size."""
SAME_COST = 1.05
"""Factor between two costs that count as equal."""


def choose_workers(problem: PlanningProblem, plan: Plan, consuming_seconds: float) -> int:
    """Return the loader threads of a rank: the job's number, or the least that keeps its device busy.

    Where none does, it is the least number that is as fast as the cores of a rank allow.

    Args:
        problem: the planning problem.
        plan: the plan.
        consuming_seconds: seconds of a step that never waits for data.
    """
    data = problem.job.data
    most = most_workers(problem, plan, data)
    if data.workers != "auto" or most == 1:
        return data.worker_count
    best = load_cost(problem, plan, workers=most)
    for workers in range(1, most):
        cost = load_cost(problem, plan, workers=workers)
        if _is_enough(cost, best, consuming_seconds):
            return workers
    return most


def _is_enough(cost: LoadCost, best: LoadCost, consuming_seconds: float) -> bool:
    """Return True if loading keeps up, or is as fast as the best, from the store and from the node."""
    target = consuming_seconds / HEADROOM
    pairs = [(cost.local_seconds, best.local_seconds)]
    if cost.store_share:
        pairs.append((cost.store_seconds, best.store_seconds))
    return all(seconds <= max(target, SAME_COST * least) for seconds, least in pairs)
