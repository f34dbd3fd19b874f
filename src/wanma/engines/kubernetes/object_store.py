"""Files of a run in an object store, in place of a volume: each pod has a run directory of its own.

    URL/NAME/code/DIGEST.tar              code snapshot, unpacked by each pod's init container
    URL/NAME/submission.tar.gz            job file
    URL/NAME/records/HOST.NUMBER.tar.gz   newest small records of a pod
    URL/NAME/finished                     the run has ended well
    URL/NAME/claims, checkpoints          unless the job has `cluster.claims`, `checkpoint.upload`

    python -m wanma.engines.kubernetes.object_store URL/NAME RUN_DIRECTORY [ARCHIVE SNAPSHOTS]

prepares the run directory of a pod, and unpacks its code.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.engines.code import unpack
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
from wanma.job.errors import EXIT_FAILED, JobError, WanmaError
from wanma.job.retry import RetryPolicy
from wanma.job.run.run_directory import RunDirectory

SUBMISSION, FINISHED, KEY = "submission.tar.gz", "finished", "cluster.kubernetes.store"
_RECORDS = re.compile(r"([\w-]+)\.(\d{9})\.tar\.gz")


class ObjectStore(Connections):
    """Files of a run in an object store, seen from the machine that submits it.

    Programs run here, on copies of what the pods have sent.

    Args:
        url: URL of the run.
        first_host: host name of the run's first pod.
        run: run directory here.
    """

    def __init__(self, url: str, first_host: str, run: RunDirectory) -> None:
        self._storage = RemoteStorage(url, key=KEY)
        self._first, self._run = first_host, run
        self._copies = run.engine_files / "store"

    def send(self, run: RunDirectory, code: Path | None) -> None:
        """Write the files of a submission, the archive of its code, and the records of earlier starts."""
        if code is not None and self._storage.size(f"code/{code.name}") != code.stat().st_size:
            self._storage.upload_file(code, f"code/{code.name}")
        self._storage.remove(FINISHED)
        self._storage.remove_folder("records")
        shutil.rmtree(self._copies, ignore_errors=True)
        source = RecordSource(Host(self._first, ""), str(self._copies / self._first))
        for name in ("engine", "checkpoints"):
            (Path(source.folder) / name).mkdir(parents=True)
        send_history(self, [source], run)
        PodRecords(self._storage, Path(source.folder), self._first).send()
        names = [path.name for path in run.engine_files.glob("*.toml")]
        _send_archive(self._storage, SUBMISSION, run.engine_files, names)

    def fetch(self, run: RunDirectory) -> None:
        """Bring what is new of the run's small records into the run directory here. Raises `WanmaError`."""
        newest = _newest_records(self._storage)
        for host, name in newest.items():
            folder, marker = self._copies / host, self._copies / f"{host}.newest"
            if not marker.exists() or marker.read_text() != name:
                shutil.rmtree(folder, ignore_errors=True)
                _fetch_archive(self._storage, f"records/{name}", folder)
                (folder / "engine").mkdir(exist_ok=True)
                marker.write_text(name)
        hosts = sorted(newest, key=lambda host: (host != self._first, host))
        if hosts:
            sources = [RecordSource(Host(host, ""), str(self._copies / host)) for host in hosts]
            fetch_records(self, sources, run)

    def remove(self, _run: RunDirectory) -> None:
        """Remove all files of the run from the object store. Raises `WanmaError`."""
        self._storage.remove_folder("")

    def ask(
        self,
        host: Host,
        program: ModuleType,
        request: Mapping[str, Any],
        data: bytes | Path = b"",
        seconds: float = QUERY_SECONDS,
    ) -> Reply:
        """Run a program here, on the copy of a host's files. Raises `HostError`."""
        content = data.read_bytes() if isinstance(data, Path) else data
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", BOOTSTRAP],
                input=make_message(program, request) + content,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(host, f"no answer within {seconds:.0f} s: {self._copies}", "try again") from error
        reply = read_reply(done.stdout)
        if reply is None or (isinstance(reply.value, dict) and reply.value.get("problem")):
            text = reply.value["text"] if reply is not None else done.stderr.decode(errors="replace")
            raise HostError(host, f"the copies of records in {self._copies}: {text}", "free space there")
        return reply


