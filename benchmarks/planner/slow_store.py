"""A web server with ranges that answers each request after a delay: a store with latency, as its own process.

with slow_store(folder, delay_seconds=0.03) as address: ...      # f"{address}/name"
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@contextmanager
def slow_store(folder: Path, delay_seconds: float) -> Iterator[str]:
    """Serve the files of a folder in another process; yields its address."""
    command = [sys.executable, "-m", "benchmarks.planner.slow_store", str(folder), str(delay_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def handler(folder: Path, delay_seconds: float) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for files of a folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_content: bool) -> None:
            time.sleep(delay_seconds)
            path = folder / unquote(urlsplit(self.path).path).lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status = path.stat()
            start, end = byte_range(self.headers.get("Range"), status.st_size)
            is_part = (start, end) != (0, status.st_size)
            self.send_response(206 if is_part else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{status.st_size}")
            self.end_headers()
            if with_content:
                with path.open("rb") as file:
                    file.seek(start)
                    self.wfile.write(file.read(end - start))

    return Handler


def byte_range(header: str | None, size: int) -> tuple[int, int]:
    """Return the first byte and the end of the range that a header asks for; the whole file without one."""
    if not header or not header.startswith("bytes="):
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size


def main(folder: str, delay_seconds: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(Path(folder), float(delay_seconds)))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
