"""Values that the host reads from tensors in a step: a GPU is waited for once a step, whatever is seen."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.own import PartlyLabelled, Tagger, seeded
from support.ranks import run_here
from support.text import REAL_TEXT
from wanma.job.plan.plan import Plan
from wanma.training.run import trainer

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__", "numpy", "cpu")
"""Methods of a tensor by which the host waits for its values."""
WAITING_OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave")
"""Operators for whose result the host of a GPU waits: a number, or a shape."""
GENERATOR_STATE = "has_drawn"
"""Function that reads the state of torch's CPU generator, which is on the host."""
STEPS = (4, 12)
LEAST = {"log_every_steps": 1_000_000}
ALL = {"tensorboard": True, "log_every_steps": 1, "gradient_norms_every_steps": 1}
EXPERTS = {
    "model": {
        "family": "decoder", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 32,
        "experts": 4, "experts_per_token": 2, "expert_feed_forward": 8,
    },
    "data": {"text": [REAL_TEXT], "sequence_length": 16},
}  # fmt: skip
TAGGER = {"model": {"factory": "support.own:Tagger"}}

Measure = Callable[[dict[str, Any], dict[str, Any]], Counter[str]]
"""Function from a job and its section [observe] to the reads of a step, by the function that reads."""


class _Operators(TorchDispatchMode):
    """Counter of operators that wait."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name in ("index", "index_put_") else ()
        if name in WAITING_OPERATORS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self._seen[f"operator {name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measure:
    """Count reads in this thread in runs of one rank, without those of the start and of the end."""
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

    def measure(job: dict[str, Any], observe: dict[str, Any]) -> Counter[str]:
        counts = []
        for steps in STEPS:
            seen.clear()
            whole = job | {
                "train": {"steps": steps, "global_batch": 8},
                "checkpoint": {"every_steps": 0},
                "observe": observe,
            }
            if job is EXPERTS:
                whole["data"] = job["data"] | {"cache": str(tmp_path / "cache")}
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            objects = {} if job is EXPERTS else {"model": seeded(Tagger), "data": PartlyLabelled()}
            with _Operators(seen):
                assert len(run_here(folder, whole, Plan(micro_batch=4), objects).steps) == steps
            counts.append(Counter(seen))
        more = counts[1] - counts[0]
        del more[GENERATOR_STATE]
        wrong = {name: count for name, count in more.items() if count % (STEPS[1] - STEPS[0])}
        assert not wrong, "as many in every step"
        return Counter({name: count // (STEPS[1] - STEPS[0]) for name, count in more.items()})

    return measure


@pytest.mark.parametrize("observe", [{}, ALL], ids=["default", "all"])
def test_a_step_is_read_once(reads_of_a_step: Measure, observe: dict[str, Any]) -> None:
    assert reads_of_a_step(TAGGER, observe) == {"reduce_step_totals": 1}


def test_experts_are_observed_without_a_further_reading(reads_of_a_step: Measure) -> None:
    dispatch = {"counts_to_list": 2 * 2}  # the model's own, in each layer and micro-batch
    for observe in (LEAST, ALL):
        assert reads_of_a_step(EXPERTS, observe) == {"reduce_step_totals": 1, **dispatch}


@pytest.mark.parametrize(
    ("read", "name"), [(float, "<lambda>"), (lambda one: torch.full((), one), "operator _local_scalar_dense")]
)
def test_a_reading_of_an_observer_is_noticed(
    reads_of_a_step: Measure, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any], name: str
) -> None:
    monkeypatch.setattr(trainer, "peak_rank_memory_bytes", lambda _: bool(read(torch.ones(())) is None))
    assert reads_of_a_step(TAGGER, LEAST)[name] == 1
