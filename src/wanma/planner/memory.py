"""Memory of a plan on its fullest rank, by kind.

Sharded state follows Rajbhandari et al. 2020, section 5; what FSDP2 holds beside it is from its own
behaviour (one unit of communication per block, another for the rest), which a test measures.
Activations are the workload's elements per layer (Korthikanti et al. 2022, section 4.1).
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.forecast import Forecast, Layer, Workload
from wanma.job.plan import UPDATED_TOGETHER, Plan
from wanma.planner.stages import fullest_share, stages_in_flight

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

CPU_RUNTIME_BYTES = 340 << 20
"""Resident memory of a rank before its model exists: Python, torch, dynamo and their libraries."""

WHOLE_SHARE = 0.25
"""Share of a block's kept activations that tensor parallelism does not split: the inputs and outputs of
its normalisations, 4 hidden of about 16 to 20 (Korthikanti et al. 2022, section 4.2.1: 10 of 34 bytes)."""

INPUT_SHARE = 1 / 16
"""Share of a block's kept activations that is its input, where nobody counted; about 1 of 16 hidden-sized
tensors in a decoder."""

COSTLY_SHARE = 3 / 8
"""Share of them that selective recompute keeps beside the input, likewise; about 6 of 16 in a decoder."""


def forecast_memory(
    workload: Workload,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int = 2,
    weight_average: bool = False,
) -> Forecast:
    """What one rank needs.

    Args:
        optimizer: `train.optimizer`.
        micro_batches: of one step and rank, at most.
        weight_average: whether an averaged copy of the weights is kept.
    """
    blocks, others = _units(workload)
    master = 8 if plan.precision == "fp64" else 4
    compute = BYTES[plan.precision]
    # A pipeline's fullest rank has most of the blocks, and the embedding or the head; or both of them.
    together = plan.pp == 1 or plan.is_v_shaped
    ends = [_parameters(others)] if together else [_parameters([layer]) for layer in others]
    share = fullest_share(plan, sum(layer.count for layer in blocks))
    rest = max(ends, default=0) / plan.tp
    # Of experts a rank has those of its place on `ep`, and shares these with the ranks that have the same.
    spread = 1 - 1 / plan.ep
    block = (
        max((layer.parameters - spread * layer.expert_parameters for layer in blocks), default=0) / plan.tp
    )
    experts = sum(layer.count * layer.expert_parameters for layer in blocks) * share / plan.tp
    held = _parameters(blocks) * share / plan.tp - spread * experts + rest
    expert_shards = plan.expert_ranks[1]
    sharded = (held - experts / plan.ep) / plan.shard_ranks + experts / plan.ep / expert_shards

    # FSDP2 computes with a copy of the weights in compute precision beside the shards of the master's,
    # also where there is nobody to share with. On a GPU it gathers the next block while one computes.
    # In a pipeline blocks stay gathered from their backward on, and gradients whole to the step's end.
    around = 1 if plan.device == "cpu" else 2
    away = plan.offload_parameters != "nothing"
    by_block = (plan.shard == "parameters" or away) and plan.pp == 1
    gathered = rest + around * block if by_block else held
    parameters = sharded * master

    # Gradients of one unit are copied into one buffer to be reduced. Without reduction at every
    # micro-batch, whole gradients are accumulated in fp32 until the last.
    # On a CPU they are one unit where they are whole anyway (`parallel.shard`), and with one shard the
    # buffer becomes the gradient.
    one_unit = plan.device == "cpu" and plan.shard in ("nothing", "optimizer") and not away
    unit = held if one_unit else max(rest, block)
    whole = micro_batches > 1 and (plan.pp > 1 or plan.shard in ("nothing", "optimizer"))
    if whole:
        gradients = held * master + unit * master
    elif one_unit and plan.shard_ranks == 1:
        gradients = held * (compute + master)
    else:
        gradients = sharded * master + unit * (compute + master)

    gradients *= workload.trained_share
    average = sharded * master * int(weight_average)
    state = master * _state_elements(optimizer, blocks, others) * sharded / max(workload.parameters, 1)
    state *= workload.trained_share

    activations = _activations(workload, plan, micro_batches)
    elsewhere = {"nothing": 0.0, "host": 0.0, "disk": 0.0}
    elsewhere[plan.offload_activations] += activations.away * compute
    elsewhere[plan.offload_parameters] += parameters
    if away and plan.device == "cuda":
        # Then the update runs on the host: what belongs to the shards is there.
        here = "host" if plan.offload_optimizer == "nothing" else plan.offload_optimizer
        elsewhere[here] += state
        of_shards = 0.0 if whole else sharded * master * workload.trained_share
        elsewhere["host"] += average + sharded * master * workload.trained_share
        gradients, state, average = gradients - of_shards, 0.0, 0.0
    elif plan.offload_optimizer != "nothing":
        elsewhere[plan.offload_optimizer] += state
        state = min(state, state / max(sharded, 1) * UPDATED_TOGETHER)
    return Forecast(
        parameters_bytes=int((0 if away else parameters) + gathered * compute),
        gradients_bytes=int(gradients),
        optimizer_bytes=int(state + average),
        activations_bytes=int(activations.here * compute),
        logits_bytes=int(activations.logits * compute),
        runtime_bytes=CPU_RUNTIME_BYTES if plan.device == "cpu" else 0,
        host_bytes=int(elsewhere["host"]),
        disk_bytes=int(elsewhere["disk"]),
    )


class _Activations(NamedTuple):
    """Elements that a rank keeps for backward."""

    here: float
    """Of its blocks, on the device."""
    away: float
    """Of its blocks, where the plan offloads them to."""
    logits: float
    """Of all else."""


def _activations(workload: Workload, plan: Plan, micro_batches: int) -> _Activations:
    blocks, others = _units(workload)
    if not blocks:
        blocks, others = others, []
    here = away = deepest = 0.0
    share = fullest_share(plan, sum(layer.count for layer in blocks))
    for layer in blocks:
        every = layer.activation_elements_per_sample
        inputs = _known(layer.input_elements_per_sample, every * INPUT_SHARE)
        costly = _known(layer.costly_elements_per_sample, every * COSTLY_SHARE)
        held = layer.count * share
        in_stage = max(round(held), 1)
        again = len(plan.recomputed(in_stage)) / in_stage * held
        kept = (held - again) * every + again * inputs
        by_operator = again * costly if plan.recompute == "selective" else 0.0
        if plan.offload_activations == "nothing":
            here += kept + by_operator
        else:  # the results that selective recompute keeps stay on the device
            here, away = here + by_operator, away + kept
        if again or plan.offload_activations != "nothing":
            deepest = max(deepest, every)
    whole = WHOLE_SHARE / plan.tp if plan.sequence else WHOLE_SHARE
    size = (whole + (1 - WHOLE_SHARE) / plan.tp) / plan.cp * plan.micro_batch
    in_flight = _in_flight(plan, micro_batches)
    # While backward runs it again or fetches it, one block is here as a whole; on a GPU the next one comes.
    around = 2 if plan.device == "cuda" and plan.offload_activations != "nothing" else 1
    # Logits once as the loss keeps them and once as their gradient, split over the vocabulary.
    logits = 2 * sum(layer.activation_elements_per_sample for layer in others) / (plan.tp * plan.cp)
    return _Activations(
        (here * in_flight + around * deepest) * size, away * in_flight * size, logits * plan.micro_batch
    )


def _known(counted: float | None, typical: float) -> float:
    return typical if counted is None else counted


def _in_flight(plan: Plan, micro_batches: int) -> float:
    """Micro-batches whose activations the fullest rank holds at once, of all its stages."""
    if plan.pp == 1:
        return 1.0
    return stages_in_flight(plan.schedule, plan.pp, plan.virtual_stages, micro_batches) / plan.virtual_stages


def _units(workload: Workload) -> tuple[list[Layer], list[Layer]]:
    """The repeated blocks, and everything else."""
    blocks = [layer for layer in workload.layers if layer.count > 1 or layer.is_block]
    return blocks, [layer for layer in workload.layers if layer not in blocks]


def _parameters(layers: list[Layer]) -> int:
    return sum(layer.count * layer.parameters for layer in layers)


def _state_elements(optimizer: str, blocks: list[Layer], others: list[Layer]) -> float:
    """Elements of optimizer state of the whole model.

    AdamW keeps two moments, SGD one momentum. Muon keeps one for the blocks' matrices and leaves the
    rest to AdamW. Adafactor keeps a row and a column for each matrix, which is next to nothing.
    """
    copies = {"adamw": (2, 2), "sgd": (1, 1), "muon": (1, 2), "adafactor": (0, 0)}[optimizer]
    return copies[0] * _parameters(blocks) + copies[1] * _parameters(others)
