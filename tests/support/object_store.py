"""A small S3 server in this process, which can be slow, gone, or know no conditions; it counts requests."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from support.server_thread import ServerThread

BUCKET = "bucket"


class ObjectStore:
    """One bucket.

    Attributes:
        objects: content by key.
        requests: kinds of all requests, such as "PUT 7".
        is_conditional: False: `If-None-Match` is ignored, as by old servers.
        delay_seconds: time until a request is answered.
        is_gone: requests are answered with an error that clients retry.

    Args:
        address: address of this machine at which clients reach it.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.is_conditional, self.is_gone, self.delay_seconds = True, False, 0.0
        self.lock = threading.Lock()
        listened = address if address == "127.0.0.1" else ""  # the address may be added later
        self._server = ServerThread(_handler(self), listened)
        self._url = f"http://{address}:{self._server.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which s3fs finds this server."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "FSSPEC_S3_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, path: str) -> str:
        return f"s3://{BUCKET}/{path}"

    def names(self, folder: str) -> list[str]:
        """Names below a folder, sorted."""
        with self.lock:
            return sorted(key.removeprefix(f"{folder}/") for key in self.objects if key.startswith(folder))

    def close(self) -> None:
        self._server.close()


@contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1") -> Iterator[ObjectStore]:
    """A server that this process and its children use for s3://; arguments as of `ObjectStore`."""
    import s3fs

    store = ObjectStore(address)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    from fsspec.config import conf, set_conf_env

    monkeypatch.setitem(conf, "s3", {})
    set_conf_env(conf)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield store
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        store.close()


def _handler(store: ObjectStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            key, query = self._begin()
            if key is None:
                return
            if not key:
                self._list(query)
            elif (content := store.objects.get(key)) is None:
                self._error(404, "NoSuchKey")
            else:
                self._answer(200, content, ETag=_etag(content))

        def do_HEAD(self) -> None:
            key, _ = self._begin()
            if key is None:
                return
            content = store.objects.get(key)
            if content is None:
                self._answer(404, b"")
            else:
                self._answer(200, content, ETag=_etag(content))

        def do_PUT(self) -> None:
            content = self._body()
            key, _ = self._begin()
            if key is None:
                return
            with store.lock:
                exists = self.headers.get("If-None-Match") == "*" and key in store.objects
                if not (exists and store.is_conditional):
                    store.objects[key] = content
            if exists and store.is_conditional:
                self._error(412, "PreconditionFailed")
            else:
                self._answer(200, b"", ETag=_etag(content))

        def do_DELETE(self) -> None:
            key, _ = self._begin()
            if key is None:
                return
            with store.lock:
                store.objects.pop(key, None)
            self._answer(204, b"")

        def _begin(self) -> tuple[str | None, dict[str, list[str]]]:
            """Key and query of the request; no key: it has been answered."""
            address = urlsplit(self.path)
            key = unquote(address.path).lstrip("/").partition("/")[2]
            store.requests.append(f"{self.command} {key.rpartition('/')[2]}")
            time.sleep(store.delay_seconds)
            if store.is_gone:
                self._error(503, "SlowDown")
                return None, {}
            return key, parse_qs(address.query, keep_blank_values=True)

        def _body(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
                return content
            whole = b""
            while content:
                size, _, rest = content.partition(b"\r\n")
                count = int(size.partition(b";")[0], 16)
                if not count:
                    break
                whole, content = whole + rest[:count], rest[count + 2 :]
            return whole

        def _list(self, query: dict[str, list[str]]) -> None:
            prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
            files, folders = [], set()
            with store.lock:
                for key, content in sorted(store.objects.items()):
                    rest = key.removeprefix(prefix)
                    if not key.startswith(prefix):
                        continue
                    if delimiter and delimiter in rest:
                        folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                    else:
                        files.append((key, content))
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            contents = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><ETag>{_etag(content)}</ETag>"
                f"<LastModified>{now}</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
                for key, content in files
            )
            prefixes = "".join(
                f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders
            )
            text = (
                '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>'
                f"<KeyCount>{len(files) + len(folders)}</KeyCount>{contents}{prefixes}</ListBucketResult>"
            )
            self._answer(200, text.encode())

        def _error(self, status: int, code: str) -> None:
            self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

        def _answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            for name, value in headers.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # the client has given up
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, *_arguments: Any) -> None:
            """Log nothing."""

    return Handler


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
