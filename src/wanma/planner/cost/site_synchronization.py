"""What sites exchange, how often, and how much of it the steps beside it hide.

Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from wanma.job.plan.plan import Plan
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.hardware_model.collective_time import Group, all_gather_seconds, all_reduce_seconds
from wanma.planner.hardware_model.model import Machine
from wanma.planner.hardware_model.operator_time import streaming_seconds

SENT_BYTES = {"nothing": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}
"""Of an element of what weights have moved, as it travels."""

_TOLD_BYTES = 128.0
"""What ranks tell each other after every step: losses, norms, who was asked to stop."""

INTERFERENCE = 0.15
"""As of `data_parallel`: of the time of communication that runs beside compute, what the compute loses."""


@dataclass(frozen=True)
class Between:
    """What goes over the links between the sites."""

    sent_bytes: float
    """Of one rank in one exchange."""
    exchange_seconds: float
    """Of one, by itself."""
    exchanges_per_step: float
    beside_steps: int
    """That one may take before it is waited for."""
    update_seconds: float
    """Of a step, for the outer update."""
    told_seconds: float
    """Of a step, for what ranks always tell each other."""

    def seconds(self, step_seconds: float) -> float:
        """What all of it adds to a step that takes `step_seconds` without."""
        hidden = min(self.exchange_seconds, self.beside_steps * step_seconds)
        waited = self.exchange_seconds - hidden + INTERFERENCE * hidden
        return waited * self.exchanges_per_step + self.update_seconds + self.told_seconds


def between_sites(
    plan: Plan, machine: Machine, software: Software, parameters: float, trained_share: float
) -> Between | None:
    """None for a plan without sites.

    Args:
        parameters: of the fullest rank, before `tp` and sharding.
    """
    seldom = plan.synchronization
    if seldom is None:
        return None
    sites = Group(plan.sites, plan.site_ranks)
    mine = _exchanged(plan, software, parameters, trained_share)
    sent = sent_bytes(plan, software, parameters, trained_share)
    told = all_reduce_seconds(machine, sites, _TOLD_BYTES)
    if not seldom.is_local:
        beside = min(seldom.staleness, 1)  # more are on their way then, but each step sends as much again
        return Between(sent, all_reduce_seconds(machine, sites, sent), 1.0, beside, 0.0, told)
    if seldom.compression == "nothing":
        seconds = all_reduce_seconds(machine, sites, sent)
    else:
        seconds = all_gather_seconds(machine, sites, sent * plan.sites)
    # Difference written, read and rounded; outer weights, momentum and a site's own read and written.
    moved = mine * 4.0 * (3 + 2 + (2 if seldom.momentum else 0) + 2)
    update = streaming_seconds(machine.chip, moved) / seldom.every
    return Between(
        sent, seconds, seldom.fragments / seldom.every, seldom.overlap_steps, update if mine else 0.0, told
    )


def sent_bytes(plan: Plan, software: Software, parameters: float, trained_share: float) -> float:
    """Of one rank in one exchange between sites; arguments as of `between_sites`."""
    seldom = plan.synchronization
    if seldom is None:
        return 0.0
    mine = _exchanged(plan, software, parameters, trained_share)
    if not seldom.is_local:
        return mine * software.gradient_bytes
    return mine / seldom.fragments * SENT_BYTES[seldom.compression]


def _exchanged(plan: Plan, software: Software, parameters: float, trained_share: float) -> float:
    """Parameters of a rank that sites exchange something of."""
    return 0.0 if software.frozen else parameters * trained_share / plan.tp / plan.shard_ranks
