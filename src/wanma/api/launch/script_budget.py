"""Budget of a user's script, by time: a script may never do a step."""

from __future__ import annotations

import time
from collections.abc import Callable

from wanma.api.session import SESSION_EVENT
from wanma.elastic.launch_config import OnEvent
from wanma.engines.lease.budget import BudgetWatch
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.cluster import BudgetSection, ClusterSection
from wanma.observe.console.record_follower import read_records


def with_budget(
    write: Callable[[Event], object], run: RunDirectory, section: ClusterSection, ranks: int
) -> OnEvent:
    """Return `write`, followed by the reason for which the budget ends the run, once.

    Args:
        write: function that gets the run's events.
        run: run directory; earlier starts count if a session has recorded them there.
        section: settings of the command; without a budget there, the one of a session's job holds.
        ranks: processes on each node.

    Raises:
        WanmaError: as of `BudgetWatch`.
    """
    began = time.time()

    def open_watch(settings: ClusterSection) -> BudgetWatch | None:
        if settings.budget == BudgetSection():
            return None
        cluster = read_cluster(settings.file) if settings.file is not None else discover_node()
        return BudgetWatch(settings.budget, cluster, read_records(run, began) if run.job.exists() else ())

    watch = open_watch(section)
    if watch is not None:  # time counts from here, as a session may never begin
        devices = {"world_size": ranks * section.nodes, "nodes": section.nodes}
        watch.on_event({"kind": "start", "time": began, "step": None, **devices})

    def on_event(event: Event) -> str | None:
        nonlocal watch
        write(event)
        if watch is None and event["kind"] == SESSION_EVENT:
            try:
                watch = open_watch(ClusterSection.model_validate(event["cluster"]))
            except WanmaError as error:
                return error.message
        return watch.on_event(event) if watch is not None else None

    return on_event
