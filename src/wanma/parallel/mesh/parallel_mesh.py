"""Device meshes and process groups of a plan, with mesh dimensions in the plan's rank order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wanma.collectives.all_reduce.nccl_switch import nccl_algorithm, nccl_algorithm_environment
from wanma.collectives.functional_all_gather import patch_functional_all_gather
from wanma.collectives.timing.communication_timer import CommunicationTimer, use_timer
from wanma.collectives.timing.event_clock import EventClock
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.parallel import CollectiveTransport
from wanma.parallel.mesh.backend_selection import log_backend, select_backend
from wanma.torch_internals.dtensor import clear_dtensor_caches, unflatten_mesh
from wanma.torch_internals.fake_tensors import FAKE_BACKEND
from wanma.torch_internals.loaded import is_dtensor_loaded


@dataclass(frozen=True)
class ParallelMesh:
    """Device meshes of one plan as one rank sees them.

    The world is seen in up to three ways, all of them meshes of one root, as FSDP2 wants it: by the plan's
    dimensions; by the part of the state that ranks hold, (stage, replicate, shard, state_tp); and the same
    for experts, (expert_stage, expert_replicate, expert_shard, ep, expert_tp). Where the plan has sites,
    these come first in each view (site, state_site, expert_site), and all other dimensions are within one.
    """

    plan: Plan
    rank: int
    device: torch.device
    plan_mesh: DeviceMesh
    parameter_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None
    """Expert mesh (expert_stage, expert_replicate, expert_shard, ep, expert_tp); None without `ep`."""
    embedding_mesh: DeviceMesh | None = None
    """Mesh (embedding, embedding_holder) of all data ranks, and of this rank alone, for embedding tables that
    they share; None where embedding tables are dense."""
    local_world_sizes: tuple[int, ...] = ()
    """Ranks of each node, as in `WorkerContext`."""
    communication_timer: CommunicationTimer = field(default_factory=CommunicationTimer, compare=False)
    """Timer of all communication of this rank."""

    @property
    def hsdp_mesh(self) -> DeviceMesh:
        """Mesh (replicate, shard) of the ranks that hold the same part of the model, `cp` included."""
        return self.parameter_mesh["replicate", "shard"]

    @property
    def expert_hsdp_mesh(self) -> DeviceMesh:
        """Mesh (expert_replicate, expert_shard) of the ranks that hold the same experts."""
        assert self.expert_mesh is not None
        return self.expert_mesh["expert_replicate", "expert_shard"]

    def dim_mesh(self, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of a plan's dimension to which this rank belongs."""
        if name == "tp":
            return self.parameter_mesh["state_tp"]  # the one that FSDP2 finds in parameters split by `tp`
        if name == "ep":
            assert self.expert_mesh is not None
            return self.expert_mesh["ep"]
        return self.plan_mesh[name]

    def coordinate(self, name: str) -> int:
        """Return this rank's coordinate in mesh dimension `name`."""
        return self.plan.coordinates(self.rank)[name]

    @property
    def site(self) -> int:
        """Index of this rank's site."""
        return self.plan.site_of(self.rank)

    @property
    def data_rank(self) -> int:
        return self.plan.data_parallel_rank(self.rank)

    @property
    def contributes_loss(self) -> bool:
        """Selection of one rank of those that compute the same losses: the last stage's first tensor rank.

        Context ranks compute the losses of different positions.
        """
        return self.plan.has_last_stage(self.rank) and self.coordinate("tp") == 0


