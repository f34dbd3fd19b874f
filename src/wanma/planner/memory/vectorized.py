"""Memory of many plans at once that differ only in recompute and in the sharding of model states.

Saved activations depend on the former, model states on the latter, so that both are computed once and
combined as arrays. The numbers equal those of `peak.forecast_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.planner.cost.data_parallel import block_key
from wanma.planner.memory.memory_table import MemoryTable
from wanma.planner.memory.model_states import Parameters, State, state_of
from wanma.planner.memory.peak import (
    Setting,
    boundary_bytes,
    held_logits,
    kept_of_stages,
    later_share,
    parameters_of,
    runtime_bytes,
    stage_counts,
    unlike_ranks,
    unused_shares,
)

Array = npt.NDArray[np.float64]


class States:
    """Candidate shardings of the model states over the data ranks of one mesh.

    Args:
        plans: plans with different shardings; all other settings are equal.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        alike: dict[object, list[int]] = {}
        for number, plan in enumerate(self.plans):
            alike.setdefault(block_key(plan), []).append(number)
        self.alike = list(alike.values())
        """Indices of shardings, grouped by equal block cost."""
        self._runtime = np.array([runtime_bytes(plan) for plan in self.plans])
        self._known: dict[tuple[object, ...], dict[str, Array]] = {}

    def applied(self, number: int, plan: Plan) -> Plan:
        """Return `plan` with the sharding of index `number`."""
        way = self.plans[number]
        return plan.but(dp_replicate=way.dp_replicate, dp_shard=way.dp_shard, shard=way.shard)

    def held(self, mine: Parameters, setting: Setting) -> dict[str, Array]:
        """Return the bytes of a rank with these parameters, by field of `State`, over the shardings."""
        key = (mine, setting.micro_batches > 1, setting.software)
        if key not in self._known:
            found = [
                state_of(
                    mine,
                    plan,
                    setting.optimizer,
                    micro_batches=setting.micro_batches,
                    weight_average=setting.weight_average,
                    software=setting.software,
                )
                for plan in self.plans
            ]
            arrays = {name: np.array([getattr(one, name) for one in found]) for name in State._fields}
            arrays["runtime"] = self._runtime
            self._known[key] = arrays
        return self._known[key]


def memory_grid(
    table: MemoryTable,
    plan: Plan,
    recomputes: Sequence[tuple[Recompute, float]],
    states: States,
    setting: Setting,
) -> Array:
    """Return the bytes of the rank with the largest peak, as an array of shape (recomputes, states).

    Args:
        table: memory table of `plan`.
        recomputes: kinds and shares of recompute that replace the plan's.
    """
    stages = stage_counts(table, plan)
    ranks = unlike_ranks(plan, stages, setting)
    of_ranks = [_of_rank(rank, table, plan, recomputes, states, stages, setting) for rank in ranks]
    fullest: Array = np.stack(of_ranks).max(axis=0)
    return fullest


def _of_rank(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    recomputes: Sequence[tuple[Recompute, float]],
    states: States,
    stages: list[tuple[int, ...]],
    setting: Setting,
) -> Array:
    """Return the peak bytes of one pipeline rank, as an array of shape (recomputes, states)."""
    numbers = plan.stages_of(rank) if plan.pp > 1 else (0,)
    logits, head = (table.logits, table.head) if len(stages) - 1 in numbers else (0.0, 0.0)
    boundary = boundary_bytes(table, plan, setting, numbers)
    held = states.held(parameters_of(rank, table, plan, stages), setting)
    kept, block, working = _activations(rank, table, plan, recomputes, [stages[n] for n in numbers], setting)
    at_loss = kept + head + setting.software.logits_copies * logits
    in_block = working + held_logits(logits, plan, setting.software) + table.travelling
    at_first_block = kept + in_block
    at_first_layer = later_share(kept_of_stages(rank, plan, setting)) * kept
    at_last_block = at_first_layer + block + in_block
    at_head = kept + head + logits
    in_blocks = np.maximum(held["reducing"] + at_first_block[:, None], held["made"] + at_last_block[:, None])
    at_end = held["final"] + held["receiving"] - held["let_go"]
    before = held["accumulated"] + np.maximum(
        at_loss[:, None], np.maximum(in_blocks, held["last"] + at_head[:, None])
    )
    peak = np.maximum(before, held["accumulated"] + held["added"] + at_first_layer[:, None])
    peak = np.maximum(peak, at_end)
    let_go = np.maximum(held["last"], (kept - at_first_layer)[:, None])
    hole = np.maximum(logits, np.where(held["accumulated"] > 0, let_go, 0.0))
    late = held["late"] * (held["late"] > hole)
    late = late + held["late_buffer"] * (held["late_buffer"] > hole)
    on_top = np.maximum(before + late - peak, 0.0)
    peak = peak + boundary
    shares = unused_shares(plan, setting.software)
    used = held["parameters"] + held["optimizer"] + held["buffers"] + held["runtime"] + peak
    whole: Array = used + shares.passing * peak + shares.gathered * held["gathered"] + shares.late * on_top
    return whole


def _activations(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    recomputes: Sequence[tuple[Recompute, float]],
    mine: list[tuple[int, ...]],
    setting: Setting,
) -> tuple[Array, Array, Array]:
    """Return (saved, of one block, working) bytes of activations, each of shape (recomputes,).

    They are the fields of the same names in `peak._Activations`.
    """
    runs_again = np.array([kind != "none" for kind, _ in recomputes])
    shares = np.array([share for _, share in recomputes]) * runs_again
    is_selective = np.array([kind == "selective" for kind, _ in recomputes])
    stays = plan.offload_activations == "none"
    kept = np.zeros(len(recomputes))
    block = np.zeros(len(recomputes))
    deepest = np.zeros(len(recomputes))
    working = 0.0
    for counts, flight in zip(mine, kept_of_stages(rank, plan, setting), strict=True):
        blocks = sum(counts)
        again = np.ceil(np.round(blocks * shares, 9))
        share = again / blocks if blocks else again
        for kind, count in zip(table.kinds, counts, strict=True):
            if not count:
                continue
            parts = kind.bytes
            one = share * parts.costly * is_selective
            if stays:
                one = one + (1 - share) * parts.kept + share * parts.inputs
            kept += count * flight * one
            block = np.maximum(block, one * bool(flight))
            working = max(working, parts.working)
            here = again > 0 if stays else np.ones(len(recomputes), dtype=bool)
            deepest = np.maximum(deepest, parts.kept * here)
    around = 2 if plan.device == "cuda" and not stays else 1
    return kept, block, working + around * deepest
