"""Hand-over between a rank that reads and its peers, through memory on a node and over TCP between nodes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from wanma.data.batch import Batch
from wanma.data.handover.batch_client import BatchClient
from wanma.data.handover.messages import (
    BatchRequest,
    ServerEndpoint,
    receive_bytes,
    receive_message,
    send_message,
)
from wanma.data.handover.sample_reading import PeerReading, PeerServer
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import EXIT_USAGE, WanmaError

SECRET = bytes(range(32))
STRANGE, BROKEN = 100, 200


def read(is_validation: bool, sample_indices: IndexArray) -> Batch:
    """Read a batch whose rows are (sample index, process), and twice the index as the target."""
    if STRANGE in sample_indices:
        raise WanmaError("data: the file has gone", "bring it back", EXIT_USAGE)
    if BROKEN in sample_indices:
        raise ZeroDivisionError("no number")
    samples = torch.from_numpy(sample_indices.copy())
    inputs = torch.stack([samples, torch.full_like(samples, os.getpid())], 1)
    targets = 2 * samples + int(is_validation)
    return Batch((inputs,), targets, samples, torch.ones(len(samples), dtype=torch.bool))


def never(is_validation: bool, sample_indices: IndexArray) -> Batch:
    raise AssertionError("a peer has read for itself")


@contextmanager
def peers(*, local: bool = True, content: Any = "complete", reader: Any = read) -> Iterator[Any]:
    """Yield a server, with one consumer more, and its client."""
    server = PeerServer(
        reader,
        consumers=2,
        readers=2,
        limit_bytes=None,
        rank=3,
        secret=SECRET,
        host="" if local else "127.0.0.1",
    )
    client = BatchClient(server.server.endpoint, SECRET, is_local=local)
    peer = PeerReading(never if reader is read else reader, client, content)
    try:
        yield server, peer
    finally:
        peer.close()
        server.close()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("wanma-handover")}


@pytest.mark.parametrize("local", [True, False], ids=["on the node", "on another node"])
def test_a_peer_gets_what_the_reader_has_and_reads_nothing(local: bool) -> None:
    with peers(local=local) as (server, peer):
        for is_validation in (False, True):
            own = server.take(is_validation, np.array([4, 9, 2]))
            handed = peer.take(is_validation, np.array([4, 9, 2]))
            for one, other in ((own.inputs[0], handed.inputs[0]), (own.targets, handed.targets)):
                assert torch.equal(one, other)
            assert torch.equal(own.samples, handed.samples)
        assert (server.training_samples_read, peer.training_samples_read) == (3, 0)
        assert server.batches.kept_bytes == 0
    assert threads() == set()


def test_many_threads_of_a_peer_get_each_their_own_batch() -> None:
    with peers() as (server, peer), ThreadPoolExecutor(8) as pool:
        requests = [np.arange(n, n + 3) for n in range(0, 90, 3)]
        found = list(pool.map(lambda rows: peer.take(False, rows).samples.tolist(), requests))
        assert found == [rows.tolist() for rows in requests]
        own = [server.take(False, rows).samples.tolist() for rows in requests]
        assert own == found
        assert server.training_samples_read == 90


def test_a_pipeline_stage_on_another_node_is_sent_the_part_that_it_needs() -> None:
    with peers(local=False, content="targets") as (_, peer):
        batch = peer.take(False, np.array([1, 2]))
        assert batch.targets.tolist() == [2, 4]
        assert (batch.inputs[0].shape, int(batch.inputs[0].sum())) == ((2, 2), 0)
    with peers(local=False, content="rows") as (_, peer):
        batch = peer.take(False, np.array([1, 2]))
        assert (batch.samples.tolist(), batch.targets.tolist()) == ([1, 2], [0, 0])


@pytest.mark.parametrize("local", [True, False], ids=["on the node", "on another node"])
def test_an_error_of_reading_reaches_the_peer_and_the_next_batch_comes(local: bool) -> None:
    with peers(local=local) as (_, peer):
        with pytest.raises(WanmaError, match="data: the file has gone") as caught:
            peer.take(False, np.array([STRANGE]))
        assert local or caught.value.message.endswith("(read by rank 3 on 127.0.0.1)")
        assert (caught.value.hint, caught.value.exit_code) == ("bring it back", EXIT_USAGE)
        with pytest.raises(WanmaError, match="data: ZeroDivisionError: no number"):
            peer.take(False, np.array([BROKEN]))
        assert peer.take(False, np.array([5])).samples.tolist() == [5]


def test_samples_that_cannot_be_handed_over_are_read_by_each(caplog: pytest.LogCaptureFixture) -> None:
    def read_sparse(is_validation: bool, sample_indices: IndexArray) -> Batch:
        batch = read(is_validation, sample_indices)
        return replace(batch, inputs=(batch.inputs[0].to_sparse(),))

    with peers(reader=read_sparse) as (server, peer):
        for first in (1, 3):
            assert peer.take(False, np.array([first])).inputs[0].to_dense()[0, 0] == first
            assert server.take(False, np.array([first])).inputs[0].to_dense()[0, 0] == first
    assert [record.message for record in caplog.records] == [
        "data: a sample has a tensor of layout torch.sparse_coo, torch.int64, so that each rank reads its "
        "samples itself"
    ] * 2


@pytest.mark.parametrize("local", [True, False], ids=["on the node", "on another node"])
def test_the_end_of_the_reader_is_told_as_that_of_a_peer(local: bool) -> None:
    with peers(local=local) as (server, peer):
        peer.take(False, np.array([1]))
        server.close()
        for _ in range(2):  # with a connection from before, and with a new one
            with pytest.raises(WanmaError, match="connection closed by peer: rank 3"):
                peer.take(False, np.array([2]))


def test_a_stranger_gets_nothing() -> None:
    with peers(local=False) as (server, _):
        stranger = BatchClient(server.server.endpoint, bytes(32), is_local=False)
        with pytest.raises(WanmaError, match="connection closed by peer"):
            stranger.request(BatchRequest(False, np.array([1])))
        assert server.training_samples_read == 0


def test_a_stranger_that_sends_no_secret_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanma.data.handover.batch_server._SECRET_SECONDS", 0.01)
    with peers(local=False) as (server, _):
        endpoint = server.server.endpoint
        with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
            stranger.settimeout(60)
            assert stranger.recv(1) == b""


def test_a_peer_that_may_open_no_more_files_says_so() -> None:
    name = f"wanma-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(f"\0{name}")
        listener.listen()
        client = BatchClient(ServerEndpoint(3, name), SECRET, is_local=True)
        task = pool.submit(client.request, BatchRequest(False, np.array([1])))
        connection, _ = listener.accept()
        with connection:
            assert receive_bytes(connection, len(SECRET)) == SECRET
            assert receive_message(connection)["samples"] == [1]
            send_message(connection, {"layout": {}})
            connection.sendall(b"\0")  # without a descriptor, as where the kernel has dropped it
            with pytest.raises(WanmaError, match="this rank may open no more files"):
                task.result()
        client.close()
