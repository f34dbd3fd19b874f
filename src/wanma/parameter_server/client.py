"""Client of the parameter servers in one worker: a pull or a push is one request to each server."""

from __future__ import annotations

import bisect
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from wanma.job.errors import AllRanksError, WanmaError
from wanma.job.run.parameter_servers import (
    AppliedStep,
    ServedParameter,
    ServedStep,
    ServerAccess,
    ServerPosition,
    StepContribution,
)
from wanma.parameter_server.frames import (
    OUTAGE_RETRY_SECONDS,
    OUTAGE_SECONDS,
    Buffers,
    Connection,
    Frame,
    PeerLostError,
    ask_peers,
)
from wanma.parameter_server.shards import IDS_KEY, pack_tensors, row_pieces, slice_rows, unpack_tensors
from wanma.parameter_server.table import ServerTable

_CHANGE_SECONDS = 0.05
"""Interval at which the table is read while servers begin to use another."""
_WIRE_DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Entries = dict[int, list[tuple[dict[str, Any], Tensor]]]
"""Tensors by shard, each with its keys."""


@dataclass(frozen=True)
class _Piece:
    """Part of a parameter's rows in one shard: of a table those that a step uses."""

    parameter: ServedParameter
    shard: int
    ids: Tensor | None
    """Rows within the shard; None: all."""
    rows: slice
    """Place of the rows in the tensor of the parameter."""

    @property
    def keys(self) -> dict[str, Any]:
        return {"shard": self.shard, "name": self.parameter.name, "is_table": self.parameter.is_table}