class PodRecords:
    """Small records of one pod, sent to the object store as one archive, whole each time.

    Args:
        storage: object store of the run.
        folder: run directory.
        host: host name of the pod.
    """

    def __init__(self, storage: RemoteStorage, folder: Path, host: str) -> None:
        self._storage, self._folder, self._host = storage, folder, host
        name = _newest_records(storage).get(host, "")
        self._number = int(name.split(".")[1]) if name else 0
        self._sent: dict[str, tuple[int, int]] = {}

    def send(self) -> None:
        """Send the records if they have changed. Raises `WanmaError`.

        The archive before stays, as somebody may be reading it.
        """
        found: dict[str, tuple[int, int]] = {}
        try:
            for name in host_files.record_names(str(self._folder), False):
                status = (self._folder / name).stat()
                found[name] = status.st_size, status.st_mtime_ns
            if found == self._sent or not found:
                return
            _send_archive(self._storage, self._name(self._number + 1), self._folder, found)
        except (OSError, tarfile.TarError) as error:  # a file was cut or removed meanwhile: the next time
            raise WanmaError(f"cannot read the records of the run: {error}") from error
        self._number, self._sent = self._number + 1, found
        if self._number > 2:
            self._storage.remove(self._name(self._number - 2))

    def _name(self, number: int) -> str:
        return f"records/{self._host}.{number:09d}.tar.gz"


def check_store(url: str) -> None:
    """Refuse an object store that cannot be read from here. Raises `JobError`."""
    try:
        RemoteStorage(url, RetryPolicy(max_attempts=2), key=KEY).size(SUBMISSION)
    except WanmaError as error:
        raise JobError(f"{KEY}: {error.message}", error.hint) from error


def prepare_pod(url: str, folder: Path, archive: Path | None) -> None:
    """Fetch the files of a submission, the pod's own records of an earlier life, and the code.

    Raises:
        WanmaError: the object store fails.
    """
    storage = RemoteStorage(url, key=KEY)
    _fetch_archive(storage, SUBMISSION, folder / "engine")
    if name := _newest_records(storage).get(socket.gethostname()):
        _fetch_archive(storage, f"records/{name}", folder)
    if archive is not None:
        archive.parent.mkdir(parents=True, exist_ok=True)
        size = storage.size(f"code/{archive.name}")
        if size is None:
            raise WanmaError(f"{url}/code/{archive.name} is gone", "submit the run again")
        storage.download_file(f"code/{archive.name}", archive, size)


def _newest_records(storage: RemoteStorage) -> dict[str, str]:
    """Return the name of the newest archive of records by host."""
    matches = [match for name in sorted(storage.list_files("records")) if (match := _RECORDS.fullmatch(name))]
    return {match[1]: match[0] for match in matches}


def _send_archive(storage: RemoteStorage, path: str, folder: Path, names: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
            for name in sorted(names):
                archive.add(folder / name, name, recursive=False)
        storage.upload_file(packed, path)


def _fetch_archive(storage: RemoteStorage, path: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with storage.open(path) as file, tarfile.open(fileobj=file, mode="r|gz") as archive:  # type: ignore[call-overload]
        archive.extractall(folder, filter="data")


def main(arguments: list[str]) -> int:
    """Run as a program; see the top of this file."""
    url, folder, *code = arguments
    try:
        prepare_pod(url, Path(folder), Path(code[0]) if code else None)
    except WanmaError as error:
        print(f"error: {error.message}\n  {error.hint}", file=sys.stderr)
        return EXIT_FAILED
    return unpack.main(code) if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
