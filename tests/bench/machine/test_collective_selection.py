"""Selection of collectives: sizes, names, and the words of a command line."""

from __future__ import annotations

import pytest

from wanma.bench.machine.collective_selection import CollectiveSelection, parse_sizes
from wanma.job.errors import JobError

KNOWN = (
    ("all_reduce", "backend"),
    ("all_reduce", "ring"),
    ("all_gather", "backend"),
    ("broadcast", "tree"),
)


def test_sizes_are_a_list_or_a_range_of_fourfold_steps() -> None:
    assert parse_sizes("1K..16K") == (1024, 4096, 16384)
    assert parse_sizes("1K..10K") == (1024, 4096, 10240), "both ends are measured"
    assert parse_sizes("4M, 1KiB,100") == (100, 1024, 4 << 20)
    assert parse_sizes("2K..2K") == (2048,)
    assert len(parse_sizes("1K..256M")) == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a size"),
        ("1X", "'1X' is not a size"),
        ("4K..1K", "the range 4K..1K must rise"),
        ("0", "sizes must be 1 byte to 16G"),
        ("17G", "sizes must be 1 byte to 16G"),
    ],
)
def test_what_is_no_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message.replace(".", r"\.")):
        parse_sizes(text)


def select(collectives: list[str], algorithms: list[str]) -> tuple[tuple[str, str], ...]:
    return CollectiveSelection.parse(None, collectives, algorithms).algorithms_of(KNOWN)


def test_collectives_and_algorithms_narrow_each_other_down() -> None:
    assert select([], []) == KNOWN
    assert select(["all_reduce"], []) == KNOWN[:2]
    assert select([], ["backend"]) == (KNOWN[0], KNOWN[2])
    assert select(["broadcast"], ["tree"]) == (KNOWN[3],)


def test_names_that_there_are_not_are_refused_with_those_there_are() -> None:
    for collectives, algorithms, fact in (
        (["all_reduced"], [], "'all_reduced'.* mean 'all_reduce'"),
        ([], ["butterfly"], "--algorithms: .* 'butterfly'.\n.* from backend, ring, tree"),
        (["broadcast"], ["ring"], "broadcast: ring .*\n.* from tree"),
    ):
        with pytest.raises(JobError, match=fact):
            select(collectives, algorithms)


def test_only_what_is_selected_is_part_of_a_command_line() -> None:
    selection = CollectiveSelection.parse("4K,64K", [], ["ring", "tree"])
    assert selection.words == ("--sizes", "4096,65536", "--algorithms", "ring,tree")
    assert CollectiveSelection.parse("", [], []).words == ()
