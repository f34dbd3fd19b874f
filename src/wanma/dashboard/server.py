"""Server of the dashboard (Starlette): pages, their changes as server-sent events, targets for Prometheus.

It only reads. Host names other than its own are refused, so that no page of another site can read it through
a name that points here.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from wanma.dashboard.pages import (
    MAX_COMPARED,
    comparison_page,
    log_page,
    log_text,
    run_page,
    runs_page,
    script_page,
)
from wanma.job.run.run_directory import RunDirectory, list_runs
from wanma.observe.endpoint import TARGETS_FOLDER
from wanma.report.run_report import Report, StepTable, read_report
from wanma.report.script_run import read_script_run

POLL_SECONDS = 1.0
_SAFE = {"X-Content-Type-Options": "nosniff"}
KEEP_ALIVE_POLLS = 15
"""Polls without a change after which an empty line is sent, so that no proxy closes the connection."""
MAX_RUNS = 16
"""Most runs whose steps are kept in memory."""

Stamp = tuple[tuple[int, int], ...]
"""Sizes and times of a run's files, which tell whether it has changed."""

Diagnose = Callable[[Report], str]
"""Function from a run's report to the text of its diagnosis."""


def make_application(folder: Path, diagnose: Diagnose, hosts: Sequence[str] = ()) -> Starlette:
    """Return the application for a folder of runs; `hosts`: further names of it, such as that of a proxy."""
    server = _Server(folder, diagnose)
    routes = [
        Route("/", server.show_runs),
        Route("/compare", server.compare),
        Route("/events", server.follow),
        Route("/targets", server.list_targets),
        Route("/runs/{name}/", server.show_run),
        Route("/runs/{name}", _add_slash),
        Route("/runs/{name}/logs/rank-{rank:int}.log", server.show_log),
    ]
    allowed = ["localhost", "127.0.0.1", "[::1]", *hosts]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed)])


class _Server:
    """Requests, answered by threads where files are read."""

    def __init__(self, folder: Path, diagnose: Diagnose) -> None:
        self._folder, self._diagnose = folder, diagnose
        self._cache = ReportCache()

    def show_runs(self, _: Request) -> Response:
        return HTMLResponse(runs_page(self._runs(), self._folder.absolute()), headers=_SAFE)

    def show_run(self, request: Request) -> Response:
        run = self._find(request)
        if (script := read_script_run(run)) is not None:
            return HTMLResponse(script_page(script), headers=_SAFE)
        report = self._cache.read(run)
        return HTMLResponse(run_page(report, self._diagnose(report)))

    def show_log(self, request: Request) -> Response:
        """Answer with the end of a rank's log: a page that follows it for a browser, else plain text."""
        run, rank = self._find(request), request.path_params["rank"]
        if (text := log_text(run, rank)) is None:
            raise HTTPException(404, "no such log")
        headers = {**_SAFE, "Vary": "Accept"}
        if "text/html" in request.headers.get("Accept", ""):
            return HTMLResponse(log_page(run, rank, text), headers=headers)
        return PlainTextResponse(text, headers=headers)

    def compare(self, request: Request) -> Response:
        known = {run.name: run for run in self._runs() if run.job.is_file()}
        names = request.query_params.getlist("run")[:MAX_COMPARED]
        if not (runs := [known[name] for name in names if name in known]):
            raise HTTPException(404, "choose runs on the first page")
        return HTMLResponse(comparison_page([self._cache.read(run) for run in runs]))

    def list_targets(self, _: Request) -> Response:
        """Return the endpoints of all runs, for http_sd_configs of Prometheus."""
        targets: list[Any] = []
        for path in sorted((self._folder / TARGETS_FOLDER).glob("*.json")):
            try:
                targets += json.loads(path.read_text())
            except (OSError, ValueError):  # it ends just now
                continue
        return JSONResponse(targets)

    async def follow(self, request: Request) -> Response:
        """Answer with an event at each change of the runs named, or of any; with `rank` of its log."""
        names = request.query_params.getlist("run")
        rank = request.query_params.get("rank", "")
        if rank and not rank.isdecimal():
            raise HTTPException(404, "rank is a number")
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            self._changes(names, int(rank) if rank else None), media_type="text/event-stream", headers=headers
        )

    async def _changes(self, names: Sequence[str], rank: int | None) -> AsyncIterator[str]:
        seen, quiet = await asyncio.to_thread(self._stamps, names, rank), 0
        yield ": open\n\n"
        while True:
            await asyncio.sleep(POLL_SECONDS)
            stamps = await asyncio.to_thread(self._stamps, names, rank)
            quiet += 1
            if stamps != seen:
                seen, quiet = stamps, 0
                yield "data: changed\n\n"
            elif quiet >= KEEP_ALIVE_POLLS:
                quiet = 0
                yield ": quiet\n\n"

    def _stamps(self, names: Sequence[str], rank: int | None) -> list[Any]:
        return [
            (run.path, run_stamp(run) if rank is None else file_stamps([run.rank_log(rank)]))
            for run in self._runs()
            if run.name in names or not names
        ]

    def _runs(self) -> list[RunDirectory]:
        return [run for run in list_runs(self._folder) if run.job.is_file() or run.script.is_file()]

    def _find(self, request: Request) -> RunDirectory:
        """Return the run that a path names; an error 404 for one that the folder does not list."""
        for run in self._runs():
            if run.name == request.path_params["name"]:
                return run
        raise HTTPException(404, "no run of this name")


def _add_slash(request: Request) -> Response:
    """Redirect to the same path with a slash, relative: below a proxy's path it is another."""
    return RedirectResponse(f"./{quote(request.path_params['name'])}/")


class ReportCache:
    """Cache of the reports of some runs; its methods may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Path, tuple[Stamp, StepTable, Report]] = OrderedDict()

    def read(self, run: RunDirectory) -> Report:
        """Return the report of a run, as its directory has it now."""
        with self._lock:
            stamp, known = run_stamp(run), self._known.pop(run.path, None)
            # A run that is over stays as it is; one that lives changes its state with the time, too.
            if known is None or known[0] != stamp or known[2].state == "running":
                table = StepTable(run.metrics) if known is None else known[1]
                known = (stamp, table, read_report(run, table=table))
            self._known[run.path] = known
            if len(self._known) > MAX_RUNS:
                self._known.popitem(last=False)
            return known[2]


def run_stamp(run: RunDirectory) -> Stamp:
    """Return sizes and times of the files of a run that change during it."""
    return file_stamps([run.metrics, run.events, run.job, run.script, run.plan, run.node_usage(0)])


def file_stamps(paths: Iterable[Path]) -> Stamp:
    """Return sizes and times of files, zeros of one that is missing."""
    stamps = []
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((state.st_size, state.st_mtime_ns))
    return tuple(stamps)
