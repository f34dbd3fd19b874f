"""Client of a rank that reads: requests batches, with a connection for each thread that waits for one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from wanma.data.batch import Batch
from wanma.data.handover.batch_layout import UnsupportedTensorError, read_batch
from wanma.data.handover.messages import (
    BatchRequest,
    ServerEndpoint,
    receive_bytes,
    receive_message,
    send_message,
    set_tcp_options,
)
from wanma.data.handover.shared_batches import map_batch
from wanma.job.errors import EXIT_FAILED, WanmaError

_CONNECT_TIMEOUT_SECONDS = 60.0


class BatchClient:
    """Client of one server; for several threads at once.

    Args:
        is_local: True if the server is on this node. It hands over complete batches only.
    """

    def __init__(self, endpoint: ServerEndpoint, secret: bytes, *, is_local: bool) -> None:
        self._endpoint, self._secret, self._is_local = endpoint, secret, is_local
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def request(self, request: BatchRequest) -> Batch:
        """Return the batch of a request.

        Raises:
            UnsupportedTensorError: the batch cannot be handed over.
            WanmaError: the server could not read it, or has ended.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = self._connect()
            batch = self._exchange(connection, request)
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            raise WanmaError(
                f"data: connection closed by peer: rank {self._endpoint.rank} reads samples of this rank",
                "see the log of that rank",
            ) from error
        except (UnsupportedTensorError, WanmaError):  # an answer: the connection is in order
            assert connection is not None
            with self._lock:
                self._idle.append(connection)
            raise
        except BaseException:  # an interruption: the answer to come must not be that of the next request
            if connection is not None:
                connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return batch

    def close(self) -> None:
        """Close the connections that no thread uses."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _connect(self) -> socket.socket:
        if self._is_local:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(f"\0{self._endpoint.name}")
            except OSError:
                connection.close()
                raise
        else:
            address = (self._endpoint.host, self._endpoint.port)
            connection = socket.create_connection(address, _CONNECT_TIMEOUT_SECONDS)
            connection.settimeout(None)  # reading may take any time; the supervisor watches for hangs
            set_tcp_options(connection)
        with contextlib.suppress(BrokenPipeError):  # the next read tells
            connection.sendall(self._secret)
        return connection

    def _exchange(self, connection: socket.socket, request: BatchRequest) -> Batch:
        send_message(connection, request.to_json())
        answer = receive_message(connection)
        if "unsupported" in answer:
            raise UnsupportedTensorError(answer["unsupported"])
        if "error" in answer:
            message = answer["error"]
            if not self._is_local:  # the rank that raises it is not where the data lie
                message += f" (read by rank {self._endpoint.rank} on {self._endpoint.host})"
            raise WanmaError(message, answer.get("hint", ""), answer.get("code", EXIT_FAILED))
        layout = answer["layout"]
        if not self._is_local:
            size = layout["ends"][request.content]
            return read_batch(layout, receive_bytes(connection, size), size)
        content, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not content:
            raise EOFError
        if not descriptors:  # the kernel drops one for which the process has no room
            raise WanmaError(
                "data: this rank may open no more files, and cannot take a batch of its peer",
                "raise the limit with `ulimit -n`, or set data.shared_reading = 'never'",
            )
        try:
            return map_batch(layout, descriptors[0])
        finally:
            os.close(descriptors[0])
