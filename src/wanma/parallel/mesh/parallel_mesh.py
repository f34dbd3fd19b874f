"""Device meshes and process groups of a plan, with mesh dimensions in the plan's rank order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes groups that pretend known
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wanma.collectives.functional_all_gather import mend_all_gather
from wanma.collectives.timing.communication_timer import Stopwatch, watching
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import AXES, Plan
from wanma.job.run.worker import Worker
from wanma.job.sections.parallel import Collectives
from wanma.parallel.mesh.backend_selection import backend_name, tell_transport


@dataclass(frozen=True)
class Grid:
    """Device meshes of one plan as one rank sees them.

    The world is seen in up to three ways, all of them meshes of one root, as FSDP2 wants it: by the plan's
    dimensions; by the part of the state that ranks hold, (stage, replicate, shard, state_tp); and the same
    for experts, (expert_stage, expert_replicate, expert_shard, ep, expert_tp). Where the plan has sites,
    these come first in each view (site, state_site, expert_site), and all other dimensions are within one.
    """

    plan: Plan
    rank: int
    device: torch.device
    axes: DeviceMesh
    state: DeviceMesh
    experts: DeviceMesh | None
    """Expert mesh (expert_stage, expert_replicate, expert_shard, ep, expert_tp); None without `ep`."""
    ranks_by_node: tuple[int, ...] = ()
    """Ranks of each node, as in `Worker`."""
    communication: Stopwatch = field(default_factory=Stopwatch, compare=False)
    """Timer of all communication of this rank."""

    @property
    def state_mesh(self) -> DeviceMesh:
        """Mesh (replicate, shard) of the ranks that hold the same part of the model, `cp` included."""
        return self.state["replicate", "shard"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Mesh (expert_replicate, expert_shard) of the ranks that hold the same experts."""
        assert self.experts is not None
        return self.experts["expert_replicate", "expert_shard"]

    def axis(self, name: str) -> DeviceMesh:
        """Return the one-dimensional mesh of a plan's dimension to which this rank belongs."""
        if name == "tp":
            return self.state["state_tp"]  # the one that FSDP2 finds in parameters split by `tp`
        if name == "ep":
            assert self.experts is not None
            return self.experts["ep"]
        return self.axes[name]

    def at(self, name: str) -> int:
        """Return this rank's coordinate in mesh dimension `name`."""
        return self.plan.coordinates(self.rank)[name]

    @property
    def site(self) -> int:
        """Index of this rank's site."""
        return self.plan.site_of(self.rank)

    @property
    def data_rank(self) -> int:
        return self.plan.data_rank(self.rank)

    @property
    def counts_loss(self) -> bool:
        """Selection of one rank of those that compute the same losses: the last stage's first tensor rank.

        Context ranks compute the losses of different positions.
        """
        return self.plan.holds_loss(self.rank) and self.at("tp") == 0


@contextmanager
def process_grid(
    worker: Worker, plan: Plan, deadline_seconds: float, collectives: Collectives = "auto"
) -> Iterator[Grid]:
    """Join the run's process group and build its mesh; close both on exit, also after an error.

    A group is made for a single process too: the same code then runs at every size.

    Args:
        worker: context of this rank.
        plan: plan of the run.
        deadline_seconds: silence in seconds after which the supervisor calls a run hung. Collectives wait
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
    timeout = timedelta(seconds=2 * deadline_seconds + 60)
    store: Any = worker.store
    if store is None:
        store = (
            dist.HashStore()  # type: ignore[attr-defined]  # public, but torch does not list it
            if worker.world_size == 1
            else dist.TCPStore(  # type: ignore[attr-defined]  # likewise
                worker.store_host, worker.store_port, is_master=False, timeout=timeout
            )
        )
    mend_all_gather()
    backend = backend_name(worker, device, collectives)
    dist.init_process_group(
        backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=timeout
    )
    try:
        tell_transport(worker, collectives)
        grid = build_grid(plan, worker.rank, device, worker.ranks_by_node)
        # The host's clock times the waits of a CPU, not the work of a GPU.
        with watching(grid.communication) if device.type == "cpu" else nullcontext():
            yield grid
    finally:
        dist.destroy_process_group()


def build_grid(plan: Plan, rank: int, device: torch.device, ranks_by_node: tuple[int, ...] = ()) -> Grid:
    """Build the meshes of a plan in a process group that has been joined; every rank calls it.

    Args:
        ranks_by_node: ranks of each node, as in `Worker`.
    """
    saves_groups = device.type == "cpu" and plan.world_size > 1
    root = init_device_mesh(device.type, (plan.world_size,), mesh_dim_names=("world",))

    def seen_as(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        # Each group of Gloo's wakes a thread a hundred times a second, and there would be a dozen: an axis of
        # one rank gets a group that only pretends, as in torchtitan. So does the sites' in all views but the
        # first: nothing is sent by it. Without sites the first name is not needed.
        names = names[-len(sizes) :]
        silent = ("state_site", "expert_site")
        alone = [name for name, size in zip(names, sizes, strict=True) if size == 1 or name in silent]
        backends: dict[str, Any] = dict.fromkeys(alone, "fake") if saves_groups else {}
        if plan.sites > 1 and "site" in names and dist.get_backend() != "fake":  # of a dry run
            # A group of its own even where it is the world: what is under way for steps must not hold up what
            # the world tells each other at each of them.
            backends["site"] = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        return root._unflatten(0, sizes, names, backends or None)

    sites = () if plan.synchronization is None else (plan.sites,)
    within = {axis: getattr(plan, axis) for axis in AXES} | {"dp_replicate": plan.dp_replicate // plan.sites}
    axes = seen_as((*sites, *within.values()), ("site", *AXES))
    state = seen_as(
        (*sites, plan.pp, plan.replicas, plan.shard_ranks, plan.tp),
        ("state_site", "stage", "replicate", "shard", "state_tp"),
    )
    experts = None
    if plan.ep > 1:
        experts = seen_as(
            (*sites, plan.pp, *plan.expert_ranks, plan.ep, plan.tp),
            ("expert_site", "expert_stage", "expert_replicate", "expert_shard", "ep", "expert_tp"),
        )
    return Grid(plan, rank, device, axes, state, experts, ranks_by_node)


def _device(worker: Worker, plan: Plan) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    if worker.local_rank >= torch.cuda.device_count():
        raise WanmaError(
            f"rank {worker.rank}: no GPU for local rank {worker.local_rank}: "
            f"this node has {torch.cuda.device_count()}",
            "start fewer ranks here, or set cluster.device = 'cpu'",
        )
    device = torch.device("cuda", worker.local_rank)
    torch.cuda.set_device(device)
    return device
