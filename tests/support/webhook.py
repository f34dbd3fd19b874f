"""Webhook that keeps the bodies it gets."""

from __future__ import annotations

import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Self


class Webhook:
    """Webhook; a context manager.

    Args:
        statuses: statuses of the first answers; all others are 200.
    """

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[str] = []
        self._arrived: queue.Queue[str] = queue.Queue()
        remaining, keep = list(statuses), self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                keep(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(remaining.pop(0) if remaining else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def wait(self, seconds: float = 120) -> str:
        """Return the next body."""
        return self._arrived.get(timeout=seconds)

    def _keep(self, body: str) -> None:
        self.bodies.append(body)
        self._arrived.put(body)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