@contextmanager
def open_mesh(
    worker: WorkerContext, plan: Plan, hang_timeout_seconds: float, collectives: CollectiveTransport = "auto"
) -> Iterator[ParallelMesh]:
    """Join the run's process group and build its mesh; close both on exit, also after an error.

    A group is made for a single process too: the same code then runs at every size.

    Args:
        worker: context of this rank.
        plan: plan of the run.
        hang_timeout_seconds: silence in seconds after which the supervisor calls a run hung. Collectives wait
            longer than that, so that its report, which names the cause, comes before their bare time-out.
        collectives: transport of CPU ranks; `parallel.collectives` of the job.

    Raises:
        WanmaError: the plan needs another number of ranks than were started, or a device that is missing; or
            `collectives` is 'shared_memory', and shared memory cannot be used.
    """
    if plan.world_size != worker.world_size:
        raise WanmaError(
            f"rank {worker.rank}: the plan has {plan.world_size} ranks, but {worker.world_size} were started",
            "start as many ranks as pp × dp_replicate × dp_shard × cp × tp",
        )
    device = _device(worker, plan)
    timeout = timedelta(seconds=2 * hang_timeout_seconds + 60)
    store: Any = worker.store
    if store is None:
        store = (
            dist.HashStore()  # type: ignore[attr-defined]  # public, but torch does not list it
            if worker.world_size == 1
            else dist.TCPStore(  # type: ignore[attr-defined]  # likewise
                worker.store_host, worker.store_port, is_master=False, timeout=timeout
            )
        )
    patch_functional_all_gather()
    backend = select_backend(worker, device, collectives)
    with nccl_algorithm_environment(nccl_algorithm(plan)):
        dist.init_process_group(
            backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=timeout
        )
        try:
            log_backend(worker, collectives)
            parallel_mesh = build_mesh(plan, worker.rank, device, worker.local_world_sizes)
            with use_timer(parallel_mesh.communication_timer):
                yield parallel_mesh
            # Not after an error: the end of a group waits for its collectives, in which peers may have died.
            if is_dtensor_loaded():
                clear_dtensor_caches()
        finally:
            dist.destroy_process_group()


def build_mesh(
    plan: Plan, rank: int, device: torch.device, local_world_sizes: tuple[int, ...] = ()
) -> ParallelMesh:
    """Build the meshes of a plan in a process group that has been joined; every rank calls it.

    Args:
        local_world_sizes: ranks of each node, as in `WorkerContext`.
    """
    saves_groups = device.type == "cpu" and plan.world_size > 1
    root = init_device_mesh(device.type, (plan.world_size,), mesh_dim_names=("world",))

    def seen_as(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        # Each group of Gloo's wakes a thread a hundred times a second, and there would be a dozen: a mesh
        # dimension of one rank gets a fake group, as in torchtitan. So does the sites' in all views but the
        # first: nothing is sent by it. Without sites the first name is not needed.
        names = names[-len(sizes) :]
        unused_dims = ("state_site", "expert_site", "embedding_holder")
        fake_dims = [
            name for name, size in zip(names, sizes, strict=True) if size == 1 or name in unused_dims
        ]
        backends: dict[str, Any] = dict.fromkeys(fake_dims, FAKE_BACKEND) if saves_groups else {}
        if plan.sites > 1 and "site" in names and dist.get_backend() != FAKE_BACKEND:  # of a dry run
            # A group of its own even where it is the world: what is under way for steps must not hold up what
            # the world tells each other at each of them.
            backends["site"] = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return unflatten_mesh(root, sizes, names, backends)

    sites = () if plan.synchronization is None else (plan.sites,)
    dim_sizes = {axis: getattr(plan, axis) for axis in MESH_DIMS} | {
        "dp_replicate": plan.dp_replicate // plan.sites
    }
    axes = seen_as((*sites, *dim_sizes.values()), ("site", *MESH_DIMS))
    state = seen_as(
        (*sites, plan.pp, plan.replicate_group_size, plan.shard_group_size, plan.tp),
        ("state_site", "stage", "replicate", "shard", "state_tp"),
    )
    experts = None
    if plan.ep > 1:
        experts = seen_as(
            (*sites, plan.pp, *plan.expert_group_sizes, plan.ep, plan.tp),
            ("expert_site", "expert_stage", "expert_replicate", "expert_shard", "ep", "expert_tp"),
        )
    embeddings = None
    if plan.embedding != "dense":
        embeddings = seen_as((plan.world_size, 1), ("embedding", "embedding_holder"))
    timer = CommunicationTimer(EventClock() if device.type == "cuda" else None)
    return ParallelMesh(plan, rank, device, axes, state, experts, embeddings, local_world_sizes, timer)


def _device(worker: WorkerContext, plan: Plan) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    if worker.local_rank >= torch.cuda.device_count():
        raise WanmaError(
            f"rank {worker.rank}: no GPU for local rank {worker.local_rank} (GPUs on this node: "
            f"{torch.cuda.device_count()})",
            "start fewer ranks on this node, or set cluster.device = 'cpu'",
        )
    device = torch.device("cuda", worker.local_rank)
    torch.cuda.set_device(device)
    return device
