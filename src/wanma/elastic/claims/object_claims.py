"""Claims of generations in an object store, for nodes that share no file system.

    URL/generations/7             created by a conditional request: of two coordinators one gets it
    URL/generations/7.heartbeat   other content with every heartbeat
    URL/generations/7.lost.2      node 2 no longer hears that coordinator, and has ended its ranks
    URL/generations/7.ended.0     the run has ended with exit code 0

Objects appear complete or not at all, and numbers are claimed one after the other. So claim 8 closes claim 7
by its existence, and no object is ever appended to. Contents are compared, never times.

Requests, whatever the number of nodes: 36 per minute. The coordinator asks for the next claim and writes its
heartbeat every `heartbeat_seconds` (24 per minute); rank 0 asks for the next claim every `FENCE_POLL_SECONDS`
(12 per minute), and once more for each checkpoint and each upload. A start takes 3 requests. A node that has
lost its coordinator makes at most 4 per `poll_seconds`, until there is another one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, TypeVar

from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.elastic.claims.deadline_thread import DeadlineThread
from wanma.job.errors import EXIT_USAGE, STORAGE_EXTRAS, WanmaError
from wanma.job.retry import RetryPolicy
from wanma.job.run.generation_claims import Claim, superseded_error

Result = TypeVar("Result")

FOLDER = "generations"
CONDITIONAL_PROTOCOLS = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"))
"""Protocols whose libraries create an object by one conditional request; others look first, then write."""
FENCE_POLL_SECONDS = 5.0
"""Time, in seconds, between two requests of a fence in the background."""
RECORD_VALIDITY_SECONDS = 10.0
"""Time, in seconds, for which an answer of the store covers records: a silent coordinator keeps its run for
at least the heartbeat timeout."""
COMMIT_DEADLINE_SECONDS = 30.0
"""Time, in seconds, that a commit waits for the store: no step waits for it."""
_OPENING_SECONDS = 60.0
"""Longest time, in seconds, of the first requests, with the import of the storage library."""


class ObjectClaims:
    """Claims at `url`, of one run; see `wanma.job.run.generation_claims.ClaimStore`.

    Args:
        url: URL of this run alone.
        deadline_seconds: longest time of one call.
    """

    heartbeat_seconds: ClassVar[float] = 5.0
    poll_seconds: ClassVar[float] = 1.0

    def __init__(self, url: str, deadline_seconds: float = 5.0) -> None:
        self.location = url.rstrip("/")
        self.deadline_seconds = deadline_seconds
        self._thread = DeadlineThread("wanma-claims")
        self._storage: RemoteStorage | None = None
        self._claims: dict[int, Claim] = {}
        """Claims that have been read, as they were created: they never change."""

    def check_usable(self) -> None:
        """Create an object twice: the second attempt must fail.

        Raises:
            WanmaError: it does not, or the store cannot be used.
        """
        key = f"cluster.claims = '{self.location}'"
        protocol = self.location.partition("://")[0]
        way_out = (
            "use a bucket of Amazon S3, Google Cloud Storage or Azure Blob Storage, or a folder that all "
            "nodes share"
        )
        if protocol not in CONDITIONAL_PROTOCOLS:
            raise WanmaError(
                f"{key}: storage of the protocol '{protocol}' has no conditional create, so two coordinators "
                "could claim the same generation",
                way_out,
                EXIT_USAGE,
            )
        name = f"probe.{secrets.token_hex(8)}"

        def probe() -> bool:
            storage = self._open()
            try:
                return storage.create(name, b"first") and not storage.create(name, b"second")
            finally:
                storage.remove(name)

        try:
            is_exclusive = self._thread.call(probe, _OPENING_SECONDS, is_write=False)
        except WanmaError as error:
            raise WanmaError(f"{key} cannot be used: {error.message}", error.hint, EXIT_USAGE) from error
        except TimeoutError as error:
            raise WanmaError(
                f"{key} cannot be used: {error.strerror}", "check the network and the endpoint of the storage"
            ) from error
        if not is_exclusive:
            raise WanmaError(
                f"{key}: this storage has no conditional create (it replaced an object that existed), so two "
                "coordinators could claim the same generation",
                f"{way_out}; or install {STORAGE_EXTRAS[protocol][0]} 2024.12 or newer",
                EXIT_USAGE,
            )

    def create(self, claim: Claim) -> bool:
        """Claim a generation, which closes the older ones; return False if another coordinator has it."""
        values = {
            "place": claim.place,
            "coordinator": claim.coordinator,
            "host": claim.host,
            "node": claim.node,
        }
        content = json.dumps(values).encode()
        return self._call(lambda storage: storage.create(str(claim.generation), content), is_write=True)

    def read(self, generation: int) -> Claim | None:
        """Return the claim of `generation`; None: there is none."""
        return self._call(lambda storage: self._read(storage, generation, self._names(storage)))

    def newest(self) -> Claim | None:
        """Return the claim with the highest number; None if there is none."""

        def search(storage: RemoteStorage) -> Claim | None:
            names = self._names(storage)
            newest = max((int(name) for name in names if name.isdecimal()), default=None)
            return None if newest is None else self._read(storage, newest, names)

        return self._call(search)

    def newest_after(self, generation: int) -> Claim | None:
        """Return the newest claim after `generation`; None: there is none."""

        def search(storage: RemoteStorage) -> Claim | None:
            newest = None
            while (following := self._content(storage, (newest or generation) + 1)) is not None:
                newest = following.generation
            return None if newest is None else self._claims[newest]

        return self._call(search)

    def record_end(self, generation: int, exit_code: int) -> None:
        """Record that the run has ended."""
        name = f"{generation}.ended.{exit_code}"
        self._call(lambda storage: storage.write(name, b"ended", verifies=False), is_write=True)

    def write_heartbeat(self, generation: int) -> None:
        """Write the coordinator's heartbeat, for nodes that cannot reach it by network."""
        name, content = f"{generation}.heartbeat", secrets.token_hex(8).encode()
        self._call(lambda storage: storage.write(name, content, verifies=False), is_write=True)

    def read_heartbeat(self, generation: int) -> bytes | None:
        """Return a value that changes with every `write_heartbeat`; None: there is none."""
        return self._call(lambda storage: storage.read_small(f"{generation}.heartbeat"))

    def vote_lost(self, generation: int, node_rank: int) -> None:
        """Record that `node_rank` has ended its ranks because it lost the coordinator."""
        name = f"{generation}.lost.{node_rank}"
        self._call(lambda storage: storage.write(name, b"lost", verifies=False), is_write=True)

    def withdraw_vote(self, generation: int, node_rank: int) -> None:
        """Remove the vote of `node_rank`, which hears the coordinator again."""
        self._call(lambda storage: storage.remove(f"{generation}.lost.{node_rank}"), is_write=True)

    def lost_votes(self, generation: int) -> frozenset[int]:
        """Return the nodes that have recorded the loss of the coordinator."""
        return _numbers(f"{generation}.lost.", self._call(self._names))

    def fence(self, generation: int) -> ObjectFence:
        """Return the fence of the ranks of `generation`."""
        return ObjectFence(self, generation)

    def _call(self, operation: Callable[[RemoteStorage], Result], *, is_write: bool = False) -> Result:
        """Make requests in the thread; the storage's errors become `OSError`."""
        try:
            seconds = self.deadline_seconds if self._storage is not None else _OPENING_SECONDS
            return self._thread.call(lambda: operation(self._open()), seconds, is_write=is_write)
        except WanmaError as error:
            raise OSError(error.message) from error
        except TimeoutError as error:
            raise TimeoutError(error.errno, f"{self.location}: {error.strerror}") from None

    def _open(self) -> RemoteStorage:
        if self._storage is None:
            policy = RetryPolicy(
                max_attempts=3, deadline_seconds=self.deadline_seconds, initial_backoff_seconds=0.2
            )
            self._storage = RemoteStorage(f"{self.location}/{FOLDER}", policy, key="cluster.claims")
        return self._storage

    def _names(self, storage: RemoteStorage) -> set[str]:
        return set(storage.list_files(""))

    def _read(self, storage: RemoteStorage, generation: int, names: set[str]) -> Claim | None:
        if str(generation) not in names or (claim := self._content(storage, generation)) is None:
            return None
        codes = _numbers(f"{generation}.ended.", names)
        is_followed = any(name.isdecimal() and int(name) > generation for name in names)
        return replace(claim, followed=is_followed, ended=min(codes, default=None))

    def _content(self, storage: RemoteStorage, generation: int) -> Claim | None:
        """Return a claim as it was created; None: there is none."""
        if generation not in self._claims:
            content = storage.read_small(str(generation))
            if content is None:
                return None
            self._claims[generation] = Claim(generation, **json.loads(content))
        return self._claims[generation]


