"""Benchmark of the data feed: its store with latency, its data, and its page."""

from __future__ import annotations

import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from benchmarks.planner import data_feed
from benchmarks.planner.data_feed import Comparison
from benchmarks.planner.slow_store import byte_range, slow_store


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, (0, 10)),
        ("bytes=0-3", (0, 4)),
        ("bytes=4-", (4, 10)),
        ("bytes=8-20", (8, 10)),
        ("bytes=-3", (7, 10)),
    ],
)
def test_a_range_is_clipped_to_the_file(header: str | None, expected: tuple[int, int]) -> None:
    assert byte_range(header, 10) == expected


def test_the_store_serves_ranges_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    with slow_store(tmp_path, 0.0) as address:
        part = urllib.request.Request(f"{address}/a.txt", headers={"Range": "bytes=2-4"})
        with urllib.request.urlopen(part) as answer:
            assert (answer.status, answer.read()) == (206, b"234")
            assert answer.headers["Content-Range"] == "bytes 2-4/10"
        with urllib.request.urlopen(f"{address}/a.txt") as answer:
            assert (answer.status, answer.read()) == (200, b"0123456789")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{address}/b.txt")


def test_images_are_jpeg_shards_and_texts_differ(tmp_path: Path) -> None:
    data_feed.write_images(tmp_path / "files", 3)
    (shard,) = (tmp_path / "files").glob("*.tar")
    with tarfile.open(shard) as archive:
        names = archive.getnames()
        file = archive.extractfile("000000.jpg")
        assert file is not None
        assert file.read(2) == b"\xff\xd8"
    assert names == [f"00000{number}.{suffix}" for number in range(3) for suffix in ("jpg", "cls")]


def test_the_page_counts_the_forecasts_within_the_band() -> None:
    right = Comparison("JPEG, disk", "1", "samples/s", 100.0, 90.0, "decoding")
    wrong = Comparison("JPEG, store, 30 ms", "2", "samples/s", 300.0, 100.0, "store requests")
    assert (right.is_right, wrong.is_right) == (True, False)
    text = data_feed.report([right, wrong])
    assert "1 of 2 forecasts are from 0.5 to 2" in text
    assert "| JPEG, disk | 1 | 100 samples/s | 90 samples/s | 1.11 | decoding |" in text
