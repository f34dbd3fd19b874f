"""S3 server over a link with latency and a rate, for objects that are files of a folder.

    python s3_server.py FOLDER LATENCY_SECONDS BYTES_PER_SECOND

Objects are the files of FOLDER/BUCKET. It knows what readers need: ListObjectsV2, HeadObject, GetObject with
ranges; it checks no signature. Each answer begins LATENCY_SECONDS after its request, and the contents of all
answers share the rate, as on one link. The server prints its port.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE_BYTES = 32 << 10
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")


class Link:
    """Link whose bytes leave one after the other, at a constant rate.

    Args:
        latency_seconds: time from a request to the first byte of its answer.
        bytes_per_second: rate of all contents together.
    """

    def __init__(self, latency_seconds: float, bytes_per_second: float) -> None:
        self.latency_seconds, self._rate = latency_seconds, bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, size: int) -> None:
        """Wait until the link has carried `size` more bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
            due = self._free_at
        if (seconds := due - time.monotonic()) > 0:
            time.sleep(seconds)


def main() -> None:
    folder, latency, rate = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(folder, Link(latency, rate)))
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


def handler(folder: Path, link: Link) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests for the files of a folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, with_content: bool) -> None:
            time.sleep(link.latency_seconds)
            address = urlsplit(self.path)
            bucket, _, key = unquote(address.path).lstrip("/").partition("/")
            if not key:
                content = listing(folder, bucket, parse_qs(address.query, keep_blank_values=True)).encode()
                self._send(200, content, {"Content-Type": "application/xml"}, with_content)
                return
            root = (folder / bucket).resolve()
            path = (root / key).resolve()
            if not path.is_file() or root.parent != folder.resolve() or root not in path.parents:
                body = b"<Error><Code>NoSuchKey</Code><Message>There is no such object.</Message></Error>"
                self._send(404, body, {"Content-Type": "application/xml"}, with_content)
                return
            content = path.read_bytes()
            headers = {
                "ETag": f'"{tag(path)}"',
                "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
                "Content-Type": "binary/octet-stream",
                "Accept-Ranges": "bytes",
            }
            part = _part(self.headers.get("Range", ""), len(content))
            if part is None:
                self._send(200, content, headers, with_content)
                return
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(content)}"
            self._send(206, content[part.start : part.stop], headers, with_content)

        def _send(self, status: int, content: bytes, headers: dict[str, str], with_content: bool) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            try:
                self.end_headers()
                if with_content:
                    for start in range(0, len(content), PIECE_BYTES):
                        piece = content[start : start + PIECE_BYTES]
                        link.wait_for(len(piece))
                        self.wfile.write(piece)
            except ConnectionError:  # the reader has what it wants
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler


def tag(path: Path) -> str:
    """Return the ETag of a file: the hash of its identity, in the form of a multipart object's."""
    status = path.stat()
    return hashlib.md5(f"{path} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest() + "-1"


def listing(folder: Path, bucket: str, query: dict[str, list[str]]) -> str:
    """Return the answer of ListObjectsV2, in one page."""
    prefix = query.get("prefix", [""])[0]
    delimiter = query.get("delimiter", [""])[0]
    root = folder / bucket
    entries, folders = [], set[str]()
    for path in sorted(root.rglob("*")):
        key = path.relative_to(root).as_posix()
        if not path.is_file() or not key.startswith(prefix):
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            folders.add(prefix + head + delimiter)
            continue
        status = path.stat()
        modified = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        entries.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
            f"<ETag>&quot;{tag(path)}&quot;</ETag><Size>{status.st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    shared = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(entries) + len(shared)}</KeyCount><MaxKeys>100000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{''.join(entries)}{''.join(shared)}</ListBucketResult>"
    )


def _part(text: str, size: int) -> range | None:
    """Return the positions that the header `Range` names; None: it names none."""
    match = _RANGE.match(text)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        return range(max(size - int(match[2]), 0), size)
    return range(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)


if __name__ == "__main__":
    main()
