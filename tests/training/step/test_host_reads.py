"""Values that the host reads from tensors in a step: a GPU is waited for once a step, whatever is seen."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from support.own import PartlyLabelled, Tagger, seeded
from support.ranks import run_here
from wanma.job.plan.plan import Plan

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__", "numpy", "cpu")
"""Methods of a tensor by which the host waits for its values."""


GENERATOR_STATE = "has_drawn"
"""Function that reads the state of torch's CPU generator, which is on the host."""
STEPS = (4, 12)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of these methods in this thread, by the function that calls."""
    seen: Counter[str] = Counter()
    here = threading.get_ident()

    def counted(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() == here:
                seen[sys._getframe(1).f_code.co_name] += 1
            return method(tensor, *arguments, **options)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    return seen


@pytest.mark.parametrize(
    ("observe", "expected"),
    [
        ({}, {"reduce_step_totals": 1}),
        ({"tensorboard": True, "log_every_steps": 1}, {"reduce_step_totals": 1}),
        ({"gradient_norms_every_steps": 1}, {"reduce_step_totals": 1, "measure": 1}),
    ],
    ids=["default", "observed", "norms by layer"],
)
def test_a_step_is_read_once(
    tmp_path: Path, reads: Counter[str], observe: dict[str, Any], expected: dict[str, int]
) -> None:
    counts = []
    for steps in STEPS:
        reads.clear()
        job = {
            "model": {"factory": "support.own:Tagger"},
            "train": {"steps": steps, "global_batch": 8},
            "checkpoint": {"every_steps": 0},
            "observe": observe,
        }
        objects = {"model": seeded(Tagger), "data": PartlyLabelled()}
        assert len(run_here(tmp_path / str(steps), job, Plan(micro_batch=4), objects).steps) == steps
        counts.append(Counter(reads))
    more = counts[1] - counts[0]  # without those of the start and of the end
    del more[GENERATOR_STATE]
    assert more == {name: (STEPS[1] - STEPS[0]) * count for name, count in expected.items()}
