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
from wanma.planner.cost.data_parallel import data_parallel_key
from wanma.planner.memory.memory_table import MemoryTable
from wanma.planner.memory.model_states import MemoryInputs, ModelStates, model_states_of
from wanma.planner.memory.peak import (
    block_counts_of_stages,
    fragmentation_shares,
    in_flight_of_rank,
    rank_parameters_of,
    remaining_share,
    representative_ranks,
    retained_logits,
    runtime_bytes,
    stage_buffer_bytes,
)
from wanma.planner.memory.rank_parameters import RankParameters

Array = npt.NDArray[np.float64]


class ShardingOptions:
    """Candidate shardings of the model states over the data ranks of one mesh.

    Args:
        plans: plans with different shardings; all other settings are equal.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        numbers_by_key: dict[object, list[int]] = {}
        for number, plan in enumerate(self.plans):
            numbers_by_key.setdefault(data_parallel_key(plan), []).append(number)
        self.equal_cost_groups = list(numbers_by_key.values())
        """Indices of shardings, grouped by equal block cost."""
        self._runtime = np.array([runtime_bytes(plan) for plan in self.plans])
        self._bytes_by_key: dict[tuple[object, ...], dict[str, Array]] = {}

    def apply(self, number: int, plan: Plan) -> Plan:
        """Return `plan` with the sharding of index `number`."""
        option = self.plans[number]
        return plan.with_changes(
            dp_replicate=option.dp_replicate, dp_shard=option.dp_shard, shard=option.shard
        )

    def state_bytes(self, rank_parameters: RankParameters, memory_inputs: MemoryInputs) -> dict[str, Array]:
        """Return the bytes of a rank with these parameters, by field of `ModelStates`, over the shardings."""
        key = (rank_parameters, memory_inputs.micro_batches > 1, memory_inputs.framework)
        if key not in self._bytes_by_key:
            model_states = [model_states_of(rank_parameters, plan, memory_inputs) for plan in self.plans]
            arrays = {
                name: np.array([getattr(states, name) for states in model_states])
                for name in ModelStates._fields
            }
            arrays["runtime"] = self._runtime
            self._bytes_by_key[key] = arrays
        return self._bytes_by_key[key]


def peak_memory_grid(
    table: MemoryTable,
    plan: Plan,
    recompute_options: Sequence[tuple[Recompute, float]],
    sharding_options: ShardingOptions,
    memory_inputs: MemoryInputs,
) -> Array:
    """Return the bytes of the rank with the largest peak, as an array of shape (recomputes, states).

    Args:
        table: memory table of `plan`.
        recompute_options: kinds and shares of recompute that replace the plan's.
    """
    stages = block_counts_of_stages(table, plan)
    ranks = representative_ranks(plan, stages, memory_inputs)
    rank_peaks = [
        _peak_of_rank(rank, table, plan, recompute_options, sharding_options, stages, memory_inputs)
        for rank in ranks
    ]
    fullest: Array = np.stack(rank_peaks).max(axis=0)
    return fullest


def _peak_of_rank(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    recompute_options: Sequence[tuple[Recompute, float]],
    sharding_options: ShardingOptions,
    block_counts: list[tuple[int, ...]],
    memory_inputs: MemoryInputs,
) -> Array:
    """Return the peak bytes of one pipeline rank, as an array of shape (recomputes, states)."""
    numbers = plan.stages_of_pipeline_rank(rank) if plan.pp > 1 else (0,)
    logits, head = (
        (table.logits_bytes, table.head_saved_bytes) if len(block_counts) - 1 in numbers else (0.0, 0.0)
    )
    boundary = stage_buffer_bytes(table, plan, memory_inputs, numbers)
    state = sharding_options.state_bytes(rank_parameters_of(rank, table, plan, block_counts), memory_inputs)
    saved, block, working = _activations(
        rank, table, plan, recompute_options, [block_counts[n] for n in numbers], memory_inputs
    )
    at_loss = saved + head + memory_inputs.framework.logits_copies * logits
    block_bytes = (
        working + retained_logits(logits, plan, memory_inputs.framework) + table.exchange_buffer_bytes
    )
    at_first_block = saved + block_bytes
    at_first_layer = remaining_share(in_flight_of_rank(rank, plan, memory_inputs)) * saved
    at_last_block = at_first_layer + block + block_bytes
    at_head = saved + head + logits
    during_blocks = np.maximum(
        state["reduction_workspace"] + at_first_block[:, None],
        state["block_gradients"] + at_last_block[:, None],
    )
    at_end = state["all_gradients"] + state["receive_buffers"] - state["released_parameters"]
    before = state["accumulated_gradients"] + np.maximum(
        at_loss[:, None], np.maximum(during_blocks, state["post_block_gradients"] + at_head[:, None])
    )
    peak = np.maximum(
        before, state["accumulated_gradients"] + state["unaccumulated_gradients"] + at_first_layer[:, None]
    )
    peak = np.maximum(peak, at_end)
    released = np.maximum(state["post_block_gradients"], (saved - at_first_layer)[:, None])
    freed = np.maximum(logits, np.where(state["accumulated_gradients"] > 0, released, 0.0))
    last_gradients = state["last_gradient"] * (state["last_gradient"] > freed)
    last_gradients = last_gradients + state["last_reduction_buffer"] * (
        state["last_reduction_buffer"] > freed
    )
    overhead = np.maximum(before + last_gradients - peak, 0.0)
    peak = peak + boundary
    shares = fragmentation_shares(plan, memory_inputs.framework)
    used = state["parameters"] + state["optimizer"] + state["buffers"] + state["runtime"] + peak
    total: Array = (
        used
        + shares.transient * peak
        + shares.gathered_parameters * state["gathered_parameters"]
        + shares.last_gradient * overhead
    )
    return total


def _activations(
    rank: int,
    table: MemoryTable,
    plan: Plan,
    recompute_options: Sequence[tuple[Recompute, float]],
    block_counts: list[tuple[int, ...]],
    memory_inputs: MemoryInputs,
) -> tuple[Array, Array, Array]:
    """Return (saved, of one block, working) bytes of activations, each of shape (recomputes,).

    They are the fields of the same names in `peak._Activations`.
    """
    runs_again = np.array([kind != "none" for kind, _ in recompute_options])
    shares = np.array([share for _, share in recompute_options]) * runs_again
    is_selective = np.array([kind == "selective" for kind, _ in recompute_options])
    stays_on_device = plan.offload_activations == "none"
    saved = np.zeros(len(recompute_options))
    block = np.zeros(len(recompute_options))
    deepest = np.zeros(len(recompute_options))
    working = 0.0
    for counts, flight in zip(block_counts, in_flight_of_rank(rank, plan, memory_inputs), strict=True):
        blocks = sum(counts)
        recomputed = np.ceil(np.round(blocks * shares, 9))
        share = recomputed / blocks if blocks else recomputed
        for kind, count in zip(table.kinds, counts, strict=True):
            if not count:
                continue
            parts = kind.activations
            block_saved = share * parts.selective_saved * is_selective
            if stays_on_device:
                block_saved = block_saved + (1 - share) * parts.saved + share * parts.inputs
            saved += count * flight * block_saved
            block = np.maximum(block, block_saved * bool(flight))
            working = max(working, parts.backward_workspace)
            has_recompute = recomputed > 0 if stays_on_device else np.ones(len(recompute_options), dtype=bool)
            deepest = np.maximum(deepest, parts.saved * has_recompute)
    buffers = 2 if plan.device == "cuda" and not stays_on_device else 1
    return saved, block, working + buffers * deepest
