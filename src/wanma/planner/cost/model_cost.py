"""Layer costs of a model, in its order: layers before its blocks, groups of equal blocks, layers after.

A layer's cost depends on the few settings of a plan in `pieces_key`; stages are composed of layers by others.
A search therefore computes layer costs once for many plans. Pure functions, without torch.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import PartTime
from wanma.planner.cost.offload import is_moving
from wanma.planner.cost.step import Stage
from wanma.planner.pipeline.schedules import blocks_of_stages


class Blocks(NamedTuple):
    """Group of equal consecutive blocks."""

    part: PartTime
    """Cost of one block."""
    number: int
    """Number of these blocks in the whole model."""
    parameters: float
    """Parameters of one block, before `tp`, on one rank of `ep`."""


class End(NamedTuple):
    """Layer outside the repeated blocks, such as an embedding or a head."""

    part: PartTime
    parameters: float


class Pieces(NamedTuple):
    """Layer costs of a model, in its order."""

    before: tuple[End, ...]
    blocks: tuple[Blocks, ...]
    after: tuple[End, ...]


def pieces_key(plan: Plan) -> tuple[object, ...]:
    """Return the key of plans with equal layer costs, for one model, hardware model and framework."""
    split = (plan.tp, plan.cp, plan.ep, plan.sequence_parallel, plan.cp_method, plan.pp > 1)
    return (*split, plan.micro_batch, plan.recompute, plan.compile, plan.precision, plan.fp8, is_moving(plan))


def counts_of_stages(pieces: Pieces, plan: Plan) -> list[tuple[int, ...]]:
    """Return the number of blocks of each group in every stage."""
    ends = list(accumulate(kind.number for kind in pieces.blocks))
    found, start = [], 0
    for size in blocks_of_stages(ends[-1] if ends else 0, plan):
        stop = start + size
        found.append(
            tuple(
                max(min(stop, end) - max(start, end - kind.number), 0)
                for kind, end in zip(pieces.blocks, ends, strict=True)
            )
        )
        start = stop
    return found


def stages_of(pieces: Pieces, plan: Plan) -> list[Stage]:
    """Return the plan's stages in the order of the model; equal ones are one object."""
    stages: dict[object, Stage] = {}
    found = []
    for number, counts in enumerate(counts_of_stages(pieces, plan)):
        key = (counts, number == 0, number == plan.stages - 1)
        if key not in stages:
            stages[key] = _stage(pieces, plan, *key)
        found.append(stages[key])
    return found


def _stage(pieces: Pieces, plan: Plan, counts: tuple[int, ...], is_first: bool, is_last: bool) -> Stage:
    """Return the stage that holds `counts` blocks of each group."""
    held = [(kind, count) for kind, count in zip(pieces.blocks, counts, strict=True) if count]
    ends = (*(pieces.before if is_first else ()), *(pieces.after if is_last else ()))
    total = sum(counts)
    return Stage(
        tuple((kind.part, count, kind.parameters) for kind, count in held),
        len(plan.recomputed(total)) / total if total else 0.0,
        tuple((end.part, end.parameters) for end in ends),
        sum(count * kind.parameters for kind, count in held) + sum(end.parameters for end in ends),
    )
