"""The supervisor's files for copies of the ranks' state."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from wanma.checkpoint.in_memory.memory_file import MemoryFileHeader, MemoryFileWriter, read_header
from wanma.elastic.protocol.messages import InMemoryCheckpointId, InMemoryCheckpointShard
from wanma.elastic.recovery.in_memory_checkpoint_files import InMemoryCheckpointFiles
from wanma.elastic.workers.progress_board import ProgressBoard
from wanma.job.errors import WanmaError


@pytest.fixture
def files() -> Iterator[InMemoryCheckpointFiles]:
    files = InMemoryCheckpointFiles(2)
    yield files
    files.close()


def write(path: str, step: int, rank: int = 0, generation: int = 1, whole: bool = True) -> None:
    image = MemoryFileWriter(path)
    content = image.content(8)
    image.mark_incomplete(MemoryFileHeader(step, generation, rank, world_size=2))
    if whole:
        image.finish(8, xxhash.xxh3_128(content), b"{}")
    content.release()
    image.close()


def test_more_ranks_than_files_may_be_open_are_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(WanmaError, match=r"1,000 ranks on one node .*\(256\)") as caught:
            InMemoryCheckpointFiles(1000)
        os.close(os.dup(0))  # those that it had are closed again
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.hint


def test_files_are_empty_at_first_and_can_be_opened_by_others(files: InMemoryCheckpointFiles) -> None:
    assert files.list_complete_shards() == ()
    paths = [path for local_rank in (0, 1) for path in files.get_write_paths(local_rank, None)]
    assert len(set(paths)) == 4
    assert [Path(path).stat().st_size for path in paths] == [0, 0, 0, 0]


def test_only_whole_images_are_held(files: InMemoryCheckpointFiles) -> None:
    one, other = files.get_write_paths(1, None)
    write(one, step=4, rank=5, generation=2)
    write(other, step=5, rank=5, generation=2, whole=False)
    assert files.list_complete_shards() == (InMemoryCheckpointShard(5, InMemoryCheckpointId(2, 4), 2),)


def test_what_is_restored_from_is_overwritten_last(files: InMemoryCheckpointFiles) -> None:
    one, other = files.get_write_paths(0, None)
    write(one, step=4)
    write(other, step=5)
    assert files.get_write_paths(0, InMemoryCheckpointId(1, 4)) == (other, one)
    assert files.get_write_paths(0, InMemoryCheckpointId(1, 5)) == (one, other)


def test_images_of_that_moment_are_found_and_no_others(files: InMemoryCheckpointFiles) -> None:
    mine, theirs = files.get_write_paths(0, None), files.get_write_paths(1, None)
    write(mine[0], step=4, rank=2)
    write(mine[1], step=5, rank=2)
    write(theirs[0], step=4, rank=3)
    write(theirs[1], step=4, rank=3, generation=2)
    assert files.get_restore_paths(InMemoryCheckpointId(1, 4)) == {"2": (mine[0],), "3": (theirs[0],)}
    assert files.get_restore_paths(InMemoryCheckpointId(1, 9)) == {}
    head = read_header(mine[1])
    assert head is not None
    assert head.step == 5


def test_guests_have_files_of_their_own_that_stay_theirs(files: InMemoryCheckpointFiles) -> None:
    """Node 0 of [2, 3] takes the images of ranks 2, 3 and 4."""
    files.allocate(2, (2, 3, 4), None)
    by_rank = [files.get_backup_paths(rank, (2, 3), None) for rank in (0, 1)]
    assert [sorted(guests) for guests in by_rank] == [["2", "4"], ["3"]]
    one, other = by_rank[0]["4"]
    write(one, step=7, rank=4)
    write(other, step=8, rank=4)
    write(files.get_write_paths(0, None)[0], step=7, rank=0)
    assert set(files.list_complete_shards()) == {
        InMemoryCheckpointShard(0, InMemoryCheckpointId(1, 7), 2),
        *(InMemoryCheckpointShard(4, InMemoryCheckpointId(1, n), 2) for n in (7, 8)),
    }
    assert files.get_restore_paths(InMemoryCheckpointId(1, 8)) == {"4": (other,)}
    assert files.get_backup_paths(0, (2, 3), InMemoryCheckpointId(1, 7))["4"] == (other, one)
    assert files.get_backup_paths(0, (2,), None) == {}


def test_pairs_are_shared_out_anew_and_only_what_is_restored_from_outlives_its_use(
    files: InMemoryCheckpointFiles,
) -> None:
    files.allocate(2, (2, 3, 4), None)
    write(files.get_write_paths(1, None)[0], step=7, rank=1)
    write(files.get_backup_paths(0, (2, 3), None)["4"][0], step=7, rank=4)
    files.allocate(1, (), InMemoryCheckpointId(1, 7))
    assert set(files.get_restore_paths(InMemoryCheckpointId(1, 7))) == {"1", "4"}, (
        "both are needed, wherever they lie"
    )
    files.allocate(1, (), InMemoryCheckpointId(2, 9))
    assert files.get_restore_paths(InMemoryCheckpointId(1, 7)) == {}
    assert len(files.get_write_paths(0, None)) == 2


def test_the_board_tells_the_newest_finished_step() -> None:
    board = ProgressBoard.create(1)
    writer = board.writer(0)
    assert board.read_progress(0).last_finished_step is None
    writer.report_progress(7, "waiting for data")
    assert board.read_progress(0).last_finished_step is None, (
        "a step that was taken up is not one that was finished"
    )
    writer.report_finished_step(8)
    assert (
        board.read_progress(0).step,
        board.read_progress(0).last_finished_step,
        board.read_progress(0).phase,
    ) == (8, 8, "step done")
    writer.report_progress(8, "waiting for data")
    assert board.read_progress(0).last_finished_step == 8
    board.close()
