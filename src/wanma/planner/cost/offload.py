"""Time of offload transfers: weights, optimizer state and activations in host memory or on disk.

Keys are `parallel.offload_*`. It follows the runtime in `parallel.memory` and `training.optimizer`. On a GPU
a block's weights arrive while the block before computes, and activations go to the host and back on a stream
of their own. Copies of activations to and from files, and of optimizer state, block the device. On a CPU
every transfer blocks. Pure functions, without torch.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Offload
from wanma.planner.hardware_model.model import HardwareModel

GATHERED_COPIES = 2
"""Copies of a block's weights that a CPU allocates: the buffer that they are gathered into, and the
parameters."""


class OffloadTransfers(NamedTuple):
    """Seconds of the offload transfers of one block and micro-batch."""

    weights: float
    """Transfer of this rank's shard of the weights before they are gathered: in forward, and again in
    backward."""
    gradients: float
    """Transfer of this rank's shard of the gradients to the place of the offloaded weights."""
    activations_out: float
    """Transfer of activations from the device."""
    activations_in: float


def uses_offload(plan: Plan) -> bool:
    """Return whether the plan offloads anything."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return any(target != "none" for target in places)


def keeps_state_on_disk(plan: Plan) -> bool:
    """Return whether weights or optimizer state lie on disk, for which memory has no room."""
    offloads = "disk" in (plan.offload_parameters, plan.offload_optimizer)
    return offloads or plan.embedding_memory_bytes is not None


def reshards_after_forward(plan: Plan) -> bool:
    """Return whether a block's weights are gathered for each forward and each backward.

    They are where weights are sharded or offloaded; a pipeline keeps them gathered to the end of the step.
    """
    return (plan.shard == "parameters" or plan.offload_parameters != "none") and plan.pp == 1


def updates_on_cpu(plan: Plan) -> bool:
    """Return whether the optimizer runs on the CPUs beside a GPU, where offloaded weights are stored."""
    return plan.device != "cpu" and plan.offload_parameters != "none"


def transfer_seconds(
    hardware: HardwareModel, plan: Plan, place: Offload, moved_bytes: float, *, from_device: bool
) -> float:
    """Return the seconds of copying `moved_bytes` from the device to `place`, or back.

    On a CPU host memory is the device's own, and takes none.
    """
    if place == "none" or moved_bytes <= 0:
        return 0.0
    seconds = moved_bytes / hardware.host.link_bytes_per_second if plan.device != "cpu" else 0.0
    if place == "disk":  # through the host's memory, one after the other
        seconds += moved_bytes / (hardware.host.write_rate if from_device else hardware.host.read_rate)
    return seconds


def master_weight_bytes(plan: Plan) -> float:
    """Return the bytes of one master weight or gradient, as the optimizer stores it."""
    return 8.0 if plan.precision == "fp64" else 4.0


def weight_transfer_seconds(hardware: HardwareModel, plan: Plan, sharded_elements: float) -> float:
    """Return the seconds of transferring `sharded_elements` parameters, a rank's shard, to be gathered."""
    return transfer_seconds(
        hardware,
        plan,
        plan.offload_parameters,
        sharded_elements * master_weight_bytes(plan),
        from_device=False,
    )


def gradient_transfer_seconds(hardware: HardwareModel, plan: Plan, sharded_elements: float) -> float:
    """Return the seconds of transferring the gradients of `sharded_elements` parameters to the host.

    Their weights are offloaded there. Gradients stay in host memory, also where weights are offloaded to
    disk.
    """
    target: Offload = "host" if updates_on_cpu(plan) else "none"
    return transfer_seconds(
        hardware, plan, target, sharded_elements * master_weight_bytes(plan), from_device=True
    )


def host_accumulation_seconds(hardware: HardwareModel, plan: Plan, sharded_elements: float) -> float:
    """Return the seconds of adding gradients of `sharded_elements` parameters to earlier ones on the host.

    A blocking copy comes first, then a sum on the host.
    """
    summed = 3 * sharded_elements * master_weight_bytes(plan) / hardware.host.memory_bytes_per_second
    return gradient_transfer_seconds(hardware, plan, sharded_elements) + summed


def optimizer_state_transfer_seconds(
    hardware: HardwareModel, plan: Plan, updated: float, optimizer_state_bytes: float
) -> float:
    """Return the seconds of transferring optimizer state to the update of `updated` parameters and back.

    Args:
        optimizer_state_bytes: bytes of optimizer state per parameter.
    """
    state: Offload = plan.offload_optimizer
    if updates_on_cpu(plan) or plan.device == "cpu":
        # The update runs where files are mapped: their pages are read, and written again.
        files = updated * optimizer_state_bytes * (state == "disk")
        files += updated * master_weight_bytes(plan) * (plan.offload_parameters == "disk")
        return files / hardware.host.read_rate + files / hardware.host.write_rate
    return sum(
        transfer_seconds(hardware, plan, state, updated * optimizer_state_bytes, from_device=out)
        for out in (False, True)
    )


def returns_freed_memory(plan: Plan) -> bool:
    """Return whether a CPU's rank returns freed memory to the kernel."""
    places = (plan.offload_parameters, plan.offload_optimizer, plan.offload_activations)
    return plan.device == "cpu" and "disk" in places


def reallocated_bytes(
    plan: Plan, weight_bytes: float, activation_bytes: float, micro_batches: int, *, is_block: bool
) -> tuple[float, float]:
    """Return (forward, backward) bytes that one micro-batch allocates again after their release.

    Memory is returned after each block where its weights or activations are in files, else after the update.

    Args:
        weight_bytes: bytes of a block's parameters in compute precision.
        activation_bytes: bytes of its activations until backward.
    """
    if not returns_freed_memory(plan):
        return 0.0, 0.0
    if plan.offload_activations == "disk" and is_block:  # made, then read from their file with gradients
        forward, backward = activation_bytes, 2 * activation_bytes
    elif plan.offload_parameters == "disk" or plan.offload_activations == "disk":
        forward, backward = activation_bytes, 0.0
    else:
        forward, backward = activation_bytes / micro_batches, 0.0
    if plan.offload_parameters == "disk":
        forward += GATHERED_COPIES * weight_bytes
        backward += (GATHERED_COPIES + 1) * weight_bytes  # with their gradients
    return forward, backward
