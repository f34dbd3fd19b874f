"""Server of shards: a process that answers pulls, collects pushes, and applies updates on order.

Workers push; the coordinator orders each update once all its pushes are here. The primary of a shard passes
an update on to the other holder before it acknowledges it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.parameter_server.frames import Buffers, Connection, FrameServer, PeerLostError
from wanma.parameter_server.moves import PEER_SECONDS, HolderLostError, ShardMove
from wanma.parameter_server.shards import (
    Gradient,
    Shard,
    pack_tensors,
    sum_gradients,
    unpack_tensors,
)
from wanma.parameter_server.table import ServerTable
from wanma.torch_internals.operators import foreach_norm

Answer = tuple[dict[str, Any], Buffers]
_MOVE_SECONDS = 10.0
"""Time in which a server copies rows before it answers that it goes on."""


class ParameterServer:
    """Shards of one server, and the requests to it.

    Args:
        number: number of the server.
        secret: secret of the run.
        host: address to listen on.
    """

    def __init__(self, number: int, secret: bytes, host: str = "127.0.0.1") -> None:
        self._number, self._secret = number, secret
        self._table: ServerTable | None = None
        self._optimizer: dict[str, Any] = {}
        self._shards: dict[int, Shard] = {}
        """Shards by the table in use; another table comes with another dictionary."""
        self._move: ShardMove | None = None
        """Shards that are collected for another table."""
        self._pushes: dict[int, tuple[int, dict[int, dict[str, Gradient]]]] = {}
        """By worker its newest push: the step, and gradients by shard and parameter."""
        self._generation = 0
        self._sums: dict[int, tuple[list[Any], dict[str, Gradient]]] = {}
        """By shard an update with its contributors, and their summed gradients, until it is applied."""
        self._unconfirmed: dict[int, dict[str, Gradient]] = {}
        """By shard the gradients of its newest update, until all other holders have applied it."""
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, tuple[str, int]], Connection] = {}
        """By shard and endpoint the connection to its other holder."""
        self._frames = FrameServer(self._handle, secret, host, name=f"parameter server {number}")
        self.address = self._frames.address

    def _handle(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        operations = {
            "reset": self._reset,
            "load": self._load,
            "pull": self._pull,
            "push": self._push,
            "reduce": self._reduce,
            "apply": self._apply,
            "replicate": self._replicate,
            "rows": self._rows,
            "prepare": self._prepare,
            "activate": self._activate,
        }
        if header["op"] not in operations:
            raise WanmaError(f"parameter server {self._number} has no operation {header['op']}")
        return operations[header["op"]](header, buffers)

    # ---------------------------------------------------------------- workers

    def _pull(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        """Return the rows of each entry (shard, name), all of them or those whose ids are in a buffer."""
        if (shards := self._shards_by(header["table"])) is None:
            return {"stale": True}, ()
        answer = []
        for keys, ids in unpack_tensors(header["tensors"], buffers):
            shard = shards[keys["shard"]]
            with shard.lock:  # an update of another worker may come before the copy is sent
                values = shard.rows(keys["name"], ids if keys["is_table"] else None)
            answer.append(({"shard": keys["shard"], "name": keys["name"]}, values))
        descriptions, content = pack_tensors(answer)
        return {"tensors": descriptions}, content

    def _push(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        without: dict[int, dict[str, Gradient]] = {shard: {} for shard in header["shards"]}
        gradients = without | _unpack_gradients(header, buffers)
        generation, worker = header["generation"], header["worker"]
        with self._lock:
            if self._table is None or header["table"] != self._table.version:
                return {"stale": True}, ()
            if generation < self._generation:
                raise WanmaError(f"worker {worker} is of an earlier start of the run")
            if generation > self._generation:
                self._generation = generation
                self._pushes.clear()
            self._pushes[worker] = (header["step"], gradients)  # those before are applied, or repeated
        return {}, ()

    def _shards_by(self, version: int) -> dict[int, Shard] | None:
        """Return the shards if the table in use has this version, else None."""
        with self._lock:
            return self._shards if self._table is not None and self._table.version == version else None

    # ---------------------------------------------------------------- updates

    def _reduce(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Sum the pushes of an update; return the squared norm of the sums, or the workers to push again."""
        update, square, missing = header["update"], 0.0, set[int]()
        for shard in self._primary_shards():
            if shard.version >= update:
                continue
            gradients, absent = self._summed(shard, header)
            missing |= absent
            if gradients:  # as `local_squared_norm`
                norms = torch.stack(foreach_norm([one.values for one in gradients.values()]))
                square += float(norms.double().square().sum())
        return {"square": square, "missing": sorted(missing)}, ()

    def _apply(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Apply an update on both holders of each shard whose primary is here; it may be ordered again."""
        table, update, missing = self._require_table(), header["update"], set[int]()
        for shard in self._primary_shards():
            gradients: dict[str, Gradient] = {}
            if shard.version < update and not header["is_skipped"]:
                gradients, absent = self._summed(shard, header)
                missing |= absent
                if absent:
                    continue
            with shard.lock:
                if shard.version < update:
                    shard.apply(update, gradients, header["factor"], header["learning_rate"])
                    self._unconfirmed[shard.index] = gradients
                if shard.index in self._unconfirmed:  # else an earlier order has passed it on
                    for backup in table.holders[shard.index][1:]:
                        try:
                            self._pass_on(shard, backup, header, self._unconfirmed[shard.index])
                        except PeerLostError:
                            return {"lost": backup}, ()
                    del self._unconfirmed[shard.index]
            self._sums.pop(shard.index, None)
        if not missing:
            with self._lock:
                for worker, step in header["contributors"]:
                    if self._pushes.get(worker, (None,))[0] == step:
                        del self._pushes[worker]
        return {"missing": sorted(missing)}, ()

    def _summed(self, shard: Shard, header: dict[str, Any]) -> tuple[dict[str, Gradient], set[int]]:
        """Return a shard's summed gradients, and the workers whose pushes are not here."""
        parts: list[dict[str, Gradient]] = []
        missing = set()
        with self._lock:
            # Its contributors may be others, or have started again, if it was ordered in vain before.
            order = [self._generation, header["update"], header["contributors"]]
            known, sums = self._sums.get(shard.index, ([], {}))
            if known == order:
                return sums, set()
            for worker, step in header["contributors"]:
                pushed_step, pushed = self._pushes.get(worker, (None, {}))
                if pushed_step == step and shard.index in pushed:
                    parts.append(pushed[shard.index])
                elif shard.weights:
                    missing.add(worker)
        if missing or not shard.weights:
            return {}, missing
        by_name = {name: [part[name] for part in parts if name in part] for name in shard.weights}
        summed = {name: sum_gradients(some) for name, some in by_name.items() if some}
        self._sums[shard.index] = (order, summed)
        return summed, set()

    def _pass_on(
        self, shard: Shard, backup: int, header: dict[str, Any], gradients: dict[str, Gradient]
    ) -> None:
        """Apply an update at the other holder, and wait for it."""
        tensors: list[tuple[dict[str, Any], Tensor]] = []
        for name, gradient in gradients.items():
            keys = {"shard": shard.index, "name": name, "is_table": gradient.ids is not None}
            if gradient.ids is not None:
                tensors.append(({**keys, "field": "ids"}, gradient.ids))
            tensors.append(({**keys, "field": "values"}, gradient.values))
        descriptions, content = pack_tensors(tensors)
        numbers = {key: header[key] for key in ("update", "factor", "learning_rate")}
        table = self._require_table()
        message = {"op": "replicate", "table": table.version, **numbers, "shard": shard.index}
        key = (shard.index, table.endpoints[backup])
        try:
            if key not in self._peers:
                self._peers[key] = Connection(table.endpoints[backup], self._secret, 0.0)
            answer, _ = self._peers[key].request({**message, "tensors": descriptions}, content, PEER_SECONDS)
        except PeerLostError:
            self._peers.pop(key, None)
            raise
        if "stale" in answer:  # this server counts as lost, and does not know it
            raise WanmaError(f"parameter server {self._number} holds shard {shard.index} no more")

    def _replicate(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        if (shards := self._shards_by(header["table"])) is None:
            return {"stale": True}, ()
        shard = shards[header["shard"]]
        gradients = _unpack_gradients(header, buffers).get(shard.index, {})
        with shard.lock:
            shard.apply(header["update"], gradients, header["factor"], header["learning_rate"])
        return {}, ()

    # ---------------------------------------------------------------- filling and moving

    def _reset(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Make empty shards for a table, at the position that the run begins from."""
        table, self._optimizer = ServerTable.from_json(header["table"]), header["optimizer"]
        shards = {index: Shard(table, index, self._optimizer) for index in table.shards_of(self._number)}
        for shard in shards.values():
            shard.version = header["update"]
        with self._lock:
            self._table = None  # nothing of the content before is kept
        self._use(table, shards)
        return {}, ()

    def _load(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        """Fill a row range of one parameter in one shard."""
        if (shards := self._shards_by(header["table"])) is None:
            return {"stale": True}, ()
        tensors = {keys["field"]: tensor for keys, tensor in unpack_tensors(header["tensors"], buffers)}
        shards[header["shard"]].fill(header["name"], header["start"], tensors)
        return {}, ()

    def _rows(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Return a piece of a row range of one parameter in one shard, with its optimizer state."""
        if (shards := self._shards_by(header["table"])) is None:
            return {"stale": True}, ()
        shard = shards[header["shard"]]
        with shard.lock:
            rows = range(header["start"], header["stop"])
            tensors, stop = shard.read(header["name"], rows, header.get("since"))
            version = shard.version
        descriptions, content = pack_tensors(({"field": key}, tensor) for key, tensor in tensors.items())
        return {"tensors": descriptions, "stop": stop, "version": version}, content

    def _prepare(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Collect the shards of a new table for some seconds; when it is done, `activate` uses them."""
        table, self._optimizer = ServerTable.from_json(header["table"]), header["optimizer"]
        if self._move is None or self._move.table.version != table.version:
            source = ServerTable.from_json(header["source"])
            self._move = ShardMove(
                self._number, self._shards, source, table, header["update"], self._optimizer, self._secret
            )
        move, self._move = self._move, None
        try:
            is_done = move.advance(_MOVE_SECONDS)
        except HolderLostError as error:
            return {"lost": error.args[0]}, ()
        self._move = move  # after an error it is begun anew
        return {"is_done": is_done}, ()

    def _activate(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Put a table to use: the prepared one, or one in which this server holds what it holds already."""
        table, shards = ServerTable.from_json(header["table"]), self._shards
        if self._move is not None and self._move.table.version == table.version:
            shards = self._move.shards
        self._use(table, {index: shards[index] for index in table.shards_of(self._number)})
        return {}, ()

    def _use(self, table: ServerTable, shards: dict[int, Shard]) -> None:
        """Put a table and its shards to use. Pushes for shards of other rows are dropped, to be repeated."""
        if self._move is not None:
            self._move.close()
        with self._lock:
            if self._table is None or len(self._table.holders) != len(table.holders):
                self._pushes.clear()
                self._unconfirmed.clear()
            self._table, self._shards, self._move = table, shards, None
            self._sums.clear()

    def _primary_shards(self) -> list[Shard]:
        return [self._shards[index] for index in self._require_table().primary_shards(self._number)]

    def _require_table(self) -> ServerTable:
        if self._table is None:
            raise WanmaError(f"parameter server {self._number} has no parameters yet")
        return self._table


def _unpack_gradients(header: dict[str, Any], buffers: list[bytearray]) -> dict[int, dict[str, Gradient]]:
    """Return the gradients of a message by shard and parameter; ids come before the values of their rows."""
    gradients: dict[int, dict[str, Gradient]] = {}
    ids: Tensor | None = None
    for keys, tensor in unpack_tensors(header["tensors"], buffers):
        if keys["field"] == "ids":
            ids = tensor
        else:
            of_shard = gradients.setdefault(keys["shard"], {})
            of_shard[keys["name"]] = Gradient(tensor.float(), ids if keys["is_table"] else None)
    return gradients


def main() -> None:
    """Run a server: settings come as one line of JSON on standard input, whose end ends the process."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in the workers; the threads of its connections have it from here
    server = ParameterServer(settings["number"], base64.b64decode(settings["secret"]), settings["host"])
    with contextlib.suppress(OSError):  # the disk of the log may be full
        sys.stderr.write(f"parameter server {settings['number']}, process {os.getpid()}\n")
        sys.stderr.flush()
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()  # the process that started it has ended, or closes it
    os._exit(0)


if __name__ == "__main__":
    main()
