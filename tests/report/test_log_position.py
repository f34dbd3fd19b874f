"""Position in a log that grows, begins anew or loses its first lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.report.log_position import LogPosition

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
