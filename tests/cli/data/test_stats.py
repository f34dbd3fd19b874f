"""`wanma data stats`: rows, bytes, lengths and duplicates, by source and by file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.data_command import DataCommand

TEXTS = ["a" * 10, "b" * 100, "a" * 10, "c", "b" * 100, "a" * 10]
JOB = """\
[model]
preset = "gpt-1m"
[data]
sources = [{name = "x", text = ["x"], weight = 3}, {name = "y", text = ["y"]}]
[train]
steps = 1
global_batch = 1
"""


def test_rows_bytes_and_duplicates_are_counted_by_file(data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", [{"text": text} for text in TEXTS[:3]])
    data.write_lines("in/b.jsonl", [{"text": text} for text in TEXTS[3:]])
    found = data.json("stats", "in")
    (source,) = found["sources"]
    assert [
        (Path(one["file"]).name, one["rows"], one["content_bytes"], one["duplicates"])
        for one in source["files"]
    ] == [
        ("a.jsonl", 3, 120, 1),
        ("b.jsonl", 3, 111, 2),
    ]
    assert source["duplicates"] == 3
    assert source["size"] == sum(path.stat().st_size for path in (data.folder / "in").iterdir())
    assert source["histogram"] == [[1, 1], [2, 0], [4, 0], [8, 0], [16, 3], [32, 0], [64, 0], [128, 2]]
    assert [(one["rows"], one["row"]) for one in found["most_repeated"]] == [(3, 0), (2, 1)]


def test_fields_decide_what_a_duplicate_is(data: DataCommand) -> None:
    data.write_lines("a.jsonl", [{"text": text, "id": number} for number, text in enumerate(TEXTS)])
    counts = [
        data.json("stats", "a.jsonl", *asked)["sources"][0]["duplicates"]
        for asked in ((), ("--fields", "text"), ("--exclude", "id"))
    ]
    assert counts == [0, 3, 3]
    ran = data("stats", "a.jsonl", "--fields", "txt")
    assert ran.code == 2
    assert "no row has a field txt" in ran.told_once()


def test_sources_of_a_job_share_their_duplicates(data: DataCommand) -> None:
    for source in "xy":
        (data.folder / source).mkdir()
        (data.folder / source / "same.txt").write_text("the same")
        (data.folder / source / "own.txt").write_text(source)
    (data.folder / "job.toml").write_text(JOB)
    ran = data("stats", "job.toml")
    ran.check()
    found = data.json("stats", "job.toml")
    assert [(one["name"], one["rows"], one["duplicates"]) for one in found["sources"]] == [
        ("x", 2, 0),
        ("y", 2, 1),
    ]
    assert re.search(r"^y +text +2 +2 .* 1 \(50.0 %\)", ran.out, re.MULTILINE)


def test_equal_images_are_duplicates_wherever_they_lie(data: DataCommand) -> None:
    for name, color in (("a/1.png", 1), ("a/2.png", 1), ("b/3.png", 2)):
        data.write_image(f"pictures/{name}", (color, 0, 0))
    assert data.json("stats", "pictures")["sources"][0]["duplicates"] == 1


def test_damaged_rows_are_counted(data: DataCommand) -> None:
    (data.folder / "a.jsonl").write_text('{"text": "a"}\n{\n{"text": "b"}\n')
    (source,) = data.json("stats", "a.jsonl")["sources"]
    assert (source["rows"], source["damaged"]) == (3, 1)


def test_processes_count_as_one_does(data: DataCommand) -> None:
    for number in range(4):
        data.write_lines(f"in/{number}.jsonl", [{"text": text * number} for text in TEXTS * 50])
    one, two = (data.json("stats", "in", "--processes", count) for count in ("1", "2"))
    assert one == two


@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_of_any_width_shows_every_number(columns: int, data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", [{"text": text} for text in TEXTS])
    data.write_lines("in/b.jsonl", [{"text": text} for text in TEXTS])
    ran = data("stats", "in", columns=columns)
    assert ran.code == 0
    assert "9 (75.0 %)" in ran.out
    assert "up to 16 B" in ran.out
    assert "6 times:" in ran.out


def test_an_empty_folder_is_one_message(data: DataCommand) -> None:
    (data.folder / "in").mkdir()
    ran = data("stats", "in")
    assert ran.code == 2
    assert "no file in the folder 'in'" in ran.told_once()
