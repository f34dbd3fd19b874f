"""Files of plain web servers: with ranges, and without, through a node cache."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from support.server_thread import ServerThread
from wanma.data.cache.node_cache import NodeCache
from wanma.data.stores.listing import list_files
from wanma.data.stores.remote_file import RemoteFile
from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import RetryPolicy

CONTENT = random.Random(2).randbytes(300_000)
QUICK = RetryPolicy(max_attempts=3, initial_backoff_seconds=0.01)


class WebServer:
    """Web server of one file.

    Attributes:
        content, etag, has_ranges: what it serves, and how.
        statuses: statuses of the next answers, instead of the file.
        gets: headers `Range` of all GET requests; None: the whole file.
    """

    def __init__(self) -> None:
        self.content, self.etag, self.has_ranges = CONTENT, '"1"', True
        self.statuses: list[int] = []
        self.gets: list[str | None] = []
        self.server = ServerThread(_handler(self))
        self.url = f"http://127.0.0.1:{self.server.port}/file.bin"


def _handler(web: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.command == "GET":
                web.gets.append(self.headers.get("Range"))
            status, body = 200, web.content
            if web.statuses:
                status, body = web.statuses.pop(0), b""
            elif web.has_ranges and (wanted := self.headers.get("Range")):
                start, end = wanted.removeprefix("bytes=").split("-")
                status, body = 206, web.content[int(start) : int(end) + 1]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if web.etag:
                self.send_header("ETag", web.etag)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Log nothing."""

    return Handler


@contextmanager
def web_server() -> Iterator[WebServer]:
    web = WebServer()
    try:
        yield web
    finally:
        web.server.close()


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


def test_ranges_are_read_and_a_busy_server_is_asked_again(web: WebServer) -> None:
    (file,) = list_files([web.url], "data.text")
    web.statuses = [503, 500]
    assert RemoteFile(file, QUICK).read(1000, 2000) == CONTENT[1000:2000]
    assert web.gets == ["bytes=1000-1999"] * 3


def test_a_file_that_changes_is_named(web: WebServer) -> None:
    (file,) = list_files([web.url], "data.text")
    web.etag = '"2"'
    with pytest.raises(WanmaError, match=r'file.bin.* ETag was "1" and is "2"'):
        RemoteFile(file, QUICK).read(0, 10)


def test_a_server_that_fails_is_not_taken_for_an_absence(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wanma.data.stores.listing.STORAGE_RETRY_POLICY", QUICK)
    web.statuses = [503, 503]
    assert list_files([web.url], "data.text")[0].size == len(CONTENT)
    for statuses, kind, fact in (
        ([500] * 6, WanmaError, r"file.bin': HTTP status 500 \(after 3"),
        ([403] * 2, WanmaError, "no permission"),
        ([404] * 2, JobError, "does not exist"),
    ):
        web.statuses = statuses
        with pytest.raises(kind, match=fact):
            list_files([web.url], "data.text")


_FORKING_PROGRAM = """
import os, sys
from wanma.data.stores.listing import list_files
from wanma.data.stores.remote_file import RemoteFile

(file,) = list_files([sys.argv[1]], "data.text")
source = RemoteFile(file)
source.read(0, 10)
child = os.fork()
if not child:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(source.read(10, 20)))
"""


def test_a_forked_process_that_ends_leaves_the_connections_to_its_parent(web: WebServer) -> None:
    """By a connection that is kept between requests: else the parent waits until its request is given up."""
    lasting = ServerThread(type("Lasting", (_handler(web),), {"protocol_version": "HTTP/1.1"}))
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _FORKING_PROGRAM, f"http://127.0.0.1:{lasting.port}/file.bin"],
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        lasting.close()
    assert (ran.stdout, ran.returncode) == ("10\n", 0), ran.stderr
    assert web.gets.count("bytes=10-19") == 1, "the request is not repeated"


def test_a_server_without_ranges_is_refused_by_name(web: WebServer) -> None:
    web.has_ranges = False
    (file,) = list_files([web.url], "data.text")
    with pytest.raises(WanmaError, match=r"data.text\[0\]: .* whole files only") as error:
        RemoteFile(file, QUICK).read(1000, 2000)
    assert "data.cache_bytes" in error.value.hint
    assert RemoteFile(file, QUICK).read(0, len(CONTENT)) == CONTENT, "a whole file is one range"


def test_a_server_without_ranges_sends_a_file_once_to_a_node_cache(web: WebServer, tmp_path: Path) -> None:
    web.has_ranges = False
    (file,) = list_files([web.url], "data.text")
    cache = NodeCache(tmp_path, 1 << 20, block_bytes=50_000)
    source = cache.open(file)
    ranges = [(0, 10), (49_995, 50_005), (290_000, 300_000)]
    web.gets.clear()
    assert source.read_ranges(ranges) == [CONTENT[start:end] for start, end in ranges]
    assert NodeCache(tmp_path, 1 << 20, block_bytes=50_000).open(file).read(0, len(CONTENT)) == CONTENT
    assert web.gets.count(f"bytes=0-{len(CONTENT) - 1}") == 1
    assert cache.traffic["cache_blocks", "miss"] == -(-len(CONTENT) // 50_000)


def test_a_cache_too_small_for_a_whole_file_says_so(web: WebServer, tmp_path: Path) -> None:
    web.has_ranges = False
    (file,) = list_files([web.url], "data.text")
    cache = NodeCache(tmp_path, 200_000, block_bytes=50_000)
    with pytest.raises(WanmaError, match=r"whole files only, .* no room") as error:
        cache.open(file).read(0, 10)
    assert "data.cache_bytes" in error.value.hint


def test_a_whole_file_is_asked_for_again_after_a_failure(web: WebServer, tmp_path: Path) -> None:
    web.has_ranges = False
    (file,) = list_files([web.url], "data.text")
    source = NodeCache(tmp_path, 1 << 20, block_bytes=50_000, policy=QUICK).open(file)
    web.statuses = [500]
    assert source.read(100, 200) == CONTENT[100:200]
