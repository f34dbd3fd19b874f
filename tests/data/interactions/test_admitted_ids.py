"""Rows for raw ids: which ids get one of their own, which share, and which give theirs to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from wanma.data.interactions.admitted_ids import AdmittedIds
from wanma.data.interactions.dataset import InteractionDataset
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.sections.data import DataSection

LARGE = (1 << 63) - 1


def ids_of(admitted: AdmittedIds) -> list[int]:
    found: list[int] = admitted.table[:, 0].tolist()
    return found


def test_new_ids_follow_in_the_order_of_their_counts_and_known_ones_stay() -> None:
    first = AdmittedIds.none(2).admit(np.array([7, LARGE, 5, 5, 9, LARGE]), max_rows=9)
    assert ids_of(first) == [-1, -1, LARGE, 5, 7, 9]
    second = first.admit(np.array([3, 4, 4, 5, 8, 8, 8]), max_rows=8)
    assert ids_of(second) == [-1, -1, LARGE, 5, 7, 9, 8, 4]  # none is left for 3
    assert second.table[:, 1].tolist() == [0, 0, 1, 0, 1, 1, 0, 0]
    rows = second.rows_of(np.array([8, LARGE, 3, 0, 9]))
    assert rows[[0, 1, 4]].tolist() == [6, 2, 5]
    assert all(row < 2 for row in rows[[2, 3]])


def test_rare_ids_share_rows_the_same_everywhere() -> None:
    admitted = AdmittedIds.none(50).admit(np.array([1, 2, 2, 3, 3, 3]), max_rows=99, min_count=3)
    assert ids_of(admitted)[50:] == [3]
    unknown = np.arange(10, 2010)
    rows = admitted.rows_of(unknown)
    assert set(rows.tolist()) == set(range(50))
    assert rows.tolist() == AdmittedIds.none(50).rows_of(unknown).tolist()
    assert admitted.rows_of(np.array([2, LARGE])).tolist() == [36, 49]  # of every version


def test_a_full_table_gives_the_rows_of_ids_that_were_not_used_for_longest_to_new_ones() -> None:
    admitted = AdmittedIds.none(1).admit(np.array([1, 2, 3, 4]), max_rows=5)
    for ids in ([1, 2, 3], [1, 2]):
        admitted = admitted.admit(np.array(ids), max_rows=5)
    assert admitted.table[:, 1].tolist() == [0, 0, 0, 1, 2]
    for runs, expected in ((None, [1, 2, 3, 4]), (3, [1, 2, 3, 8]), (2, [1, 2, 9, 8]), (1, [7, 6, 9, 8])):
        after = admitted.admit(np.array([8, 8, 8, 9, 9, 7, 6]), max_rows=5, evict_after_runs=runs)
        assert ids_of(after)[1:] == expected


def section_of(folder: Path, rows: list[tuple[Any, ...]], **keys: Any) -> DataSection:
    text = "\n".join(["user,item,rating,time,tags", *(",".join(map(str, row)) for row in rows)])
    (folder / "log.csv").write_text(text + "\n")
    own: dict[str, Any] = {
        "path": str(folder / "log.csv"),
        "cache": str(folder / "cache"),
        "kind": "interactions",
    }
    own["validation_fraction"] = 0.1
    return DataSection.model_validate({**own, "columns": {"sparse": ["tags"]}, "interactions": keys})


ROWS = [(LARGE - n % 3, 10**15 + n % 5, n % 2, n, f"{n % 4}") for n in range(30)]


@pytest.mark.parametrize("ranks_items", [True, False])
def test_a_data_set_has_rows_in_place_of_ids(ranks_items: bool, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"admit_rows": {"*": 40}, "shared_rows": 4}
    keys |= {"target": "click", "split": "leave_last"} if ranks_items else {"split": "time"}
    rows = [*ROWS, (LARGE, 77, 1, 99, "5|77")]  # 77 and 5 are in no training row
    data = InteractionDataset(section_of(tmp_path, rows, **keys), 1, 100)
    assert data.interaction_sizes.tables == {"user": 7, "item": 9, "tags": 8}
    assert data.interaction_sizes.shared_rows == {"user": 4, "item": 4, "tags": 4}
    batch = data.batch(range(data.train_samples)).keywords
    for name, values in (("user", 3), ("item", 5), ("tags", 4)):
        assert sorted(set(batch[name].flatten().tolist())) == list(range(4, 4 + values))
    held_out = data.validation_batch(range(data.validation_samples)).keywords
    assert int(held_out["item"].min()) < 4
    assert int(held_out["tags"].min()) < 4
    assert data.fingerprint == InteractionDataset(section_of(tmp_path, rows, **keys), 2, 100).fingerprint
    if ranks_items:
        raw = {int(user): row for user, row in zip(held_out["user"], held_out["seen"], strict=True)}
        assert len(raw) == 3
        assert all(int((seen >= 0).sum()) in (9, 10) for seen in raw.values())


def test_a_table_without_a_row_left_is_a_warning(tmp_path: Path) -> None:
    section = section_of(tmp_path, ROWS, admit_rows={"item": 6, "user": 40}, shared_rows=4)
    assert "admit_rows: table 'item'" in InteractionDataset(section, 1, 100).bad_data_note
    assert not InteractionDataset(section_of(tmp_path, ROWS, admit_rows={"*": 200}), 1, 100).bad_data_note


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, "x"])
def test_a_value_that_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    rows = [*ROWS[:3], (value, *ROWS[3][1:])]
    with pytest.raises(WanmaError, match=r"row 3: .*column user") as raised:
        InteractionDataset(section_of(tmp_path, rows, admit_rows={"*": 200}), 1, 100)
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("admit_rows", {"admit_rows": {"item": 100}}),  # as many as are shared
        ("admit_rows", {"admit_rows": {"other": 200}}),
        ("hash_rows", {"admit_rows": {"item": 200}, "hash_rows": {"i*": 5}}),
        ("admit_count", {"admit_count": 2}),
        ("evict_after_runs", {"evict_after_runs": 2}),
    ],
)
def test_keys_that_contradict_each_other_are_refused(key: str, keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=key):
        section_of(tmp_path, ROWS, **keys)


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("shared_rows", {"admit_rows": {"*": 40}, "shared_rows": 5}),
        ("admit_rows", {"admit_rows": {"item": 6, "user": 40}, "shared_rows": 4}),
    ],
)
def test_a_table_of_the_run_before_that_does_not_fit_is_refused(
    key: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    known = AdmittedIds.none(4).admit(np.arange(20, 25), max_rows=40).table
    with pytest.raises(JobError, match=f"{key}.*'item'"):
        InteractionDataset(section_of(tmp_path, ROWS, **keys), 1, 100, {"item": known})
