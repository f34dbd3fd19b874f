"""The split between training and validation never leaks."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.text.sequence_packing import ValidationSplit, split_documents
from wanma.data.text.token_file import TokenFile
from wanma.job.errors import JobError


def file_of(lengths: list[int], digests: list[int]) -> TokenFile:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenFile(
        Path(), {}, np.zeros(offsets[-1], np.uint16), offsets, np.array(digests, dtype=np.uint64)
    )


def hashes(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64).tolist()


def covered(segments: np.ndarray) -> set[int]:
    return {position for start, end in segments for position in range(start, end)}


def documents_in(file: TokenFile, segments: np.ndarray) -> set[int]:
    inside = covered(segments)
    return {
        int(digest)
        for digest, start, end in zip(file.digests, file.offsets[:-1], file.offsets[1:], strict=True)
        if end > start and start in inside
    }


corpora = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=30)
contents = hashes(13)


@given(
    sources=st.lists(corpora, min_size=1, max_size=3),
    fraction=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9]),
    sequence_length=st.integers(1, 20),
)
def test_sides_never_share_a_document_and_each_gets_a_sequence(
    sources: list[list[tuple[int, int]]], fraction: float, sequence_length: int
) -> None:
    # equal content has equal length
    lengths = {which: length for source in sources for length, which in source}
    files = [
        file_of([lengths[which] for _, which in source], [contents[which] for _, which in source])
        for source in sources
    ]
    if min(len(file.tokens) for file in files) < 4 * (sequence_length + 1) / (1 - fraction) + 30:
        with suppress(JobError):  # too little text: refused or split, but never split wrongly
            check_split(files, split_documents(files, fraction, sequence_length), fraction, sequence_length)
        return
    check_split(files, split_documents(files, fraction, sequence_length), fraction, sequence_length)


def check_split(
    files: list[TokenFile], splits: list[ValidationSplit], fraction: float, sequence_length: int
) -> None:
    for file, split in zip(files, splits, strict=True):
        assert covered(split.train) | covered(split.validation) == set(range(len(file.tokens)))
        assert not covered(split.train) & covered(split.validation)
        assert len(covered(split.train)) > sequence_length
    if fraction:
        assert max(len(covered(split.validation)) for split in splits) > sequence_length
    if not splits[0].validation_tail_fraction:
        train = set().union(*(documents_in(f, s.train) for f, s in zip(files, splits, strict=True)))
        kept = set().union(*(documents_in(f, s.validation) for f, s in zip(files, splits, strict=True)))
        assert not train & kept


def test_the_share_of_documents_is_the_fraction() -> None:
    file = file_of([10] * 20_000, hashes(20_000))
    (split,) = split_documents([file], 0.1, 8)
    assert len(covered(split.validation)) / 200_000 == pytest.approx(0.1, abs=0.01)


def test_adding_documents_moves_none_to_the_other_side() -> None:
    digests = hashes(2000)
    before = file_of([10] * 1000, digests[:1000])
    after = file_of([10] * 2000, digests)
    (first,), (second,) = split_documents([before], 0.1, 8), split_documents([after], 0.1, 8)
    assert documents_in(before, first.validation) <= documents_in(after, second.validation)


def test_a_huge_document_on_the_wrong_side_stays_in_training() -> None:
    digests = [1, 2**63, 2**63 + 1]  # the first falls into validation by its hash
    (split,) = split_documents([file_of([10_000, 50, 60], digests)], 0.01, 16)
    assert split.train.tolist() == [[0, 10_000], [10_050, 10_110]]
    assert split.validation.tolist() == [[10_000, 10_050]]


def test_a_single_document_is_split_inside_at_the_fraction() -> None:
    (split,) = split_documents([file_of([10_000], [5])], 0.1, 16)
    assert split.validation_tail_fraction == 0.1
    assert split.train.tolist() == [[0, 9000]]
    assert split.validation.tolist() == [[9000, 10_000]]


def test_copies_of_one_document_are_split_at_the_same_place() -> None:
    (split,) = split_documents([file_of([1000, 1000], [5, 5])], 0.1, 16)
    assert split.train.tolist() == [[0, 900], [1000, 1900]]


def test_neighbours_are_one_segment() -> None:
    (split,) = split_documents([file_of([10] * 100, [2**63] * 99 + [0])], 0.01, 8)
    assert split.train.tolist() == [[0, 990]]


@pytest.mark.parametrize(("tokens", "fraction"), [(16, 0.0), (16, 0.01), (20, 0.01), (30, 0.9)])
def test_too_little_text_names_the_sequence_length(tokens: int, fraction: float) -> None:
    with pytest.raises(JobError, match=r"data\.sequence_length: 16 is too long"):
        split_documents([file_of([tokens], [5])], fraction, 16)
