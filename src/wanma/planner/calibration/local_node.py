"""Local node of a measurement: rank counts, data-parallel plan, device name and description."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from wanma.job.cluster import NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.run.resource_limits import cpu_model


def rank_counts(node: NodeGroup, requested: Sequence[int]) -> list[int]:
    """Return the rank counts to measure with, ascending; default: powers of two up to its GPUs or cores.

    Args:
        requested: rank counts that the user gave; empty: the default.

    Raises:
        JobError: a rank count is too small, or larger than the node's number of GPUs.
    """
    gpus = len(node.devices)
    max_ranks = gpus or node.cores
    if requested:
        if min(requested) < 1:
            raise JobError(f"--ranks {min(requested)}: a calibration needs at least one rank")
        if gpus and max(requested) > max_ranks:
            raise JobError(
                f"--ranks {max(requested)}: this node has {max_ranks} GPUs", f"give at most {max_ranks}"
            )
        return sorted(set(requested))
    return [1 << power for power in range(max_ranks.bit_length())]


def baseline_plan(node: NodeGroup, ranks: int, node_count: int = 1) -> Plan:
    """Return a plan of replicas alone, with `ranks` on each of `node_count` nodes like this one."""
    device = "cuda" if node.devices else "cpu"
    threads = max(node.cores // ranks, 1)
    return Plan(dp_replicate=ranks * node_count, device=device, threads_per_rank=threads)


def calibration_device_name(node: NodeGroup, plan: Plan) -> str:
    """Return the device's name in a calibration."""
    return node.devices[0].name if plan.device == "cuda" else cpu_model()


def node_text(node: NodeGroup) -> str:
    """Return a description of the measured node: devices, CPU and versions, each once."""
    processor = "" if cpu_model() in str(node) else f"{cpu_model()}, {node.cores} cores, "
    return f"{node}, {processor}{platform.system()} {platform.release()}, torch {version('torch')}"
