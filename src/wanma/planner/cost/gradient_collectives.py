"""Time of collectives that sum gradients over ranks, compressed or not (`collectives.compression`).

The plan's default method counts for all parameters, because a forecast does not know which parameters a group
of the plan matches. Pure functions, without torch.
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
"""Bytes per gradient element in each of two phases, with a scale for each block of 256."""

CHOSEN_BYTES = 8.0
"""Bytes per element that top-k sends: its value and its index."""

MATRIX_SIDE = 1024.0
"""Assumed side, in elements, of the matrices that PowerSGD factorises; larger ones compress better."""

MOVED_BYTES: Mapping[Compression, float] = MappingProxyType(
    {"bf16": 42.0, "fp16": 86.0, "int8": 122.0, "topk": 60.0, "powersgd": 32.0}
)
"""Bytes per element that a method reads and writes, if each of its operations passes once through memory."""

CPU_INT8_BYTES = 66.0
"""The same for int8 where its codec is compiled for the CPU: each way one pass over the encoded values, the
result and the error; beside it copies of gradients and error feedback into a buffer, and of the sums out of
it."""

KERNELS: Mapping[Compression, int] = MappingProxyType(
    {"bf16": 8, "fp16": 20, "int8": 24, "topk": 12, "powersgd": 12}
)
"""Approximate number of kernels for each bucket."""

TOGETHER_ELEMENTS, AT_ONCE = 1 << 21, 2
"""Elements of one message of a codec, and number of messages in flight; a test compares both with
`collectives.compression`."""

BY_MACHINES_BYTES, BY_MACHINES_KERNELS = 36.0, 8
"""Bytes per element and kernels of a hierarchical all-reduce, beside the method: copies of gradients and
error feedback into a buffer, and of the sums out of another."""

KEEP_ERRORS: frozenset[Compression] = frozenset({"int8", "topk", "powersgd"})
"""Methods with error feedback; a test compares them with `collectives.compression`."""

LOOKED_AT: tuple[Compression, ...] = ("bf16", "int8")
"""Methods that `auto` tries where a job allows compression. The others change training more, or save less
time."""


@dataclass(frozen=True)
class Summing:
    """Times of the collectives that sum gradients on a hardware model.

    Args:
        whole_bytes: bytes of an uncompressed element.
    """

    plan: Plan
    machine: Machine
    whole_bytes: float

    def all_reduce(self, group: Group, elements: float, algorithm: Algorithm | None = None) -> float:
        """Return the seconds until every rank has the sum of all `elements`.

        Args:
            algorithm: algorithm for uncompressed gradients; None: the fastest. With "hierarchical",
                compressed gradients are exchanged only between nodes.
        """
        kind, machine = self._kind(), self.machine
        if group.size == 1 or not elements:
            return 0.0
        if kind == "none":
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
        """Return the seconds of the messages of a compressed all-reduce."""
        if kind == "topk":
            sent = elements * self.plan.compression_share * CHOSEN_BYTES
            return all_gather_seconds(self.machine, group, group.size * sent)
        if kind == "powersgd":
            return all_reduce_seconds(self.machine, group, elements * self._thin_bytes())
        sent = elements * CODEC_BYTES[kind]
        exchanged = all_to_all_seconds(self.machine, group, sent)
        return exchanged + all_gather_seconds(self.machine, group, sent)

    def _parts(self, elements: float, *, is_cut: bool) -> int:
        """Return the number of messages in which a rank reduces all its gradients.

        They are buckets, or the single unit that FSDP2 has of replicas on a CPU; with `is_cut`, parts of
        these. Other units of FSDP2 are reduced one by one, and each counts as one part.
        """
        if self.plan.device != "cpu" or self.plan.shard not in ("none", "optimizer"):
            return 1
        together = self.plan.bucket_bytes / self.whole_bytes if self.plan.computes_with_state else elements
        return max(math.ceil(elements / (min(TOGETHER_ELEMENTS, together) if is_cut else together)), 1)

    def _in_flight(
        self, kind: Compression, group: Group, elements: float, parts: int, beside: float = 0.0
    ) -> float:
        """Return the seconds of a compressed all-reduce in which the codec works beside messages in flight.

        All but one part of the shorter of the two is hidden, and the latencies of two messages overlap.
        Within a node messages take the cores that compute, and nothing is hidden.

        Args:
            beside: seconds of computing, summed over all parts.
        """
        first = self._travelling(kind, group, 1.0)
        rest = parts * (self._travelling(kind, group, elements / parts) - first)
        computing = parts * self._moving(kind, elements / parts) + beside
        if not crosses(self.machine, group):
            return parts * first + rest + computing
        travelling = max(parts / AT_ONCE, 1.0) * first + rest
        return max(travelling, computing) + min(travelling, computing) / parts

    def reduce_scatter(self, group: Group, elements: float, *, compressed: bool) -> float:
        """Return the seconds until every rank has its shard of the sum.

        Args:
            compressed: the plan's method compresses this collective, because these shards are not replicated.
        """
        kind, machine = self._kind() if compressed else "none", self.machine
        if group.size == 1 or not elements:
            return 0.0
        if kind == "none":
            return reduce_scatter_seconds(machine, group, elements * self.whole_bytes)
        if kind == "powersgd":
            return all_reduce_seconds(machine, group, elements * self._thin_bytes()) + self._moving(
                kind, elements
            )
        each = self.plan.compression_share * CHOSEN_BYTES if kind == "topk" else CODEC_BYTES[kind]
        return all_to_all_seconds(machine, group, elements * each) + self._moving(kind, elements)

    def _kind(self) -> Compression:
        """Return the plan's method, or "none" where it would not make elements smaller."""
        kind = self.plan.compression
        return "none" if CODEC_BYTES.get(kind, 0.0) >= self.whole_bytes else kind

    def _thin_bytes(self) -> float:
        """Return the bytes per element of PowerSGD's two thin factors in fp32."""
        return 4.0 * self.plan.compression_rank * 2 / MATRIX_SIDE

    def _moving(self, kind: Compression, elements: float) -> float:
        """Return the seconds that the method computes on the device for so many elements."""
        is_compiled = kind == "int8" and self.plan.device == "cpu"
        moved = CPU_INT8_BYTES if is_compiled else MOVED_BYTES[kind]
        return streaming_seconds(self.machine.chip, elements * moved, KERNELS[kind])


