"""Saves of ranks whose nodes do not share rank 0's checkpoint folder: rank 0 writes their parts for them.

    channel     small messages and bytes of any size between ranks, through the run's rendezvous store
    session     `CommitSession` of a rank without the folder, and that of rank 0, which receives the parts

The folder then lies on rank 0's node alone. Only one rank at a time sends, a few chunks ahead of the writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from wanma.checkpoint.format.manifest import data_file_name, dump_json
from wanma.checkpoint.save.commit_session import CommitSession
from wanma.job.errors import WanmaError

CHUNK_BYTES = 4 << 20
"""Bytes of one message; the store of torch takes at most 8 MiB."""
CHUNKS_AHEAD = 4
_LONGEST_PAUSE_SECONDS = 0.05
_COMMITTED = "committed"


class Store(Protocol):
    """Part of torch's stores that a channel needs."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class StoreChannel:
    """Channel between ranks.

    Args:
        store: a connection of its own: others must not wait for it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def wait_for(self, keys: Sequence[str], deadline: float, check: Callable[[], None] | None = None) -> str:
        """Wait until one of the keys exists and return it.

        Args:
            keys: the keys.
            deadline: time, of the monotonic clock.
            check: called again and again; raises to end the wait.

        Raises:
            TimeoutError: none exists at the deadline.
        """
        pause = 0.001
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise TimeoutError(keys[0])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def read(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def take(self, key: str) -> bytes:
        """Return a value and remove it."""
        value = self.read(key)
        self._store.delete_key(key)
        return value

    def send(
        self, key: str, content: memoryview, seconds: float, check: Callable[[], None] | None = None
    ) -> None:
        """Send bytes; the receiver takes them chunk by chunk.

        Raises:
            TimeoutError: the receiver took nothing for `seconds`.
        """
        for number, start in enumerate(range(0, len(content), CHUNK_BYTES)):
            if number >= CHUNKS_AHEAD:
                self._wait_until_taken(f"{key}/{number - CHUNKS_AHEAD}", seconds, check)
            self._store.set(f"{key}/{number}", bytes(content[start : start + CHUNK_BYTES]))

    def receive(
        self,
        key: str,
        size: int,
        seconds: float,
        check: Callable[[], None] | None = None,
        *,
        other_keys: Sequence[str] = (),
    ) -> Iterator[bytes]:
        """Yield the bytes that `send` sends; end early where one of `other_keys` appears.

        Raises:
            TimeoutError: nothing came for `seconds`.
        """
        for number in range(-(-size // CHUNK_BYTES)):
            chunk = f"{key}/{number}"
            found = self.wait_for([chunk, *other_keys], time.monotonic() + seconds, check)
            if found != chunk:
                return
            yield self.take(chunk)

    def _wait_until_taken(self, key: str, seconds: float, check: Callable[[], None] | None) -> None:
        deadline, pause = time.monotonic() + seconds, 0.001
        while self._store.check([key]):
            if check is not None:
                check()
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class RelayedCommitSession(CommitSession):
    """Commit session of a rank that sends its part to rank 0.

    Args:
        partial: the folder being written, on rank 0's node.
        rank: this rank.
        world_size: number of ranks.
        deadline_seconds: longest silence of rank 0.
        channel: channel to rank 0.
    """

    def __init__(
        self, partial: Path, rank: int, world_size: int, deadline_seconds: float, channel: StoreChannel
    ) -> None:
        super().__init__(partial, rank, world_size, deadline_seconds)
        self._channel = channel
        self._key = f"{partial.name}/{rank}"
        self._outcome_key = f"{partial.name}/outcome"

    def create_folder(self) -> None:
        """Nothing to do: rank 0 makes the folder."""

    def write(self, content: memoryview) -> str:
        """Send this rank's file; return its SHA-256.

        Raises:
            WanmaError: rank 0 has aborted the save, or does not answer.
        """
        digest = hashlib.sha256(content).hexdigest()
        self._channel.put(f"{self._key}/size", str(len(content)).encode())
        try:
            deadline = time.monotonic() + 2 * self._deadline_seconds
            self._channel.wait_for([f"{self._key}/go"], deadline, self._check_outcome)
            self._channel.send(f"{self._key}/data", content, self._deadline_seconds, self._check_outcome)
        except TimeoutError:
            raise WanmaError(
                f"rank 0 did not take the part of rank {self._rank} within {self._deadline_seconds:g} s",
                "see the log of rank 0 for the cause",
            ) from None
        return digest

    def publish(self, rank_manifest: dict[str, Any]) -> None:
        self._channel.put(f"{self._key}/table", dump_json(rank_manifest, "the rank manifest").encode())

    def abort(self, message: str) -> None:
        self._channel.put(f"{self._key}/failed", message.encode())

    def wait_for_commit(self, final: Path) -> None:  # noqa: ARG002  # on rank 0's node
        deadline = time.monotonic() + 2 * self._deadline_seconds
        try:
            self._channel.wait_for([self._outcome_key], deadline)
        except TimeoutError:
            raise WanmaError(
                f"rank 0 did not commit within {2 * self._deadline_seconds:g} s",
                "see the log of rank 0 for the cause",
            ) from None
        self._check_outcome()

    def remove_own(self) -> None:
        """Nothing to do: rank 0 removes the folder."""

    def _check_outcome(self) -> None:
        """Raise `WanmaError` if rank 0 has aborted the save."""
        try:
            self._channel.wait_for([self._outcome_key], -1.0)
        except TimeoutError:
            return
        if (outcome := self._channel.read(self._outcome_key).decode()) != _COMMITTED:
            raise WanmaError(outcome)


class ReceivingCommitSession(CommitSession):
    """Commit session of rank 0 that also writes the parts of ranks without the folder.

    Args:
        partial: the folder being written.
        world_size: number of ranks.
        deadline_seconds: longest silence of a rank.
        channel: channel to the other ranks.
        senders: ranks without the folder.
    """

    def __init__(
        self,
        partial: Path,
        world_size: int,
        deadline_seconds: float,
        channel: StoreChannel,
        senders: Sequence[int],
    ) -> None:
        super().__init__(partial, 0, world_size, deadline_seconds)
        self._channel, self._senders = channel, sorted(senders)

    def gather(self) -> list[dict[str, Any]]:
        for rank in self._senders:
            self._receive(rank)
        return super().gather()

    def abort(self, message: str) -> None:
        self._channel.put(f"{self._partial.name}/outcome", message.encode())
        super().abort(message)

    def announce_commit(self) -> None:
        self._channel.put(f"{self._partial.name}/outcome", _COMMITTED.encode())

    def _receive(self, rank: int) -> None:
        """Write the file and the manifest of one rank, as it would have written them.

        Raises:
            WanmaError: a rank failed, or sends nothing.
            OSError: the disk failed.
        """
        key = f"{self._partial.name}/{rank}"
        failed, table = f"{key}/failed", f"{key}/table"
        try:
            deadline = time.monotonic() + self._deadline_seconds
            if self._channel.wait_for([f"{key}/size", failed], deadline, self._check_notes) != failed:
                size = int(self._channel.take(f"{key}/size"))
                self._channel.put(f"{key}/go", b"")
                digest = self._write_file(rank, key, size, failed)
                found = self._channel.wait_for([table, failed], time.monotonic() + self._deadline_seconds)
                if found == table:
                    self._write_table(rank, self._channel.take(table), digest)
                    return
            raise WanmaError(self._channel.take(failed).decode())
        except TimeoutError:
            raise WanmaError(
                f"rank {rank} did not send its part within {self._deadline_seconds:g} s after rank 0's",
                f"check the network between its node and rank 0's, or let all nodes share "
                f"{self._partial.parent}: the run directory on a shared file system",
            ) from None

    def _write_file(self, rank: int, key: str, size: int, failed: str) -> str:
        digest = hashlib.sha256()
        if size == 0:
            return ""
        with (self._partial / data_file_name(rank)).open("wb") as file:
            blocks = self._channel.receive(
                f"{key}/data", size, self._deadline_seconds, self._check_notes, other_keys=[failed]
            )
            for block in blocks:
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _write_table(self, rank: int, table: bytes, digest: str) -> None:
        sent = json.loads(table)["file"]
        if sent is not None and sent["sha256"] != digest:
            raise WanmaError(
                f"the part of rank {rank} was damaged on its way to rank 0", "check the network between them"
            )
        path = self._path("table", rank)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(table)
        temporary.replace(path)

    def _check_notes(self) -> None:
        """Raise `WanmaError` if a rank with the folder has left a note of its failure."""
        for note in sorted(self._partial.glob("failed-*.json")):
            text = note.read_text("utf-8")
            raise WanmaError(json.loads(text)["message"] if text else f"{note.name}: No space left on device")
