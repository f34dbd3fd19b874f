"""Dashboard of a test, served by a thread of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import requests
import uvicorn

from support.server_thread import ServerThread
from wanma.dashboard.server import make_application
from wanma.report.run_report import Report

PROXY = "proxy.example"
"""Further name to which it answers."""


def _diagnose(report: Report) -> str:
    return f"diagnosis of {report.run.name}"


@contextmanager
def served_dashboard(folder: Path, diagnose: Callable[[Report], str] = _diagnose) -> Iterator[str]:
    """Serve the dashboard of a folder of runs; yields its URL without a slash at the end."""
    application = make_application(folder, diagnose, [PROXY])
    settings = uvicorn.Config(application, port=0, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@contextmanager
def proxied(url: str) -> Iterator[str]:
    """Serve a site below the path /wanma of another, as a reverse proxy does; yields the URL of that path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/wanma/"):
                self.send_error(404)
                return
            path = self.path.removeprefix("/wanma")
            headers = {"Host": PROXY}
            with requests.get(
                url + path, headers=headers, stream=True, allow_redirects=False, timeout=60
            ) as answer:
                self.send_response(answer.status_code)
                for name in ("Content-Type", "Location"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                with suppress(requests.RequestException, OSError):  # one of both sides has gone
                    for part in answer.iter_content(None):
                        self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with closing(ServerThread(Handler)) as server:
        yield f"http://127.0.0.1:{server.port}/wanma"
