"""Parameter servers of a run: their processes beside the supervisor, and the entry of its workers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from wanma.job.plan.plan import Plan
from wanma.job.run.parameter_servers import ServerAccess
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event, WorkerContext
from wanma.job.sections.job import Job
from wanma.parameter_server.coordinator import ServerCoordinator, UpdateRule
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.step_clock import StepClock

SERVED_ENTRY = "wanma.api.run.parameter_servers:train_worker"
DEFAULT_STALENESS = 4
"""Bound of staleness where the job sets `servers.mode = 'bounded'` alone."""


class RunServers:
    """Parameter servers of a run: first an endpoint for its workers, then processes; none without any."""

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
        self._secret = secrets.token_bytes(32)
        self._coordinator: ServerCoordinator | None = None
        if section.count:
            self._coordinator = ServerCoordinator(self._secret, clock, rule)

    @property
    def access(self) -> ServerAccess | None:
        """Access of the workers to the servers; None: the job has none."""
        return None if self._coordinator is None else self._coordinator.access

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
        with (
            closing(self._coordinator),
            closing(
                ServerGroup(section.count, section.replicas, self._secret, self._run.path / "logs", show)
            ) as group,
        ):
            self._coordinator.start(group, show)
            yield


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
    servers = ParameterServerClient(access, worker.rank, worker.generation, section.mode, section.compression)
    train_with_servers(worker, request, servers)
