"""Time of collectives that sum gradients over ranks, compressed or not (`collectives.compression`).

The plan's default method counts for all parameters, because a forecast does not know which parameters a group
of the plan matches. Pure functions, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wanma.collectives.compression.compression_traits import (
    COMPRESSION_TRAITS,
    ERROR_FEEDBACK_METHODS,
    MAX_IN_FLIGHT,
    MAX_SLICE_ELEMENTS,
)
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import AllReduceAlgorithm, Compression
from wanma.planner.cost.compression_cost import COMPRESSION_COSTS
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

HIERARCHICAL_TRAFFIC_BYTES, HIERARCHICAL_KERNELS = 36.0, 8
"""Bytes per element and kernels of a hierarchical all-reduce, beside the method: copies of gradients and
error feedback into a buffer, and of the sums out of another."""


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
            algorithm: algorithm for uncompressed gradients; None: the fastest of a library's. With
                "message_hierarchical", compressed gradients are exchanged only between nodes.
        """
        kind, machine = self._kind(), self.hardware
        if group.size == 1 or not elements:
            return 0.0
        if kind == "none":
            return all_reduce_seconds(machine, group, elements * self.uncompressed_element_bytes, algorithm)
        local_size = group.members_within(machine.links[0], machine.device_count)
        by_machines = algorithm == "message_hierarchical" and 1 < local_size < group.size
        splits_by_node = by_machines and not COMPRESSION_TRAITS[kind].is_low_rank
        is_chunked = COMPRESSION_COSTS[kind].exchange == "all_to_all_and_all_gather" or splits_by_node
        parts = self._message_count(elements, is_chunked=is_chunked)
        if not by_machines:
            return self._overlapped_seconds(kind, group, elements, parts)
        inner_group = RankGroup(local_size, group.stride)
        total_bytes = elements * self.uncompressed_element_bytes
        outer_group = RankGroup(-(-group.size // local_size), group.stride * local_size)
        scattered = reduce_scatter_seconds(machine, inner_group, total_bytes)
        gathered = all_gather_seconds(machine, inner_group, total_bytes)
        filled = memory_bound_seconds(
            machine.chip, elements * HIERARCHICAL_TRAFFIC_BYTES, HIERARCHICAL_KERNELS
        )
        return self._overlapped_seconds(
            kind, outer_group, elements / local_size, parts, scattered + gathered + filled
        )

    def _transfer_seconds(self, kind: Compression, group: RankGroup, elements: float) -> float:
        """Return the seconds of the messages of a compressed all-reduce."""
        cost = COMPRESSION_COSTS[kind]
        sent = elements * cost.message_element_bytes(self.plan)
        match cost.exchange:
            case "all_gather":
                return all_gather_seconds(self.hardware, group, group.size * sent)
            case "all_reduce":
                return all_reduce_seconds(self.hardware, group, sent)
            case "all_to_all_and_all_gather":
                exchanged = all_to_all_seconds(self.hardware, group, sent)
                return exchanged + all_gather_seconds(self.hardware, group, sent)

    def _message_count(self, elements: float, *, is_chunked: bool) -> int:
        """Return the number of messages in which a rank reduces all its gradients.

        They are buckets, or the single unit that FSDP2 has of replicas on a CPU; with `is_chunked`, parts of
        these. Other units of FSDP2 are reduced one by one, and each counts as one part.
        """
        if self.plan.device != "cpu" or self.plan.shard not in ("none", "optimizer"):
            return 1
        message_elements = (
            self.plan.bucket_bytes / self.uncompressed_element_bytes
            if self.plan.computes_on_master_weights
            else elements
        )
        return max(
            math.ceil(
                elements / (min(MAX_SLICE_ELEMENTS, message_elements) if is_chunked else message_elements)
            ),
            1,
        )

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
        transfer = messages * (self._transfer_seconds(kind, group, elements / messages) - first)
        computing = messages * self._codec_seconds(kind, elements / messages) + compute_seconds
        if not leaves_innermost_level(self.hardware, group):
            return messages * first + transfer + computing
        travelling = max(messages / MAX_IN_FLIGHT, 1.0) * first + transfer
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
        cost = COMPRESSION_COSTS[kind]
        sent = elements * cost.message_element_bytes(self.plan)
        exchange_seconds = all_reduce_seconds if cost.exchange == "all_reduce" else all_to_all_seconds
        return exchange_seconds(machine, group, sent) + self._codec_seconds(kind, elements)

    def _kind(self) -> Compression:
        """Return the plan's method, or "none" where it would not make elements smaller."""
        kind = self.plan.compression
        if kind == "none":
            return kind
        cost = COMPRESSION_COSTS[kind]
        is_encoded = cost.exchange == "all_to_all_and_all_gather"
        if is_encoded and cost.message_element_bytes(self.plan) >= self.uncompressed_element_bytes:
            return "none"
        return kind

    def _codec_seconds(self, kind: Compression, elements: float) -> float:
        """Return the seconds that the method computes on the device for so many elements."""
        cost = COMPRESSION_COSTS[kind]
        traffic = cost.traffic_bytes
        if self.plan.device == "cpu" and cost.cpu_traffic_bytes is not None:
            traffic = cost.cpu_traffic_bytes
        return memory_bound_seconds(self.hardware.chip, elements * traffic, cost.kernels)


MESSAGE_ALGORITHMS: Mapping[AllReduceAlgorithm, Algorithm] = MappingProxyType(
    {
        "ring": "message_ring",
        "tree": "message_tree",
        "halving_doubling": "message_halving_doubling",
        "hierarchical": "message_hierarchical",
    }
)
"""Cost models of the algorithms of `collectives.algorithms`, by the plan's name."""


def all_reduce_cost_algorithm(plan: Plan, hardware: HardwareModel, replicas: RankGroup) -> Algorithm | None:
    """Return the cost model of the plan's all-reduce over `replicas`; None: the fastest of a library's.

    On CPUs it is one of wanma's algorithms, the ring of Gloo between nodes, or what was measured within one.
    """
    if plan.device != "cpu":
        return plan.all_reduce if plan.all_reduce in ("ring", "tree") else None
    is_between_nodes = leaves_innermost_level(hardware, replicas)
    if plan.all_reduces_by_messages and (is_between_nodes or plan.all_reduce != "hierarchical"):
        return MESSAGE_ALGORITHMS[plan.all_reduce]
    return "gloo_ring" if is_between_nodes else None


def gradient_element_bytes(plan: Plan, framework_bytes: float = 4.0) -> float:
    """Return the bytes of a gradient's element as it is reduced without compression.

    Args:
        plan: the plan.
        framework_bytes: bytes in precisions below fp64, `FrameworkTraits.gradient_bytes`; wanma's own are 4.
    """
    return 8.0 if plan.precision == "fp64" else framework_bytes


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
    sent_elements = (ranks - 1) / ranks * elements  # once; an all-reduce sends it twice
    plain = (1 if scatters else 2) * gradient_element_bytes(plan) * sent_elements
    if plan.compression == "none":
        return plain, plain
    cost = COMPRESSION_COSTS[plan.compression]
    message_bytes = cost.message_element_bytes(plan) * sent_elements
    match cost.exchange:
        case "all_gather":
            return (message_bytes if scatters else ranks * message_bytes), plain
        case "all_reduce":
            return 2 * message_bytes, plain
        case "all_to_all_and_all_gather":
            return (1 if scatters else 2) * message_bytes, plain
