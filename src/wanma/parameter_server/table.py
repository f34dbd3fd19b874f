"""Table of the servers: for each parameter the row ranges of its shards, and the servers that hold them.

A shard has a row range of every parameter. It is the unit of replication: its first holder is the primary,
which applies updates and passes them on to the other. Each change makes a new version of the table; a server
refuses requests of another version than its own. Free of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from wanma.job.run.parameter_servers import ServedParameter


@dataclass(frozen=True)
class ServerTable:
    """Versioned assignment of shards to servers."""

    version: int
    parameters: tuple[ServedParameter, ...]
    holders: tuple[tuple[int, ...], ...]
    """Servers of each shard, the primary first."""
    endpoints: Mapping[int, tuple[str, int]]
    """Host and port of each server."""

    @classmethod
    def build(
        cls,
        version: int,
        parameters: Sequence[ServedParameter],
        endpoints: Mapping[int, tuple[str, int]],
        replicas: int,
        nodes: Mapping[int, int] = MappingProxyType({}),
    ) -> ServerTable:
        """Return a table with one shard for each server, whose backup is the next server.

        Args:
            version: version of the table.
            parameters: all parameters.
            endpoints: host and port of each server.
            replicas: holders of each shard.
            nodes: node of each server: the backup is the next server on another node, if there is one.
        """
        servers = sorted(endpoints)
        holders = []
        for index, primary in enumerate(servers):
            others = servers[index + 1 :] + servers[:index]
            others.sort(key=lambda other: nodes.get(other) == nodes.get(primary))  # stable: the next is first
            holders.append((primary, *others[: replicas - 1]))
        return cls(version, tuple(parameters), tuple(holders), dict(endpoints))

    def start(self, parameter: ServedParameter, shard: int) -> int:
        """Return the first row of a shard; that of the shard after it is the end."""
        return parameter.rows * shard // len(self.holders)

    def row_range(self, parameter: ServedParameter, shard: int) -> range:
        return range(self.start(parameter, shard), self.start(parameter, shard + 1))

    def starts(self, parameter: ServedParameter) -> list[int]:
        """Return the first row of every shard, and the end of the last."""
        return [self.start(parameter, shard) for shard in range(len(self.holders) + 1)]

    def shards_of(self, server: int) -> list[int]:
        """Return the shards that a server holds."""
        return [shard for shard, holders in enumerate(self.holders) if server in holders]

    def primary_shards(self, server: int) -> list[int]:
        return [shard for shard, holders in enumerate(self.holders) if holders[0] == server]

    def primaries(self) -> list[int]:
        """Return the servers that are primary of a shard."""
        return sorted({holders[0] for holders in self.holders})

    def without(self, lost: Collection[int], version: int) -> ServerTable | None:
        """Return a table of another version, in which the remaining holder of each shard is its primary.

        Returns:
            None if a shard has no other holder than the lost servers.
        """
        holders = tuple(tuple(one for one in some if one not in lost) for some in self.holders)
        return replace(self, version=version, holders=holders) if all(holders) else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "endpoints": {str(key): value for key, value in self.endpoints.items()}}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ServerTable:
        return cls(
            value["version"],
            tuple(ServedParameter(**{**one, "shape": tuple(one["shape"])}) for one in value["parameters"]),
            tuple(tuple(holders) for holders in value["holders"]),
            {int(server): (host, port) for server, (host, port) in value["endpoints"].items()},
        )