def _numbers(prefix: str, names: set[str]) -> frozenset[int]:
    """Return the numbers at the end of the names that begin with `prefix`."""
    return frozenset(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))


class ObjectFence:
    """Generation fence by the claims of an object store.

    `check` asks the store. `check_record` relies on an answer of the last `RECORD_VALIDITY_SECONDS`, which a
    thread renews; a process that stood still for longer asks before it writes. The claim that the ranks start
    with counts as the first answer.
    """

    def __init__(self, claims: ObjectClaims, generation: int) -> None:
        self._claims, self._generation = claims, generation
        self._successor: Claim | None = None
        self._asked_at = time.monotonic()
        """Time, on the monotonic clock, at which the newest request began that found no newer generation."""
        self._error: OSError | None = None
        """Error of the newest request; None: it was answered."""
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Ask the store, for up to `COMMIT_DEADLINE_SECONDS`.

        Raises:
            WanmaError: a newer generation exists, or the store does not answer.
        """
        deadline = time.monotonic() + COMMIT_DEADLINE_SECONDS
        while True:
            try:
                self._ask()
                break
            except OSError as error:
                if time.monotonic() + 1.0 > deadline:
                    raise WanmaError(
                        f"cannot read the claims of the run, which may have a newer generation: {error}",
                        "check the network and the credentials of cluster.claims; nothing is committed until "
                        "it answers",
                    ) from error
            time.sleep(1.0)
        self._raise_if_superseded()

    def check_record(self) -> None:
        """Raise `WanmaError` if a newer generation exists, `OSError` if the store is silent for too long."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="wanma-fence", daemon=True)
            self._thread.start()
        if self._successor is None and time.monotonic() - self._asked_at > RECORD_VALIDITY_SECONDS:
            if self._error is not None:  # the thread asks; a step does not wait for it
                raise self._error
            self._ask()
        self._raise_if_superseded()

    def _poll(self) -> None:
        while self._successor is None:
            with contextlib.suppress(OSError):  # `check_record` raises it, once it has lasted
                self._ask()
            time.sleep(FENCE_POLL_SECONDS)

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            self._successor = self._successor or self._claims.newest_after(self._generation)
        except OSError as error:
            self._error = error
            raise
        self._asked_at, self._error = began, None

    def _raise_if_superseded(self) -> None:
        if self._successor is not None:
            raise superseded_error(self._generation, self._successor)
