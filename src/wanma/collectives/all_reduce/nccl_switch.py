"""NCCL's switch of its all-reduce algorithm: the environment variable that a plan sets in its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from wanma.job.plan.plan import Plan

NCCL_ALGORITHM_VARIABLE = "NCCL_ALGO"
"""Environment variable that restricts NCCL's choice among its algorithms."""


def nccl_algorithm(plan: Plan) -> str:
    """Return the value of NCCL_ALGO for `plan`; empty where NCCL chooses.

    It names the collective: a bare `tree` would leave all-gathers without an algorithm (NCCL 2.24 and later).
    """
    if plan.device != "cuda" or plan.all_reduce == "backend":
        return ""
    return f"allreduce:{plan.all_reduce}"


@contextmanager
def nccl_algorithm_environment(algorithm: str) -> Iterator[None]:
    """Set NCCL's algorithm for the process groups that are made inside; the former value returns afterwards.

    NCCL reads the variable when it makes a communicator.

    Args:
        algorithm: result of `nccl_algorithm`; empty: the environment's value stays.
    """
    former = os.environ.get(NCCL_ALGORITHM_VARIABLE)
    if algorithm:
        os.environ[NCCL_ALGORITHM_VARIABLE] = algorithm
    try:
        yield
    finally:
        if algorithm and former is None:
            os.environ.pop(NCCL_ALGORITHM_VARIABLE, None)
        elif algorithm and former is not None:
            os.environ[NCCL_ALGORITHM_VARIABLE] = former
