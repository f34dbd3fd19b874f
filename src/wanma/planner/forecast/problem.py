"""Planning problem: job, workload, homogeneous cluster, hardware model and memory limit.

Pure data, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import EmbeddingTable, Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.observe.units import bytes_text
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.cost.optimizer_update import optimizer_cost_of
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.hardware_model.model import HardwareModel
from wanma.planner.memory.in_memory_checkpoints import in_memory_checkpoint_bytes
from wanma.planner.memory.model_states import optimizer_state_elements

USABLE_DEVICE_MEMORY_SHARE = 0.93
"""Share of a GPU's memory that a forecast may fill.

CUDA's and NCCL's part and what the allocator leaves unused are forecast; where runs reported what they had
reserved, forecasts were at most 3 % below it (docs/results/planner-memory.md).
"""
USABLE_HOST_MEMORY_SHARE = 0.85
"""Share of a node's host memory that a forecast may fill; the system and other programs need the rest.

Forecasts for CPUs were up to 5 % below real runs (docs/results/planner-memory.md).
"""

DIRTY_PAGE_SHARE = 0.15
"""Share of a node's host memory that files rewritten in every step may fill.

Beyond it Linux has programs wait for the disk (vm.dirty_ratio = 20 and vm.dirty_background_ratio = 10 of what
is available: from halfway between them on). One copy of weights and optimizer state is compared with it.
"""


@dataclass(frozen=True)
class PlanningProblem:
    """Inputs of a forecast beside the plan, which stay the same while plans vary."""

    job: Job
    """Job of the user: batch, optimizer, precision, steps, checkpoints."""
    cluster: Cluster
    workload: Workload
    hardware: HardwareModel
    """Hardware model of the cluster's devices."""
    memory_limit_bytes: float
    """Memory of one device that a plan may fill, in bytes."""
    dimensions: DecoderConfig | None = None
    """Dimensions of a decoder, whose operators are known one by one; None for any other model."""
    framework: FrameworkTraits = field(default_factory=FrameworkTraits)
    """Framework traits of the training program: our own runtime's."""
    heterogeneous_cluster: Cluster | None = None
    """Heterogeneous cluster that `cluster` replaces by equal nodes; None where its nodes are equal."""
    server_tables: tuple[EmbeddingTable, ...] = ()
    """Embedding tables that parameter servers hold; they are not in `workload`."""

    @property
    def global_batch(self) -> int:
        """Samples of a step, once the batch ramp is over."""
        batches = [batch for step, batch in self.job.train.batch_ramp if step < self.job.train.steps]
        return batches[-1] if batches else self.job.train.global_batch

    @property
    def sequence_length(self) -> int:
        """Tokens of one sample."""
        return self.workload.tokens_per_sample

    def peak_flops_per_second(self, precision: str) -> float:
        """Return the dense peak of one device in FLOP/s, the mean over a heterogeneous cluster's, for MFU."""
        mean = (
            mean_peak_flops(self.heterogeneous_cluster, precision)
            if self.heterogeneous_cluster is not None
            else None
        )
        return mean or self.hardware.chip.peak_flops_per_second[precision]


@dataclass(frozen=True)
class PlanningInputs:
    """Inputs of planning a job; its planning problems are built from them."""

    job: Job
    cluster: Cluster
    """Nodes of the job, as they are: several kinds are not yet replaced by equal ones."""
    workload: Workload
    """Workload of the job's model."""
    dimensions: DecoderConfig | None = None
    """Dimensions of a decoder; None for any other model."""
    calibration: Calibration | None = None
    """Measurements of the devices."""

    def problem(self, *, ranks: int = 1) -> PlanningProblem:
        """Build the planning problem, as `build_problem`."""
        return build_problem(
            self.job, self.cluster, self.workload, self.dimensions, self.calibration, ranks=ranks
        )


def build_problem(
    job: Job,
    cluster: Cluster,
    workload: Workload,
    dimensions: DecoderConfig | None = None,
    calibration: Calibration | None = None,
    *,
    ranks: int = 1,
) -> PlanningProblem:
    """Build the planning problem of a job on its nodes.

    A heterogeneous cluster counts as equal nodes, each as slow and as small as its weakest, which is how
    ranks with equal shares of the batch run.

    Args:
        job: the job.
        cluster: nodes of the job that are not in it are taken to be like those that are.
        workload: workload of the job's model.
        dimensions: the decoder's dimensions; None for any other model.
        calibration: measurements of the devices.
        ranks: ranks of one node, where they compute on its CPUs.

    Raises:
        JobError: a GPU is asked for and none is there.
    """
    machines = homogeneous_cluster(job, cluster)
    (node,) = machines.nodes
    memory_bytes: float = min(
        (device.memory_bytes for device in node.devices),
        # Beside servers, ranks need unlike memory: `server_forecast` compares their sum.
        default=node.memory_bytes // (1 if job.servers.count else ranks),
    )
    machine = build_hardware_model(
        machines, calibration=calibration, ranks=ranks, threads=job.cluster.threads_per_rank
    )
    update = optimizer_cost_of(job.train, workload, dimensions)
    state_bytes = 4.0 * optimizer_state_elements(workload, job.train)
    in_files = (4.0 * workload.parameters + state_bytes) / job.cluster.nodes
    keeps_files = in_files <= DIRTY_PAGE_SHARE * node.memory_bytes
    machine = replace(machine, host=replace(machine.host, keeps_files=keeps_files))
    trained = workload.parameters * workload.trainable_share
    traits = FrameworkTraits(
        fragmentation_factor=machine.unused_factor,
        optimizer_bytes=update.moved_bytes,
        optimizer_flops=update.flops,
        optimizer_exchanged_bytes=update.exchanged_bytes,
        optimizer_state_bytes=state_bytes / max(trained, 1.0),
        shared_memory_nodes=0 if job.parallel.collectives == "gloo" else job.cluster.nodes,
        logits_copies=1.0 if dimensions is not None else 2.0,
        casts_frozen_weights=job.model.factory is None,
    )
    memory_bytes *= USABLE_DEVICE_MEMORY_SHARE if node.devices else USABLE_HOST_MEMORY_SHARE
    heterogeneous = cluster if len(cluster.nodes) > 1 and node.devices else None
    served = workload.tables if job.servers.count else ()
    if served:
        workload = replace(workload, tables=())
    return PlanningProblem(
        job, machines, workload, machine, memory_bytes, dimensions, traits, heterogeneous, served
    )


