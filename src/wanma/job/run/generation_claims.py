"""Claims of generations (fencing tokens): each start of the ranks claims its number in a claim store.

A number can be claimed once, whatever the clocks of the nodes say; times are never compared between nodes.
`folder_claims` has the claims of a shared folder, `wanma.elastic.claims` those of an object store. A lock
service of an engine would be a third `ClaimStore`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from wanma.job.errors import WanmaError


@dataclass(frozen=True)
class Claim:
    """Claim of one generation: one start of the run's ranks, or the intention to start them."""

    generation: int
    place: str
    """Rendezvous endpoint HOST:PORT; empty: the claim is being written, or its writer died over it."""
    coordinator: str
    """Identity of the coordinator, unique among processes."""
    host: str
    """Host name of the coordinator, for people."""
    node: int | None = None
    """Node rank of the coordinator; None while it is undecided."""
    followed: bool = False
    ended: int | None = None
    """Exit code of the run; None while it runs."""


class ClaimStore(Protocol):
    """Store of a run's claims, seen by all nodes; every method raises `OSError` if it cannot be reached.

    A claim that was created is seen by every later call on every node. No method blocks for longer than
    `deadline_seconds`.
    """

    @property
    def location(self) -> str:
        """Folder or URL, for messages."""

    @property
    def deadline_seconds(self) -> float | None:
        """Longest time, in seconds, of one call; None: as long as the file system takes."""

    @property
    def heartbeat_seconds(self) -> float:
        """Longest time, in seconds, between two heartbeats that a coordinator writes."""

    @property
    def poll_seconds(self) -> float:
        """Time, in seconds, between two searches for another coordinator."""

    def check_usable(self) -> None:
        """Refuse a store in which a number could be claimed twice.

        Raises:
            WanmaError: names the store and the way out.
        """

    def create(self, claim: Claim) -> bool:
        """Claim a generation, which closes the older ones; return False if another coordinator has it."""

    def read(self, generation: int) -> Claim | None:
        """Return the claim of `generation`; None if the store shows none to this node."""

    def newest(self) -> Claim | None:
        """Return the claim with the highest number; None if there is none."""

    def newest_after(self, generation: int) -> Claim | None:
        """Return a claim with a higher number than `generation`, which has been claimed; None: there is none.

        It is what a coordinator asks all the time, and needs fewer requests than `newest`.
        """

    def record_end(self, generation: int, exit_code: int) -> None:
        """Record that the run has ended, so that no node looks for its coordinator."""

    def write_heartbeat(self, generation: int) -> None:
        """Write the coordinator's heartbeat, for nodes that cannot reach it by network."""

    def read_heartbeat(self, generation: int) -> Hashable:
        """Return a value that changes with every `write_heartbeat`; None: there is none."""

    def vote_lost(self, generation: int, node_rank: int) -> None:
        """Record that `node_rank` has ended its ranks because it lost the coordinator."""

    def withdraw_vote(self, generation: int, node_rank: int) -> None:
        """Remove the vote of `node_rank`, which hears the coordinator again."""

    def lost_votes(self, generation: int) -> frozenset[int]:
        """Return the nodes that have recorded the loss of the coordinator."""

    def fence(self, generation: int) -> GenerationFence:
        """Return the fence of the ranks of `generation`."""


class GenerationFence(Protocol):
    """Generation fence: prevents ranks of an older generation from writing into the run of a newer one.

    The time of one request remains between a check and the write after it. A missing claim is no fence: on a
    node whose run directory is private, and holds the claims, there is nothing to protect.
    """

    def check(self) -> None:
        """Ask the store, before a commit or an upload.

        Raises:
            WanmaError: a newer generation exists, or the store does not answer in time.
            OSError: a folder cannot be read.
        """

    def check_record(self) -> None:
        """Check before a record, many times per second: an answer of the last seconds counts.

        Raises:
            WanmaError: a newer generation exists.
            OSError: that has been unknown for too long.
        """


def superseded_error(generation: int, newest: Claim) -> WanmaError:
    """Return the error of ranks whose run has a newer generation."""
    return WanmaError(
        f"generation {generation} of this run was superseded by generation {newest.generation} "
        f"(coordinator {newest.place}): this process stops writing to the run directory",
        "wait: the run continues there, and this node rejoins when it reaches that address",
    )
