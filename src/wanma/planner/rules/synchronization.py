"""Synchronization settings of sites: defaults, validation, conversion to `Synchronization`.

The rules run before anything starts; each error names the keys, the cause and the way out.
"""

from __future__ import annotations

from typing import Any

from wanma.job.errors import JobError
from wanma.job.file.serialization import value_text
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection

DEFAULT_SYNCHRONIZE_EVERY = 100
DEFAULT_OUTER_LEARNING_RATE = 0.7
DEFAULT_OUTER_MOMENTUM = 0.9
DEFAULT_OVERLAP_MIX = 0.5
DEFAULT_STALENESS = 1
"""Defaults of the synchronization settings: interval in steps, outer rate and momentum, mix, staleness.

Outer rate and momentum are those of Douillard et al. 2023, section 3, the mixing factor that of Douillard et
al. 2025, section 3; the interval is the shortest that these papers have for models of any size.
"""

_LOCAL_STEP_METHODS = ("local_sgd", "diloco")
_SYNCHRONIZATION_KINDS_BY_KEY: dict[str, tuple[str, ...]] = {
    "sites": (*_LOCAL_STEP_METHODS, "delayed"),
    "synchronize_every": _LOCAL_STEP_METHODS,
    "synchronous_steps": _LOCAL_STEP_METHODS,
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
    "fragments": _LOCAL_STEP_METHODS,
    "overlap_steps": _LOCAL_STEP_METHODS,
    "overlap_mixing_factor": _LOCAL_STEP_METHODS,
    "outer_compression": _LOCAL_STEP_METHODS,
    "outer_offload": _LOCAL_STEP_METHODS,
    "staleness": ("delayed",),
}
"""Synchronization methods to which each key of [parallel] applies."""


def build_synchronization(parallel: ParallelSection) -> Synchronization | None:
    """Return the synchronization between sites of a job; None where all ranks synchronize at every step.

    Raises:
        JobError: the keys contradict each other.
    """
    kind = parallel.synchronize
    _check_keys(parallel)
    if kind == "every_step":
        return None
    sites = parallel.sites or parallel.dp_replicate
    if parallel.dp_replicate % sites:
        raise JobError(
            f"parallel.sites = {sites} does not divide parallel.dp_replicate = {parallel.dp_replicate}: "
            "all sites need equally many replicas",
            f"unset parallel.sites, or set parallel.dp_replicate to a multiple of {sites}",
        )
    if kind == "delayed":
        staleness = DEFAULT_STALENESS if parallel.staleness is None else parallel.staleness
        return Synchronization(kind, sites, staleness=staleness)
    interval = parallel.synchronize_every or DEFAULT_SYNCHRONIZE_EVERY
    if parallel.fragments > interval:
        raise JobError(
            f"parallel.fragments = {parallel.fragments} with parallel.synchronize_every = {interval}: at "
            "most one fragment is exchanged per step",
            f"set parallel.fragments to at most {interval}, or raise parallel.synchronize_every",
        )
    if parallel.overlap_steps >= interval:
        raise JobError(
            f"parallel.overlap_steps = {parallel.overlap_steps}: an exchange must end before the next "
            f"one of the same fragment begins, after parallel.synchronize_every = {interval} steps",
            f"set parallel.overlap_steps below {interval}, or raise parallel.synchronize_every",
        )
    mix = DEFAULT_OVERLAP_MIX if parallel.overlap_mixing_factor is None else parallel.overlap_mixing_factor
    outer: dict[str, Any] = {}
    if kind == "diloco":
        momentum = parallel.outer_momentum
        outer = {
            "outer_learning_rate": parallel.outer_learning_rate or DEFAULT_OUTER_LEARNING_RATE,
            "momentum": DEFAULT_OUTER_MOMENTUM if momentum is None else momentum,
        }
    return Synchronization(
        kind,
        sites,
        interval,
        parallel.synchronous_steps,
        fragments=parallel.fragments,
        overlap_steps=parallel.overlap_steps,
        overlap_mixing_factor=mix if parallel.overlap_steps else 0.0,
        compression=parallel.outer_compression,
        offload=parallel.outer_offload,
        **outer,
    )


def check_synchronization(job: Job, plan: Plan) -> None:
    """Check the synchronization between sites against the plan's other settings and the nodes.

    Raises:
        JobError: names the keys.
    """
    synchronization = plan.synchronization
    if synchronization is None:
        return
    key = f"parallel.synchronize = '{synchronization.kind}'"
    if plan.compression_methods:
        raise JobError(
            f"{key} with parallel.compression: checkpoints of sites do not support error feedback yet",
            "unset parallel.compression; parallel.outer_compression compresses the exchange between sites",
        )
    if plan.offload_parameters != "none":
        raise JobError(
            f"{key} with parallel.offload_parameters = '{plan.offload_parameters}': the exchange "
            "between sites needs weights and gradients on the device",
            "unset parallel.offload_parameters, or shard them within each site (parallel.dp_shard)",
        )
    if synchronization.has_local_weights and plan.offload_optimizer == "disk":
        raise JobError(
            f"{key} with parallel.offload_optimizer = 'disk': the outer weights and their momentum "
            "would take the memory that the offload saves",
            "unset parallel.offload_optimizer, or shard the state within each site (parallel.dp_shard)",
        )
    if synchronization.has_local_weights and job.train.weight_average > 0:
        raise JobError(
            f"{key} with train.weight_average = {job.train.weight_average:g}: the average of the sites "
            "is evaluated and saved already",
            "unset train.weight_average",
        )
    if synchronization.offload == "host" and plan.device == "cpu":
        raise JobError(
            "parallel.outer_offload = 'host' has no effect on CPUs: the data is in host memory already",
            "unset parallel.outer_offload",
        )
    nodes = job.cluster.nodes
    if nodes > 1 and plan.sites > 1 and nodes % plan.sites and plan.sites % nodes:
        raise JobError(
            f"parallel.sites = {plan.sites} on cluster.nodes = {nodes}: a site that shares its nodes "
            "with parts of other sites would wait for the slow links at every step",
            "set parallel.sites (default: dp_replicate) to a divisor or a multiple of cluster.nodes",
        )


def _check_keys(parallel: ParallelSection) -> None:
    """Refuse synchronization keys that would have no effect."""
    kind = parallel.synchronize
    for key, kinds in _SYNCHRONIZATION_KINDS_BY_KEY.items():
        default = ParallelSection.model_fields[key].default
        if getattr(parallel, key) != default and kind not in kinds:
            means = " or ".join(f"'{one}'" for one in kinds)
            raise JobError(
                f"parallel.{key} = {value_text(getattr(parallel, key))} has no effect with "
                f"parallel.synchronize = '{kind}'",
                f"unset it, or set parallel.synchronize = {means}",
            )
    if parallel.overlap_mixing_factor is not None and not parallel.overlap_steps:
        raise JobError(
            f"parallel.overlap_mixing_factor = {parallel.overlap_mixing_factor:g} with "
            "parallel.overlap_steps = 0: no step runs during an exchange",
            "unset parallel.overlap_mixing_factor, or set parallel.overlap_steps",
        )
    if parallel.auto and kind != "every_step":
        raise JobError(
            f"parallel.synchronize = '{kind}' with parallel = 'auto': the search covers only plans that "
            "synchronize at every step",
            "set the mesh dimensions: dp_replicate for the sites, the others within each site",
        )
