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
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    leaves_innermost_level,
    reduce_scatter_seconds,
)
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import memory_bound_seconds

ENCODED_ELEMENT_BYTES: Mapping[Compression, float] = MappingProxyType(
    {"bf16": 2.0, "fp16": 2 + 4 / 256, "int8": 1 + 4 / 256}
)
"""Bytes per gradient element in each of two phases, with a scale for each block of 256."""

TOPK_ELEMENT_BYTES = 8.0
"""Bytes per element that top-k sends: its value and its index."""

POWERSGD_MATRIX_SIDE = 1024.0
"""Assumed side, in elements, of the matrices that PowerSGD factorises; larger ones compress better."""

CODEC_TRAFFIC_BYTES: Mapping[Compression, float] = MappingProxyType(
    {"bf16": 42.0, "fp16": 86.0, "int8": 122.0, "topk": 60.0, "powersgd": 32.0}
)
"""Bytes per element that a method reads and writes, if each of its operations passes once through memory."""

CPU_INT8_TRAFFIC_BYTES = 66.0
"""The same for int8 where its codec is compiled for the CPU: each way one pass over the encoded values, the
result and the error; beside it copies of gradients and error feedback into a buffer, and of the sums out of
it."""

CODEC_KERNELS: Mapping[Compression, int] = MappingProxyType(
    {"bf16": 8, "fp16": 20, "int8": 24, "topk": 12, "powersgd": 12}
)
"""Approximate number of kernels for each bucket."""

CODEC_CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT = 1 << 21, 2
"""Elements of one message of a codec, and number of messages in flight; a test compares both with
`collectives.compression`."""

HIERARCHICAL_TRAFFIC_BYTES, HIERARCHICAL_KERNELS = 36.0, 8
"""Bytes per element and kernels of a hierarchical all-reduce, beside the method: copies of gradients and
error feedback into a buffer, and of the sums out of another."""

ERROR_FEEDBACK_METHODS: frozenset[Compression] = frozenset({"int8", "topk", "powersgd"})
"""Methods with error feedback; a test compares them with `collectives.compression`."""

SEARCHED_COMPRESSIONS: tuple[Compression, ...] = ("bf16", "int8")
"""Methods that `auto` tries where a job allows compression. The others change training more, or save less
time."""


