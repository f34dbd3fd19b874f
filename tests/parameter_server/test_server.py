"""Server of shards, called in this process."""

from __future__ import annotations

import torch

from support.server_runs import OPTIMIZERS, PARAMETERS, SECRET
from wanma.parameter_server.server import ParameterServer
from wanma.parameter_server.shards import pack_tensors
from wanma.parameter_server.table import ServerTable


def test_a_server_keeps_one_push_of_a_worker() -> None:
    server = ParameterServer(0, SECRET)
    table = ServerTable.build(1, PARAMETERS, {0: server.address}, 1)
    settings = {"optimizer": OPTIMIZERS["sgd"], "update": 0}
    server._handle({"op": "reset", "table": table.to_json(), **settings}, [])
    for step in (0, 1):
        keys = {"shard": 0, "is_table": False, "field": "values"}
        tensors = ((keys | {"name": one.name}, torch.ones(one.rows, one.width)) for one in PARAMETERS)
        descriptions, content = pack_tensors(tensors)
        push = {"op": "push", "table": 1, "worker": 0, "generation": 1, "step": step, "shards": [0]}
        server._handle({**push, "tensors": descriptions}, [bytearray(one) for one in content])
    missing = [
        server._handle({"op": "reduce", "update": 1, "contributors": [[0, step]]}, [])[0]["missing"]
        for step in (0, 1)
    ]
    assert missing == [[0], []]


def test_a_push_without_a_gradient_of_a_shard_is_not_missed() -> None:
    server = ParameterServer(0, SECRET)
    table = ServerTable.build(1, PARAMETERS[:1], {0: server.address}, 1)
    settings = {"optimizer": OPTIMIZERS["sgd"], "update": 0}
    server._handle({"op": "reset", "table": table.to_json(), **settings}, [])
    push = {"op": "push", "table": 1, "generation": 1, "step": 0, "shards": [0], "tensors": []}
    order = {"update": 1, "contributors": [[0, 0], [1, 0]]}
    server._handle({**push, "worker": 0}, [])
    assert server._handle({"op": "reduce", **order}, [])[0]["missing"] == [1]
    server._handle({**push, "worker": 1}, [])
    assert server._handle({"op": "reduce", **order}, [])[0] == {"square": 0.0, "missing": []}
    numbers = {"factor": 1.0, "learning_rate": 0.1, "is_skipped": False}
    assert server._handle({"op": "apply", **order, **numbers}, [])[0]["missing"] == []