class ParameterServerClient:
    """Parameter servers, as one worker uses them: the implementation of `ParameterServers`.

    Args:
        access: coordinator of the servers.
        worker: rank of this worker.
        generation: number of this start of the workers.
        mode: `servers.mode` of the job.
        compression: `servers.compression` of the job.
        node: number of the worker's node, which the coordinator is told if the run has several.
        show_life: function that is called while row ranges move or the network to a server is away.
    """

    def __init__(
        self,
        access: ServerAccess,
        worker: int,
        generation: int,
        mode: str,
        compression: str = "none",
        node: int = 0,
        show_life: Callable[[], None] = lambda: None,
    ) -> None:
        self.mode, self._worker, self._generation = mode, worker, generation
        self._secret, self._wire_dtype, self._show_life = access.secret, _WIRE_DTYPES[compression], show_life
        self._coordinator = Connection((access.host, access.port), access.secret)
        self._node = None if access.node_endpoint is None else (node, *access.node_endpoint)
        self._servers: dict[tuple[str, int], Connection] = {}
        self._suspects: set[tuple[str, int]] = set()
        """Servers whose connection was lost, and is made once again before they count as lost."""
        self._outage_began: float | None = None
        """Time since which this worker does not reach a server that lives; None: it reaches all."""
        self.step = 0
        """Newest step that this worker was given."""
        self._table: ServerTable | None = None
        self._pieces: tuple[ServerTable, list[Tensor], list[_Piece]] | None = None
        """Pieces of the newest pull, which its push has too: their table, ids, and themselves."""
        self._last_push: tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]] | None = None
        self._fetched_update: int | None = None
        """Newest update of which all rows have been loaded or fetched; None: not all have been."""

    def close(self) -> None:
        for connection in (self._coordinator, *self._servers.values()):
            connection.close()

    def drop(self, address: tuple[str, int]) -> None:
        """Close the connection to a server, which the next request makes again."""
        connection = self._servers.pop(address, None)
        if connection is not None:
            connection.close()

    def join(self, data: str = "", recorded: int | None = None) -> ServerPosition:
        answer, _ = self._ask_patiently("join", node=self._node, data=data, recorded=recorded)
        return ServerPosition(answer["is_loaded"], answer["step"], answer["updates"])

    def load(
        self,
        parameters: Sequence[ServedParameter],
        optimizer: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        state: Mapping[str, Mapping[str, Tensor]],
        position: ServerPosition,
        after_piece: Callable[[], None] = lambda: None,
    ) -> None:
        answer, _ = self._ask_patiently(
            "open",
            parameters=[asdict(one) for one in parameters],
            optimizer=dict(optimizer),
            steps=position.step,
        )
        self._table = table = ServerTable.from_json(answer["table"])
        for parameter in table.parameters:
            name, kinds = parameter.name, {key: by for key, by in state.items() if key != "step"}
            tensors = {"weight": weights[name], **{key: by[name] for key, by in kinds.items() if name in by}}
            if not parameter.is_table:  # a table's have rows already; of some states a row is one number
                tensors = {
                    key: tensor.reshape(parameter.rows, parameter.width) for key, tensor in tensors.items()
                }
            if len(tensors) > 1:
                own = state.get("step", {}).get(name)  # else it had a gradient in each update
                tensors["step"] = torch.tensor(float(position.updates if own is None else own))
            for shard, holders in enumerate(table.holders):
                for rows in row_pieces(table.row_range(parameter, shard), parameter):
                    header = {"op": "load", "table": table.version, "shard": shard, "name": name}
                    header["start"] = rows.start - table.start(parameter, shard)
                    self._load_rows(holders, header, slice_rows(tensors, rows.start, rows.stop))
                    after_piece()
        self._fetched_update = position.step

    def _load_rows(
        self, holders: tuple[int, ...], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Fill rows on all holders of their shard."""
        descriptions, buffers = pack_tensors(({"field": key}, tensor) for key, tensor in tensors.items())
        for server in holders:
            try:
                answer, _ = self._server(server).request({**header, "tensors": descriptions}, buffers)
                cause = "another server was lost" if "stale" in answer else ""
            except PeerLostError as error:
                cause = str(error)
            if cause:
                raise WanmaError(
                    f"worker {self._worker} cannot fill parameter server {server}: {cause}",
                    "the same command continues from the newest checkpoint",
                )
            self._show_life()

    def begin(self, pause_step: int, position: ServerPosition | None = None) -> int:
        numbers = {} if position is None else {"steps": position.step, "updates": position.updates}
        table = None if self._table is None else self._table.version
        answer, _ = self._ask_patiently("begin", (), pause_step=pause_step, table=table, **numbers)
        self._refresh_table(None)
        return int(answer.get("pause_step", 0))

    def next_step(self, is_drain_requested: bool, upcoming: int = 0) -> ServedStep:
        answer, buffers = self._ask_patiently(
            "next", (), is_drain_requested=is_drain_requested, upcoming=upcoming
        )
        if self._table is not None and answer.get("table", self._table.version) != self._table.version:
            self._refresh_table(None)
        self.step = answer.get("step", self.step)
        blobs = iter(buffers)
        records = tuple(
            AppliedStep(**{**one, "statistics": tuple(bytes(next(blobs)) for _ in range(one["statistics"]))})
            for one in answer.get("records", ())
        )
        return ServedStep(
            answer.get("step"),
            tuple(answer.get("upcoming", ())),
            answer.get("is_pause", False),
            answer.get("outcome", ""),
            records,
        )

    def pull(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all dense parameters, and of each table the rows with the given ids, as `ParameterServers`.

        Raises:
            WanmaError: ids do not ascend, or one is negative or not in its table.
        """
        while True:
            pieces = self._pieces_of(rows)
            entries: Entries = {}
            for piece in pieces:
                if piece.ids is None or len(piece.ids):
                    ids = torch.empty(0) if piece.ids is None else piece.ids
                    entries.setdefault(piece.shard, []).append((piece.keys, ids))
            if (answers := self._ask_servers("pull", entries, {})) is not None:
                break
        by_key = {(keys["shard"], keys["name"]): tensor for keys, tensor in answers}
        parts: dict[str, list[Tensor]] = {}
        for piece in pieces:
            of_parameter = parts.setdefault(piece.parameter.name, [])
            if (tensor := by_key.get((piece.shard, piece.parameter.name))) is not None:
                of_parameter.append(tensor)
        found: dict[str, Tensor] = {}
        for parameter in self._require_table().parameters:
            tensors = parts[parameter.name] or [torch.empty(0, parameter.width)]
            joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            found[parameter.name] = joined if parameter.is_table else joined.reshape(parameter.shape)
        return found

    def push(self, step: int, gradients: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        self._last_push = (step, gradients, rows)
        while True:
            entries: Entries = {}
            for piece in self._pieces_of(rows):
                of_shard = entries.setdefault(piece.shard, [])
                if (whole := gradients.get(piece.parameter.name)) is None:
                    continue
                gradient = whole.reshape(-1, piece.parameter.width)
                if piece.ids is not None:
                    of_shard.append(({**piece.keys, "field": "ids"}, piece.ids))
                of_shard.append(
                    ({**piece.keys, "field": "values"}, gradient[piece.rows].to(self._wire_dtype))
                )
            if self._ask_servers("push", entries, {"step": step}) is not None:
                return

    def finish(self, contribution: StepContribution) -> None:
        fields = asdict(contribution)
        statistics = fields.pop("statistics")
        while True:
            answer, _ = self._ask_patiently("finish", (statistics,), **fields)
            if answer["result"] == "applied":
                self._last_push = None
                return
            assert self._last_push is not None
            self._refresh_table(None)
            self.push(*self._last_push)

    def fetch(self) -> Iterator[tuple[ServedParameter, range | Tensor, dict[str, Tensor]]]:
        self._refresh_table(None)
        since, updates = self._fetched_update, list[int]()
        for parameter in self._require_table().parameters:
            row = 0
            while row < parameter.rows:
                table = self._require_table()
                starts = table.starts(parameter)
                shard = bisect.bisect_right(starts, row) - 1
                header = {"op": "rows", "table": table.version, "shard": shard, "name": parameter.name}
                header["since"] = since
                header |= {"start": row - starts[shard], "stop": starts[shard + 1] - starts[shard]}
                server = table.holders[shard][0]
                try:
                    answer, buffers = self._server(server).request(header)
                except PeerLostError:
                    self._handle_loss(server)
                    continue
                if "stale" in answer:
                    self._follow_change()
                    continue
                unpacked = unpack_tensors(answer["tensors"], buffers)
                tensors = {keys["field"]: tensor for keys, tensor in unpacked}
                stop = starts[shard] + answer["stop"]
                ids = tensors.pop(IDS_KEY, None)
                yield parameter, range(row, stop) if ids is None else ids + starts[shard], tensors
                row = stop
                updates.append(answer["version"])
                self._note_success()
                self._show_life()
        self._fetched_update = min(updates)

    def resume(self, pause_step: int, outcome: str = "") -> None:
        self._ask("resume", pause_step=pause_step, outcome=outcome)

    def staleness_histogram(self) -> dict[int, int]:
        answer, _ = self._ask("staleness")
        return {int(staleness): int(count) for staleness, count in answer["counts"]}

    # ---------------------------------------------------------------- inside

    def _ask(self, operation: str, buffers: Buffers = (), **fields: Any) -> Frame:
        message = {"op": operation, "worker": self._worker, "generation": self._generation, **fields}
        try:
            return self._coordinator.request(message, buffers)
        except PeerLostError as error:
            raise WanmaError(
                f"worker {self._worker}: the coordinator of the parameter servers is lost: {error}",
                "the same command continues the run; the coordinator runs beside rank 0",
            ) from error
        except WanmaError as error:
            raise AllRanksError(error.message, error.hint) from error

    def _ask_patiently(self, operation: str, buffers: Buffers = (), **fields: Any) -> Frame:
        """Ask the coordinator until its answer is not to wait."""
        while True:
            answer, content = self._ask(operation, buffers, **fields)
            if "wait" not in answer:
                return answer, content
            if answer["is_moving"]:  # else another worker is waited for, whose silence may be a hang
                self._show_life()

    def _ask_servers(
        self, operation: str, entries: Entries, fields: Mapping[str, Any]
    ) -> list[tuple[dict[str, Any], Tensor]] | None:
        """Send one request to each primary at once; None: it has to be repeated."""
        table = self._require_table()
        by_server: Entries = {}
        for shard, tensors in entries.items():
            by_server.setdefault(table.holders[shard][0], []).extend(tensors)
        message = {
            "op": operation,
            "table": table.version,
            "worker": self._worker,
            "generation": self._generation,
            **fields,
        }

        def requests() -> Iterator[tuple[int, dict[str, Any], Buffers]]:
            for server, tensors in sorted(by_server.items()):
                descriptions, buffers = pack_tensors(tensors)
                shards = [shard for shard in entries if table.holders[shard][0] == server]
                yield server, {**message, "shards": shards, "tensors": descriptions}, buffers

        answers, lost, refusal = ask_peers(self._server, requests())
        if refusal is not None:
            raise refusal
        if lost:
            self._handle_loss(min(lost))
        elif any("stale" in header for header, _ in answers.values()):
            self._follow_change()
        else:
            self._note_success()
            return [
                one
                for header, content in answers.values()
                for one in unpack_tensors(header.get("tensors", ()), content)
            ]
        return None

    def _note_success(self) -> None:
        self._suspects.clear()
        self._outage_began = None

    def _follow_change(self) -> None:
        """Read the table again, while some servers may still be about to use it."""
        time.sleep(_CHANGE_SECONDS)
        self._refresh_table(None)

    def _handle_loss(self, server: int) -> None:
        """Drop a lost connection; if it is lost twice in a row, the coordinator looks after the server.

        A server that it reaches is not replaced: this worker waits for the network.

        Raises:
            WanmaError: the network stays away.
        """
        before = self._require_table()
        address = before.endpoints[server]
        self.drop(address)
        if address not in self._suspects:
            self._suspects.add(address)
            return
        self._suspects.remove(address)
        self._refresh_table(server)
        if self._require_table().version != before.version:
            self._outage_began = None
            return
        now = time.monotonic()
        self._outage_began = now if self._outage_began is None else self._outage_began
        if now - self._outage_began > OUTAGE_SECONDS:
            raise WanmaError(
                f"worker {self._worker} has not reached parameter server {server} at {address[0]}:"
                f"{address[1]} for {OUTAGE_SECONDS:.0f} s, while the coordinator reaches it",
                "restore the network between their nodes; the same command continues the run",
            )
        self._show_life()
        time.sleep(OUTAGE_RETRY_SECONDS)

    def _server(self, number: int) -> Connection:
        address = self._require_table().endpoints[number]
        if address not in self._servers:
            try:
                self._servers[address] = Connection(address, self._secret, 0.0)
            except WanmaError as error:  # the server has ended, and another program has its port
                raise PeerLostError(error.message) from error
        return self._servers[address]

    def _refresh_table(self, lost: int | None) -> None:
        """Read the table again; a lost server is replaced first."""
        version = -1 if self._table is None else self._table.version
        answer, _ = self._ask_patiently("table", lost=lost, table=version)
        if "table" not in answer:
            raise AllRanksError(
                "the parameter servers hold nothing", "the same command continues from the newest checkpoint"
            )
        self._table = ServerTable.from_json(answer["table"])

    def _require_table(self) -> ServerTable:
        assert self._table is not None
        return self._table

    def _pieces_of(self, rows: Mapping[str, Tensor]) -> list[_Piece]:
        """Return the parts of all parameters, and of the rows of tables, that lie in each shard.

        Raises:
            WanmaError: ids do not ascend, or one is negative or not in its table.
        """
        table = self._require_table()
        ids = [rows[parameter.name] for parameter in table.parameters if parameter.is_table]
        known = self._pieces
        if known is None or known[0] is not table or any(map(operator.is_not, known[1], ids)):
            pieces = [
                piece
                for parameter in table.parameters
                for piece in self._pieces_of_parameter(table, parameter, rows)
            ]
            self._pieces = known = (table, ids, pieces)
        return known[2]

    def _pieces_of_parameter(
        self, table: ServerTable, parameter: ServedParameter, rows: Mapping[str, Tensor]
    ) -> Iterator[_Piece]:
        """Yield a parameter's pieces; shards without a row of it have none."""
        starts = table.starts(parameter)
        ids, cuts = None, starts
        if parameter.is_table:
            ids = rows[parameter.name]
            places = ids.numpy()  # single numbers are read much faster than from tensors
            if not (places[1:] > places[:-1]).all():
                raise WanmaError(
                    f"worker {self._worker}: the ids of {parameter.name} do not ascend, each once",
                    "give them as torch.unique returns them",
                )
            if len(places) and (places[0] < 0 or places[-1] >= parameter.rows):
                raise WanmaError(
                    f"worker {self._worker}: {parameter.name} has rows 0 to {parameter.rows - 1}, and the "
                    f"data have id {places[0] if places[0] < 0 else places[-1]}",
                    "remove the row from the data, or set model.recommender.tables",
                )
            cuts = places.searchsorted(starts).tolist()
        for shard in range(len(table.holders)):
            if starts[shard] < starts[shard + 1]:
                part = slice(cuts[shard], cuts[shard + 1])
                own = None if ids is None else ids[part] - starts[shard] if starts[shard] else ids[part]
                yield _Piece(parameter, shard, own, part)
