"""Process-wide settings of torch's arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job

VECTOR_MATH_OPERATORS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2",
    "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Operators that torch gives to Intel's vector math library (ATen/cpu/vml.h)."""


def configure_numerics(job: Job, plan: Plan) -> None:
    """Apply the settings of the job and the plan: threads, determinism, choice of kernels."""
    torch.set_num_threads(plan.threads_per_rank)
    warm_up_vector_math()
    if job.train.deterministic:
        if plan.compile:
            torch.use_deterministic_algorithms(True)
        else:
            torch.set_deterministic_debug_mode("error")  # the same, without the import of the compiler
        if plan.device == "cuda":
            # Without it cuBLAS refuses to be deterministic; read when its first handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if plan.device == "cuda":
        torch.backends.cudnn.benchmark = not job.train.deterministic


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Let this thread and the threads that it starts take numbers below 1.2e-38 as zero, as TensorFlow does.

    Processors compute with denormal numbers tens of times more slowly, and a model makes the more of them the
    surer it is: gradients of the softmax, states of an optimizer, weights that decay. Steps became slower as
    training went on (https://github.com/pytorch/pytorch/issues/19651).
    """
    for dtype in (np.float32, np.float64):
        np.finfo(dtype)  # NumPy keeps it; before 2.4 it warns when it finds no denormal numbers
    was_set = float(torch.tensor(1e-39) * 1.0) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_set)


def warm_up_vector_math() -> None:
    """Call every function of the vector math library once, in one thread, before several do at once.

    The library (oneMKL 2024.2, in torch's wheels) chooses each function's kernel in its first call. Threads
    that are first together can get one of low accuracy for their share of that call
    (https://github.com/pytorch/pytorch/issues/188792): the loss of a process's first step differed by some
    1e-6 of itself in one run of about ten, and so a run that was resumed in a new process was not repeatable.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in VECTOR_MATH_OPERATORS:
            getattr(torch, name)(one)
