"""Tasks of a token file that several nodes with a common cache encode together, and its only builder.

A lock makes one process the builder; the kernel drops it with the process. No torch here.

In the folder of an unfinished token file:

    claims/N             locked by the process that encodes task N, until it ends or dies; by the builder
                         until the task is joined
    joined               number of tasks whose parts are in the token file
    part-N               part of task N that the builder has encoded
    part-N-NODE          part of task N that another node has encoded
    part-N.json          its name, sizes and result

The builder joins the parts in order. It encodes a task itself unless another node has, or is about to.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from wanma.data.stores.file_locks import exclusive_lock, is_locked
from wanma.data.text.encoding_task import EncodingResult, EncodingTask
from wanma.data.text.part_writer import part_files
from wanma.job.run.run_directory import write_json

_MAX_AHEAD = 256
"""Tasks by which another node may be ahead of the builder: their parts take space."""
_CLAIM_SECONDS = 600.0
"""Wait of the builder for a task that another node encodes; then it does so itself."""
_WINDOW = 128
"""Consecutive tasks that a helper takes from their end."""
_POLL_SECONDS = 0.5
_HOLDER_SECONDS, _HOLDER_POLL_SECONDS = 1.0, 0.02
"""Wait for the name of a builder that has just begun, and its interval."""

_ABANDONED_SECONDS = 7 * 24 * 3600.0
"""Age of an unfinished token file from which on nobody is expected to go on with it."""

log = logging.getLogger("wanma.data")

Encode = Callable[[Path], EncodingResult]
"""Function (part) that encodes a task and writes its part."""
EncodedPart = tuple[Path, EncodingResult]


class SharedTasks:
    """Tasks of one unfinished token file; a context manager, whose end gives up the claims of the builder."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._node, self._claims = folder, node, folder / "claims"
        self._claims.mkdir(exist_ok=True)
        self._claimed: dict[int, ExitStack] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._claimed:
            self._claimed.popitem()[1].close()

    @property
    def joined(self) -> int:
        """Number of tasks whose parts are in the token file."""
        try:
            return int((self._folder / "joined").read_bytes() or b"0")
        except FileNotFoundError:
            return 0

    def run_as_builder(self, number: int, task: EncodingTask, encode: Encode) -> EncodedPart:
        """Return the part of a task; it is encoded here unless another node has, or does so in good time.

        The claim stays until `mark_joined`: before that nothing tells a helper that the task is done.
        """
        with ExitStack() as claim:
            claim.enter_context(exclusive_lock(self._claims / str(number), _CLAIM_SECONDS))
            encoded = self._encoded_part(number, task)
            if encoded is None:
                part = self._folder / f"part-{number}"
                encoded = part, encode(part)
            self._claimed[number] = claim.pop_all()
            return encoded

    def run_as_helper(self, number: int, task: EncodingTask, encode: Encode) -> EncodedPart | None:
        """Encode a task and return its part; None: another node has, or is about to."""
        with exclusive_lock(self._claims / str(number), 0) as descriptor:
            is_free = descriptor is not None and self._encoded_part(number, task) is None
            if not is_free or number < self.joined:
                return None
            part = self._folder / f"part-{number}-{self._node}"
            result = encode(part)
            sizes = {path.name: path.stat().st_size for path in part_files(part)}
            record = {"task": task.name, "part": part.name, "sizes": sizes, "result": result.to_json()}
            write_json(self._record_path(number), record)
            return part, result

    def mark_joined(self, number: int) -> None:
        """Note that the part of a task, and those of all before it, are in the token file."""
        descriptor = os.open(self._folder / "joined", os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(descriptor, f"{number + 1:020d}".encode(), 0)
        finally:
            os.close(descriptor)
        self._record_path(number).unlink(missing_ok=True)
        (self._claims / str(number)).unlink(missing_ok=True)
        if (claim := self._claimed.pop(number, None)) is not None:
            claim.close()

    def open_tasks(
        self, tasks: Iterable[EncodingTask], is_over: Callable[[], bool]
    ) -> Iterator[tuple[int, EncodingTask]]:
        """Yield tasks that are not joined yet, never far ahead of the builder, until it has ended.

        Those of a window come from its end: the builder begins at its front, and none waits for the other
        until they meet.
        """
        numbered = enumerate(tasks)
        while window := list(islice(numbered, _WINDOW)):
            while window[0][0] >= self.joined + _MAX_AHEAD and not is_over():
                time.sleep(_POLL_SECONDS)
            for number, task in reversed(window):
                if is_over():
                    return
                if number >= self.joined:
                    yield number, task

    def _record_path(self, number: int) -> Path:
        return self._folder / f"part-{number}.json"

    def _encoded_part(self, number: int, task: EncodingTask) -> EncodedPart | None:
        """Return the part that another node has written, if it is whole."""
        try:
            record = json.loads(self._record_path(number).read_text(encoding="utf-8"))
            sizes = {name: (self._folder / name).stat().st_size for name in record["sizes"]}
        except (FileNotFoundError, ValueError):
            return None
        if record["task"] != task.name or sizes != record["sizes"]:
            return None
        return self._folder / record["part"], EncodingResult(**record["result"])


@contextmanager
def builder_lock(folder: Path, node: str, help_builder: Callable[[], None]) -> Iterator[None]:
    """Hold the lock as the only builder of a token file; a builder on another node is helped meanwhile.

    Args:
        help_builder: called once if a process of another node builds it.
    """
    path = _lock_path(folder)
    deadline = time.monotonic() + _HOLDER_SECONDS
    while True:
        with exclusive_lock(path, 0) as descriptor:
            if descriptor is not None:
                _write_holder(descriptor, node)
                yield
                return
        process_id, _, holder = path.read_text().partition(" ")
        is_elsewhere = holder not in ("", node) and build_folder_of(folder).is_dir()
        if is_elsewhere or time.monotonic() > deadline:
            break
        time.sleep(_HOLDER_POLL_SECONDS)
    log.info("waiting for process %s %s, which builds the token file %s", process_id or "?", holder, folder)
    if is_elsewhere:
        help_builder()
    with exclusive_lock(path, math.inf) as descriptor:
        assert descriptor is not None
        _write_holder(descriptor, node)
        yield


def is_being_built(folder: Path) -> bool:
    """Return True if a process holds the lock of the builder."""
    return is_locked(_lock_path(folder))


def remove_abandoned_builds(folder: Path) -> None:
    """Remove unfinished token files of `folder` that killed builders left and nobody went on with for a week.

    Those of builders that live are locked. A failure is left to the next one that tries.
    """
    for build in folder.glob("*.building"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (build, *build.iterdir()))
            if time.time() - newest < _ABANDONED_SECONDS:
                continue
            with exclusive_lock(_lock_path(build.with_suffix("")), 0) as descriptor:
                if descriptor is not None:
                    shutil.rmtree(build)
                    log.info("%s was left unfinished, and is removed", build)


def build_folder_of(folder: Path) -> Path:
    """Return the folder of the unfinished token file."""
    return folder.with_name(f"{folder.name}.building")


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _write_holder(descriptor: int, node: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} {node}".encode(), 0)
