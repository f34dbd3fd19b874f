"""Time of offload transfers: weights, optimizer state and activations in host memory or on disk.

Keys are `parallel.offload_*`. It follows the runtime in `wanma.parallel.memory` and `wanma.training.state`.
On a GPU a block's weights arrive while the block before computes, and activations go to the host and back on
a stream of their own. Copies of activations to and from files, and of optimizer state, block the device. On a
CPU every transfer blocks. Pure functions, without torch.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Offload
from wanma.planner.hardware_model.model import Machine

GATHERED_COPIES = 2
"""Copies of a block's weights that a CPU allocates: the buffer that they are gathered into, and the
parameters."""


class Moved(NamedTuple):
    """Seconds of the offload transfers of one block and micro-batch."""

    weights: float
    """Transfer of this rank's shard of the weights before they are gathered: in forward, and again in
    backward."""
    gradients: float
    """Transfer of this rank's shard of the gradients to the place of the offloaded weights."""
    out: float
    """Transfer of activations from the device."""
    back: float


def is_moving(plan: Plan) -> bool:
    """Return whether the plan offloads anything."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return any(place != "none" for place in places)


def gathers_again(plan: Plan) -> bool:
    """Return whether a block's weights are gathered for each forward and each backward.

    They are where weights are sharded or offloaded; a pipeline keeps them gathered to the end of the step.
    """
    return (plan.shard == "parameters" or plan.offload_parameters != "none") and plan.pp == 1


def updates_on_host(plan: Plan) -> bool:
    """Return whether the optimizer runs on the CPUs beside a GPU, where offloaded weights are stored."""
    return plan.device != "cpu" and plan.offload_parameters != "none"


def copy_seconds(machine: Machine, plan: Plan, place: Offload, moved_bytes: float, *, out: bool) -> float:
    """Return the seconds of copying `moved_bytes` from the device to `place`, or back.

    On a CPU host memory is the device's own, and takes none.
    """
    if place == "none" or moved_bytes <= 0:
        return 0.0
    seconds = moved_bytes / machine.host.link_bytes_per_second if plan.device != "cpu" else 0.0
    if place == "disk":  # through the host's memory, one after the other
        seconds += moved_bytes / (machine.host.write_rate if out else machine.host.read_rate)
    return seconds


def master_bytes(plan: Plan) -> float:
    """Return the bytes of one master weight or gradient, as the optimizer stores it."""
    return 8.0 if plan.precision == "fp64" else 4.0


def weights_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Return the seconds of transferring `shards` parameters, a rank's shard, to be gathered."""
    return copy_seconds(machine, plan, plan.offload_parameters, shards * master_bytes(plan), out=False)


def gradients_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Return the seconds of transferring the gradients of `shards` parameters to the host.

    Their weights are offloaded there. Gradients stay in host memory, also where weights are offloaded to
    disk.
    """
    place: Offload = "host" if updates_on_host(plan) else "none"
    return copy_seconds(machine, plan, place, shards * master_bytes(plan), out=True)


def adding_on_host_seconds(machine: Machine, plan: Plan, shards: float) -> float:
    """Return the seconds of adding gradients of `shards` parameters to earlier ones on the host.

    A blocking copy comes first, then a sum on the host.
    """
    summed = 3 * shards * master_bytes(plan) / machine.host.memory_bytes_per_second
    return gradients_seconds(machine, plan, shards) + summed


def state_seconds(machine: Machine, plan: Plan, updated: float, state_bytes: float) -> float:
    """Return the seconds of transferring optimizer state to the update of `updated` parameters and back.

    Args:
        state_bytes: bytes of optimizer state per parameter.
    """
    state: Offload = plan.offload_optimizer
    if updates_on_host(plan) or plan.device == "cpu":
        # The update runs where files are mapped: their pages are read, and written again.
        files = updated * state_bytes * (state == "disk")
        files += updated * master_bytes(plan) * (plan.offload_parameters == "disk")
        return files / machine.host.read_rate + files / machine.host.write_rate
    return sum(copy_seconds(machine, plan, state, updated * state_bytes, out=out) for out in (False, True))


def trims(plan: Plan) -> bool:
    """Return whether a CPU's rank returns freed memory to the kernel."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return plan.device == "cpu" and "disk" in places


def asked_again_bytes(
    plan: Plan, weights: float, kept: float, micro_batches: int, *, is_block: bool
) -> tuple[float, float]:
    """Return (forward, backward) bytes that one micro-batch allocates again after their release.

    Memory is returned after each block where its weights or activations are in files, else after the update.

    Args:
        weights: bytes of a block's parameters in compute precision.
        kept: bytes of its activations until backward.
    """
    if not trims(plan):
        return 0.0, 0.0
    if plan.offload_activations == "disk" and is_block:  # made, then read from their file with gradients
        ahead, back = kept, 2 * kept
    elif plan.offload_parameters == "disk" or plan.offload_activations == "disk":
        ahead, back = kept, 0.0
    else:
        ahead, back = kept / micro_batches, 0.0
    if plan.offload_parameters == "disk":
        ahead += GATHERED_COPIES * weights
        back += (GATHERED_COPIES + 1) * weights  # with their gradients
    return ahead, back
