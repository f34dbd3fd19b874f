"""Records of a run on its hosts: brought into the run directory here, and taken along to another first host.

Only bytes that are new are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.engines.hosts import host_files
from wanma.engines.hosts.connections import Connections, Host, HostError, Reply, join_errors
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json

FETCH_SECONDS = 120.0
"""Deadline of one transfer, in seconds."""


@dataclass(frozen=True)
class RecordSource:
    """Run directory on a host."""

    host: Host
    folder: str


@dataclass(frozen=True)
class RecordOwner:
    """Host whose records are the run's: the first one, or that of a coordinator which has taken over."""

    host: str
    """The host, as the user names it."""
    steps_changed: float = 0.0
    """Time at which its steps were written last, as far as is known, in unix seconds."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the beginning of files here that are records of earlier owners, by name."""


def record_owner(run: RunDirectory, sources: Sequence[RecordSource]) -> RecordOwner:
    """Return the owner of the records that are here; unless another one was seen, the first host."""
    try:
        return RecordOwner(**json.loads(_owner_file(run).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return RecordOwner(sources[0].host.text)


def fetch_records(connections: Connections, sources: Sequence[RecordSource], run: RunDirectory) -> None:
    """Bring the small records of a run home: those of their owner, and the logs of the other hosts.

    A coordinator that has taken over writes further steps on its own host, which becomes the owner: its steps
    follow those that are here. Of a log that several hosts have, as after a change of ranks, the newest
    counts.

    Raises:
        WanmaError: no host answers, or the run directory here cannot be written to.
    """
    owner = before = record_owner(run, sources)
    pending = list(sources)
    failures: list[HostError] = []
    try:
        while pending:
            replies, failed = connections.ask_all(
                {source.host: partial(_ask, connections, source, owner, run) for source in pending}
            )
            failures += failed
            pending = [source for source in pending if source.host in replies]
            newest = max(replies, key=lambda host: float(replies[host].value["steps_changed"]), default=None)
            changed = replies[newest].value["steps_changed"] if newest is not None else 0.0
            if newest is not None and newest.text != owner.host and changed > _last_change(owner, replies):
                owner = _succeeding(newest, changed, run)
                continue
            owner = _store(replies, owner, run.path)
            pending = [source for source in pending if not replies[source.host].value["is_complete"]]
        if owner != before:
            write_json(_owner_file(run), asdict(owner))
    except OSError as error:
        raise WanmaError(
            f"cannot write the run's records to {run.path}: {error.strerror or error}",
            "free space on its disk, or correct its permissions",
        ) from error
    if len(failures) == len(sources):
        raise WanmaError(f"the run's records cannot be fetched: {failures[0].message}", failures[0].hint)


def _owner_file(run: RunDirectory) -> Path:
    return run.engine_files / "records.json"


def _last_change(owner: RecordOwner, replies: Mapping[Host, Reply]) -> float:
    """Return the time at which the owner's steps were written last."""
    answers = [reply.value["steps_changed"] for host, reply in replies.items() if host.text == owner.host]
    return max(owner.steps_changed, *answers) if answers else owner.steps_changed


def _succeeding(host: Host, steps_changed: float, run: RunDirectory) -> RecordOwner:
    """Return the next owner: what is here of growing records stays, and its own follow."""
    paths = (path for path in (run.metrics, run.events) if path.exists())
    return RecordOwner(host.text, steps_changed, {path.name: path.stat().st_size for path in paths})


def send_history(connections: Connections, sources: Sequence[RecordSource], run: RunDirectory) -> None:
    """Send the records of earlier starts to the first host of the next one, unless it has them.

    That host continues them: steps, events and the changes of the job since the last start.

    Raises:
        WanmaError: a host does not answer or cannot be written to; or the newest checkpoint is here and on no
            host, and the run would begin again.
    """
    _owner_file(run).unlink(missing_ok=True)  # the first host is the next owner, with all of it
    known = {name: value for name, value in _known(run.path).items() if _is_history(name, run)}
    if not known:
        return
    first = sources[0]
    requests = {
        source.host: {
            "operation": "compare",
            "folder": source.folder,
            "known": known if source is first else {},
        }
        for source in sources
    }
    answers, failures = connections.ask_each(host_files, requests)
    if failures:
        raise join_errors(failures, "hosts of the run do not answer:")
    listed = [name for answer in answers.values() for name in answer.value["checkpoints"]]
    found = [name for name in listed if re.fullmatch(r"step-\d+", name)]  # others are unfinished
    newest = max((path.name for _, path in list_committed(run.checkpoints)), default="")
    if newest > max(found, default=""):
        raise WanmaError(
            f"the newest checkpoint of the run, {newest}, is in {run.checkpoints} and on none of its hosts",
            f"copy it to {first.folder}/checkpoints on {first.host.text}; a run that begins again needs "
            "another --run-dir",
        )
    names = answers[first.host].value["differing"]
    if names:
        files = [[name, known[name][0]] for name in names]
        data = b"".join((run.path / name).read_bytes()[:size] for name, size in files)
        request = {"operation": "restore", "folder": first.folder, "files": files}
        connections.ask(first.host, host_files, request, data, FETCH_SECONDS)


def _is_history(name: str, run: RunDirectory) -> bool:
    """Return True for a record that the next start of the run continues."""
    path = run.path / name
    return path in (run.job, run.plan, run.metrics, run.events) or run.tensorboard in path.parents


def _ask(connections: Connections, source: RecordSource, owner: RecordOwner, run: RunDirectory) -> Reply:
    request = {
        "operation": "records",
        "folder": source.folder,
        "only_logs": source.host.text != owner.host,
        "known": _known(run.path, owner),
    }
    return connections.ask(source.host, host_files, request, seconds=FETCH_SECONDS)


def _known(folder: Path, owner: RecordOwner | None = None) -> dict[str, tuple[int, str]]:
    """Return size and hash of the records that are here, by name; without those of earlier owners."""
    known = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        top = name.split("/")[0]
        is_output = name.startswith("engine/output-")
        if (top in host_files.LARGE_FOLDERS and not is_output) or not path.is_file() or path.is_symlink():
            continue
        start = owner.starts.get(name, 0) if owner is not None else 0
        size = path.stat().st_size
        grows = name.endswith(host_files.GROWING)
        known[name] = size - start, host_files.tail_hash(str(path), size, grows, start)
    return known


def _store(replies: Mapping[Host, Reply], owner: RecordOwner, folder: Path) -> RecordOwner:
    """Write the received bytes; of a file that several hosts have, those of the newest.

    Returns:
        the owner, with the time of its steps, and its starts without steps that it has repeated.
    """
    newest: dict[str, tuple[float, Host]] = {}
    for host, reply in replies.items():
        if host.text == owner.host:
            owner = replace(owner, steps_changed=reply.value["steps_changed"])
        for name, changed in reply.value["times"].items():
            if name not in newest or changed > newest[name][0]:
                newest[name] = changed, host
    for host, reply in replies.items():
        position = 0
        for name, offset, size in reply.value["files"]:
            data = reply.data[position : position + size]
            position += size
            if newest[name][1] == host and len(data) == size and _is_safe(name):
                start = owner.starts.get(name, 0)
                if start and not offset and name == "metrics.jsonl":
                    if b"\n" not in data:
                        continue  # its first step is being written
                    start = _bytes_before_step((folder / name).read_bytes()[:start], data)
                    owner = replace(owner, starts={**owner.starts, name: start})
                _write(folder / name, start, offset, data)
    return owner


def _bytes_before_step(known: bytes, data: bytes) -> int:
    """Return the bytes of the lines of `known` whose steps come before the first one of `data`."""
    first = json.loads(data.partition(b"\n")[0])["step"]
    kept = 0
    for line in known.splitlines(keepends=True):
        if not line.endswith(b"\n") or (line.strip() and json.loads(line)["step"] >= first):
            break
        kept += len(line)
    return kept


def _is_safe(name: str) -> bool:
    """Return True for a path that stays within the run directory and is no file of the engine's own."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name not in ("", ".", "engine.json")


def _write(path: Path, start: int, offset: int, data: bytes) -> None:
    """Append to a file, or replace it from `start` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if offset:
        with path.open("r+b") as file:
            file.seek(start + offset)
            file.write(data)
        return
    kept = path.read_bytes()[:start] if start else b""
    partial = path.with_name(f".{path.name}.new")
    partial.write_bytes(kept + data)
    partial.replace(path)
