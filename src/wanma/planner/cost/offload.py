"""What waits elsewhere (`parallel.offload_*`): what bringing it to the device and back takes.

As `parallel.offload`, `parallel.away` and `training.state_home` do it. On a GPU a block's weights come while
the block before computes, and activations go to the host and come back on a stream of their own; copies of
activations to and from files, and of optimizer state, are waited for. On a CPU everything is waited for.
Pure functions, without torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Offload
from wanma.planner.hardware_model.model import Machine

if TYPE_CHECKING:
    from wanma.job.forecast.forecast import Workload
    from wanma.planner.cost.model_cost import Pieces
    from wanma.planner.memory.memory_table import MemoryTable


GATHERED_COPIES = 2
"""Of a block's weights on a CPU: the buffer that they are gathered into, and the parameters."""


class Moved(NamedTuple):
    """Seconds of the copies that one block and micro-batch needs."""

    weights: float
    """This rank's part of them, brought to be gathered: forward, and again backward."""
    gradients: float
    """This rank's part of them, brought to where the weights wait."""
    out: float
    """Activations sent away."""
    back: float


def is_moving(plan: Plan) -> bool:
    """Whether anything waits elsewhere."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return any(place != "nothing" for place in places)


def gathers_again(plan: Plan) -> bool:
    """Whether a block's weights are gathered for each forward and each backward: sharded ones, and those that
    wait elsewhere. A pipeline keeps them to the end of the step."""
    return (plan.shard == "parameters" or plan.offload_parameters != "nothing") and plan.pp == 1


def updates_on_host(plan: Plan) -> bool:
    """Whether the optimizer runs on the processors beside a GPU: where the weights are."""
    return plan.device != "cpu" and plan.offload_parameters != "nothing"


def copy_seconds(machine: Machine, plan: Plan, place: Offload, moved_bytes: float, *, out: bool) -> float:
    """Of `moved_bytes` from the device to `place`, or back; to a CPU the host's memory is no other place."""
    if place == "nothing" or moved_bytes <= 0:
        return 0.0
    seconds = moved_bytes / machine.host.link_bytes_per_second if plan.device != "cpu" else 0.0
    if place == "disk":  # through the host's memory, one after the other
        seconds += moved_bytes / (machine.host.write_rate if out else machine.host.read_rate)
    return seconds


def master_bytes(plan: Plan) -> float:
    """Of one parameter, as the optimizer keeps it."""
    return 8.0 if plan.precision == "fp64" else 4.0


def weights_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Of bringing `shards` parameters, those that a rank keeps, to be gathered."""
    return copy_seconds(machine, plan, plan.offload_parameters, shards * master_bytes(plan), out=False)


def gradients_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Of bringing the gradients of `shards` parameters to the host, where their weights are. Gradients
    stay in its memory, also where weights are on disk."""
    place: Offload = "host" if updates_on_host(plan) else "nothing"
    return copy_seconds(machine, plan, place, shards * master_bytes(plan), out=True)


def adding_on_host_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Of adding gradients of `shards` parameters to those of the micro-batches before: a copy that is waited
    for, then a sum on the host."""
    summed = 3 * shards * master_bytes(plan) / machine.host.memory_bytes_per_second
    return gradients_seconds(machine, plan, shards) + summed


def state_seconds(machine: Machine, plan: Plan, updated: float, state_bytes: float) -> float:
    """Of an update of `updated` parameters, what bringing optimizer state to it and back takes.

    Args:
        state_bytes: that the optimizer keeps of a parameter.
    """
    state: Offload = plan.offload_optimizer
    if updates_on_host(plan) or plan.device == "cpu":
        # It runs where files are mapped: their pages come, and go again changed.
        files = updated * state_bytes * (state == "disk")
        files += updated * master_bytes(plan) * (plan.offload_parameters == "disk")
        return files / machine.host.read_rate + files / machine.host.write_rate
    return sum(copy_seconds(machine, plan, state, updated * state_bytes, out=out) for out in (False, True))


def trims(plan: Plan) -> bool:
    """Whether a CPU's rank gives memory that was freed back to the kernel (`scratch.Scratch.rest`)."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return plan.device == "cpu" and "disk" in places


def asked_again_bytes(
    plan: Plan, weights: float, kept: float, micro_batches: int, *, is_block: bool
) -> tuple[float, float]:
    """Memory that forward and backward of one micro-batch ask for again because it was given back: after each
    block where its weights or activations are in files, else after the update.

    Args:
        weights: bytes of a block's parameters as they are computed with.
        kept: of its activations.
    """
    if not trims(plan):
        return 0.0, 0.0
    if plan.offload_activations == "disk" and is_block:  # made, and back from its file, with what they make
        ahead, back = kept, 2 * kept
    elif plan.offload_parameters == "disk" or plan.offload_activations == "disk":
        ahead, back = kept, 0.0
    else:
        ahead, back = kept / micro_batches, 0.0
    if plan.offload_parameters == "disk":
        ahead += GATHERED_COPIES * weights
        back += (GATHERED_COPIES + 1) * weights  # with their gradients
    return ahead, back


def with_kept(pieces: Pieces, table: MemoryTable, workload: Workload, logits_copies: float) -> Pieces:
    """`pieces` that know their activations, for plans that keep something elsewhere. What has no repeated
    blocks has nothing that would be sent.

    Args:
        table: of the same model and plan.
        logits_copies: as of `operators.Software`.
    """
    repeated = [layer for layer in workload.layers if layer.is_block or layer.count > 1]
    kinds = [kind for layer, kind in zip(repeated, table.kinds, strict=False) if layer.is_block]
    blocks = tuple(
        one._replace(part=replace(one.part, kept_bytes=kind.bytes.kept, kept_again_bytes=kind.bytes.inputs))
        for one, kind in zip(pieces.blocks, kinds, strict=True)
    )
    *others, last = pieces.after
    made = logits_copies * table.logits + table.head
    last = last._replace(part=replace(last.part, kept_bytes=made))
    return pieces._replace(blocks=blocks, after=(*others, last))
