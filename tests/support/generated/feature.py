"""Features of a module of one's own, as source: blocks, lines of the model's own class, and what is done to a
finished model. In them x is (rows, T, D); `task` is (rows,) int64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature's source, by the place where it stands."""

    block: str = ""
    """Body of a class of its own, from x to x."""
    init: str = ""
    """Lines of the model's constructor, after its blocks."""
    forward: str = ""
    """Lines of the model's forward, after its blocks."""
    end: str = ""
    """Lines of the model's forward, from `output` to `output`."""
    setup: str = ""
    """Lines that change the finished `model`."""
    methods: str = ""
    """Methods of the model's class."""
    whole_batch: bool = False
    """Its result is defined over the batch of a forward, so that a plain loop's is over the global batch."""
    draws: bool = False
    """It draws random numbers, which a plain loop would take from a generator."""
    parts: bool = False
    """The samples decide which of its modules are called."""
    layers: bool = False
    """Batch normalization: several micro-batches need `model.batch_norm_group`."""


def block(init: str, forward: str, more: str = "", **traits: bool) -> Feature:
    """A module of its own: lines of its constructor, and of its forward, whose last is an expression."""
    *lines, last = forward.strip().split("\n")
    body = ["def __init__(self):", "    super().__init__()"]
    body += [f"    {line}" for line in init.strip().split("\n")]
    body += ["", "def forward(self, x):", *(f"    {line}" for line in lines), f"    return {last.strip()}"]
    if more:
        body += ["", *more.strip().split("\n")]
    return Feature(block="\n".join(body), **traits)


LINEAR = "self.linear = nn.Linear(D, D)"
