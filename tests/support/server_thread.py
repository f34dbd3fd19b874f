"""A web server of a test, in a thread that ends as soon as it is asked to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STOP_POLL_SECONDS = 0.02
"""Interval, in seconds, at which a server looks whether it is to end: each test waits for that."""


class ServerThread:
    """Server that answers requests from its construction to `close`.

    Attributes:
        port: its port.
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(STOP_POLL_SECONDS,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
