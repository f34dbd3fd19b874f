"""Cases of the study: runs with one fault each, its look-alikes among them, and healthy runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Trouble = Literal["", "cpu quota", "slow link", "slow disk", "killed"]
"""Fault from outside; empty: none, or one of the program's own."""


@dataclass(frozen=True)
class Case:
    """Run of the study."""

    name: str
    expected: str
    """Name of the first finding that is right; empty: none may be there."""
    words: tuple[str, ...] = ()
    """Words that its title, evidence or change must have."""
    job: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys that differ from those of every run, by section."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `programs.model`."""
    data: str = "Rows"
    """Class of the data."""
    trouble: Trouble = ""
    strikes: bool = False
    """The program's own fault begins after some steps."""
    seconds: float = 25.0
    """Time of training after the fault began."""
    is_script: bool = False
    """It is the loop of one's own."""


_HANG = {"cluster": {"hang_timeout_seconds": 8, "max_restarts": 0}}
_NO_RESTART = {"cluster": {"max_restarts": 0}}

FAULTS = (
    Case("CPU quota on one rank", "straggler", ("rank 1", "processors"), trouble="cpu quota"),
    Case("slow link", "communication", ("gradients",), trouble="slow link"),
    Case("slow disk", "slow_store", ("store",), data="Stored", trouble="slow disk"),
    Case("tokenizing in one thread", "slow_loading", ("work on its samples",), data="Tokenized"),
    Case(
        "micro-batch too small",
        "small_micro_batch",
        ("parallel.micro_batch",),
        job={"parallel": {"micro_batch": 1}, "train": {"global_batch": 64}},
        model={"width": 32, "blocks": 12},
        data="Narrow",
    ),
    Case(
        "NaN in the loss",
        "not_finite",
        ("operations", "logarithm"),
        job={"train": {"non_finite": "skip"}, "observe": {"gradient_norms_every_steps": 1}, **_NO_RESTART},
        model={"kind": "Breaking"},
        strikes=True,
        seconds=6,
    ),
    Case(
        "NaN in the backward of a layer",
        "not_finite",
        ("layers", "root"),
        job={"train": {"non_finite": "skip"}, "observe": {"gradient_norms_every_steps": 1}, **_NO_RESTART},
        model={"kind": "Steep"},
        strikes=True,
        seconds=6,
    ),
    Case(
        "NaN in a sample",
        "not_finite",
        ("samples",),
        job={"train": {"non_finite": "skip"}, "observe": {"gradient_norms_every_steps": 1}, **_NO_RESTART},
        data="Damaged",
        strikes=True,
        seconds=6,
    ),
    Case(
        "bad learning rate",
        "learning_rate",
        ("train.learning_rate",),
        job={"train": {"learning_rate": 0.1, "gradient_clip": 0, "warmup_steps": 300}},
    ),
    Case("stuck loader", "hang", ("__getitem__",), job=_HANG, data="Stuck", strikes=True, seconds=60),
    Case(
        "dead collective", "hang", ("rank 1",), job=_HANG, model={"kind": "Hanging"}, strikes=True, seconds=60
    ),
    Case(
        "error on one rank",
        "failure",
        ("rank 1", "4711"),
        job=_NO_RESTART,
        model={"kind": "Failing"},
        strikes=True,
    ),
    Case("killed from outside", "crash", ("killed",), trouble="killed", seconds=5),
    Case("leak", "leak", ("rank",), data="Leaking", strikes=True, seconds=90),
    Case(
        "a checkpoint at each step",
        "checkpoint",
        ("checkpoint.every_steps",),
        job={"checkpoint": {"every_steps": 1}},
        model={"width": 512},
        data="Wide",
    ),
    Case(
        "bubble",
        "bubble",
        ("micro-batches",),
        job={"parallel": {"pp": 2, "dp_replicate": 1, "schedule": "gpipe", "micro_batch": 32}},
    ),
    Case("a loop that does something else", "host", ("Python",), is_script=True),
)
"""Faults and their look-alikes."""
HEALTHY = (
    Case("replicas", "", seconds=90),
    Case("ZeRO 3", "", job={"parallel": {"dp_replicate": 1, "dp_shard": 2, "shard": "parameters"}}),
    Case("one rank", "", job={"parallel": {"dp_replicate": 1}}),
    Case("a larger batch", "", job={"train": {"global_batch": 256}}, model={"blocks": 3}),
    Case("a file that is read", "", job={"data": {"workers": 2}}, data="Stored"),
)
"""Runs without a fault, in which no alert may fire."""
