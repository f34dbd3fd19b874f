"""Files of a run on its volume: sent before the start, and small records fetched, through a pod.

`exec` starts programs in a pod: one of the run's own, or a short-lived one on the same PersistentVolumeClaim.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from wanma.engines.engine import QUERY_SECONDS
from wanma.engines.hosts import host_files
from wanma.engines.hosts.connections import (
    BOOTSTRAP,
    Connections,
    Host,
    HostError,
    Reply,
    make_message,
    read_reply,
)
from wanma.engines.hosts.records import RecordSource, fetch_records, send_history
from wanma.engines.kubernetes.client import KubernetesClient, KubernetesError
from wanma.engines.kubernetes.manifests import (
    CONTAINER,
    RUN_LABEL,
    Manifest,
    Placement,
    render_files_pod,
)
from wanma.engines.kubernetes.waiting import find_cause
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.kubernetes import KubernetesSection

VOLUME = Host("the volume", "volume")
POD_SECONDS = 180.0
"""Deadline, in seconds, of the start of a pod for files."""
SEND_SECONDS = 900.0
BLOCK_BYTES = 1 << 16

_HINTS = {
    "full": "free space on the volume",
    "unwritable": "make the folder writable for the user of the image, or set cluster.kubernetes.run_as_user",
    "origin": "choose another observe.name, or remove that directory",
}
"""Way out of each problem of the programs."""


class Volume(Connections):
    """Volume of a run, reached through a pod; a context manager, whose end removes a pod made for it.

    Args:
        client: client of the API server.
        settings: settings of the engine.
        placement: names and folders of the run.
    """

    def __init__(self, client: KubernetesClient, settings: KubernetesSection, placement: Placement) -> None:
        self._client, self._settings, self._placement = client, settings, placement
        self._own_pod = ""
        self._pod = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_pod:
            self._client.delete("Pod", self._own_pod, grace_seconds=0)

    def send(self, run: RunDirectory, code: Path | None) -> None:
        """Write the files of a submission, the archive of its code, and the records of earlier starts.

        Raises:
            WanmaError: the volume cannot be written to, or has another run of this name.
        """
        texts = {path.name: path.read_text(encoding="utf-8") for path in run.engine_files.glob("*.toml")}
        request = {
            "operation": "prepare",
            "folder": self._placement.folder,
            "files": texts,
            "origin": [str(run.path), socket.gethostname()],
            "token": secrets.token_hex(8),
            "makes_token": True,
            "code": "",
        }
        self.ask(VOLUME, host_files, request)
        if code is not None:
            files = [[f"code/{code.name}", code.stat().st_size]]
            request = {"operation": "restore", "files": files, "folder": self._placement.folder}
            self.ask(VOLUME, host_files, request, code, SEND_SECONDS)
        send_history(self, [self._source()], run)

    def fetch(self, run: RunDirectory) -> None:
        """Bring what is new of the run's small records into the run directory here. Raises `WanmaError`."""
        fetch_records(self, [self._source()], run)

    def remove(self, run: RunDirectory) -> None:
        """Remove the run directory on the volume. Raises `WanmaError`."""
        origin = [str(run.path), socket.gethostname()]
        request = {"operation": "remove", "folder": self._placement.folder, "origin": origin}
        self.ask(VOLUME, host_files, request, seconds=SEND_SECONDS)

    def ask(
        self,
        host: Host,
        program: ModuleType,
        request: Mapping[str, Any],
        data: bytes | Path = b"",
        seconds: float = QUERY_SECONDS,
    ) -> Reply:
        """Run a program in the pod and return its answer. Raises `HostError`."""
        try:
            output, errors = self._execute(_blocks(make_message(program, request), data), seconds)
        except WanmaError as error:
            failure = HostError(host, error.message, error.hint)
            failure.exit_code = error.exit_code
            raise failure from error
        reply = read_reply(output)
        if reply is None:
            text = (errors or output).decode(errors="replace").strip().splitlines()
            cause = text[-1] if text else "it gave no answer"
            raise HostError(
                host,
                f"{self._settings.python} in the pod {self._pod} failed: {cause}",
                "set cluster.kubernetes.python to the interpreter of the image",
            )
        if isinstance(reply.value, dict) and reply.value.get("problem"):
            hint = _HINTS.get(reply.value["problem"], "see the message of the pod")
            raise HostError(host, f"the volume '{self._settings.volume}': {reply.value['text']}", hint)
        return reply

    def _source(self) -> RecordSource:
        return RecordSource(VOLUME, self._placement.folder)

    def _execute(self, blocks: Iterator[bytes], seconds: float) -> tuple[bytes, bytes]:
        """Run the bootstrap in the pod with these bytes as its standard input; return output and errors."""
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream
        from websocket import WebSocketException

        pod = self._ready_pod()
        deadline = time.monotonic() + seconds
        output, errors = bytearray(), bytearray()
        try:
            call = stream(
                self._client.core.connect_get_namespaced_pod_exec,
                pod,
                self._client.namespace,
                command=[self._settings.python, "-c", BOOTSTRAP],
                container=CONTAINER,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                binary=True,
                _preload_content=False,
            )
            try:
                for block in blocks:
                    call.write_stdin(block)
                while call.is_open() and time.monotonic() < deadline:
                    call.update(timeout=1)
                    output += call.read_channel(1)
                    errors += call.read_channel(2)
                if call.is_open():
                    raise KubernetesError(f"the pod {pod} gave no answer within {seconds:.0f} s", "try again")
                output += call.read_channel(1)
                errors += call.read_channel(2)
            finally:
                call.close()
        except (ApiException, WebSocketException, OSError) as error:
            self._pod = ""  # the next attempt looks for one that lives
            raise KubernetesError(
                f"no program can be started in the pod {pod}: {error}", "try again"
            ) from error
        return bytes(output), bytes(errors)

    def _ready_pod(self) -> str:
        """Return a pod that has the volume: one of the run's own, or one made for it."""
        if not self._pod:
            pods = self._client.list("Pod", f"{RUN_LABEL}={self._placement.name}")
            self._pod = next((pod["metadata"]["name"] for pod in pods if is_ready(pod)), "")
        if not self._pod:
            self._pod = self._own_pod = self._start_pod()
        return self._pod

    def _start_pod(self) -> str:
        name = f"{self._placement.name}-files-{secrets.token_hex(3)}"
        self._own_pod = name  # also removed if it does not start
        self._client.create(render_files_pod(name, self._settings, self._placement), secrets.token_hex(8))
        deadline = time.monotonic() + POD_SECONDS
        while True:
            pod = self._client.get("Pod", name)
            if pod is None:
                raise KubernetesError(f"the pod {name} was deleted by another hand", "try again")
            if is_ready(pod):
                return name
            cause = find_cause([pod], self._client.list("Event", fields=f"involvedObject.name={name}"))
            is_over = time.monotonic() > deadline or pod["status"].get("phase") == "Failed"
            if is_over or (cause is not None and cause.is_final):
                text = f"{cause.meaning} ({cause.message})" if cause is not None else "it does not start"
                raise KubernetesError(
                    f"the pod {name}, for the files of the run, waits: {text}",
                    cause.way_out if cause is not None else "see `kubectl describe pod`",
                    exit_code=EXIT_USAGE if cause is not None and cause.is_final else EXIT_FAILED,
                )
            time.sleep(0.5)


def is_ready(pod: Manifest) -> bool:
    """Return True if the container of a pod runs and is not to end."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    runs = any("running" in entry.get("state", {}) for entry in statuses if entry["name"] == CONTAINER)
    return runs and "deletionTimestamp" not in pod["metadata"]


def _blocks(head: bytes, data: bytes | Path) -> Iterator[bytes]:
    yield head
    if isinstance(data, Path):
        with data.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    else:
        yield from (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
