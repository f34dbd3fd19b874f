"""Equal rows among more than memory holds, against counting by a dictionary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from wanma.data.tools import duplicates
from wanma.data.tools.duplicates import ROW_HASH, DuplicateSearch, EqualRows
from wanma.job.errors import WanmaError

STARTS = np.array([0, 0, 300, 900, 900])
"""First rows of five parts, of which two are empty."""
ROWS = 1000


def hashes() -> np.ndarray:
    generator = np.random.default_rng(3)
    contents = generator.integers(0, 1 << 64, (400, 2), np.uint64)
    contents[:20, 0] = contents[0, 0]  # equal in one half only
    chosen = contents[generator.integers(0, len(contents), ROWS)]
    rows = np.zeros(ROWS, ROW_HASH)
    rows["high"], rows["low"], rows["row"] = chosen[:, 0], chosen[:, 1], np.arange(ROWS)
    return rows


@pytest.mark.parametrize("memory_rows", [10_000, 150, 0])
def test_files_and_memory_find_the_same_as_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_rows: int
) -> None:
    monkeypatch.setattr(duplicates, "_MEMORY_ROWS", memory_rows)
    rows = hashes()
    order = np.random.default_rng(4).permutation(ROWS)
    with DuplicateSearch(tmp_path / "cache") as search:
        for part in np.array_split(rows[order], 9):
            search.add(part)
        assert len(list((tmp_path / "cache").glob("duplicates-*"))) == (memory_rows < ROWS)
        found = search.find(STARTS, 4)
    assert not list((tmp_path / "cache").glob("*")), "files are removed"
    contents = [(int(one["high"]), int(one["low"])) for one in rows]
    firsts = {content: row for row, content in reversed(list(enumerate(contents)))}
    repeated = [row for row, content in enumerate(contents) if firsts[content] != row]
    expected = np.bincount(np.searchsorted(STARTS, repeated, side="right") - 1, minlength=len(STARTS))
    assert found.counts.tolist() == expected.tolist()
    assert found.counts[[0, 3]].tolist() == [0, 0], "empty parts"
    most = sorted(Counter(contents).items(), key=lambda one: (-one[1], firsts[one[0]]))[:4]
    assert found.most_repeated == tuple(EqualRows(count, firsts[content]) for content, count in most)


def test_no_row_has_no_duplicate(tmp_path: Path) -> None:
    with DuplicateSearch(tmp_path) as search:
        found = search.find(np.zeros(0, np.int64), 5)
    assert (found.counts.tolist(), found.most_repeated) == ([], ())


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_MEMORY_ROWS", 10)
    (tmp_path / "file").touch()
    with (
        DuplicateSearch(tmp_path / "file") as search,
        pytest.raises(WanmaError, match=r"cannot keep hashes of rows in .*file"),
    ):
        search.add(hashes())
