"""Unlike machines with round numbers, for tests of plans on mixed hardware."""

from __future__ import annotations

from dataclasses import replace

from support.machines import CHIP, machine
from support.problems import SMALL, job, problem
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.hardware_model.model import LinkLevel
from wanma.planner.heterogeneous.costs import HeterogeneousCosts
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware, NodePool

START = Plan(precision="bf16", device="cuda", sequence_parallel=True)
SLOW = replace(
    CHIP,
    name="slow chip",
    peak_flops_per_second={name: rate * 0.4 for name, rate in CHIP.peak_flops_per_second.items()},
    bandwidth_bytes_per_second=0.5e12,
)


def fleet(
    fast: int = 4,
    slow: int = 4,
    *,
    fast_bytes: float = 40e9,
    slow_bytes: float = 40e9,
    outer: float = 10e9,
    across: float = 5e9,
) -> HeterogeneousHardware:
    """`fast` test chips and `slow` ones with 0.4 of their rate, in machines of four or fewer."""
    one = machine(max(fast, 1), outer=outer)
    other = replace(machine(max(slow, 1), outer=outer), chip=SLOW)
    kinds = (
        NodePool(one, fast, min(fast, 4), fast_bytes),
        NodePool(other, slow, min(slow, 4), slow_bytes),
    )
    return HeterogeneousHardware(kinds, LinkLevel(fast + slow, 10e-6, across))


def costs(
    of: HeterogeneousHardware | None = None,
    dimensions: DecoderConfig = SMALL,
    batch: int = 16,
    start: Plan = START,
) -> HeterogeneousCosts:
    return HeterogeneousCosts(problem(job(global_batch=batch), dimensions), of or fleet(), start)