def error_bytes(plan: Plan, whole: float, shards: float) -> float:
    """Return the bytes of error feedback on one rank.

    Args:
        whole: parameters whose gradients the rank contributes.
        shards: parameters of its shard, which replicas sum.
    """
    if not plan.compressions & KEEP_ERRORS:
        return 0.0
    if plan.replicas > 1:
        return 4.0 * shards
    return 4.0 * whole if plan.shard_ranks > 1 else 0.0


def sent_bytes(plan: Plan, whole: float) -> tuple[float, float]:
    """Return the bytes of gradients that a rank sends per reduction, and those without compression.

    Args:
        whole: parameters of its part of the model, summed over all shards.
    """
    scatters = plan.replicas == 1
    ranks, elements = (plan.shard_ranks, whole) if scatters else (plan.replicas, whole / plan.shard_ranks)
    of_each = (ranks - 1) / ranks * elements  # once; an all-reduce sends it twice
    plain = (1 if scatters else 2) * 4.0 * of_each
    match plan.compression:
        case "none":
            return plain, plain
        case "topk":
            chosen = CHOSEN_BYTES * plan.compression_share * of_each
            return (chosen if scatters else ranks * chosen), plain
        case "powersgd":
            return 2 * 4.0 * of_each * 2 * plan.compression_rank / MATRIX_SIDE, plain
        case kind:
            return plain * CODEC_BYTES[kind] / 4.0, plain
