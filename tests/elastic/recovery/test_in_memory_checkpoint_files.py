"""The supervisor's files for copies of the ranks' state."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from wanma.checkpoint.in_memory.memory_file import Head, ImageFile, read_head
from wanma.elastic.protocol.messages import HeldImage, Image
from wanma.elastic.recovery.in_memory_checkpoint_files import ImageFiles
from wanma.elastic.workers.progress_board import Board
from wanma.job.errors import WanmaError


@pytest.fixture
def files() -> Iterator[ImageFiles]:
    files = ImageFiles(2)
    yield files
    files.close()


def write(path: str, step: int, rank: int = 0, generation: int = 1, whole: bool = True) -> None:
    image = ImageFile(path)
    content = image.content(8)
    image.begin(Head(step, generation, rank, world_size=2))
    if whole:
        image.finish(8, xxhash.xxh3_128(content), b"{}")
    content.release()
    image.close()


def test_more_ranks_than_files_may_be_open_are_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(WanmaError, match=r"1,000 ranks on one machine .*\(256\)") as caught:
            ImageFiles(1000)
        os.close(os.dup(0))  # those that it had are closed again
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.hint


def test_files_are_empty_at_first_and_can_be_opened_by_others(files: ImageFiles) -> None:
    assert files.held() == ()
    paths = [path for local_rank in (0, 1) for path in files.to_write(local_rank, None)]
    assert len(set(paths)) == 4
    assert [Path(path).stat().st_size for path in paths] == [0, 0, 0, 0]


def test_only_whole_images_are_held(files: ImageFiles) -> None:
    one, other = files.to_write(1, None)
    write(one, step=4, rank=5, generation=2)
    write(other, step=5, rank=5, generation=2, whole=False)
    assert files.held() == (HeldImage(5, Image(2, 4), 2),)


def test_what_is_restored_from_is_overwritten_last(files: ImageFiles) -> None:
    one, other = files.to_write(0, None)
    write(one, step=4)
    write(other, step=5)
    assert files.to_write(0, Image(1, 4)) == (other, one)
    assert files.to_write(0, Image(1, 5)) == (one, other)


def test_images_of_that_moment_are_found_and_no_others(files: ImageFiles) -> None:
    mine, theirs = files.to_write(0, None), files.to_write(1, None)
    write(mine[0], step=4, rank=2)
    write(mine[1], step=5, rank=2)
    write(theirs[0], step=4, rank=3)
    write(theirs[1], step=4, rank=3, generation=2)
    assert files.found(Image(1, 4)) == {"2": (mine[0],), "3": (theirs[0],)}
    assert files.found(Image(1, 9)) == {}
    head = read_head(mine[1])
    assert head is not None
    assert head.step == 5


def test_guests_have_files_of_their_own_that_stay_theirs(files: ImageFiles) -> None:
    """Node 0 of [2, 3] takes the images of ranks 2, 3 and 4."""
    files.arrange(2, (2, 3, 4), None)
    by_rank = [files.for_guests(rank, (2, 3), None) for rank in (0, 1)]
    assert [sorted(guests) for guests in by_rank] == [["2", "4"], ["3"]]
    one, other = by_rank[0]["4"]
    write(one, step=7, rank=4)
    write(other, step=8, rank=4)
    write(files.to_write(0, None)[0], step=7, rank=0)
    assert set(files.held()) == {
        HeldImage(0, Image(1, 7), 2),
        *(HeldImage(4, Image(1, n), 2) for n in (7, 8)),
    }
    assert files.found(Image(1, 8)) == {"4": (other,)}
    assert files.for_guests(0, (2, 3), Image(1, 7))["4"] == (other, one)
    assert files.for_guests(0, (2,), None) == {}


def test_pairs_are_shared_out_anew_and_only_what_is_restored_from_outlives_its_use(
    files: ImageFiles,
) -> None:
    files.arrange(2, (2, 3, 4), None)
    write(files.to_write(1, None)[0], step=7, rank=1)
    write(files.for_guests(0, (2, 3), None)["4"][0], step=7, rank=4)
    files.arrange(1, (), Image(1, 7))
    assert set(files.found(Image(1, 7))) == {"1", "4"}, "both are needed, wherever they lie"
    files.arrange(1, (), Image(2, 9))
    assert files.found(Image(1, 7)) == {}
    assert len(files.to_write(0, None)) == 2


def test_the_board_tells_the_newest_finished_step() -> None:
    board = Board.create(1)
    writer = board.writer(0)
    assert board.read(0).done is None
    writer.write(7, "waiting for data")
    assert board.read(0).done is None, "a step that was taken up is not one that was finished"
    writer.step_done(8)
    assert (board.read(0).step, board.read(0).done, board.read(0).phase) == (8, 8, "step done")
    writer.write(8, "waiting for data")
    assert board.read(0).done == 8
    board.close()
