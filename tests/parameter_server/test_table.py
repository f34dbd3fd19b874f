from __future__ import annotations

import pytest

from wanma.job.run.parameter_servers import ServedParameter
from wanma.parameter_server.shards import overlapping_rows
from wanma.parameter_server.table import ServerTable

PARAMETERS = (
    ServedParameter("w", (7, 2)),
    ServedParameter("b", ()),
    ServedParameter("t", (3, 4), is_table=True),
)


def table(servers: int, replicas: int = 1, version: int = 1) -> ServerTable:
    endpoints = {number: ("127.0.0.1", 1000 + number) for number in range(servers)}
    return ServerTable.build(version, PARAMETERS, endpoints, replicas)


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_each_row_is_in_one_shard_and_each_shard_on_as_many_servers_as_there_are_replicas(
    servers: int,
) -> None:
    for replicas in {1, min(2, servers)}:
        built = table(servers, replicas)
        for parameter in PARAMETERS:
            rows = [row for shard in range(servers) for row in built.row_range(parameter, shard)]
            assert rows == list(range(parameter.rows))
        assert all(len(set(holders)) == replicas for holders in built.holders)
        assert all(len(built.shards_of(server)) == replicas for server in range(servers))
        assert ServerTable.from_json(built.to_json()) == built


@pytest.mark.parametrize(("servers", "nodes"), [(2, 2), (3, 2), (5, 2), (4, 3)])
def test_the_holders_of_a_shard_are_on_two_nodes(servers: int, nodes: int) -> None:
    node_of = {number: number % nodes for number in range(servers)}
    endpoints = {number: ("127.0.0.1", 1000 + number) for number in range(servers)}
    built = ServerTable.build(1, PARAMETERS, endpoints, 2, node_of)
    assert all(len({node_of[holder] for holder in holders}) == 2 for holders in built.holders)
    assert [holders[0] for holders in built.holders] == list(range(servers))


def test_without_a_server_the_other_holder_is_primary_unless_there_is_none() -> None:
    built = table(3, 2)
    left = built.without({1}, 7)
    assert left is not None
    assert left.holders == ((0,), (2,), (2, 0))
    assert left.version == 7
    assert left.without({2}, 8) is None
    assert built.without({1, 2}, 8) is None
    assert table(3, 1).without({0}, 2) is None


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 2), (5, 4)])
def test_moved_ranges_are_made_of_all_rows_each_once(old: int, new: int) -> None:
    before, after = table(old), table(new, version=2)
    for parameter in PARAMETERS:
        rows = [
            row
            for shard in range(new)
            for other, part in overlapping_rows(before, after, parameter, shard)
            for row in part
            if row in before.row_range(parameter, other)
        ]
        assert rows == list(range(parameter.rows))
