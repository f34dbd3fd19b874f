"""Time of synchronization between sites: bytes, frequency, and the share that local steps hide.

Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import OuterCompression
from wanma.planner.cost.compression_cost import COMPRESSION_COSTS
from wanma.planner.cost.data_parallel import OVERLAP_SLOWDOWN
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.gradient_collectives import gradient_element_bytes
from wanma.planner.hardware_model.collective_time import RankGroup, all_gather_seconds, all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.hardware_model.operator_time import memory_bound_seconds

_STATUS_BYTES = 512.0
"""Bytes of the status that ranks exchange after every step: losses, norms, requests to stop, data traffic."""


@dataclass(frozen=True)
class SiteExchange:
    """Communication over the links between sites."""

    sent_bytes: float
    """Bytes that one rank sends in one exchange."""
    exchange_seconds: float
    """Seconds of one exchange, without overlap."""
    exchanges_per_step: float
    overlap_steps: int
    """Steps beside which one exchange runs before ranks wait for it."""
    update_seconds: float
    """Seconds per step of the outer update."""
    status_seconds: float
    """Seconds per step of the status exchange."""

    def exposed_seconds(self, step_seconds: float) -> float:
        """Return the seconds that all of it adds to a step of `step_seconds`."""
        hidden = min(self.exchange_seconds, self.overlap_steps * step_seconds)
        waited = self.exchange_seconds - hidden + OVERLAP_SLOWDOWN * hidden
        return waited * self.exchanges_per_step + self.update_seconds + self.status_seconds


def site_exchange(
    plan: Plan, hardware: HardwareModel, framework: FrameworkTraits, parameters: float, trainable_share: float
) -> SiteExchange | None:
    """Return the communication between sites, or None for a plan without sites.

    Args:
        parameters: parameters of the rank with most of them, before `tp` and sharding.
    """
    synchronization = plan.synchronization
    if synchronization is None:
        return None
    sites = RankGroup(plan.sites, plan.ranks_per_site)
    exchanged = _exchanged_parameters(plan, framework, parameters, trainable_share)
    sent = site_sent_bytes(plan, framework, parameters, trainable_share)
    status_seconds = all_reduce_seconds(hardware, sites, _STATUS_BYTES)
    if not synchronization.has_local_weights:
        overlap_steps = min(
            synchronization.staleness, 1
        )  # more may be in flight, but each step sends as much again
        return SiteExchange(
            sent, all_reduce_seconds(hardware, sites, sent), 1.0, overlap_steps, 0.0, status_seconds
        )
    if synchronization.compression == "none":
        seconds = all_reduce_seconds(hardware, sites, sent)
    else:
        seconds = all_gather_seconds(hardware, sites, sent * plan.sites)
    # Pseudo-gradient written, read and rounded; outer weights, momentum and the site's weights read and
    # written.
    traffic = exchanged * 4.0 * (3 + 2 + (2 if synchronization.momentum else 0) + 2)
    update = memory_bound_seconds(hardware.chip, traffic) / synchronization.every
    return SiteExchange(
        sent,
        seconds,
        synchronization.fragments / synchronization.every,
        synchronization.overlap_steps,
        update if exchanged else 0.0,
        status_seconds,
    )


def site_sent_bytes(
    plan: Plan, framework: FrameworkTraits, parameters: float, trainable_share: float
) -> float:
    """Return the bytes that one rank sends in one exchange between sites; arguments as in `site_exchange`."""
    synchronization = plan.synchronization
    if synchronization is None:
        return 0.0
    exchanged = _exchanged_parameters(plan, framework, parameters, trainable_share)
    if not synchronization.has_local_weights:
        return exchanged * gradient_element_bytes(plan, framework.gradient_bytes)
    return exchanged / synchronization.fragments * wire_element_bytes(plan, synchronization.compression)


def wire_element_bytes(plan: Plan, compression: OuterCompression) -> float:
    """Return the bytes per element of a pseudo-gradient as it is sent."""
    return 4.0 if compression == "none" else COMPRESSION_COSTS[compression].message_element_bytes(plan)


def _exchanged_parameters(
    plan: Plan, framework: FrameworkTraits, parameters: float, trainable_share: float
) -> float:
    """Return the parameters of a rank whose gradients or pseudo-gradients sites exchange."""
    return (
        0.0
        if framework.frozen_base_weights
        else parameters * trainable_share / plan.tp / plan.shard_group_size
    )