def mean_peak_flops(cluster: Cluster, precision: str) -> float | None:
    """Return the dense peak of an accelerator, mean over the cluster, in FLOP/s; None if one has none."""
    peaks = [
        (node.count, device.peak_flops_per_second.get(precision))
        for node in cluster.nodes
        for device in node.devices
    ]
    known = [(count, peak) for count, peak in peaks if peak]
    if not known or len(known) < len(peaks):
        return None
    return sum(count * peak for count, peak in known) / sum(count for count, _ in known)


def host_memory_overflow_reason(
    problem: PlanningProblem, plan: Plan, memory_forecast: Forecast
) -> str | None:
    """Return the reason why the plan's host memory does not fit on the nodes, or None.

    In-memory checkpoints count where the job sets their interval.
    """
    required, copy_bytes = float(memory_forecast.host_bytes), 0
    if isinstance(problem.job.checkpoint.in_memory_every_steps, int):
        copy_bytes = in_memory_checkpoint_bytes(problem.job, problem.workload, plan)
        required += copy_bytes + (memory_forecast.memory_bytes if plan.device == "cpu" else 0)
    (node,) = problem.cluster.nodes
    node_ranks, uneven = divmod(plan.world_size, problem.job.cluster.nodes)
    if uneven:  # a plan on a part of a hypothetical cluster
        node_ranks = min(max(len(node.devices), 1), plan.world_size)
    if required * node_ranks <= node.memory_bytes * USABLE_HOST_MEMORY_SHARE:
        return None
    snapshots = f" ({bytes_text(copy_bytes * node_ranks)} for in-memory checkpoints)" if copy_bytes else ""
    return (
        f"the plan needs {bytes_text(required * node_ranks)} of host memory on {node.name}{snapshots}, which "
        f"has {bytes_text(node.memory_bytes)}"
    )


def select_device_type(job: Job, cluster: Cluster) -> str:
    """Return the kind of device that the job runs on, "cuda" or "cpu".

    Raises:
        JobError: a GPU is asked for and none is there.
    """
    has_gpu = all(node.devices for node in cluster.nodes)
    if job.cluster.device == "cuda" and not has_gpu:
        raise JobError(
            "cluster.device = 'cuda', but this node has no NVIDIA GPU",
            "set cluster.device = 'auto' or 'cpu'; `wanma doctor` lists what was checked",
        )
    return "cuda" if has_gpu and job.cluster.device != "cpu" else "cpu"


def homogeneous_cluster(job: Job, cluster: Cluster) -> Cluster:
    """Return the job's number of equal nodes, each as slow and as small as the cluster's weakest."""
    nodes = cluster.nodes
    if select_device_type(job, cluster) == "cpu":
        nodes = tuple(replace(node, devices=()) for node in nodes)
    count = max(cluster.node_count, job.cluster.nodes)
    slowest = min(nodes, key=lambda node: _matmul_rate(node, job.train.precision))
    if len(nodes) > 1:
        level = cluster.inter_group_level()
        slowest = replace(
            slowest,
            devices=_smallest_devices(nodes, slowest),
            cores=min(node.cores for node in nodes),
            memory_bytes=min(node.memory_bytes for node in nodes),
            network=(replace(level, size=None),) if level is not None else (),
        )
    return Cluster((replace(slowest, count=count),))


def _matmul_rate(node: NodeGroup, precision: str) -> float:
    """Return the rate of matrix products of a node's slowest device, in FLOP/s; 0 where unknown."""
    devices = node.devices or ((node.cpu,) if node.cpu else ())
    return min((device.peak_flops_per_second.get(precision, 0.0) for device in devices), default=0.0)


def _smallest_devices(nodes: tuple[NodeGroup, ...], slowest: NodeGroup) -> tuple[Device, ...]:
    number = min(len(node.devices) for node in nodes)
    memory_bytes = min((device.memory_bytes for node in nodes for device in node.devices), default=0)
    return tuple(replace(device, memory_bytes=memory_bytes) for device in slowest.devices[:number])
