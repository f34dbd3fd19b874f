"""Lines of rank logs by time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from wanma.cli.main import main
from wanma.job.errors import JobError
from wanma.job.run.run_directory import RunDirectory
from wanma.report.log_times import parse_since


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Two ranks that have written in turns, a line of ten bytes each, a record of sizes after each pair."""
    run = RunDirectory(tmp_path / "runs" / "gpt")
    run.create()
    run.job.write_text("")
    records = []
    for number in range(4):
        for rank in range(2):
            with run.rank_log(rank).open("a") as file:
                file.write(f"line {number} {rank}\n" + ("no newline" if number == 3 else ""))
        sizes = [{"rank": rank, "log_bytes": run.rank_log(rank).stat().st_size} for rank in range(2)]
        records.append({"time": time.time() - 100 + 20 * number, "ranks": sizes})
    run.node_usage(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.chdir(tmp_path)
    return run


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["logs", "gpt", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_of_ranks_are_merged_by_time(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--rank", "0,1")
    assert lines[:4] == ["rank-0: line 0 0", "rank-1: line 0 1", "rank-0: line 1 0", "rank-1: line 1 1"]
    assert [line for line in lines if "no newline" not in line] == [
        f"rank-{rank}: line {number} {rank}" for number in range(4) for rank in range(2)
    ]
    unfinished = [line for line in lines if "no newline" in line]
    assert unfinished == ["rank-0: no newline", "rank-1: no newline"], "none is within another's line"
    assert run.rank_log(0).exists()


def test_lines_are_chosen_by_time_and_pattern(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--rank", "1", "--since", "70s", "--grep", "^line") == ["line 2 1", "line 3 1"]
    assert run.name == "gpt"


def test_a_log_without_times_is_printed_whole(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.node_usage(0).unlink()
    assert len(printed(capsys, "--rank", "0", "--since", "1s")) == 5


def test_wrong_times_and_patterns() -> None:
    with pytest.raises(JobError, match="--since yesterday"):
        parse_since("yesterday")
    assert parse_since("2h") == pytest.approx(time.time() - 7200, abs=5)
    assert parse_since("2026-11-28T18:00") > 0


def test_a_log_that_was_emptied_has_the_times_since_then(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    sizes = [(now - 100, 500), (now - 80, 9), (now - 20, 18)]
    records = [{"time": at, "ranks": [{"rank": 0, "log_bytes": size}]} for at, size in sizes]
    run.node_usage(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert printed(capsys, "--rank", "0", "--since", "70s")[0] == "line 1 0"
