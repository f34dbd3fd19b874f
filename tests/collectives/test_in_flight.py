"""In which order sums go on that wait for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from wanma.collectives.compression.overlap import CollectiveSteps, run_interleaved


class Message:
    """As much of a `dist.Work` as is asked for."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def wait(self) -> None:
        self.told.append(f"wait {self.name}")
        if "lost" in self.name:
            raise RuntimeError(f"{self.name}: the peer is gone")


def a_sum(told: list[str], name: str, waits: int, *, is_elsewhere: bool = False) -> CollectiveSteps[str]:
    for number in range(waits):
        told.append(f"send {name}{number}")
        message: Any = None if is_elsewhere else Message(told, f"{name}{number}")
        yield message
    told.append(f"end {name}")
    return name


def test_one_computes_while_the_messages_of_another_travel() -> None:
    told: list[str] = []
    assert run_interleaved(a_sum(told, name, 2) for name in "abc") == ["a", "b", "c"]
    assert told == [
        *("send a0", "send b0", "wait a0", "send a1", "wait b0", "send b1"),
        *("wait a1", "end a", "send c0", "wait b1", "end b", "wait c0", "send c1", "wait c1", "end c"),
    ]


@pytest.mark.parametrize("at_once", [1, 2, 3, 9])
def test_all_ranks_communicate_in_one_order_also_those_that_have_nothing_to_wait_for(at_once: int) -> None:
    orders = []
    for rank in range(2):
        told: list[str] = []
        waits = {"a": 2, "b": 2, "c": 1, "d": 3, "e": 0, "f": 1}
        sums = (a_sum(told, name, waits[name], is_elsewhere=rank == 1 and name in "bd") for name in waits)
        assert run_interleaved(sums, at_once) == list("abcdef")
        orders.append([line for line in told if not line.startswith("wait")])
    assert orders[0] == orders[1]


def test_sums_are_made_when_their_turn_comes() -> None:
    """Not all at once: each holds memory from its beginning on."""
    told: list[str] = []

    def sums() -> Iterator[CollectiveSteps[str]]:
        for name in "abcd":
            told.append(f"make {name}")
            yield a_sum(told, name, 1)

    run_interleaved(sums())
    assert told.index("end a") < told.index("make c")
    assert told.index("end b") < told.index("make d")


def test_what_does_not_wait_ends_at_once_and_nothing_is_nothing() -> None:
    told: list[str] = []
    assert run_interleaved([a_sum(told, "a", 1), a_sum(told, "b", 0)]) == ["a", "b"]
    assert told == ["send a0", "end b", "wait a0", "end a"]
    assert run_interleaved([]) == []


def test_a_lost_message_ends_all_of_them() -> None:
    told: list[str] = []
    with pytest.raises(RuntimeError, match="lost0: the peer is gone"):
        run_interleaved(a_sum(told, name, 1) for name in ("lost", "b", "c"))
    assert "send c0" not in told
