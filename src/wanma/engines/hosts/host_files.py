"""Program that prepares the files of a run on a host, and sends its small records home."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from typing import Any, BinaryIO, Callable, Dict, Iterator, List

LARGE_FOLDERS = ("checkpoints", "generations", "scratch", "engine", "code", "copied")
"""Folders of the run directory that stay on the host; of `engine` the output of the supervisors is sent."""
CHECKED_BYTES = 64 << 10
"""Bytes before the known end of a file whose hash shows that the file has only grown."""
GROWING = (".jsonl", ".log")
"""Ends of the names of files that are only appended to; others are compared as a whole."""
MOST_BYTES = 64 << 20
"""Most bytes of records in one answer."""


def main(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Do the operation of the request: prepare, remove, unpack, records, compare or restore."""
    operations = {
        "prepare": _prepare,
        "remove": _remove,
        "unpack": _unpack,
        "records": _records,
        "compare": _compare,
        "restore": _restore,
    }
    try:
        return operations[request["operation"]](request, reply)
    except OSError as error:
        kind = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "unwritable"
        place = error.filename or request["folder"]  # a write names no file
        reply({"problem": kind, "text": "{}: {}".format(place, error.strerror or error)})
        return 0


def _prepare(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Make the run directory and write its files.

    Args:
        request: `folder`, the run directory; `files`: text by name, for its folder `engine`; `origin`: the
            run directory at home; `token`: file that the first host makes and others look for; `makes_token`;
            `code`: folder of the unpacked code.
        reply: sends `has_code` and `sees_token`.
    """
    engine = os.path.join(request["folder"], "engine")
    for folder in (request["folder"], engine, os.path.join(request["folder"], "checkpoints")):
        os.makedirs(folder, exist_ok=True)
    origin = os.path.join(engine, "origin.json")
    if os.path.exists(origin):
        with open(origin) as file:
            found = json.load(file)
        if found != request["origin"]:
            reply({"problem": "origin", "text": "{} on {}".format(*found)})
            return 0
    _write(origin, json.dumps(request["origin"]))
    for name, text in request["files"].items():
        _write(os.path.join(engine, name), text)
    token = os.path.join(engine, "token-" + request["token"])
    if request["makes_token"]:
        for name in os.listdir(engine):
            if name.startswith("token-"):
                os.unlink(os.path.join(engine, name))
        _write(token, "")
    reply({"has_code": os.path.isdir(request["code"]), "sees_token": os.path.exists(token)})
    return 0


def _remove(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Remove the run directory, if it is that of `origin`; it may be gone, by another node of the run.

    Args:
        request: `folder`, the run directory; `origin`: the run directory at home.
        reply: sends `is_removed`.
    """
    try:
        with open(os.path.join(request["folder"], "engine", "origin.json")) as file:
            found = json.load(file)
    except FileNotFoundError:
        reply({"is_removed": False})
        return 0
    if found != request["origin"]:
        reply({"problem": "origin", "text": "{} on {}".format(*found)})
        return 0
    shutil.rmtree(request["folder"], ignore_errors=True)
    reply({"is_removed": not os.path.exists(request["folder"])})
    return 0


def _write(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}.new"
    with open(temporary, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _unpack(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Receive a code snapshot on standard input and unpack it.

    Args:
        request: `folder` of the unpacked snapshots, `name` of the archive, its size `bytes`, and the source
            of the `unpacker`.
        reply: sends `path` of the code.
    """
    os.makedirs(request["folder"], mode=0o700, exist_ok=True)
    archive = os.path.join(request["folder"], request["name"])
    partial = f"{archive}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            for block in _read_blocks(sys.stdin.buffer, request["bytes"]):
                file.write(block)
        os.replace(partial, archive)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-", archive, request["folder"]],
            input=request["unpacker"].encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        for path in (partial, archive):
            if os.path.exists(path):
                os.unlink(path)
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip()
        for code in (errno.ENOSPC, errno.EDQUOT):  # which the unpacker's message names
            if os.strerror(code) in text:
                raise OSError(code, os.strerror(code))
        reply({"problem": "code", "text": text})
        return 0
    reply({"path": os.fsdecode(done.stdout).strip()})
    return 0


def _read_blocks(source: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        block = source.read(min(size, 1 << 20))
        if not block:
            raise OSError(errno.EIO, "the connection ended during the transfer")
        size -= len(block)
        yield block


def _records(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Send the records that are new: names, sizes and offsets as the reply, then the bytes in that order.

    Args:
        request: `folder`, the run directory; `known`: [bytes, hash of the last ones] by name; `only_logs`:
            the other records are another host's.
        reply: sends `files`, a list of [name, offset, bytes], `times` of all files, `is_complete`, and
            `steps_changed`, time at which the steps were written last; 0: this host has none.
    """
    files: List[List[Any]] = []
    times: Dict[str, float] = {}
    total = 0
    for name in sorted(record_names(request["folder"], request["only_logs"])):
        path = os.path.join(request["folder"], name)
        held, digest = request["known"].get(name, [None, ""])
        offset = held or 0
        try:
            status = os.stat(path)
            size, times[name] = status.st_size, status.st_mtime
            grows = name.endswith(GROWING)
            if offset and (
                size < offset or (size > offset and not grows) or tail_hash(path, offset, grows) != digest
            ):
                offset = 0  # written anew
        except FileNotFoundError:
            continue
        if size > offset or (not size and held != 0):
            size = min(size, offset + MOST_BYTES - total)
            files.append([name, offset, size - offset])
            total += size - offset
        if total >= MOST_BYTES:
            break
    steps = os.path.join(request["folder"], "metrics.jsonl")
    steps_changed = os.path.getmtime(steps) if os.path.exists(steps) else 0.0
    reply(
        {
            "files": files,
            "times": times,
            "is_complete": total < MOST_BYTES,
            "steps_changed": steps_changed,
        }
    )
    for name, offset, size in files:
        with open(os.path.join(request["folder"], name), "rb") as file:
            file.seek(offset)
            block = file.read(size)
        # A file that was cut meanwhile is written anew, and seen by its hash the next time.
        sys.stdout.buffer.write(block.ljust(size, b"\n"))
    sys.stdout.buffer.flush()
    return 0


def _compare(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Compare the records at home with those here; one that has grown here is no difference.

    Args:
        request: `folder`, the run directory; `known`: [bytes, hash of the last ones] by name.
        reply: sends `differing`, names of records that are missing here or differ, and `checkpoints`, names.
    """
    differing = []
    for name, (size, digest) in request["known"].items():
        path = os.path.join(request["folder"], name)
        grows = name.endswith(GROWING)
        try:
            here = os.path.getsize(path)
            if here < size or (here > size and not grows) or tail_hash(path, size, grows) != digest:
                differing.append(name)
        except FileNotFoundError:
            differing.append(name)
    reply({"differing": differing, "checkpoints": os.listdir(os.path.join(request["folder"], "checkpoints"))})
    return 0


def _restore(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Write records whose bytes follow on standard input.

    Args:
        request: `folder`, the run directory; `files`, a list of [name, bytes].
        reply: sends nothing.
    """
    for name, size in request["files"]:
        path = os.path.join(request["folder"], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial = f"{path}.{os.getpid()}.new"
        with open(partial, "wb") as file:
            for block in _read_blocks(sys.stdin.buffer, size):
                file.write(block)
        os.replace(partial, path)
    reply({})
    return 0


def record_names(folder: str, only_logs: bool) -> Iterator[str]:
    """Yield the paths of the records below the run directory."""
    for name in os.listdir(os.path.join(folder, "engine")):
        if name.startswith("output-"):
            yield os.path.join("engine", name)
    top = os.path.join(folder, "logs") if only_logs else folder
    for parent, folders, files in os.walk(top):
        if parent == folder:
            folders[:] = [name for name in folders if name not in LARGE_FOLDERS]
        for name in files:
            path = os.path.join(parent, name)
            if not name.startswith(".") and not os.path.islink(path) and os.path.isfile(path):
                yield os.path.relpath(path, folder)


def tail_hash(path: str, end: int, grows: bool, start: int = 0) -> str:
    """Return the hash of the bytes from `start` to `end`; of a file that only grows, of the last ones."""
    size = min(end - start, CHECKED_BYTES) if grows else end - start
    with open(path, "rb") as file:
        file.seek(end - size)
        return hashlib.sha256(file.read(size)).hexdigest()