@dataclass(frozen=True)
class GradientCollectives:
    """Times of the collectives that sum gradients on a hardware model.

    Args:
        uncompressed_element_bytes: bytes of an uncompressed element.
    """

    plan: Plan
    hardware: HardwareModel
    uncompressed_element_bytes: float

    def all_reduce(self, group: RankGroup, elements: float, algorithm: Algorithm | None = None) -> float:
        """Return the seconds until every rank has the sum of all `elements`.

        Args:
            algorithm: algorithm for uncompressed gradients; None: the fastest. With "hierarchical",
                compressed gradients are exchanged only between nodes.
        """
        kind, machine = self._kind(), self.hardware
        if group.size == 1 or not elements:
            return 0.0
        if kind == "none":
            return all_reduce_seconds(machine, group, elements * self.uncompressed_element_bytes, algorithm)
        inside = group.members_within(machine.links[0], machine.device_count)
        by_machines = algorithm == "hierarchical" and 1 < inside < group.size
        is_cut = kind in ENCODED_ELEMENT_BYTES or (by_machines and kind == "topk")
        parts = self._message_count(elements, is_chunked=is_cut)
        if not by_machines:
            return self._overlapped_seconds(kind, group, elements, parts)
        within, whole = RankGroup(inside, group.stride), elements * self.uncompressed_element_bytes
        between = RankGroup(-(-group.size // inside), group.stride * inside)
        scattered = reduce_scatter_seconds(machine, within, whole)
        gathered = all_gather_seconds(machine, within, whole)
        filled = memory_bound_seconds(
            machine.chip, elements * HIERARCHICAL_TRAFFIC_BYTES, HIERARCHICAL_KERNELS
        )
        return self._overlapped_seconds(
            kind, between, elements / inside, parts, scattered + gathered + filled
        )

    def _transfer_seconds(self, kind: Compression, group: RankGroup, elements: float) -> float:
        """Return the seconds of the messages of a compressed all-reduce."""
        if kind == "topk":
            sent = elements * self.plan.compression_share * TOPK_ELEMENT_BYTES
            return all_gather_seconds(self.hardware, group, group.size * sent)
        if kind == "powersgd":
            return all_reduce_seconds(self.hardware, group, elements * self._low_rank_bytes())
        sent = elements * ENCODED_ELEMENT_BYTES[kind]
        exchanged = all_to_all_seconds(self.hardware, group, sent)
        return exchanged + all_gather_seconds(self.hardware, group, sent)

    def _message_count(self, elements: float, *, is_chunked: bool) -> int:
        """Return the number of messages in which a rank reduces all its gradients.

        They are buckets, or the single unit that FSDP2 has of replicas on a CPU; with `is_chunked`, parts of
        these. Other units of FSDP2 are reduced one by one, and each counts as one part.
        """
        if self.plan.device != "cpu" or self.plan.shard not in ("none", "optimizer"):
            return 1
        together = (
            self.plan.bucket_bytes / self.uncompressed_element_bytes
            if self.plan.computes_on_master_weights
            else elements
        )
        return max(math.ceil(elements / (min(CODEC_CHUNK_ELEMENTS, together) if is_chunked else together)), 1)

    def _overlapped_seconds(
        self,
        kind: Compression,
        group: RankGroup,
        elements: float,
        messages: int,
        compute_seconds: float = 0.0,
    ) -> float:
        """Return the seconds of a compressed all-reduce in which the codec works beside messages in flight.

        All but one part of the shorter of the two is hidden, and the latencies of two messages overlap.
        Within a node messages take the cores that compute, and nothing is hidden.

        Args:
            compute_seconds: seconds of computing, summed over all parts.
        """
        first = self._transfer_seconds(kind, group, 1.0)
        rest = messages * (self._transfer_seconds(kind, group, elements / messages) - first)
        computing = messages * self._codec_seconds(kind, elements / messages) + compute_seconds
        if not leaves_innermost_level(self.hardware, group):
            return messages * first + rest + computing
        travelling = max(messages / CHUNKS_IN_FLIGHT, 1.0) * first + rest
        return max(travelling, computing) + min(travelling, computing) / messages

    def reduce_scatter(self, group: RankGroup, elements: float, *, compressed: bool) -> float:
        """Return the seconds until every rank has its shard of the sum.

        Args:
            compressed: the plan's method compresses this collective, because these shards are not replicated.
        """
        kind, machine = self._kind() if compressed else "none", self.hardware
        if group.size == 1 or not elements:
            return 0.0
        if kind == "none":
            return reduce_scatter_seconds(machine, group, elements * self.uncompressed_element_bytes)
        if kind == "powersgd":
            return all_reduce_seconds(
                machine, group, elements * self._low_rank_bytes()
            ) + self._codec_seconds(kind, elements)
        each = (
            self.plan.compression_share * TOPK_ELEMENT_BYTES
            if kind == "topk"
            else ENCODED_ELEMENT_BYTES[kind]
        )
        return all_to_all_seconds(machine, group, elements * each) + self._codec_seconds(kind, elements)

    def _kind(self) -> Compression:
        """Return the plan's method, or "none" where it would not make elements smaller."""
        kind = self.plan.compression
        return "none" if ENCODED_ELEMENT_BYTES.get(kind, 0.0) >= self.uncompressed_element_bytes else kind

    def _low_rank_bytes(self) -> float:
        """Return the bytes per element of PowerSGD's two thin factors in fp32."""
        return 4.0 * self.plan.compression_rank * 2 / POWERSGD_MATRIX_SIDE

    def _codec_seconds(self, kind: Compression, elements: float) -> float:
        """Return the seconds that the method computes on the device for so many elements."""
        is_compiled = kind == "int8" and self.plan.device == "cpu"
        moved = CPU_INT8_TRAFFIC_BYTES if is_compiled else CODEC_TRAFFIC_BYTES[kind]
        return memory_bound_seconds(self.hardware.chip, elements * moved, CODEC_KERNELS[kind])


def error_feedback_bytes(plan: Plan, unsharded_elements: float, sharded_elements: float) -> float:
    """Return the bytes of error feedback on one rank.

    Args:
        unsharded_elements: parameters whose gradients the rank contributes.
        sharded_elements: parameters of its shard, which replicas sum.
    """
    if not plan.compression_methods & ERROR_FEEDBACK_METHODS:
        return 0.0
    if plan.replicate_group_size > 1:
        return 4.0 * sharded_elements
    return 4.0 * unsharded_elements if plan.shard_group_size > 1 else 0.0


def reduction_sent_bytes(plan: Plan, unsharded_elements: float) -> tuple[float, float]:
    """Return the bytes of gradients that a rank sends per reduction, and those without compression.

    Args:
        unsharded_elements: parameters of its part of the model, summed over all shards.
    """
    scatters = plan.replicate_group_size == 1
    ranks, elements = (
        (plan.shard_group_size, unsharded_elements)
        if scatters
        else (plan.replicate_group_size, unsharded_elements / plan.shard_group_size)
    )
    of_each = (ranks - 1) / ranks * elements  # once; an all-reduce sends it twice
    plain = (1 if scatters else 2) * 4.0 * of_each
    match plan.compression:
        case "none":
            return plain, plain
        case "topk":
            chosen = TOPK_ELEMENT_BYTES * plan.compression_share * of_each
            return (chosen if scatters else ranks * chosen), plain
        case "powersgd":
            return 2 * 4.0 * of_each * 2 * plan.compression_rank / POWERSGD_MATRIX_SIDE, plain
        case kind:
            return plain * ENCODED_ELEMENT_BYTES[kind] / 4.0, plain
