"""Messages between a rank that reads and its peers: a length of four bytes, then JSON. No torch here."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wanma.data.sampling.permutation import IndexArray

if TYPE_CHECKING:
    from wanma.data.handover.batch_layout import Content

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class ServerEndpoint:
    """Endpoint of a rank that reads for others."""

    rank: int
    name: str
    """Abstract name of its Unix socket, for ranks on the same node."""
    host: str = ""
    """Address for ranks on other nodes; empty: there are none."""
    port: int = 0


@dataclass(frozen=True)
class BatchRequest:
    """Request for the batch of some samples."""

    is_validation: bool
    sample_indices: IndexArray
    content: Content = "complete"
    """Part of the batch that is sent to another node."""
    part: str = ""
    """Fingerprint of a part of the data; empty: samples in the order of the run."""
    rows: IndexArray | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "validation": self.is_validation,
            "samples": self.sample_indices.tolist(),
            "content": self.content,
            "part": self.part,
            "rows": None if self.rows is None else self.rows.tolist(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BatchRequest:
        rows = value["rows"]
        return cls(
            value["validation"],
            np.array(value["samples"], np.int64),
            value["content"],
            value["part"],
            None if rows is None else np.array(rows, np.int64),
        )


def set_tcp_options(connection: socket.socket) -> None:
    """Send small messages at once, and let a read end within half a minute if the peer's machine is gone.

    Reading itself has no deadline: a peer may read its samples for any time.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # macOS has no TCP_KEEPIDLE
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Receive one message.

    Raises:
        EOFError: the other side has closed the connection.
    """
    (size,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    message: dict[str, Any] = json.loads(bytes(receive_bytes(connection, size)))
    return message


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Receive so many bytes.

    Raises:
        EOFError: the other side has closed the connection.
    """
    content = bytearray(size)
    view, received = memoryview(content), 0
    while received < size:
        count = connection.recv_into(view[received:])
        if not count:
            raise EOFError
        received += count
    return content
