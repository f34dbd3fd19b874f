"""Move of row ranges: a server collects its shards of a new table from the holders of the old one.

Pulls and pushes go on meanwhile with the old table; updates wait until the new one is in use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.frames import Connection, PeerLostError
from wanma.parameter_server.shards import Shard, overlapping_rows, row_pieces, slice_rows, unpack_tensors
from wanma.parameter_server.table import ServerTable

PEER_SECONDS = 60.0
"""Longest wait for another server."""


class HolderLostError(Exception):
    """Loss of the connection to the server, its argument, that holds the rows to be copied."""


class ShardMove:
    """Shards of one server by a new table, filled piece by piece with rows and their optimizer state.

    Args:
        number: number of the server.
        held: shards that it holds by the old table.
        old: table in use.
        new: table that it collects shards for.
        update: number of the newest update of all shards.
        optimizer: settings of the optimizer.
        secret: secret of the run.
    """

    def __init__(
        self,
        number: int,
        held: Mapping[int, Shard],
        old: ServerTable,
        new: ServerTable,
        update: int,
        optimizer: Mapping[str, Any],
        secret: bytes,
    ) -> None:
        self.table = new
        self.shards: dict[int, Shard] = {}
        self._number, self._held, self._old, self._update = number, held, old, update
        self._optimizer, self._secret = optimizer, secret
        self._keeps_rows = len(old.holders) == len(new.holders)
        """True if shards have the same rows in both tables."""
        self._holders: dict[int, Connection] = {}
        self._pieces = self._collect()

    def advance(self, seconds: float) -> bool:
        """Copy for some seconds; return whether all shards are complete.

        Raises:
            HolderLostError: a holder cannot be reached; the move is to be begun again.
        """
        deadline = time.monotonic() + seconds
        for _ in self._pieces:
            if time.monotonic() > deadline:
                return False
        self.close()
        return True

    def close(self) -> None:
        for connection in self._holders.values():
            connection.close()
        self._holders = {}

    def _collect(self) -> Iterator[None]:
        """Fill the shards, one piece for each value."""
        for index in self.table.shards_of(self._number):
            if self._keeps_rows and index in self._held:
                self.shards[index] = self._held[index]
                continue
            shard = self.shards[index] = Shard(self.table, index, self._optimizer)
            shard.version = self._update
            for parameter in self.table.parameters:
                for source, rows in overlapping_rows(self._old, self.table, parameter, index):
                    for piece in row_pieces(rows, parameter):
                        self._copy(shard, parameter, source, piece)
                        yield

    def _copy(self, shard: Shard, parameter: ServedParameter, source: int, rows: range) -> None:
        """Copy rows of one parameter from shard `source` of the old table."""
        start = self._old.start(parameter, source)
        tensors, version = self._read(source, parameter.name, rows.start - start, rows.stop - start)
        if self._keeps_rows:
            shard.version = version
        elif version != self._update:
            raise WanmaError(
                f"parameter servers cannot move {parameter.name}: shard {source} is at update {version} "
                f"instead of {self._update}"
            )
        shard.fill(parameter.name, rows.start - self.table.start(parameter, shard.index), tensors)

    def _read(self, source: int, name: str, start: int, stop: int) -> tuple[dict[str, Tensor], int]:
        """Return rows of a shard with their optimizer state, and the newest update that they have."""
        if (own := self._held.get(source)) is not None:
            return slice_rows(own.tensors(name), start, stop), own.version
        holder = self._old.holders[source][0]
        message = {"op": "rows", "table": self._old.version, "shard": source, "name": name}
        try:
            if holder not in self._holders:
                self._holders[holder] = Connection(self._old.endpoints[holder], self._secret, 0.0)
            header, buffers = self._holders[holder].request(
                {**message, "start": start, "stop": stop}, (), PEER_SECONDS
            )
        except PeerLostError as error:
            self.close()
            raise HolderLostError(holder) from error
        if "stale" in header:
            raise WanmaError(f"parameter server {holder} has another table than its group")
        tensors = {keys["field"]: tensor for keys, tensor in unpack_tensors(header["tensors"], buffers)}
        return tensors, header["version"]
