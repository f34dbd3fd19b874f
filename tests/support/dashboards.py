"""Dashboard of a test, served by a thread of it, and runs for it."""

from __future__ import annotations

import json
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
from wanma.job.run.run_directory import RunDirectory
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


def make_run(folder: Path, name: str = "gpt", rate: str = "1e-3") -> RunDirectory:
    run = RunDirectory(folder / name)
    run.create()
    run.job.write_text(f"[train]\nsteps = 100\nlearning_rate = {rate}\n")
    run.events.write_text(
        json.dumps({"kind": "start", "time": 1.0, "step": 0, "steps": 100, "host": "x", "plan": "<b>"}) + "\n"
    )
    run.rank_log(0).write_text("<script>alert(1)</script>\n")
    return run


def write_steps(run: RunDirectory, first: int, last: int, loss: float = 2.0, mode: str = "a") -> None:
    with run.metrics.open(mode) as file:
        for step in range(first, last + 1):
            record = {
                "step": step,
                "time": time.time(),
                "loss": loss,
                "step_seconds": 0.5,
                "phases": {"data": 0.1},
            }
            file.write(json.dumps(record) + "\n")


def write_usage(run: RunDirectory, ranks: int = 2) -> None:
    with run.node_usage(0).open("w") as file:
        for second in range(10):
            entries = [
                {"rank": rank, "steps": second, "compute_seconds": second * (1 + rank), "data_seconds": 0.0,
                 "cpu_seconds": float(second), "memory_bytes": 1 << 30}
                for rank in range(ranks)
            ]  # fmt: skip
            file.write(json.dumps({"time": float(second), "ranks": entries}) + "\n")
