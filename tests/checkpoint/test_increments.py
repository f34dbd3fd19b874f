"""Incremental checkpoints: changed rows alone are written, and what is loaded is what a full save holds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from wanma.checkpoint.format.manifest import Box
from wanma.checkpoint.inspection.integrity_scan import LocalFiles, scan_checkpoint
from wanma.checkpoint.load.reader import (
    CheckpointReader,
    find_defects,
    find_newest_valid,
    load_full_tensors,
    load_tensors,
)
from wanma.checkpoint.save import commit
from wanma.checkpoint.save.checkpointer import Checkpointer, SaveResult
from wanma.checkpoint.store.checkpoint_folder import list_committed

ROWS, WIDTH = 4000, 8
ROW_BYTES = WIDTH * 4 + 8


class Table:
    """A table with a state for each row, and a dense weight."""

    def __init__(self) -> None:
        self.tensors = {
            "table": torch.randn(ROWS, WIDTH),
            "state": torch.zeros(ROWS),
            "dense": torch.randn(3, 3),
        }
        self.changed = torch.zeros(ROWS, dtype=torch.bool)

    def change(self, *rows: int) -> None:
        self.tensors["table"][list(rows)] += 1
        self.tensors["state"][list(rows)] += 1
        self.tensors["dense"] += 1
        self.changed[list(rows)] = True

    def save(self, checkpointer: Checkpointer, step: int, *, full: bool = False) -> SaveResult:
        rows = None if full else {"table": self.changed, "state": self.changed}
        checkpointer.save(step, self.tensors, {"step": step}, changed_rows=rows)
        if full:
            self.changed.zero_()
        (result,) = checkpointer.wait()
        return result

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def same(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = load_full_tensors(path)
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def test_an_increment_loads_as_a_full_save_and_costs_what_has_changed(tmp_path: Path) -> None:
    table, states, sizes = Table(), {}, {}
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        for step, rows in enumerate([(), (2, 3999), (2, 7), (), (11,)], start=1):
            if rows:
                table.change(*rows)
            result = table.save(checkpointer, step, full=step in (1, 4))
            assert result.error is None
            states[step], sizes[step] = table.copy(), result.total_bytes
    for step, state in states.items():
        assert same(step_path(tmp_path, step), state)
        assert find_defects(step_path(tmp_path, step)) == []
        assert scan_checkpoint(f"step-{step:08d}", LocalFiles(step_path(tmp_path, step))).is_valid
    assert all(size is not None and size > ROWS * ROW_BYTES // 2 for size in (sizes[1], sizes[4]))
    assert all(size is not None and size < 2000 for size in (sizes[2], sizes[3], sizes[5]))


def test_any_box_of_an_increment_can_be_read(tmp_path: Path) -> None:
    table = Table()
    with Checkpointer(tmp_path) as checkpointer:
        table.save(checkpointer, 1, full=True)
        table.change(0, 1, 1999, 2000, 3999)
        table.save(checkpointer, 2)
    reader = CheckpointReader(step_path(tmp_path, 2))
    for start, count, column, width in ((0, 2, 0, 8), (1, 1999, 3, 2), (2000, 2000, 7, 1), (5, 0, 0, 8)):
        part = reader.read("table", Box((start, column), (count, width)))
        assert torch.equal(part, table.tensors["table"][start : start + count, column : column + width])
    larger = {"table": torch.full((ROWS + 5, WIDTH), -1.0)}
    load_tensors(step_path(tmp_path, 2), larger, strict=False, extended_names=["table"])
    assert torch.equal(larger["table"][:ROWS], table.tensors["table"])
    assert (larger["table"][ROWS:] == -1).all()


def test_a_full_save_may_be_removed_before_its_increments(tmp_path: Path) -> None:
    table = Table()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        table.save(checkpointer, 1, full=True)
        for step in (2, 3, 4):
            table.change(step)
            assert table.save(checkpointer, step).error is None
            assert [saved for saved, _ in list_committed(tmp_path)] == [step]
    assert same(step_path(tmp_path, 4), table.tensors)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_ends_before_its_commit_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table()
    with Checkpointer(tmp_path) as checkpointer:
        table.save(checkpointer, 1, full=True)
        before = table.copy()
        table.change(5)

        def end(*_: Any) -> None:
            raise SystemExit

        with monkeypatch.context() as patched:
            patched.setattr(commit, "dump_manifest", end)  # as by SIGKILL: nothing is cleaned up
            checkpointer.save(2, table.tensors, {"step": 2}, changed_rows={"table": table.changed})
            assert checkpointer.wait() == []
    assert [path.name for path in tmp_path.glob("*.partial-*/base-*")] == ["base-00000.safetensors"]
    assert Checkpointer(tmp_path).removed_saves == ["step-00000002.partial-0-2"]
    assert find_newest_valid(tmp_path) == step_path(tmp_path, 1)
    assert same(step_path(tmp_path, 1), before)


@pytest.mark.parametrize("damage", ["missing", "shorter", "other content"])
def test_a_damaged_file_of_the_full_save_makes_its_increments_invalid_too(
    damage: str, tmp_path: Path
) -> None:
    table = Table()
    with Checkpointer(tmp_path) as checkpointer:
        table.save(checkpointer, 1, full=True)
        table.change(5)
        table.save(checkpointer, 2)
    file = step_path(tmp_path, 2) / "base-00000.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-1] if damage == "shorter" else content[:-1] + b"x")
    (problem,) = find_defects(step_path(tmp_path, 2))
    assert problem.startswith("base-00000.safetensors")


def test_a_file_system_without_hard_links_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    table = Table()
    with Checkpointer(tmp_path) as checkpointer:
        table.save(checkpointer, 1, full=True)
        table.change(1)
        error = table.save(checkpointer, 2).error
        assert error is not None
        assert "checkpoint.full_every" in error.hint
        assert not checkpointer.can_save_increment
        assert table.save(checkpointer, 3, full=True).error is None
        assert checkpointer.can_save_increment
