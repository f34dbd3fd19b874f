"""Parameter servers of a run: their processes beside the supervisor, and the entry of its workers."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from wanma.elastic.protocol.shared_secret import load_rendezvous_secret
from wanma.elastic.transport.endpoint import resolve_endpoint
from wanma.hardware.discovery.network_interfaces import find_route_to
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import ServerAccess
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.server_request import take_server_request
from wanma.job.run.worker import Event, WorkerContext
from wanma.job.sections.job import Job
from wanma.parameter_server.coordinator import ServerCoordinator
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost
from wanma.parameter_server.step_clock import StepClock
from wanma.parameter_server.update_rule import UpdateRule

SERVED_ENTRY = "wanma.api.run.parameter_servers:train_worker"
DEFAULT_STALENESS = 4
"""Bound of staleness where the job sets `servers.mode = 'bounded'` alone."""
_POLL_SECONDS = 0.5
"""Interval at which a request for another number of servers is looked for."""
_COORDINATOR_KEY = "wanma parameter servers"
"""Key of the rendezvous store under which rank 0 publishes the coordinator of the servers."""


class RunServers:
    """Parameter servers of a run: first an endpoint for its workers, then processes; none without any.

    With several nodes each has a host of servers; the coordinator on the node of rank 0 uses them all.
    """

    def __init__(self, job: Job, plan: Plan, run: RunDirectory) -> None:
        section = job.servers
        self._section, self._run = section, run
        bound = DEFAULT_STALENESS if section.staleness is None else section.staleness
        clock = StepClock(
            plan.world_size,
            is_synchronous=section.mode == "synchronous",
            staleness=bound if section.mode == "bounded" else None,
        )
        rule = UpdateRule(job.train.gradient_clip, stops_if_not_finite=job.train.non_finite == "stop")
        self._nodes = job.cluster.nodes
        self._secret = secrets.token_bytes(32)
        self._coordinator: ServerCoordinator | None = None
        if section.count:
            address, is_remote = "127.0.0.1", self._nodes > 1
            if is_remote:
                address, self._secret = _network_access(job)
            self._coordinator = ServerCoordinator(
                self._secret, clock, rule, address=address, nodes=self._nodes
            )
            self._host = ServerHost(self._secret, run.path / "logs", address=address, is_remote=is_remote)

    @property
    def access(self) -> ServerAccess | None:
        """Access of the workers to the servers; None: the job has none."""
        if self._coordinator is None:
            return None
        return replace(self._coordinator.access, node_endpoint=self._host.endpoint)

    @contextmanager
    def serve(self, write: Callable[[Event], None]) -> Iterator[None]:
        """Run the server processes within the context.

        Args:
            write: function that shows the user an event.
        """

        def show(text: str, level: str) -> None:
            write({"kind": "message", "level": level, "text": text})

        section = self._section
        if self._coordinator is None:
            yield
            return
        logs = self._run.path / "logs"
        group = ServerGroup(section.count, section.replicas, self._secret, logs, show, self._nodes)
        with closing(self._host), closing(group), closing(self._coordinator):
            if self._nodes == 1:
                group.set_hosts({0: self._host})
            self._coordinator.start(group, show)
            is_over = threading.Event()
            follower = threading.Thread(
                target=self._follow_requests, args=(self._coordinator, is_over), daemon=True
            )
            follower.start()
            try:
                yield
            finally:
                is_over.set()

    def _follow_requests(self, coordinator: ServerCoordinator, is_over: threading.Event) -> None:
        """Resize the servers as the run's user asks, on the node whose coordinator the workers use."""
        count: int | None = None
        while not is_over.wait(_POLL_SECONDS):
            if coordinator.is_loaded:
                count = take_server_request(self._run) or count
            if count is not None and coordinator.resize(count):
                count = None


def _network_access(job: Job) -> tuple[str, bytes]:
    """Return the address of this node on the run's network, and the servers' secret, the same on all nodes.

    Raises:
        WanmaError: the nodes share no secret, or there is no route to `cluster.rendezvous`.
    """
    assert job.cluster.rendezvous is not None  # by `planner.rules.mesh`
    endpoint = resolve_endpoint(job.cluster.rendezvous)
    route = find_route_to(endpoint.address[0], job.cluster.network_interface)
    if route is None:
        raise WanmaError(
            f"this node has no route to cluster.rendezvous = '{job.cluster.rendezvous}', on which parameter "
            "servers listen",
            "give cluster.rendezvous an address that all nodes reach, or set cluster.network_interface",
            EXIT_USAGE,
        )
    secret = load_rendezvous_secret(endpoint.is_loopback, os.environ)
    return route.address, hmac.digest(secret, b"wanma parameter servers", "sha256")


def train_worker(worker: WorkerContext, payload: bytes) -> None:
    """Train as one worker of parameter servers; the supervisor calls it in every rank.

    Args:
        worker: context of this rank.
        payload: as of `wanma.training.loop.train_worker.train_worker`.
    """
    from wanma.parameter_server.client import ParameterServerClient
    from wanma.training.loop.server_training import train_with_servers
    from wanma.training.loop.train_worker import read_request

    request = read_request(payload)
    section, access = request.job.servers, request.servers
    assert access is not None
    if access.node_endpoint is not None:
        access = _find_coordinator(worker, access)

    def show_life() -> None:
        worker.supervisor_client.report_progress(servers.step, "waiting for parameter servers")

    servers = ParameterServerClient(
        access, worker.rank, worker.generation, section.mode, section.compression, worker.node_rank, show_life
    )
    # The chief's own module, loss and metrics refer to each other, and to none of its worker's.
    has_module = "model" in request.user_objects
    chief_request = read_request(payload) if worker.rank == 0 and has_module else request
    train_with_servers(worker, request, servers, chief_request)


def _find_coordinator(worker: WorkerContext, access: ServerAccess) -> ServerAccess:
    """Return the access to the coordinator of rank 0's node, which rank 0 publishes to all workers."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it so

    store = worker.store
    if store is None:
        store = TCPStore(worker.store_host, worker.store_port, is_master=False)
    if worker.rank == 0:
        store.set(_COORDINATOR_KEY, json.dumps([access.host, access.port]))
    host, port = json.loads(store.get(_COORDINATOR_KEY))
    return replace(access, host=host, port=port)
