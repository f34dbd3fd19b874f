"""Observer of a run of this node, whose alerts go to the console and, on the first node, into the records."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from wanma.api.run.run_records import record_supervisor_event
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.alerts.monitor import ALERT_EVENT
from wanma.observe.run_observer import RunObserver


def open_observer(
    run: RunDirectory,
    settings: ObserveSection,
    write: Callable[[Event], None],
    *,
    node: int,
    checkpoint_interval_steps: int,
    plan: Mapping[str, Any],
) -> RunObserver:
    """Return the observer, which is to be entered.

    Args:
        run: run directory.
        settings: section [observe] of the job.
        write: shows an event.
        node: node rank of this node.
        checkpoint_interval_steps: steps between two checkpoints; 0: there are none.
        plan: content of plan.json; empty: unknown.

    Raises:
        JobError: as of `RunObserver`.
        WanmaError: likewise.
    """

    def show(event: Event) -> None:
        write(event)
        if event["kind"] == ALERT_EVENT and node == 0:
            record_supervisor_event(run, event, write)

    return RunObserver(
        run,
        settings,
        node=node,
        hostname=socket.gethostname(),
        checkpoint_interval_steps=checkpoint_interval_steps,
        plan=plan,
        show=show,
    )
