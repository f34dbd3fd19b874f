"""A stand-in for WebHDFS: one folder, a NameNode and a DataNode at two addresses, with its redirects.

`test_webhdfs.py` reads and writes it with Hadoop's own client, so that it says what HDFS says.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.server_thread import ServerThread

PREFIX = "/webhdfs/v1"


@dataclass(frozen=True)
class Operation:
    """One request, the `number`-th of all, counted from 1."""

    number: int
    name: str
    path: str
    is_datanode: bool


class WebHdfs:
    """Two servers of one folder.

    Attributes:
        fault: called with each operation; returns (status, name of Hadoop's exception), or None.
        operations: all requests.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fault: Callable[[Operation], tuple[int, str] | None] = lambda _: None
        self.operations: list[Operation] = []
        self.lock = threading.Lock()
        self._servers = [ServerThread(_handler(self, bool(role))) for role in (0, 1)]
        self.namenode, self.datanode = (f"127.0.0.1:{server.port}" for server in self._servers)

    def url(self, path: str) -> str:
        return f"webhdfs://{self.namenode}/{path}"

    def close(self) -> None:
        for server in self._servers:
            server.close()


@contextmanager
def webhdfs(root: Path) -> Iterator[WebHdfs]:
    servers = WebHdfs(root)
    try:
        yield servers
    finally:
        servers.close()


def _status(path: Path, name: str = "") -> dict[str, Any]:
    info = path.stat()
    return {
        "pathSuffix": name,
        "type": "DIRECTORY" if path.is_dir() else "FILE",
        "length": 0 if path.is_dir() else info.st_size,
        "owner": "root",
        "group": "root",
        "permission": "755",
        "accessTime": int(info.st_atime * 1e3),
        "modificationTime": int(info.st_mtime * 1e3),
        "blockSize": 1 << 27,
        "replication": 1,
        "childrenNum": 0,
        "fileId": info.st_ino,
        "storagePolicy": 0,
    }


def _handler(hdfs: WebHdfs, is_datanode: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {name.lower(): values[0] for name, values in parse_qs(url.query).items()}
            name = unquote(url.path).removeprefix(PREFIX)
            self._body = self._read_body()
            operation = query.get("op", "").upper()
            with hdfs.lock:
                number = len(hdfs.operations) + 1
                hdfs.operations.append(Operation(number, operation, name, is_datanode))
            if (fault := hdfs.fault(hdfs.operations[number - 1])) is not None:
                self._refuse(*fault, f"{operation} {name}")
            elif operation in ("OPEN", "CREATE", "APPEND") and not is_datanode:
                self._redirect(operation, hdfs.root / name.lstrip("/"), query)
            else:
                self._run(operation, hdfs.root / name.lstrip("/"), query)

        do_GET = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

        def _redirect(self, operation: str, path: Path, query: dict[str, str]) -> None:
            if operation == "OPEN" and not path.is_file():
                self._refuse(404, "FileNotFoundException", f"File does not exist: {path.name}")
            elif operation == "OPEN" and 0 < path.stat().st_size <= int(query.get("offset", 0)):
                text = f"Offset={query['offset']} out of the range [0, {path.stat().st_size}); OPEN"
                self._refuse(403, "IOException", text)
            else:
                self._answer(307, Location=f"http://{hdfs.datanode}{self.path}&namenoderpcaddress=x")

        def _run(self, operation: str, path: Path, query: dict[str, str]) -> None:
            if operation in ("GETFILESTATUS", "LISTSTATUS", "OPEN") and not path.exists():
                self._refuse(404, "FileNotFoundException", f"File does not exist: {path.name}")
            elif operation == "GETFILESTATUS":
                self._answer(200, {"FileStatus": _status(path)})
            elif operation == "LISTSTATUS":
                entries = (
                    [_status(child, child.name) for child in sorted(path.iterdir())]
                    if path.is_dir()
                    else [_status(path)]
                )
                self._answer(200, {"FileStatuses": {"FileStatus": entries}})
            elif operation == "OPEN":
                start, length = int(query.get("offset", 0)), int(query.get("length", 1 << 62))
                self._answer(200, path.read_bytes()[start : start + length])
            elif operation == "CREATE":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._body)
                self._answer(201, Location=f"webhdfs://{hdfs.namenode}/{path.name}")
            elif operation == "MKDIRS":
                path.mkdir(parents=True, exist_ok=True)
                self._answer(200, {"boolean": True})
            elif operation == "DELETE":
                existed = path.exists()
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
                self._answer(200, {"boolean": existed})
            elif operation == "RENAME":
                path.rename(hdfs.root / query["destination"].lstrip("/"))
                self._answer(200, {"boolean": True})
            elif operation in ("SETPERMISSION", "SETOWNER", "SETTIMES"):
                self._answer(200)
            elif operation == "GETDELEGATIONTOKEN":
                self._answer(200, {"Token": None})
            else:
                self._refuse(400, "UnsupportedOperationException", operation)

        def _refuse(self, status: int, exception: str, message: str) -> None:
            package = "java.io" if exception.startswith(("File", "IO")) else "org.apache.hadoop.ipc"
            remote = {"exception": exception, "javaClassName": f"{package}.{exception}", "message": message}
            self._answer(status, {"RemoteException": remote})

        def _answer(self, status: int, body: dict[str, Any] | bytes = b"", **headers: str) -> None:
            kind = "application/json" if isinstance(body, dict) else "application/octet-stream"
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            self.send_response(status)
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_arguments: Any) -> None:
            """Log nothing."""

    return Handler
