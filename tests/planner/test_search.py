"""The optimum that a search finds is the optimum of the model, and what it leaves out could not have won."""

from __future__ import annotations

import pickle
from dataclasses import replace

from support.problems import SMALL, job, problem
from wanma.planner.search import search
from wanma.planner.space import Space


def test_where_nothing_fits_it_says_which_plan_comes_nearest() -> None:
    given = problem(memory_bytes=1e6)
    space = replace(Space.of_job(job({"pp": 1, "tp": 1}), given.cluster, SMALL), devices=(8,))
    found = search(given, space)
    assert found.candidates == () == found.pareto
    assert found.nearest is not None
    assert found.nearest.forecast.step is not None
    assert found.pruned["memory"] == found.considered


def test_an_outcome_is_pure_data() -> None:
    given = problem()
    space = replace(Space.of_job(job({"pp": 1, "tp": 1, "cp": 1}), given.cluster, SMALL), devices=(2,))
    found = search(given, space)
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.best is not None
