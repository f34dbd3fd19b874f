"""HTTP endpoint of a node's metrics for Prometheus, and the file by which Prometheus finds it."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from wanma.job.errors import JobError, missing_extra_error
from wanma.job.run.process_state import is_process_alive
from wanma.job.run.run_directory import write_json
from wanma.observe.series.catalogue import CATALOGUE
from wanma.observe.series.run_series import Sample

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TARGETS_FOLDER = ".endpoints"
"""Folder, in that of the run directories, with a file for each endpoint in the format of file_sd_configs."""


class MetricsEndpoint:
    """Endpoint at `/metrics`; a context manager, served by a thread.

    Args:
        port: port; 0: any that is free, also if the port is in use.
        token: required of readers as `Authorization: Bearer TOKEN`; empty: none is.
        samples: returns the present samples; called in another thread.
        labels: labels of every series.

    Raises:
        JobError: the address is not loopback, and there is no token; or it is none of this machine's.
        WanmaError: the package `prometheus-client` is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        samples: Callable[[], Iterable[Sample]],
        labels: Mapping[str, str],
        warn: Callable[[str], object] = lambda _: None,
    ) -> None:
        if host not in LOOPBACK and not token:
            raise JobError(
                f"observe.metrics_host = {host!r} lets other machines read the metrics, without a token",
                "set observe.metrics_token = 'env:NAME' or 'file:PATH', or leave metrics_host out",
            )
        try:
            import prometheus_client
        except ImportError as error:
            raise missing_extra_error("prometheus-client", "prometheus", "observe.metrics_port") from error
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(samples, labels))
        handler = _handler(registry, prometheus_client, token)
        try:
            self._server = _Server(host, port, handler)
        except OSError as error:
            try:
                self._server = _Server(host, 0, handler)
            except OSError:
                raise JobError(
                    f"observe.metrics_host = {host!r}: {error.strerror or error}",
                    "give an address of this node, or 0.0.0.0 for all, which fits every node",
                ) from error
            warn(f"observe.metrics_port = {port}: {error.strerror}; metrics are on port {self.port}")
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="wanma-metrics")
        self._host = host
        self._target_file: Path | None = None
        self._target = ""
        """Content of the target file."""

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def announce(self, runs: Path, name: str, labels: Mapping[str, str]) -> None:
        """Write the file by which Prometheus finds the endpoint, in place of an earlier one."""
        self._remove_target()
        remove_stale_targets(runs)
        host = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        host = f"[{host}]" if ":" in host else host
        folder = runs / TARGETS_FOLDER
        path, labels = folder / f"{name}.json", {**labels, "__meta_process": str(os.getpid())}
        with contextlib.suppress(OSError):  # the endpoint works without the file
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, [{"targets": [f"{host}:{self.port}"], "labels": labels}])
            self._target_file, self._target = path, path.read_text()

    def _remove_target(self) -> None:
        """Remove the file, unless another node has replaced it, which has this one's former number."""
        with contextlib.suppress(OSError):
            if self._target_file is not None and self._target_file.read_text() == self._target:
                self._target_file.unlink()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_target()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Server at an address of IPv4 or IPv6, which writes nothing: the console belongs to the run."""

    # That of HTTPServer asks for the name of the address, which a broken resolver answers late.
    server_bind = socketserver.TCPServer.server_bind

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, *_: object) -> None:
        """Ignore a reader that has gone."""


class _Collector:
    """Collector that asks for the present samples at each reading."""

    def __init__(self, samples: Callable[[], Iterable[Sample]], labels: Mapping[str, str]) -> None:
        self._samples, self._labels = samples, labels

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for sample in self._samples():
            metric = CATALOGUE[sample.metric]
            labels = {**self._labels, **dict(sample.labels)}
            if metric.name not in families:
                make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric.name] = make(metric.family_name, metric.meaning, labels=tuple(labels))
            families[metric.name].add_metric(tuple(labels.values()), sample.value)
        return families.values()


def _handler(registry: Any, client: Any, token: str) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests for a registry."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "")
            content_type = "text/plain"
            if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                status, body = 401, b"this endpoint needs a token\n"
            elif self.path.partition("?")[0] not in ("/metrics", "/"):
                status, body = 404, b"metrics are at /metrics\n"
            else:
                encoder, content_type = client.exposition.choose_encoder(self.headers.get("Accept", ""))
                status, body = 200, encoder(registry)
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: the console belongs to the run."""

    return Handler


def remove_stale_targets(runs: Path) -> None:
    """Remove the files of endpoints on this host whose process is gone."""
    for path in (runs / TARGETS_FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, LookupError):  # it is written just now, or not ours
            labels = json.loads(path.read_text())[0]["labels"]
            if labels["host"] == socket.gethostname() and not is_process_alive(labels["__meta_process"]):
                path.unlink()
