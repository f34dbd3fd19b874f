"""Keeper of a run's number of nodes: asks for nodes that the run lacks, and gives nodes back to other work.

It lives in the supervisor on the node of rank 0, in a thread of its own: a scheduler that does not answer
must not delay the run. Only a run whose number of nodes may change has one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from wanma.engines.engine import WANTED_NODES_KEY, Engine, Handle
from wanma.engines.engine_record import EngineRecord, change_handle
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event

MOST_FAILED_REQUESTS = 3
"""Nodes that may fail to join, one after another, before no more are asked for."""
CHECK_SECONDS = 10.0
"""Interval, in seconds, of checks while the run has too few nodes: a scheduler notices a loss late."""


class NodeKeeper:
    """Keeper of the number of nodes; a context manager, whose end withdraws what is still waited for.

    Args:
        run: run directory.
        engine: engine of the run.
        secret: shared secret of the run's supervisors.
        notify: receives texts for the user, in the keeper's thread.
    """

    def __init__(
        self, run: RunDirectory, engine: Engine, secret: str, notify: Callable[[str], object]
    ) -> None:
        self._run, self._engine, self._secret, self._notify = run, engine, secret, notify
        self._nodes: int | None = None
        """Nodes of the newest start of the ranks; None: rank 0 has not started on this node."""
        self._is_short = False
        self._changed = threading.Event()
        self._is_closing = False
        self._last_problem = ""
        self._thread = threading.Thread(target=self._watch, daemon=True, name="wanma-node-keeper")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._changed.set()
        self._thread.join()
        if self._nodes is not None:
            self._change(lambda record: self._engine.release(record.handle))

    def on_event(self, event: Event) -> None:
        """Take notice of a start of the ranks."""
        if event["kind"] == "start" and "nodes" in event:
            self._nodes = int(event["nodes"])
            self._changed.set()

    def _watch(self) -> None:
        while not self._is_closing:
            self._changed.wait(CHECK_SECONDS if self._is_short or self._engine.gives_way else None)
            self._changed.clear()
            if not self._is_closing and self._nodes is not None:
                self._change(self._request)

    def _request(self, record: EngineRecord) -> Handle:
        """Ask for the nodes that the run lacks; those that are asked for already count."""
        if self._engine.failed_requests(record.handle) >= MOST_FAILED_REQUESTS:
            raise WanmaError(
                f"{MOST_FAILED_REQUESTS} nodes that were asked for failed to join; see `wanma logs`"
            )
        if (given := self._engine.give_way(record.handle)) != record.handle:
            self._notify(f"a node is given back: other work of the engine '{self._engine.name}' waits for it")
            return given
        submission = record.read_submission(self._secret)
        wanted = int(record.handle.get(WANTED_NODES_KEY, submission.nodes))
        self._is_short = self._nodes is not None and self._nodes < wanted
        if not self._is_short:
            return record.handle
        handle = self._engine.resize(record.handle, submission, wanted, may_shrink=False)
        if handle != record.handle:
            self._notify(
                f"{self._nodes} of {wanted} nodes: more were asked of the engine '{self._engine.name}'"
            )
        return handle

    def _change(self, change: Callable[[EngineRecord], Handle]) -> None:
        """Change the handle of the run; a failure is told once, and the run goes on."""
        try:
            change_handle(self._run, change)
        except WanmaError as error:
            if error.message != self._last_problem and not self._is_closing:
                self._last_problem = error.message
                self._notify(f"no further nodes: {error.message}")
