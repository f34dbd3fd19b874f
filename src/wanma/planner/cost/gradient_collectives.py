"""What it takes to sum gradients over ranks, whole or made smaller (`collectives.compression`).

For the plan's own method, as if it were every parameter's: which parameters a group of the plan's matches, no
forecast knows. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Compression
from wanma.planner.hardware_model.collective_time import (
    Algorithm,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    crosses,
    reduce_scatter_seconds,
)
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import streaming_seconds

CODEC_BYTES: Mapping[Compression, float] = MappingProxyType(
    {"bf16": 2.0, "fp16": 2 + 4 / 256, "int8": 1 + 4 / 256}
)
"""Of a gradient's element, in each of two phases; with a scale for each block of 256."""

CHOSEN_BYTES = 8.0
"""Of an element that top-k sends: its value and its place."""

MATRIX_SIDE = 1024.0
"""Of the matrices that PowerSGD makes thin. Larger ones cost less, and all of them next to nothing."""

MOVED_BYTES: Mapping[Compression, float] = MappingProxyType(
    {"bf16": 42.0, "fp16": 86.0, "int8": 122.0, "topk": 60.0, "powersgd": 32.0}
)
"""Of an element, read and written on the way: every operation of the method once through memory."""

CPU_INT8_BYTES = 66.0
"""Likewise where the codec is compiled for the processor: each way one pass over what is encoded, what comes
of it and what is lost; beside it gradients and what is owed are put into a buffer, and the sums taken out."""

KERNELS: Mapping[Compression, int] = MappingProxyType(
    {"bf16": 8, "fp16": 20, "int8": 24, "topk": 12, "powersgd": 12}
)
"""Operations for each bucket, about."""

TOGETHER_ELEMENTS, AT_ONCE = 1 << 21, 2
"""Of which codecs make messages, and how many of these are under way: as `collectives.compression`, which a
test compares."""

BY_MACHINES_BYTES, BY_MACHINES_KERNELS = 36.0, 8
"""Likewise of sums by machines, beside the method: gradients and what is owed are put into a buffer, and the
sums taken out of another."""

KEEP_ERRORS: frozenset[Compression] = frozenset({"int8", "topk", "powersgd"})
"""Methods with an error memory: as `collectives.compression`, which a test compares."""

LOOKED_AT: tuple[Compression, ...] = ("bf16", "int8")
"""What `auto` tries where a job allows compression. The other methods change training more than a step's time
tells, or less than these."""


