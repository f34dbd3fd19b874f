"""Server of shards: a process that answers pulls, collects pushes, and applies updates on order.

Workers push; the coordinator orders each update once all its pushes are here. The primary of a shard passes
an update on to the other holder before it acknowledges it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.parameter_server.frames import Buffers, Connection, FrameServer, PeerLostError
from wanma.parameter_server.shards import (
    Gradient,
    Shard,
    overlapping_rows,
    pack_tensors,
    sum_gradients,
    unpack_tensors,
)
from wanma.parameter_server.table import ServerTable

Answer = tuple[dict[str, Any], Buffers]
_PEER_SECONDS = 60.0
"""Longest wait for another server."""
_KEPT_PUSHES = 64
"""Pushes of a worker that a server keeps; the oldest go first."""


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
        self._prepared: tuple[ServerTable, dict[int, Shard]] | None = None
        self._pushes: OrderedDict[tuple[int, int, int], dict[int, dict[str, Gradient]]] = OrderedDict()
        """By (generation, step, worker): gradients by shard and parameter."""
        self._generation = 0
        self._sums: dict[int, tuple[int, dict[str, Gradient]]] = {}
        """By shard the newest update and its summed gradients, until it is applied."""
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, int], Connection] = {}
        """By shard and server the connection to its other holder."""
        self._frames = FrameServer(self._handle, secret, host)
        self.address = self._frames.address

    def close(self) -> None:
        self._frames.close()
        for peer in self._peers.values():
            peer.close()

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
        if self._is_stale(header):
            return {"stale": True}, ()
        answer = []
        for keys, ids in unpack_tensors(header["tensors"], buffers):
            shard = self._shards[keys["shard"]]
            with shard.lock:
                # A copy: an update of another worker may come before it is sent.
                values = shard.rows(keys["name"], ids if keys["is_table"] else None).clone()
            answer.append(({"shard": keys["shard"], "name": keys["name"]}, values))
        descriptions, content = pack_tensors(answer)
        return {"tensors": descriptions}, content

    def _push(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        if self._is_stale(header):
            return {"stale": True}, ()
        gradients: dict[int, dict[str, Gradient]] = {}
        ids: Tensor | None = None
        for keys, tensor in unpack_tensors(header["tensors"], buffers):
            if keys["field"] == "ids":
                ids = tensor
                continue
            by_name = gradients.setdefault(keys["shard"], {})
            by_name[keys["name"]] = Gradient(tensor.float(), ids if keys["is_table"] else None)
        generation, step, worker = header["generation"], header["step"], header["worker"]
        with self._lock:
            if generation < self._generation:
                raise WanmaError(f"worker {worker} is of an earlier start of the run")
            if generation > self._generation:
                self._generation = generation
                self._pushes.clear()
            self._pushes[generation, step, worker] = gradients
            self._pushes.move_to_end((generation, step, worker))
            own = [key for key in self._pushes if key[2] == worker]
            for key in own[:-_KEPT_PUSHES]:
                del self._pushes[key]
        return {}, ()

    def _is_stale(self, header: dict[str, Any]) -> bool:
        return self._table is None or header["table"] != self._table.version

    # ---------------------------------------------------------------- updates

    def _reduce(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Sum the pushes of an update; return the squared norm of the sums, or the workers to push again."""
        update, square, missing = header["update"], 0.0, set[int]()
        for shard in self._primary_shards():
            if shard.version >= update:
                continue
            gradients, absent = self._summed(shard, header)
            missing |= absent
            square += sum(float(g.values.double().square().sum()) for g in gradients.values())
        return {"square": square, "missing": sorted(missing)}, ()

    def _apply(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Apply an update on both holders of each shard whose primary is here."""
        table, update, missing = self._require_table(), header["update"], set[int]()
        for shard in self._primary_shards():
            gradients: dict[str, Gradient] = {}
            if shard.version < update and not header["is_skipped"]:
                gradients, absent = self._summed(shard, header)
                missing |= absent
                if absent:
                    continue
            with shard.lock:
                if shard.version >= update:
                    continue
                shard.apply(update, gradients, header["factor"], header["learning_rate"])
                for backup in table.holders[shard.index][1:]:
                    try:
                        self._pass_on(shard, backup, header, gradients)
                    except PeerLostError:
                        return {"lost": backup}, ()
            self._sums.pop(shard.index, None)
        if not missing:
            with self._lock:
                for worker, step in header["contributors"]:
                    self._pushes.pop((self._generation, step, worker), None)
        return {"missing": sorted(missing)}, ()

    def _summed(self, shard: Shard, header: dict[str, Any]) -> tuple[dict[str, Gradient], set[int]]:
        """Return a shard's summed gradients, and the workers whose pushes are not here."""
        update, sums = self._sums.get(shard.index, (0, {}))
        if update == header["update"]:
            return sums, set()
        parts: list[dict[str, Gradient]] = []
        missing = set()
        with self._lock:
            for worker, step in header["contributors"]:
                pushed = self._pushes.get((self._generation, step, worker), {})
                if shard.index in pushed:
                    parts.append(pushed[shard.index])
                elif shard.weights:
                    missing.add(worker)
        if missing or not shard.weights:
            return {}, missing
        summed = {name: sum_gradients([part[name] for part in parts]) for name in shard.weights}
        self._sums[shard.index] = (header["update"], summed)
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
        message = {"op": "replicate", **numbers, "shard": shard.index, "tensors": descriptions}
        key = (shard.index, backup)
        try:
            if key not in self._peers:
                self._peers[key] = Connection(self._require_table().endpoints[backup], self._secret, 0.0)
            self._peers[key].request(message, content, _PEER_SECONDS)
        except PeerLostError:
            self._peers.pop(key, None)
            raise

    def _replicate(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        shard, gradients, ids = self._shards[header["shard"]], dict[str, Gradient](), None
        for keys, tensor in unpack_tensors(header["tensors"], buffers):
            if keys["field"] == "ids":
                ids = tensor
            else:
                gradients[keys["name"]] = Gradient(tensor, ids if keys["is_table"] else None)
        with shard.lock:
            shard.apply(header["update"], gradients, header["factor"], header["learning_rate"])
        return {}, ()

    # ---------------------------------------------------------------- filling and moving

    def _reset(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Make empty shards for a table, at the position that the run begins from."""
        self._optimizer = header["optimizer"]
        self._table = ServerTable.from_json(header["table"])
        self._shards = {
            index: Shard(self._table, index, self._optimizer) for index in self._table.shards_of(self._number)
        }
        for shard in self._shards.values():
            shard.version = header["update"]
        self._prepared, self._sums = None, {}
        with self._lock:
            self._pushes.clear()
        return {}, ()

    def _load(self, header: dict[str, Any], buffers: list[bytearray]) -> Answer:
        """Fill the complete rows of one parameter in one shard."""
        tensors = {keys["field"]: tensor for keys, tensor in unpack_tensors(header["tensors"], buffers)}
        self._shards[header["shard"]].fill(header["name"], 0, tensors)
        return {}, ()

    def _rows(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Return a row range of one parameter in one shard, with its optimizer state."""
        shard = self._shards[header["shard"]]
        with shard.lock:
            tensors = _slice(shard.tensors(header["name"]), header["start"], header["stop"])
            descriptions, content = pack_tensors(
                ({"field": key}, tensor.clone()) for key, tensor in tensors.items()
            )
        return {"tensors": descriptions, "version": shard.version}, content

    def _prepare(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Collect the shards of a new table from the holders of the old one; `activate` puts them to use."""
        self._optimizer = header["optimizer"]
        old, new = ServerTable.from_json(header["source"]), ServerTable.from_json(header["table"])
        shards: dict[int, Shard] = {}
        for index in new.shards_of(self._number):
            if index in self._shards and len(old.holders) == len(new.holders):
                shards[index] = self._shards[index]
                continue
            shards[index] = Shard(new, index, self._optimizer)
            shards[index].version = header["update"]
            for parameter in new.parameters:
                start = new.start(parameter, index)
                for other, rows in overlapping_rows(old, new, parameter, index):
                    inside = range(
                        rows.start - old.start(parameter, other), rows.stop - old.start(parameter, other)
                    )
                    tensors, version = self._copy_rows(old, other, parameter.name, inside)
                    shards[index].fill(parameter.name, rows.start - start, tensors)
                    if len(old.holders) == len(new.holders):
                        shards[index].version = version
        self._prepared = (new, shards)
        return {}, ()

    def _copy_rows(
        self, table: ServerTable, shard: int, name: str, rows: range
    ) -> tuple[dict[str, Tensor], int]:
        if shard in self._shards:
            own = self._shards[shard]
            return _slice(own.tensors(name), rows.start, rows.stop), own.version
        peer = Connection(table.endpoints[table.holders[shard][0]], self._secret)
        try:
            message = {"op": "rows", "shard": shard, "name": name, "start": rows.start, "stop": rows.stop}
            header, buffers = peer.request(message, (), _PEER_SECONDS)
        finally:
            peer.close()
        tensors = {keys["field"]: tensor for keys, tensor in unpack_tensors(header["tensors"], buffers)}
        return tensors, header["version"]

    def _activate(self, header: dict[str, Any], _buffers: list[bytearray]) -> Answer:
        """Put a table to use: the prepared one, or one in which this server holds what it holds already."""
        table = ServerTable.from_json(header["table"])
        if self._prepared is not None and self._prepared[0].version == table.version:
            self._shards = self._prepared[1]
        self._table, self._prepared, self._sums = table, None, {}
        self._shards = {index: self._shards[index] for index in table.shards_of(self._number)}
        return {}, ()

    def _primary_shards(self) -> list[Shard]:
        return [self._shards[index] for index in self._require_table().primary_shards(self._number)]

    def _require_table(self) -> ServerTable:
        if self._table is None:
            raise WanmaError(f"parameter server {self._number} has no parameters yet")
        return self._table


def _slice(tensors: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {key: tensor[start:stop] if tensor.ndim else tensor for key, tensor in tensors.items()}


def main() -> None:
    """Run a server: settings come as one line of JSON on standard input, whose end ends the process."""
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    server = ParameterServer(settings["number"], base64.b64decode(settings["secret"]), settings["host"])
    sys.stderr.write(f"parameter server {settings['number']}, process {os.getpid()}\n")
    sys.stderr.flush()
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()  # the process that started it has ended, or closes it
    os._exit(0)


if __name__ == "__main__":
    main()
