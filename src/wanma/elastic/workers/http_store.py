"""Rendezvous store of Horovod's Gloo controller: values by scope and key, over HTTP.

The protocol is that of `horovod/runner/http/http_server.py`: PUT and GET of /SCOPE/KEY, with 404 for a key
that is not there yet. In the scopes of the controller each rank has its own number as its key, and sends
DELETE once it is connected, while others may still read its value. So such a scope is emptied when all these
keys have been deleted, and Horovod may be initialized again. Gloo's keys `rank_0`, ... are never deleted.
"""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REQUEST_TIMEOUT_SECONDS = 30.0
"""Longest time, in seconds, for which a connection waits for the rest of a request."""
_CONTROLLER_SCOPES = ("global", "local_", "cross_")
"""First characters of the scopes in which a deleted key stays readable until all are deleted."""


class HttpStore:
    """Values by scope and key, safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._deleted_keys: dict[str, set[str]] = {}

    def get(self, scope: str, key: str) -> bytes | None:
        """Return a value; None if it is not there yet."""
        with self._lock:
            return self._scopes.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def delete(self, scope: str, key: str) -> None:
        """Delete a value; in a scope of the controller, all values once each rank's has been deleted."""
        with self._lock:
            values = self._scopes.get(scope, {})
            if not scope.startswith(_CONTROLLER_SCOPES):
                values.pop(key, None)
                return
            deleted = self._deleted_keys.setdefault(scope, set())
            deleted.add(key)
            if deleted >= {name for name in values if name.isdecimal()}:
                self._scopes.pop(scope, None)
                del self._deleted_keys[scope]


class HttpStoreServer(ThreadingHTTPServer):
    """Server of one `HttpStore` on a socket that listens already.

    Args:
        listener: file descriptor of the socket.
    """

    daemon_threads = True

    def __init__(self, listener: int) -> None:
        super().__init__(("", 0), _RequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=listener)
        self.server_address = self.socket.getsockname()
        self.store = HttpStore()


def serve_http_store(listener: int) -> None:
    """Serve until the process ends."""
    HttpStoreServer(listener).serve_forever()


class _RequestHandler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_SECONDS
    server: HttpStoreServer

    def do_GET(self) -> None:
        if (place := self._place()) is not None:
            value = self.server.store.get(*place)
            self._answer(HTTPStatus.OK if value is not None else HTTPStatus.NOT_FOUND, value or b"")

    def do_PUT(self) -> None:
        if (place := self._place()) is not None:
            try:
                value = self.rfile.read(int(self.headers["Content-Length"]))
            except TimeoutError:
                self._answer(HTTPStatus.REQUEST_TIMEOUT)
                return
            self.server.store.put(*place, value)
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        if (place := self._place()) is not None:
            self.server.store.delete(*place)
            self._answer(HTTPStatus.OK)

    def log_message(self, format: str, *args: object) -> None:
        """Log no request: ranks ask for each key every few milliseconds."""

    def _place(self) -> tuple[str, str] | None:
        """Return scope and key; None: the path has none, and the client has been told."""
        match self.path.split("/"):
            case ["", scope, key]:
                return scope, key
        self._answer(HTTPStatus.BAD_REQUEST)
        return None

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
