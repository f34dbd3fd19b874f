"""A case: a module, loss, data and optimizer of one's own, and their training. Its source is a program."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from support.generated.features import BLOCKS, FEATURES, ROOT, SETUP
from support.generated.losses import LOSSES
from support.generated.optimizers import BUILT_IN, OPTIMIZERS

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole batch": {"micro_batch": 8},
    "micro-batches": {"micro_batch": 2},
    "recomputing": {"micro_batch": 2, "recompute": "full"},
    "replicas": {"dp_replicate": 2, "micro_batch": 2},
    "ZeRO 1": {"dp_shard": 2, "shard": "optimizer", "micro_batch": 2},
    "ZeRO 2": {"dp_shard": 2, "shard": "gradients", "micro_batch": 2},
    "ZeRO 3": {"dp_shard": 2, "shard": "parameters", "micro_batch": 2},
    "ZeRO 3, recomputing": {"dp_shard": 2, "shard": "parameters", "micro_batch": 2, "recompute": "full"},
    "replicas, at once": {"dp_replicate": 2, "micro_batch": 4},
    "ZeRO 3, at once": {"dp_shard": 2, "shard": "parameters", "micro_batch": 4},
    "pipeline": {"pp": 2, "micro_batch": 2},
    "gpipe, recomputing": {"pp": 2, "micro_batch": 2, "schedule": "gpipe", "recompute": "full"},
    "replicas of ZeRO 2": {"dp_replicate": 2, "dp_shard": 2, "shard": "gradients", "micro_batch": 2},
    "pipeline, one by one": {"pp": 2, "micro_batch": 1},
    "replicas, one by one": {"dp_replicate": 2, "micro_batch": 1},
    "replicas of pipelines": {"dp_replicate": 2, "pp": 2, "micro_batch": 2},
}
"""Sections `[parallel]`."""

OUTPUTS = {
    "tensor": ("output", "y"),
    "tuple": ("(output, x)", "y[0]"),
    "list": ("[output, x]", "y[0]"),
    "dict": ("{'logits': output, 'x': x}", "y['logits']"),
    "dataclass": ("Output(logits=output)", "y.logits"),
    "namedtuple": ("Pair(output, x)", "y.logits"),
}
"""Output of forward, and the way in which a loss of one's own takes its logits."""

DATA = {
    "rows": "Sent = Data",
    "own_generator": """class Sent(Data):
    generator = np.random.default_rng(0)

    def __getitem__(self, index):
        x, *others = super().__getitem__(index)
        return x * float(self.generator.random()), *others""",
    "stream_drawn_at_once": """class Sent:
    def __iter__(self):
        rows = Data()
        return map(rows.__getitem__, torch.randperm(len(rows)).tolist())""",
}
"""Source of the data of a run, `Sent`, of the rows of `Data`."""

Entry = Literal["train", "session"]


@dataclass(frozen=True)
class Case:
    """One module of one's own under one layout."""

    features: tuple[str, ...] = ()
    """Names in `FEATURES`; blocks in their order."""
    loss: str = "squares"
    layout: str = "micro-batches"
    entry: Entry = "train"
    collectives: str = "gloo"
    output: str = "tensor"
    precision: str = "fp64"
    is_sequential: bool = False
    global_batch: int = 8
    steps: int = 3
    validates: bool = False
    inputs: str = "float32"
    """Data type of the samples."""
    weight_decay: float = 0.1
    data: str = "rows"
    """Name in `DATA`."""
    optimizer: str = BUILT_IN
    """Name in `OPTIMIZERS`."""
    patches_class: bool = False
    """The program has patched a class of torch before it trains."""

    def __str__(self) -> str:
        default = Case()
        given = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        )
        return f"Case({', '.join(given)})"

    @property
    def parallel(self) -> dict[str, Any]:
        return {**LAYOUTS[self.layout], "collectives": self.collectives}

    @property
    def ranks(self) -> int:
        sizes = LAYOUTS[self.layout]
        return int(sizes.get("pp", 1) * sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1))

    @property
    def is_whole(self) -> bool:
        """One forward has the global batch."""
        return self.layout == "whole batch"

    @property
    def couples_samples(self) -> bool:
        """A forward over a part of the batch is not a part of the forward over the batch."""
        return LOSSES[self.loss].whole_batch or any(FEATURES[name].whole_batch for name in self.features)

    @property
    def draws(self) -> bool:
        """It draws random numbers by other means than dropout modules."""
        return self.data == "stream_drawn_at_once" or any(FEATURES[name].draws for name in self.features)

    @property
    def statistics_group(self) -> int | None:
        if not any(FEATURES[name].layers for name in self.features):
            return None
        return 8 if self.is_whole else 2

    def job(self, name: str = "case") -> dict[str, Any]:
        group = self.statistics_group
        validates = {} if not self.validates else {"validation_samples": 5}
        return {
            "model": {
                "factory": "own:Model",
                **({"batch_norm_group": group} if group else {}),
            },
            "data": {"validation_fraction": 0.0, "prefetch": 1},
            "train": {
                "steps": self.steps,
                "global_batch": self.global_batch,
                "precision": self.precision,
                "learning_rate": 1e-2,
                "epsilon": 1e-3,
                "parameter_groups": [{"match": "*", "weight_decay": self.weight_decay}],
                **validates,
            },
            "parallel": self.parallel,
            "checkpoint": {"every_steps": 0},
            "observe": {"console": "quiet", "name": name},
        }


