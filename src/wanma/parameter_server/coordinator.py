"""Coordinator of a run's parameter servers: it gives out steps, orders updates, and replaces lost servers.

It runs in the process of the run's supervisor and holds no tensor. An update is ordered once all its pushes
have arrived, one at a time, and acknowledged once all holders of all shards have it.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import AppliedStep, ServedParameter, ServerAccess
from wanma.observe.units import count_text
from wanma.parameter_server.frames import Buffers, FrameServer
from wanma.parameter_server.server_group import ServerGroup, ServersLostError
from wanma.parameter_server.server_host import Host, RemoteHost
from wanma.parameter_server.step_clock import StepClock
from wanma.parameter_server.update_rule import UpdateDecision, UpdateRule, loss_sums

_ANSWER_SECONDS = 15.0
"""Longest wait of a request before its sender is told to ask again, and shows that it is alive."""
_MAX_UNRECORDED = 4096
"""Applied steps that the chief has not recorded, from which on the other workers wait for it: memory."""
CHIEF = 0
"""Worker that fills the servers, validates and saves."""


class ServerCoordinator:
    """Coordinator: state of the run's steps, and the requests of workers.

    Args:
        secret: secret of the run.
        clock: clock of the steps.
        rule: rule of updates.
        address: address to listen on.
        nodes: number of nodes of the run. With several, workers name the hosts of their nodes' servers.
    """

    def __init__(
        self, secret: bytes, clock: StepClock, rule: UpdateRule, *, address: str = "127.0.0.1", nodes: int = 1
    ) -> None:
        self._secret, self._clock, self._rule, self._nodes = secret, clock, rule, nodes
        self._name = secrets.token_hex(8)
        """Unique name of the group that it uses."""
        self._hosts: dict[int, Host] = {}
        """By node the hosts that workers of this generation have named."""
        self._group_of_run: ServerGroup | None = None
        self._show: Callable[[str, str], None] = lambda _text, _level: None
        self._condition = threading.Condition()
        self._generation = 0
        self._is_loaded = False
        self._has_chief_begun = False
        """True once worker 0 of this generation has found the servers filled, or has filled them."""
        self._data = ""
        """Identity of the data of the workers of this generation; empty: none has named its own."""
        self._outcome = ""
        self._failure: WanmaError | None = None
        self._contributions: dict[int, tuple[dict[str, Any], bytes]] = {}
        self._results: dict[tuple[int, int], str] = {}
        """By (worker, step): 'applied', or 'repeat' where the push has to be repeated."""
        self._unrecorded: list[AppliedStep] = []
        """Steps that the chief has not recorded, or has not come back for more since."""
        self._delivered = 0
        """Number of unrecorded steps, from the first on, that the chief was given."""
        self._decision: UpdateDecision | None = None
        """Decision on the update in progress, of which servers may have applied a part."""
        self._updating: tuple[int, ...] | None = None
        """Workers of the update in progress, which ends before another begins."""
        self._is_ordering = False
        """True while an update is being ordered from the servers."""
        self._orders = queue.SimpleQueue[tuple[int, tuple[int, ...]] | None]()
        """Step and workers of the update to order; None: no more."""
        self._is_moving = False
        """True while row ranges move, or are about to: no update begins."""
        threading.Thread(target=self._order_updates, daemon=True, name="wanma-servers-updates").start()
        self._frames = FrameServer(
            self._handle, secret, address, name="the coordinator of the parameter servers"
        )
        self.access = ServerAccess(*self._frames.address, secret)

    def start(self, group: ServerGroup, show: Callable[[str, str], None]) -> None:
        """Take the server processes.

        Args:
            group: processes of the servers.
            show: function that shows the user a text of a level.
        """
        self._group_of_run, self._show = group, show
        group.on_loss = self._fail

    @property
    def _group(self) -> ServerGroup:
        assert self._group_of_run is not None
        return self._group_of_run

    def close(self) -> None:
        with self._condition:
            self._outcome = self._outcome or "closed"
            self._condition.notify_all()
        self._orders.put(None)
        self._frames.close()

    @property
    def is_loaded(self) -> bool:
        """True if the servers hold the run's parameters."""
        return self._is_loaded

    def resize(self, count: int) -> bool:
        """Let servers join or leave: row ranges move between two updates.

        Returns:
            False if the servers hold nothing: it is to be tried again when they do.
        """
        servers, is_possible = count_text(count, "parameter server"), self._is_loaded
        try:
            if is_possible:
                self._group.launch(count)
            with self._condition:
                self._is_moving = True
                while (
                    self._is_loaded
                    and not self._outcome
                    and (self._updating is not None or self._is_ordering)
                ):
                    self._condition.wait(1.0)
                is_possible, steps = self._is_loaded and not self._outcome, self._clock.steps
            started = time.monotonic()
            if is_possible:
                is_complete = self._group.resize(count, steps)
                duration = f"{time.monotonic() - started:.1f} s"
                when = duration if is_complete else "as soon as the lost node is back"
                self._show(f"row ranges moved: {servers}, {when}", "info")
        except ServersLostError as error:
            self._fail(error)
        except WanmaError as error:
            self._show(f"the run does not get {servers}: {error}", "warning")
        finally:
            with self._condition:
                self._is_moving = False
                self._condition.notify_all()
        return is_possible

    # ---------------------------------------------------------------- requests

    def _handle(self, header: dict[str, Any], buffers: list[bytearray]) -> tuple[dict[str, Any], Buffers]:
        operation = header["op"]
        if operation == "join":
            return self._join(header), ()
        with self._condition:
            self._check_generation(header)
        if operation == "table":
            return self._current_table(header), ()
        if operation == "open":
            return self._open(header), ()
        if operation == "begin":
            return self._begin(header), ()
        if operation == "next":
            return self._next(header)
        if operation == "finish":
            return self._finish(header, buffers)
        if operation == "resume":
            return self._resume(header), ()
        if operation == "staleness":
            return {"counts": sorted(self._clock.staleness.items())}, ()
        raise WanmaError(f"the coordinator of the parameter servers has no operation {operation}")

    def _join(self, header: dict[str, Any]) -> dict[str, Any]:
        """Admit a worker; the first of a new generation ends what the one before has in progress.

        The chief waits for a worker of each node, and has the servers that are missing started.
        """
        generation = header["generation"]
        with self._condition:
            if generation > self._generation:
                deadline = time.monotonic() + _ANSWER_SECONDS
                while self._is_ordering and (left := deadline - time.monotonic()) > 0:
                    self._condition.wait(left)  # an update that all servers apply is not lost
                if self._is_ordering:
                    return self._wait_answer()
            if generation > self._generation:
                self._generation = generation
                if self._failure is not None or self._decision is not None:
                    self._is_loaded = False  # an update may be applied in part: the checkpoint is whole
                self._failure, self._outcome, self._decision, self._updating = None, "", None, None
                self._has_chief_begun, self._data, self._delivered = False, "", 0
                self._clock.abandon()
                self._contributions, self._results, self._hosts = {}, {}, {}
                self._condition.notify_all()
            self._check_generation(header)
            if data := header.get("data"):
                self._data = self._data or data
                if data != self._data:
                    raise WanmaError(
                        f"data: worker {header['worker']} has other data than others, the same in another "
                        "order, or other buffers of the model",
                        "give all nodes the same files, and draw buffers by generators that train.seed seeds",
                    )
            if (node := header.get("node")) is not None:
                number, host, port = node
                self._hosts[number] = RemoteHost((host, port), self._secret, self._name, generation)
                self._condition.notify_all()
            hosts: dict[int, Host] = {}
            if self._nodes > 1 and header["worker"] == CHIEF:
                self._wait(lambda: len(self._hosts) == self._nodes)
                if len(self._hosts) < self._nodes:
                    return self._wait_answer()
                hosts = dict(self._hosts)
        if hosts:
            try:
                if not self._change(header, "hosts", lambda: self._group.set_hosts(hosts)):
                    return self._wait_answer()
            except ServersLostError:
                with self._condition:
                    self._is_loaded = False
        with self._condition:
            if self._group.table is None:  # of a lost node the servers may be missed before it is
                self._is_loaded = False
            if (recorded := header.get("recorded")) is not None:
                self._unrecorded = [one for one in self._unrecorded if one.step >= recorded]
            steps = self._clock.steps - len(self._unrecorded)
            return {"is_loaded": self._is_loaded, "step": steps, "updates": self._clock.updates}

    def _current_table(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the table; a worker that names a server waits until that is replaced if it is lost."""
        if header.get("lost") is not None:
            number, version = header["lost"], header["table"]
            try:
                if not self._change(
                    header, f"{number} of {version}", lambda: self._group.replace_if_lost(number, version)
                ):
                    return self._wait_answer()
            except ServersLostError as error:
                self._fail(error)
                raise
        table = self._group.table
        return {} if table is None else {"table": table.to_json()}

    def _open(self, header: dict[str, Any]) -> dict[str, Any]:
        """Give the servers empty shards, which the chief fills."""
        with self._condition:
            self._wait(lambda: not self._is_moving)
            if self._is_moving:
                return self._wait_answer()
            self._is_loaded = False
        parameters = [
            ServedParameter(**{**one, "shape": tuple(one["shape"])}) for one in header["parameters"]
        ]
        if not self._change(
            header, "open", lambda: self._group.fill(parameters, header["optimizer"], header["steps"])
        ):
            return self._wait_answer()
        table = self._group.table
        return self._wait_answer() if table is None else {"table": table.to_json()}

    def _begin(self, header: dict[str, Any]) -> dict[str, Any]:
        """Begin or carry on with a run's steps, once the chief says that the servers are filled."""
        with self._condition:
            if header["worker"] == CHIEF:
                if not self._is_loaded:
                    table = self._group.table
                    if table is None or table.version != header["table"]:
                        raise WanmaError(
                            "a parameter server was lost while worker 0 filled it",
                            "the same command continues from the newest checkpoint",
                        )
                    self._clock.begin(header["steps"], header["updates"], header["pause_step"])
                    self._unrecorded, self._is_loaded = [], True
                self._has_chief_begun = True
                self._condition.notify_all()
                return {"pause_step": self._clock.pause_step}
            self._wait(lambda: self._has_chief_begun)
            return {} if self._has_chief_begun else self._wait_answer()

    def _next(self, header: dict[str, Any]) -> tuple[dict[str, Any], Buffers]:
        worker = header["worker"]
        with self._condition:
            if header["is_drain_requested"]:
                self._clock.pause()
            if worker == CHIEF and self._delivered:
                del self._unrecorded[: self._delivered]
                self._delivered = 0
                self._condition.notify_all()
            found: dict[str, Any] = {}

            def is_decided() -> bool:
                if self._outcome:
                    found["outcome"] = self._outcome
                elif worker == CHIEF and self._clock.is_paused:
                    found["is_pause"] = True
                elif worker != CHIEF and len(self._unrecorded) >= _MAX_UNRECORDED:
                    return False
                elif (step := self._clock.try_start(worker)) is not None:
                    found["step"] = step
                    found["upcoming"] = self._clock.reserve(worker, header["upcoming"])
                return bool(found)

            self._wait(is_decided)
            statistics: list[bytes] = []
            if "step" in found and (table := self._group.table) is not None:
                found["table"] = table.version  # a server that it does not name any more may hold old values
            if worker == CHIEF and found:
                found["records"] = [_record_json(record) for record in self._unrecorded]
                statistics = [blob for record in self._unrecorded for blob in record.statistics]
                if "is_pause" not in found:  # of a pause they are kept until it is over
                    self._delivered = len(self._unrecorded)
            return found or self._wait_answer(), statistics

    def _resume(self, header: dict[str, Any]) -> dict[str, Any]:
        with self._condition:
            self._unrecorded = []
            self._outcome = header["outcome"]
            if self._outcome and self._nodes > 1:
                self._group.release()
            self._clock.pause_step = header["pause_step"]
            self._condition.notify_all()
        return {}

    # ---------------------------------------------------------------- updates

    def _finish(self, header: dict[str, Any], buffers: list[bytearray]) -> tuple[dict[str, Any], Buffers]:
        """Note that a worker has pushed its step; whoever completes the step orders its update."""
        worker, step = header["worker"], header["step"]
        with self._condition:
            if (worker, step) not in self._results:
                self._contributions[worker] = (header, bytes(buffers[0]))
                workers = tuple(self._clock.finish(worker, step))
                if workers:
                    self._wait(lambda: (worker, step) in self._results or self._may_order(workers, step))
                    self._check_generation(header)
                    if (worker, step) not in self._results and self._may_order(workers, step):
                        self._updating, self._is_ordering = workers, True
                        self._orders.put((step, workers))
            self._wait(lambda: (worker, step) in self._results)
            self._check_generation(header)
            result = self._results.pop((worker, step), None)
            return (self._wait_answer() if result is None else {"result": result}), ()

    def _may_order(self, workers: tuple[int, ...], step: int) -> bool:
        """Return whether the update of a complete step may be ordered now."""
        if self._is_ordering or any((worker, step) in self._results for worker in workers):
            return False
        return self._updating == workers or (self._updating is None and not self._is_moving)

    def _order_updates(self) -> None:
        """Order updates one after another: no request waits for as long as a lost server may take."""
        while (order := self._orders.get()) is not None:
            try:
                self._update(*order)
            except Exception as error:
                if not isinstance(error, WanmaError):
                    error = WanmaError(f"step {order[0]}: {type(error).__name__}: {error}")
                with self._condition:
                    self._is_ordering = False
                    self._fail(error)

    def _update(self, step: int, workers: tuple[int, ...]) -> None:
        """Order the update of a step whose pushes are complete, or tell its workers to push again.

        The lock is not held while servers work: others go on, and those that wait are answered.
        """
        with self._condition:
            number = self._clock.steps + 1
            headers = [self._contributions[worker][0] for worker in workers]
        missing = self._order(number, step, headers)
        with self._condition:
            self._is_ordering = False
            if not missing:
                self._note_applied(workers, step, headers)
            elif self._decision is None:  # nothing is applied: others need not wait for the pushes
                self._updating = None
            for worker in missing:
                self._results[worker, step] = "repeat"
            self._condition.notify_all()

    def _order(self, number: int, step: int, headers: list[dict[str, Any]]) -> set[int]:
        """Let the servers apply an update; return the workers whose pushes they lack."""
        order = {"update": number, "contributors": [[header["worker"], step] for header in headers]}
        if self._decision is None:
            replies = self._group.ask_primaries({"op": "reduce", **order})
            if missing := {worker for reply in replies for worker in reply["missing"]}:
                return missing
            self._decision = self._rule.decide(number, headers, sum(reply["square"] for reply in replies))
        numbers = {
            "factor": self._decision.factor,
            "learning_rate": headers[0]["learning_rate"],
            "is_skipped": self._decision.is_skipped,
        }
        replies = self._group.ask_primaries({"op": "apply", **order, **numbers})
        return {worker for reply in replies for worker in reply["missing"]}

    def _note_applied(self, workers: tuple[int, ...], step: int, headers: list[dict[str, Any]]) -> None:
        """Record an update that all holders have, and release its workers."""
        assert self._decision is not None
        is_skipped = self._decision.is_skipped
        losses, targets = loss_sums(headers)
        staleness = self._clock.apply(list(workers), applied=not is_skipped)
        record = AppliedStep(
            step=self._clock.steps - 1,
            loss=losses / targets if targets else math.nan,
            target_count=targets,
            gradient_norm=self._decision.gradient_norm,
            applied=not is_skipped,
            learning_rate=headers[0]["learning_rate"],
            staleness=staleness,
            worker=workers[-1],
            statistics=tuple(self._contributions.pop(worker)[1] for worker in workers),
            data_sums=tuple(map(sum, zip(*(header["data_terms"] for header in headers), strict=True))),
            bad_places=tuple(sorted({place for header in headers for place in header["bad_places"]})),
        )
        self._unrecorded.append(record)
        self._decision, self._updating = None, None
        self._group.note_update()
        for worker in workers:
            self._results[worker, step] = "applied"

    # ---------------------------------------------------------------- inside

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for a condition, a failure or some seconds; the lock is held."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not is_done() and self._failure is None and (left := deadline - time.monotonic()) > 0:
            self._condition.wait(left)
        if self._failure is not None:
            raise self._failure

    def _wait_answer(self) -> dict[str, Any]:
        """Return the answer to ask again; while ranges move, the worker shows that it is alive."""
        return {"wait": True, "is_moving": self._is_moving or self._group.is_changing}

    def _change(self, header: dict[str, Any], name: str, change: Callable[[], object]) -> bool:
        """Change the group for a worker, unless the workers start again while it waits for other changes.

        Returns:
            False if it takes longer than a request may: it is to be asked for again.
        """

        def change_if_current() -> None:
            self._check_generation(header)
            change()

        key = (self._name, header["generation"], name)
        return self._group.wait_for_change(key, change_if_current, _ANSWER_SECONDS)

    def _check_generation(self, header: dict[str, Any]) -> None:
        if header["generation"] != self._generation:
            raise WanmaError(f"worker {header['worker']} is of an earlier start of the run")
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: WanmaError) -> None:
        """End the work of this generation of workers; the next begins from the checkpoint."""
        with self._condition:
            if self._failure is None and not self._outcome:
                self._failure, self._is_loaded = error, False
                self._show(str(error), "error")
            self._condition.notify_all()


def _record_json(record: AppliedStep) -> dict[str, Any]:
    return {**asdict(record), "statistics": len(record.statistics)}
