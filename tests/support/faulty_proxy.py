"""A web server that passes requests on, or answers with a fault; it records them all."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from support.server_thread import ServerThread


@dataclass(frozen=True)
class Request:
    """One request, the `number`-th of all, counted from 1."""

    number: int
    method: str
    path: str
    headers: dict[str, str]

    @property
    def is_ranged(self) -> bool:
        return self.method == "GET" and any(name.lower() == "range" for name in self.headers)


@dataclass(frozen=True)
class Fault:
    """Fault of one answer.

    Attributes:
        status: status instead of the answer; 0: the answer itself.
        body: body that goes with the status.
        headers: more headers.
        cut_at: bytes of the body after which the connection closes; None: all.
        pause_seconds: pause after the first half of the body.
        loses_tail: the answer says that it is complete, but lacks its second half.
    """

    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    pause_seconds: float = 0.0
    loses_tail: bool = False


SLOW_DOWN = Fault(503, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>")
EXPIRED = Fault(400, b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>")


class FaultyProxy:
    """Proxy of one web server.

    Args:
        upstream: address of the server, "http://host:port".

    Attributes:
        url: its own address.
        fault: called with each request; returns its fault, or None.
        requests: all requests.
    """

    def __init__(self, upstream: str) -> None:
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self.requests: list[Request] = []
        self.delay_seconds = 0.0
        self.is_away = False
        self.lock = threading.Lock()
        self._handler = _handler(self, upstream)
        self._server = ServerThread(self._handler)
        self.url = f"http://127.0.0.1:{self._server.port}"

    @property
    def ranged_requests(self) -> list[Request]:
        with self.lock:
            return [request for request in self.requests if request.is_ranged]

    def record(self, method: str, path: str, headers: dict[str, str]) -> Request:
        with self.lock:
            self.requests.append(Request(len(self.requests) + 1, method, path, headers))
            return self.requests[-1]

    def go_away(self) -> None:
        """Refuse connections, and cut those that are open."""
        self.is_away = True
        self._server.close()

    def come_back(self) -> None:
        """Answer again at the same address."""
        self.is_away = False
        self._server = ServerThread(self._handler, port=self._server.port)

    def close(self) -> None:
        if not self.is_away:
            self._server.close()


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


def _handler(proxy: FaultyProxy, upstream: str) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def _pass(self) -> None:
            if proxy.is_away:
                self.close_connection = True
                return
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = proxy.record(self.command, self.path, dict(self.headers))
            time.sleep(proxy.delay_seconds)
            fault = proxy.fault(request) or Fault()
            if fault.status:
                self._answer(fault.status, list(fault.headers.items()), fault.body, Fault())
                return
            connection = http.client.HTTPConnection(address)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, content, dict(self.headers))
                answer = connection.getresponse()
                headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OWN]
                length = answer.getheader("Content-Length")
                self._answer(answer.status, headers, answer.read(), fault, length)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

        def _answer(
            self,
            status: int,
            headers: list[tuple[str, str]],
            body: bytes,
            fault: Fault,
            length: str | None = None,
        ) -> None:
            if fault.loses_tail:
                body = body[: len(body) // 2]
                headers = [pair for pair in headers if pair[0].lower() != "content-range"]
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            is_head = self.command == "HEAD"
            self.send_header("Content-Length", length if is_head and length is not None else str(len(body)))
            with contextlib.suppress(ConnectionError):  # the client has given up
                self.end_headers()
                if is_head:
                    return
                half = len(body) // 2
                sent = body if fault.cut_at is None else body[: fault.cut_at]
                self.wfile.write(sent[:half])
                if fault.pause_seconds:
                    self.wfile.flush()
                    time.sleep(fault.pause_seconds)
                self.wfile.write(sent[half:])
                self.wfile.flush()
            if fault.cut_at is not None:
                self.close_connection = True

        def log_message(self, *_arguments: Any) -> None:
            """Log nothing."""

    return Handler


_OWN = ("content-length", "connection", "transfer-encoding", "date", "server")
