"""Rows of fixed length from a stream of documents."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.text.sequence_packing import PackedSequences, find_document_boundaries

END = 99


@given(
    gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=8),
    length=st.integers(1, 9),
    data=st.data(),
)
def test_rows_are_consecutive_pieces_of_the_joined_segments(
    gaps: list[tuple[int, int]], length: int, data: st.DataObject
) -> None:
    tokens = np.arange(200, dtype=np.uint16)
    bounds = np.cumsum([number for gap in gaps for number in gap]).reshape(-1, 2)
    joined = np.concatenate([tokens[start:end] for start, end in bounds]).tolist()
    stream = PackedSequences(tokens, bounds, length)
    assert stream.token_count == len(joined)
    assert stream.sequence_count == max((len(joined) - 1) // length, 0)
    if stream.sequence_count:
        rows = data.draw(st.lists(st.integers(0, stream.sequence_count - 1), min_size=1, max_size=6))
        expected = [joined[row * length : row * length + length + 1] for row in rows]
        found = stream.read(stream.find(np.array(rows)))
        assert found.tolist() == expected
        assert found.dtype == tokens.dtype
        starts = {tokens[start] for start, _ in bounds}
        seams = [[token in starts for token in row] for row in expected]
        assert stream.segment_starts(np.array(rows)).tolist() == seams


def test_a_seam_separates_like_an_end() -> None:
    rows = np.array([[5, 6, 7, 8]])
    documents, positions, foreign = find_document_boundaries(
        rows, np.array([[True, False, True, False]]), END
    )
    assert documents.tolist() == [[0, 0, 1]]
    assert positions.tolist() == [[0, 1, 0]]
    assert foreign.tolist() == [[False, True, False]]


@given(st.lists(st.lists(st.sampled_from([1, 2, END]), min_size=5, max_size=5), min_size=1, max_size=4))
def test_masks_equal_a_plain_walk(rows: list[list[int]]) -> None:
    documents, positions, foreign = find_document_boundaries(
        np.array(rows), np.zeros((len(rows), 5), bool), END
    )
    for number, row in enumerate(rows):
        document = position = 0
        for at in range(4):
            assert (documents[number, at], positions[number, at]) == (document, position)
            assert foreign[number, at] == (row[at] == END)
            document, position = (document + 1, 0) if row[at] == END else (document, position + 1)
