"""Arguments of `wanma bench collectives`, and their refusals."""

from __future__ import annotations

import pytest

from wanma.bench.collectives.selection import parse_sizes, select_algorithms, select_dtypes
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


def test_collectives_and_algorithms_narrow_each_other_down() -> None:
    assert select_algorithms([], [], KNOWN) == KNOWN
    assert select_algorithms(["all_reduce"], [], KNOWN) == KNOWN[:2]
    assert select_algorithms([], ["backend"], KNOWN) == (KNOWN[0], KNOWN[2])
    assert select_algorithms(["broadcast"], ["tree"], KNOWN) == (KNOWN[3],)


def test_names_that_there_are_not_are_refused_with_those_there_are() -> None:
    for collectives, algorithms, fact in (
        (["all_reduced"], [], "'all_reduced'.* mean 'all_reduce'"),
        ([], ["butterfly"], "--algorithms: .* 'butterfly'.\n.* from backend, ring, tree"),
        (["broadcast"], ["ring"], "broadcast: ring .*\n.* from tree"),
    ):
        with pytest.raises(JobError, match=fact):
            select_algorithms(collectives, algorithms, KNOWN)


def test_a_precision_is_fp32_unless_others_are_named() -> None:
    assert select_dtypes([]) == ("fp32",)
    assert select_dtypes(["bf16", "fp32", "bf16"]) == ("bf16", "fp32")
    with pytest.raises(JobError, match="--dtypes: unknown name 'fp8'"):
        select_dtypes(["fp8"])
