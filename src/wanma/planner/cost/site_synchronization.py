"""Time of synchronization between sites: bytes, frequency, and the share that local steps hide.

Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.hardware_model.collective_time import Group, all_gather_seconds, all_reduce_seconds
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import streaming_seconds

SENT_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Bytes per element of a pseudo-gradient as it is sent, by compression method."""

_TOLD_BYTES = 128.0
"""Bytes of the status that ranks exchange after every step: losses, norms, requests to stop."""

INTERFERENCE = 0.15
"""Share of overlapped communication time that the compute beside it loses, as in `data_parallel`."""


@dataclass(frozen=True)
class Between:
    """Communication over the links between sites."""

    sent_bytes: float
    """Bytes that one rank sends in one exchange."""
    exchange_seconds: float
    """Seconds of one exchange, without overlap."""
    exchanges_per_step: float
    beside_steps: int
    """Steps beside which one exchange runs before ranks wait for it."""
    update_seconds: float
    """Seconds per step of the outer update."""
    told_seconds: float
    """Seconds per step of the status exchange."""

    def seconds(self, step_seconds: float) -> float:
        """Return the seconds that all of it adds to a step of `step_seconds`."""
        hidden = min(self.exchange_seconds, self.beside_steps * step_seconds)
        waited = self.exchange_seconds - hidden + INTERFERENCE * hidden
        return waited * self.exchanges_per_step + self.update_seconds + self.told_seconds


def between_sites(
    plan: Plan, machine: Machine, software: Software, parameters: float, trained_share: float
) -> Between | None:
    """Return the communication between sites, or None for a plan without sites.

    Args:
        parameters: parameters of the rank with most of them, before `tp` and sharding.
    """
    seldom = plan.synchronization
    if seldom is None:
        return None
    sites = Group(plan.sites, plan.site_ranks)
    mine = _exchanged(plan, software, parameters, trained_share)
    sent = sent_bytes(plan, software, parameters, trained_share)
    told = all_reduce_seconds(machine, sites, _TOLD_BYTES)
    if not seldom.is_local:
        beside = min(seldom.staleness, 1)  # more may be in flight, but each step sends as much again
        return Between(sent, all_reduce_seconds(machine, sites, sent), 1.0, beside, 0.0, told)
    if seldom.compression == "none":
        seconds = all_reduce_seconds(machine, sites, sent)
    else:
        seconds = all_gather_seconds(machine, sites, sent * plan.sites)
    # Pseudo-gradient written, read and rounded; outer weights, momentum and the site's weights read and
    # written.
    moved = mine * 4.0 * (3 + 2 + (2 if seldom.momentum else 0) + 2)
    update = streaming_seconds(machine.chip, moved) / seldom.every
    return Between(
        sent, seconds, seldom.fragments / seldom.every, seldom.overlap_steps, update if mine else 0.0, told
    )


def sent_bytes(plan: Plan, software: Software, parameters: float, trained_share: float) -> float:
    """Return the bytes that one rank sends in one exchange between sites; arguments as in `between_sites`."""
    seldom = plan.synchronization
    if seldom is None:
        return 0.0
    mine = _exchanged(plan, software, parameters, trained_share)
    if not seldom.is_local:
        return mine * software.gradient_bytes
    return mine / seldom.fragments * SENT_BYTES[seldom.compression]


def _exchanged(plan: Plan, software: Software, parameters: float, trained_share: float) -> float:
    """Return the parameters of a rank whose gradients or pseudo-gradients sites exchange."""
    return 0.0 if software.frozen else parameters * trained_share / plan.tp / plan.shard_ranks