@dataclass(frozen=True)
class Summing:
    """Of gradients on a machine.

    Args:
        whole_bytes: of an element that is not made smaller.
    """

    plan: Plan
    machine: Machine
    whole_bytes: float

    def all_reduce(self, group: Group, elements: float, algorithm: Algorithm | None = None) -> float:
        """Seconds until every rank has the sum of all of `elements`.

        Args:
            algorithm: of whole gradients; None: the fastest. Compressed ones go between machines alone where
                it is "hierarchical".
        """
        kind, machine = self._kind(), self.machine
        if group.size == 1 or not elements:
            return 0.0
        if kind == "nothing":
            return all_reduce_seconds(machine, group, elements * self.whole_bytes, algorithm)
        inside = group.inside(machine.links[0], machine.devices)
        by_machines = algorithm == "hierarchical" and 1 < inside < group.size
        is_cut = kind in CODEC_BYTES or (by_machines and kind == "topk")
        parts = self._parts(elements, is_cut=is_cut)
        if not by_machines:
            return self._in_flight(kind, group, elements, parts)
        within, whole = Group(inside, group.stride), elements * self.whole_bytes
        between = Group(-(-group.size // inside), group.stride * inside)
        scattered = reduce_scatter_seconds(machine, within, whole)
        gathered = all_gather_seconds(machine, within, whole)
        filled = streaming_seconds(machine.chip, elements * BY_MACHINES_BYTES, BY_MACHINES_KERNELS)
        return self._in_flight(kind, between, elements / inside, parts, scattered + gathered + filled)

    def _travelling(self, kind: Compression, group: Group, elements: float) -> float:
        """Messages of an all-reduce."""
        if kind == "topk":
            sent = elements * self.plan.compression_share * CHOSEN_BYTES
            return all_gather_seconds(self.machine, group, group.size * sent)
        if kind == "powersgd":
            return all_reduce_seconds(self.machine, group, elements * self._thin_bytes())
        sent = elements * CODEC_BYTES[kind]
        exchanged = all_to_all_seconds(self.machine, group, sent)
        return exchanged + all_gather_seconds(self.machine, group, sent)

    def _parts(self, elements: float, *, is_cut: bool) -> int:
        """In which all gradients of a rank go: buckets, or the one unit that FSDP2 has of replicas on a CPU;
        of what is cut, parts of these. FSDP2's other units come one by one: as if each were one part."""
        if self.plan.device != "cpu" or self.plan.shard not in ("nothing", "optimizer"):
            return 1
        together = self.plan.bucket_bytes / self.whole_bytes if self.plan.computes_with_state else elements
        return max(math.ceil(elements / (min(TOGETHER_ELEMENTS, together) if is_cut else together)), 1)

    def _in_flight(
        self, kind: Compression, group: Group, elements: float, parts: int, beside: float = 0.0
    ) -> float:
        """One part is computed with while another's messages travel, so that all but one part of the shorter
        of the two is hidden; and the latency of two is waited for at once. Within a machine messages take the
        cores that compute.

        Args:
            beside: seconds of computing, of all parts.
        """
        first = self._travelling(kind, group, 1.0)
        rest = parts * (self._travelling(kind, group, elements / parts) - first)
        computing = parts * self._moving(kind, elements / parts) + beside
        if not crosses(self.machine, group):
            return parts * first + rest + computing
        travelling = max(parts / AT_ONCE, 1.0) * first + rest
        return max(travelling, computing) + min(travelling, computing) / parts

    def reduce_scatter(self, group: Group, elements: float, *, compressed: bool) -> float:
        """Likewise until each has its part.

        Args:
            compressed: the plan's method is at work here: nobody else repeats these shards.
        """
        kind, machine = self._kind() if compressed else "nothing", self.machine
        if group.size == 1 or not elements:
            return 0.0
        if kind == "nothing":
            return reduce_scatter_seconds(machine, group, elements * self.whole_bytes)
        if kind == "powersgd":
            return all_reduce_seconds(machine, group, elements * self._thin_bytes()) + self._moving(
                kind, elements
            )
        each = self.plan.compression_share * CHOSEN_BYTES if kind == "topk" else CODEC_BYTES[kind]
        return all_to_all_seconds(machine, group, elements * each) + self._moving(kind, elements)

    def _kind(self) -> Compression:
        """What is small already stays as it is."""
        kind = self.plan.compression
        return "nothing" if CODEC_BYTES.get(kind, 0.0) >= self.whole_bytes else kind

    def _thin_bytes(self) -> float:
        return 4.0 * self.plan.compression_rank * 2 / MATRIX_SIDE

    def _moving(self, kind: Compression, elements: float) -> float:
        is_compiled = kind == "int8" and self.plan.device == "cpu"
        moved = CPU_INT8_BYTES if is_compiled else MOVED_BYTES[kind]
        return streaming_seconds(self.machine.chip, elements * moved, KERNELS[kind])


def error_bytes(plan: Plan, whole: float, shards: float) -> float:
    """Of the memories of what was left out, on one rank.

    Args:
        whole: parameters that the rank hands gradients over of.
        shards: those of its shard, which replicas sum.
    """
    if not plan.compressions & KEEP_ERRORS:
        return 0.0
    if plan.replicas > 1:
        return 4.0 * shards
    return 4.0 * whole if plan.shard_ranks > 1 else 0.0


def sent_bytes(plan: Plan, whole: float) -> tuple[float, float]:
    """What a rank sends of gradients each time that they are summed, and what it would send of whole ones.

    Args:
        whole: parameters of its part of the model, all shards together.
    """
    scatters = plan.replicas == 1
    ranks, elements = (plan.shard_ranks, whole) if scatters else (plan.replicas, whole / plan.shard_ranks)
    of_each = (ranks - 1) / ranks * elements  # once; an all-reduce sends it twice
    plain = (1 if scatters else 2) * 4.0 * of_each
    match plan.compression:
        case "nothing":
            return plain, plain
        case "topk":
            chosen = CHOSEN_BYTES * plan.compression_share * of_each
            return (chosen if scatters else ranks * chosen), plain
        case "powersgd":
            return 2 * 4.0 * of_each * 2 * plan.compression_rank / MATRIX_SIDE, plain
        case kind:
            return plain * CODEC_BYTES[kind] / 4.0, plain
