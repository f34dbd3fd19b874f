"""Switches of arithmetic, and functions whose first call must not be made by several threads at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.training.run.numerics import VECTOR_MATH_OPERATORS, configure_numerics


class Calls(TorchDispatchMode):
    """Counts operators by name, element type and number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, torch.dtype, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.seen[func.overloadpacket.__name__, args[0].dtype, args[0].numel()] += 1
        return func(*args, **(kwargs or {}))


def test_vector_math_is_first_called_on_one_element_in_both_precisions() -> None:
    job = to_job({"model": {"family": "decoder", "layers": 1, "hidden": 8, "heads": 1}})
    threads = torch.get_num_threads()
    with Calls() as calls:
        configure_numerics(job, Plan(threads_per_rank=threads))
    expected = {
        (name, dtype, 1) for name in VECTOR_MATH_OPERATORS for dtype in (torch.float32, torch.float64)
    }
    assert expected <= calls.seen.keys()