def source(case: Case) -> str:
    """The program's own part: `make`, `Data`, `Own`, `loss`, and what a plain loop computes, `plain`."""
    blocks = [name for name in case.features if name in BLOCKS]
    loss = LOSSES[case.loss]
    returned, taken = OUTPUTS[case.output]
    classes = "\n\n".join(
        f"class {_camel(name)}(nn.Module):\n{_indented(BLOCKS[name].block)}" for name in dict.fromkeys(blocks)
    )
    model = _sequential(blocks, loss.positions) if case.is_sequential else _model(case, blocks, returned)
    setup = [SETUP[name].setup for name in case.features if name in SETUP]
    taken_in = "" if case.output == "tensor" else f"y = {taken}\n"
    second = "" if case.is_sequential else "self.task[index], "
    return f"""{_HEAD}
{classes}


{model}


def make():
    torch.manual_seed(3)
    model = {"sequence()" if case.is_sequential else "Model()"}
{_indented(chr(10).join([*setup, "return model"]))}


class Data:
    def __init__(self, size=40):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, T, D, generator=g).to(torch.{case.inputs})
        self.task = torch.tensor([0, 0, 1, 0, 0, 1, 0, 2, 0, 0]).repeat(size // 10)
        self.y = {loss.targets}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], {second}self.y[index]


{DATA[case.data]}


{OPTIMIZERS[case.optimizer]}


def loss(y, targets):
{_indented(taken_in + loss.loss)}


def plain(y, targets):
{_indented(taken_in + loss.plain)}
"""


def program(case: Case) -> types.ModuleType:
    """The module of `source`. Nobody can import it: its classes travel by value, as a notebook's do."""
    module = types.ModuleType("own_program")
    sys.modules.pop("own_program", None)
    exec(compile(source(case), f"<{case}>", "exec"), module.__dict__)
    return module


@contextmanager
def patched(case: Case) -> Iterator[None]:
    """The user's process, whose classes are patched if the case says so."""
    forward = nn.Linear.forward
    if case.patches_class:
        nn.Linear.forward = lambda self, x: 1.5 * forward(self, x)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]


_HEAD = """\
import copy
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import wanma

T, D, C = 4, 6, 3
ENTROPY = nn.CrossEntropyLoss(reduction="none")
ENTROPY_BUT_255 = nn.CrossEntropyLoss(reduction="none", ignore_index=255)
Pair = namedtuple("Pair", ["logits", "x"])


@dataclass
class Output:
    logits: torch.Tensor


class Doubled(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


class Halved(nn.Dropout):
    def forward(self, x):
        return super().forward(x) / 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def keep_lower(parameter):
    parameter.grad.copy_(parameter.grad.tril())


def scaled(y):
    if torch.is_tensor(y):
        return y * 1.5
    if isinstance(y, dict):
        return {key: value * 1.5 for key, value in y.items()}
    if isinstance(y, Output):
        return Output(y.logits * 1.5)
    return type(y)(*(v * 1.5 for v in y)) if hasattr(y, "_fields") else type(y)(v * 1.5 for v in y)

"""


def _sequential(blocks: list[str], positions: bool) -> str:
    made = [f'("block{index}", {_camel(name)}()),' for index, name in enumerate(blocks)]
    mean = [] if positions else ['("mean", Mean()),']
    parts = ['("first", nn.Linear(D, D)),', *made, *mean, '("head", nn.Linear(D, C)),']
    return "def sequence():\n    from collections import OrderedDict\n\n" + _indented(
        "return nn.Sequential(OrderedDict([\n" + _indented("\n".join(parts)) + "\n]))"
    )


def _model(case: Case, blocks: list[str], returned: str) -> str:
    root = [ROOT[name] for name in case.features if name in ROOT]
    loss = LOSSES[case.loss]
    init = [
        "super().__init__()",
        "self.first = nn.Linear(D, D)",
        f"self.blocks = nn.ModuleList([{', '.join(f'{_camel(name)}()' for name in blocks)}])",
        "self.head = nn.Linear(D, C)",
        *(feature.init for feature in root if feature.init),
    ]
    forward = [
        "x = self.first(x)",
        "for block in self.blocks:\n    x = block(x)",
        *(feature.forward for feature in root if feature.forward),
        f"output = self.head({'x' if loss.positions else 'x.mean(1)'})",
        *(feature.end for feature in root if feature.end),
        *([loss.end] if loss.end else []),
        f"return {returned}",
    ]
    methods = "".join(f"\n\n{_indented(feature.methods)}" for feature in root if feature.methods)
    return (
        "class Model(nn.Module):\n    def __init__(self):\n"
        + _indented("\n".join(init), 8)
        + "\n\n    def forward(self, x, task):\n"
        + _indented("\n".join(forward), 8)
        + methods
    )


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _indented(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line else line for line in text.split("\n"))
