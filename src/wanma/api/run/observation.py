"""Observer of a run of this node, whose alerts go to the console and, where rank 0 is, into the records."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from wanma.api.run.run_records import record_supervisor_event
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.observe import ObserveSection
from wanma.observe.run_observer import RunObserver


def open_observer(
    run: RunDirectory,
    settings: ObserveSection,
    write: Callable[[Event], None],
    *,
    node: int | None,
    checkpoint_interval_steps: int,
    plan: Mapping[str, Any],
    began: float | None = None,
) -> RunObserver:
    """Return the observer, which is to be entered.

    Args:
        run: run directory.
        settings: section [observe] of the job.
        write: shows an event.
        node: node rank of this node; None: it is not known yet.
        checkpoint_interval_steps: steps between two checkpoints; 0: there are none.
        plan: content of plan.json; empty: unknown.
        began: time of this start in unix seconds; None: now.

    Raises:
        JobError: as of `RunObserver`.
        WanmaError: likewise.
    """
    return RunObserver(
        run,
        settings,
        node=node,
        hostname=socket.gethostname(),
        checkpoint_interval_steps=checkpoint_interval_steps,
        plan=plan,
        show=write,
        record=lambda event: record_supervisor_event(run, event, write),
        began=began,
    )
