"""Position in a log that grows, begins anew or loses its first lines."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

import pytest

from wanma.report.log_position import BLOCK_BYTES, MATCH_BYTES, LogPosition

LINES = "".join(f"step {number}\n" for number in range(1_000))


@pytest.mark.parametrize(
    ("before", "after", "unread"),
    [
        pytest.param("one\n", "one\ntwo\n", "two\n", id="grown"),
        pytest.param("one\n", "one\n", "", id="unchanged"),
        pytest.param("a long line\n", "new\n", "new\n", id="shorter"),
        pytest.param("old\n", "new\nnewer\n", "new\nnewer\n", id="longer"),
        pytest.param("old\n", "new\nold\n", "new\nold\n", id="longer, with the old words"),
        pytest.param("old\n", "", "", id="emptied"),
        pytest.param("", "new\n", "new\n", id="empty before"),
        pytest.param(LINES, LINES[500:] + "newest\n", "newest\n", id="without its first lines"),
        pytest.param("old\n", "new\n", "new\n", id="of the same length"),
    ],
)
def test_what_was_not_read_is_read_once(tmp_path: Path, before: str, after: str, unread: str) -> None:
    log = tmp_path / "log"
    log.write_text(before)
    with log.open("rb") as file:
        position = LogPosition.at(file, len(before))
    log.write_text(after)
    with log.open("rb") as file:
        position.seek(file)
        assert file.read().decode() == unread


class _CountingLog(BytesIO):
    """Log that counts the bytes that are read from it."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.bytes_read += len(data)
        return data


@pytest.mark.parametrize(
    "unread", [0, 1, BLOCK_BYTES - MATCH_BYTES, BLOCK_BYTES - MATCH_BYTES + 1, BLOCK_BYTES, BLOCK_BYTES + 1]
)
def test_of_a_long_log_that_has_lost_lines_only_the_end_is_read(unread: int) -> None:
    read = random.Random(0).randbytes(16 * BLOCK_BYTES)
    position = LogPosition.at(BytesIO(read), len(read))
    log = _CountingLog(read[1:] + bytes(unread))
    position.seek(log)
    assert log.tell() == len(read) - 1
    assert log.bytes_read <= unread + 3 * BLOCK_BYTES
