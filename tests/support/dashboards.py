"""Dashboard of a test, served by a thread of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

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
    settings = uvicorn.Config(application, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
