"""Switches of arithmetic, and functions whose first call must not be made by several threads at once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
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


COUNT_DENORMALS = """
import torch
from wanma.training.run.numerics import flush_denormals

def count():
    weight = torch.full((1_000_000,), 1e-30, requires_grad=True)
    (weight * 1e-10).sum().backward(torch.tensor(1e-30))
    return int((weight.detach() * 1e-10).count_nonzero()), int(weight.grad.count_nonzero())

torch.set_num_threads(2)
with flush_denormals():
    print(*count())
torch.set_num_threads(1)
print(*count())
"""


@pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="the processor cannot flush denormal numbers to zero"
)
def test_denormal_numbers_are_zero_in_all_threads_forward_and_backward() -> None:
    found = subprocess.run(
        [sys.executable, "-c", COUNT_DENORMALS], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["0", "0", "1000000", "1000000"]  # and afterwards as before
