"""Rule of coordinator failover, on a table."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.coordinator import join
from wanma.elastic.coordinator.coordinator import Coordinator
from wanma.elastic.coordinator.coordinator_config import CoordinatorConfig
from wanma.elastic.coordinator.failover import (
    FAILOVER_STAGGER_SECONDS,
    CoordinatorObservation,
    FailoverState,
    InheritedRun,
    list_failover_order,
    may_take_over,
)
from wanma.elastic.failure import Failure
from wanma.elastic.protocol.messages import (
    AbortCommand,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
    JoinRequest,
    Message,
    PreviousMembership,
    Recovery,
    StartCommand,
    TerminationReport,
)
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import Claim


def sight(**changes: Any) -> CoordinatorObservation:
    common: dict[str, Any] = {
        "is_dead": False,
        "claim_silence_seconds": 1.0,
        "heartbeat_timeout_seconds": 20.0,
        "nodes": 2,
        "votes": 1,
        "failover_position": 0,
        "waited_seconds": 0.0,
    }
    return CoordinatorObservation(**{**common, **changes})


def test_silence_alone_proves_nothing_but_an_ended_process_does() -> None:
    assert not may_take_over(sight(waited_seconds=1e6))
    assert may_take_over(sight(is_dead=True))
    assert may_take_over(sight(claim_silence_seconds=21.0)), (
        "who cannot be seen in the run directory cannot write there"
    )


@given(nodes=st.integers(2, 9), cut=st.integers(0, 9))
def test_of_two_sides_that_both_live_at_most_the_majority_goes_on(nodes: int, cut: int) -> None:
    """The host is with the first `cut` nodes; it shows signs of life in the run directory."""
    here = min(max(cut, 1), nodes)
    there = nodes - here
    assert may_take_over(sight(nodes=nodes, votes=there)) == (there > here)


def test_each_node_in_line_has_its_turn_before_the_next() -> None:
    assert list_failover_order(4, {0, 2}) == [1, 3]
    second = {"is_dead": True, "failover_position": 1}
    assert not may_take_over(sight(**second, waited_seconds=FAILOVER_STAGGER_SECONDS - 0.1))
    assert may_take_over(sight(**second, waited_seconds=FAILOVER_STAGGER_SECONDS))


RECOVERY = Recovery("rank 1 failed", 40, 2, InMemoryCheckpointId(6, 40), (17,))


def start(node: int = 1, nodes: int = 3) -> StartCommand:
    return StartCommand(
        7, node, 2 * node, 2 * nodes, "10.0.0.1", 1, RECOVERY, (2,) * nodes, coordinator_node_rank=0
    )


@pytest.fixture
def vacancy(tmp_path: Path) -> FailoverState:
    claim = Claim(7, "10.0.0.1:1", "first", "host-0")
    FolderClaims(tmp_path).create(claim)
    return FailoverState(FolderClaims(tmp_path), start(), claim, 0.2, "no heartbeat")


def test_a_majority_that_has_lost_its_coordinator_follows_it_though_it_lives(vacancy: FailoverState) -> None:
    assert not vacancy.may_take_over()
    vacancy.claims.vote_lost(7, 2)
    assert vacancy.may_take_over(), "two of three nodes"
    vacancy.withdraw_votes()
    assert vacancy.claims.lost_votes(7) == {2}


def test_a_coordinator_that_is_seen_in_the_run_directory_is_not_followed(vacancy: FailoverState) -> None:
    for _ in range(4):
        time.sleep(0.1)
        vacancy.claims.write_heartbeat(7)
        assert not vacancy.may_take_over()
    time.sleep(0.3)
    assert vacancy.may_take_over()


def test_votes_against_one_coordinator_are_none_against_the_next(vacancy: FailoverState) -> None:
    vacancy.claims.vote_lost(7, 2)
    assert vacancy.may_take_over()
    vacancy.claims.create(Claim(8, "10.0.0.3:1", "second", "host-2", node=2))
    assert vacancy.refresh()
    assert not vacancy.refresh()
    assert vacancy.lost_nodes == {0, 2}
    assert not vacancy.may_take_over()
    assert vacancy.claims.lost_votes(8) == set()
    vacancy.is_dead = True
    assert vacancy.may_take_over()


def test_a_claim_that_is_being_written_is_waited_for_and_one_that_never_is_followed(
    vacancy: FailoverState,
) -> None:
    torn = vacancy.claims.folder / "generations" / "8"
    torn.write_text('{"generation": 8')
    assert vacancy.refresh()
    assert vacancy.claim.place == ""
    assert not vacancy.may_take_over()
    time.sleep(0.3)
    assert vacancy.may_take_over(), "its writer shows no signs of life"
    torn.unlink()
    vacancy.claims.create(Claim(8, "10.0.0.3:1", "second", "host-2", node=2))
    assert not vacancy.refresh(), "the same number"
    assert vacancy.claim.place == "10.0.0.3:1"


def successor(waits: set[int], nodes: int = 3, retries: int = 3) -> tuple[Coordinator, list[Any]]:
    said: list[Any] = []
    past = InheritedRun(start(nodes=nodes), frozenset(waits), Failure("node 0 was lost", node_rank=0), 20)
    terms = CoordinatorConfig(nodes, "job", "10.0.0.2:1", 300, retries, generation=8, inherited_run=past)
    return Coordinator(terms, lambda *word: said.append(word), 0), said


def comes(node: int, generation: int = 7, step: int = 41) -> JoinRequest:
    images = tuple(
        InMemoryCheckpointShard(rank, InMemoryCheckpointId(7, step)) for rank in (2 * node, 2 * node + 1)
    )
    was = PreviousMembership(generation, node, TerminationReport(1, step, images))
    one = join(host=f"host-{node}")
    return JoinRequest(
        one.job_hash,
        one.local_world_size,
        one.hostname,
        one.address,
        one.store_port,
        runs_coordinator=node == 1,
        previous_membership=was,
    )


def starts(said: list[tuple[int, Message]]) -> list[StartCommand]:
    return [message for _, message in said if isinstance(message, StartCommand)]


def test_a_successor_waits_for_those_that_are_left_and_counts_on() -> None:
    coordinator, said = successor({1, 2})
    coordinator.receive(1, comes(1), 1)
    coordinator.receive(2, comes(2), 2)
    assert not starts(said)
    coordinator.receive(3, join(), 3)
    found = starts(said)
    assert [(one.generation, one.node_rank, one.coordinator_node_rank) for one in found] == [
        (9, 0, 1),
        (9, 1, 1),
        (9, 2, 1),
    ]
    recovery = found[0].recovery
    assert recovery is not None
    assert (recovery.failure, recovery.last_finished_step) == ("node 0 was lost", 41)
    assert recovery.attempt == 1, "step 41 was new"
    assert (recovery.checkpoint_id, recovery.retried_steps) == (InMemoryCheckpointId(7, 41), (17,))


def test_a_successor_gives_up_those_that_do_not_come() -> None:
    coordinator, said = successor({1, 2})
    coordinator.receive(1, comes(1, step=40), 1)
    assert coordinator.deadline == 20
    coordinator.tick(20)
    for peer in (2, 3):
        coordinator.receive(peer, join(), 21)
    recovery = starts(said)[0].recovery
    assert recovery is not None
    assert recovery.attempt == 3, "without a new step the attempts of the coordinator before count"


def test_a_successor_ends_a_run_whose_attempts_are_used_up() -> None:
    coordinator, said = successor({1}, nodes=2, retries=2)
    coordinator.receive(1, comes(1, step=40), 1)
    [(_, end)] = said
    assert isinstance(end, AbortCommand)
    assert end.failure is not None
    assert "2 restarts completed no step" in end.failure.hint


def test_a_node_that_comes_back_from_an_older_start_is_a_stranger() -> None:
    coordinator, said = successor({1}, nodes=2)
    coordinator.receive(1, comes(1), 1)
    coordinator.receive(2, comes(0, generation=5), 2)
    assert [one.node_rank for one in starts(said)] == [0, 1]
    recovery = starts(said)[0].recovery
    assert recovery is not None
    assert recovery.checkpoint_id == InMemoryCheckpointId(7, 41)


def test_nothing_starts_under_a_number_that_another_has_claimed() -> None:
    said: list[Any] = []
    asked: list[int] = []

    def claim(generation: int) -> None:
        asked.append(generation)

    terms = CoordinatorConfig(1, "job", "here", 300, claim_generation=claim, generation=4)
    coordinator = Coordinator(terms, lambda *word: said.append(word), 0)
    coordinator.receive(0, join(), 1)
    assert (asked, said) == ([5], [])
    assert coordinator.has_ended


class SlowClaims:
    """A store that has not answered yet."""

    def __init__(self) -> None:
        self.answer: Any = "pending"
        self.asked: list[int] = []

    def claim(self, generation: int) -> Any:
        self.asked.append(generation)
        return generation if self.answer == "yes" else self.answer


def waiting(nodes: int = 2) -> tuple[SlowClaims, Coordinator, list[Any]]:
    """A coordinator whose nodes have all joined, and whose claim is on its way."""
    said: list[Any] = []
    claims = SlowClaims()
    terms = CoordinatorConfig(nodes, "job", "here", 300, claim_generation=claims.claim)
    coordinator = Coordinator(terms, lambda *word: said.append(word), 0)
    for peer in range(nodes):
        coordinator.receive(peer, join(), 1)
    assert (claims.asked, said, coordinator.deadline) == ([1], [], None)
    return claims, coordinator, said


def test_a_start_waits_for_its_claim_without_a_word() -> None:
    claims, coordinator, said = waiting()
    claims.answer = "yes"
    coordinator.resume_start()
    assert [one.generation for one in starts(said)] == [1, 1]


def test_a_claim_that_another_got_meanwhile_ends_the_wait() -> None:
    claims, coordinator, said = waiting()
    claims.answer = None
    coordinator.resume_start()
    assert (coordinator.has_ended, said) == (True, [])


def test_a_node_lost_while_its_start_waits_is_waited_for_and_the_claim_is_used_then() -> None:
    claims, coordinator, said = waiting()
    coordinator.handle_member_loss(1, "gone", 2)
    claims.answer = "yes"
    coordinator.resume_start()
    assert starts(said) == []
    coordinator.receive(2, join(), 3)
    assert [one.generation for one in starts(said)] == [1, 1]
