"""Client of real server processes: messages of bounded size, and the records that worker 0 is given."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise, starmap
from typing import Any

import pytest
import torch

from support.server_runs import (
    IDS,
    OPTIMIZERS,
    RATE,
    Run,
    compute,
    fetched,
    gradients,
    in_threads,
    process_ids,
    work,
)
from wanma.job.run.parameter_servers import ServedParameter, ServerPosition, StepContribution
from wanma.parameter_server import coordinator, frames
from wanma.parameter_server.server_group import ServerGroup


def test_no_message_of_a_load_or_a_fetch_has_more_rows_than_a_piece(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sizes, signs = run().clients[0], list[int](), list[str]()
    send, receive = frames._send_frame, frames._receive_frame

    def note_sent(connection: socket.socket, header: dict[str, Any], buffers: Sequence[Any]) -> None:
        sizes.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        send(connection, header, buffers)

    def note_received(connection: socket.socket, *arguments: int) -> frames.Frame:
        header, buffers = receive(connection, *arguments)
        sizes.append(sum(map(len, buffers)))
        return header, buffers

    monkeypatch.setattr(frames, "_send_frame", note_sent)
    monkeypatch.setattr(frames, "_receive_frame", note_received)
    client._show_life = lambda: signs.append("a piece")
    table = ServedParameter("t", (200_000, 64), is_table=True)
    weights = {"t": torch.arange(12_800_000.0).reshape(table.shape)}
    client.join()
    client.load([table], OPTIMIZERS["rowwise_adagrad"], weights, {}, ServerPosition(True))
    client.begin(1000, ServerPosition(True))
    client._fetched_update = None
    parts = [(rows, tensors["weight"], tensors["row_sum"]) for _, rows, tensors in client.fetch()]
    ends = (0, 65_536, 100_000, 165_536, 200_000)  # of shards and of pieces
    assert [rows for rows, _, _ in parts] == list(starmap(range, pairwise(ends)))
    assert torch.equal(torch.cat([weight for _, weight, _ in parts]), weights["t"])
    assert all(row_sum.shape == (len(rows),) for rows, _, row_sum in parts), "of a row a number"
    assert 16 << 20 <= max(sizes) < 17 << 20
    assert len(signs) == 12, "two shards have two pieces each, for two holders, and once to fetch"


@pytest.mark.parametrize("event", ["none", "a server is killed", "a server joins"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_fetch_has_the_rows_that_have_changed_since_the_one_before(
    run: Callable[..., Run], group: ServerGroup, optimizer: str, event: str
) -> None:
    served = run()
    weights = served.begin(optimizer)
    client = served.clients[0]
    copies = {"weight": weights["t"].clone()}

    def fetch_changed() -> set[int]:
        changed = set[int]()
        for parameter, rows, tensors in client.fetch():
            if parameter.name == "t":
                changed |= set(torch.as_tensor(rows).tolist())
                for kind in tensors.keys() - {"step"}:
                    part = tensors[kind]
                    copies.setdefault(kind, torch.zeros(10, *part.shape[1:]))[torch.as_tensor(rows)] = part
        return changed

    assert fetch_changed() == set(), "the servers have what this worker has loaded"
    compute(client, 0)
    assert fetch_changed() == {0, 3, 9}
    compute(client, 0)
    if event == "a server is killed":
        os.kill(process_ids(group)[0], signal.SIGKILL)
    elif event == "a server joins":
        assert served.coordinator.resize(3)
    compute(client, 0)
    found = fetch_changed()
    assert found == {3, 4} if event == "none" else found >= {3, 4}
    assert fetch_changed() == set()
    weight, state = fetched(client)
    for kind, tensors in {"weight": weight, **state}.items():
        if kind in copies:
            assert torch.equal(copies[kind], tensors["t"]), kind
    if event == "a server joins":
        assert served.coordinator.resize(2)


def test_the_record_of_a_step_names_the_bad_samples_of_all_its_workers(run: Callable[..., Run]) -> None:
    served = run(2)
    served.begin()
    places = [("a.csv: row 3", "a.csv: row 7"), ("a.csv: row 7", "a.csv: row 9")]

    def work_on_bad(worker: int) -> None:
        client = served.clients[worker]
        assert client.next_step(False).step == 0
        client.push(0, gradients(0, worker), {"t": IDS[worker]})
        client.finish(StepContribution(0, 1.0, 2.0, 1.0, RATE, bad_places=places[worker]))

    in_threads(lambda: work_on_bad(0), lambda: work_on_bad(1))
    (record,) = served.clients[0].next_step(False).records
    assert list(record.bad_places) == ["a.csv: row 3", "a.csv: row 7", "a.csv: row 9"]


def test_other_workers_wait_for_a_chief_that_is_far_behind_with_its_records(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = run(2, "asynchronous")
    served.begin()
    chief, other = served.clients
    monkeypatch.setattr(coordinator, "_MAX_UNRECORDED", 2)
    monkeypatch.setattr(coordinator, "_ANSWER_SECONDS", 0.0)
    assert [compute(other, 1) for _ in range(2)] == [0, 1]
    assert "wait" in other._ask("next", is_drain_requested=False, upcoming=0)[0]
    offer = chief.next_step(False)
    assert (offer.step, len(offer.records)) == (2, 2)
    assert "wait" in other._ask("next", is_drain_requested=False, upcoming=0)[0], (
        "it may not have recorded them yet"
    )
    work(chief, 0, 2)
    assert chief.next_step(False).step == 3
    assert compute(other, 1) == 4
