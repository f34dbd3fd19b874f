"""Connection in the event loop: non-blocking socket and framed messages."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

from wanma.elastic.protocol.framing import Framer, ProtocolError
from wanma.elastic.protocol.messages import Message
from wanma.elastic.transport.event_loop import EventLoop

logger = logging.getLogger("wanma.elastic")

MAX_UNSENT_BYTES = 16 << 20
"""Most bytes that may wait for a slow reader before the connection counts as broken."""


class Connection:
    """Connection that sends by `send` and receives by `on_message`.

    `on_closed(reason)` is called exactly once, unless `close` was called before.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        name: str,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self.framer = Framer()
        self.is_closed = False
        self.has_protocol_error = False
        """True if it ended because the other side does not speak this protocol."""
        self._loop, self._socket, self._name = loop, sock, name
        self._on_message, self._on_closed = on_message, on_closed
        self._outgoing = bytearray()
        sock.setblocking(False)
        loop.watch(sock, self._ready, selectors.EVENT_READ)

    def send(self, message: Message, generation: int | None = None) -> None:
        """Send a message; `generation`: its own, if it is not the framer's."""
        if self.is_closed:
            return
        self._outgoing += self.framer.frame(message, generation)
        self._write()

    def read(self) -> None:
        """Read everything that has arrived; needed only to read to the end out of turn."""
        while not self.is_closed:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error.strerror or str(error))
                return
            if not data:
                self._end("it closed the connection")
                return
            self._handle_data(data)

    def close(self) -> None:
        """Close without a callback; bytes that wait for a slow reader are lost."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.unwatch(self._socket)
            self._socket.close()

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write()
        if events & selectors.EVENT_READ:
            self.read()

    def _handle_data(self, data: bytes) -> None:
        try:
            self.framer.feed(data)
            while not self.is_closed and (message := self.framer.read_message()) is not None:
                self._on_message(message)
        except ProtocolError as error:
            logger.warning("%s: %s; closing the connection", self._name, error)
            self.has_protocol_error = True
            self._end(str(error))

    def _write(self) -> None:
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            if len(self._outgoing) > MAX_UNSENT_BYTES:
                self._end("it does not read its messages")
                return
        except OSError as error:
            # Unread messages of the other side may still explain why it left.
            self._outgoing.clear()
            logger.info("%s: %s", self._name, error)
        if self.is_closed:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._loop.watch(self._socket, self._ready, events)

    def _end(self, reason: str) -> None:
        if not self.is_closed:
            self.close()
            self._on_closed(reason)
