"""Index: global numbers, fingerprint, changed and damaged files, several builders, kills."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from support.data_files import LocalFile, list_files
from wanma.data.formats.format import BadDataError, FileGroup, Layout
from wanma.data.formats.json_records import JsonLines
from wanma.data.index.build import BadFilesError, open_or_build_index
from wanma.data.index.layout_file import LayoutFileCorruptError, open_layout, serialize
from wanma.data.index.records import open_records
from wanma.data.index.sample_index import SampleIndex
from wanma.data.stores import byte_source
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import usable_cores

BUILDER = """
import sys
from pathlib import Path
from support.data_files import list_files
from wanma.data.formats.json_records import JsonLines
from wanma.data.index.build import open_or_build_index

class Slow(JsonLines):
    def scan(self, group):
        with open(sys.argv[3], "a") as log:
            log.write(group.url + "\\n")
        return super().scan(group)

index = open_or_build_index(list_files(Path(sys.argv[1])), Slow(), Path(sys.argv[2]))
print(index.rows, index.fingerprint)
"""


@dataclass(frozen=True)
class CountedLines(JsonLines):
    """JSON lines that record the names of the files that are scanned."""

    scanned: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, object]:
        return {}

    def scan(self, group: FileGroup) -> Layout:
        self.scanned.append(Path(group.url).name)
        return super().scan(group)


def write_shards(folder: Path, shards: int, rows: int = 10) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        lines = [json.dumps({"shard": shard, "row": row}) for row in range(rows + shard % 3)]
        (folder / f"{shard:04d}.jsonl").write_text("\n".join(lines))


def build(folder: Path, cache: Path, data_format: JsonLines | None = None, **options: bool) -> SampleIndex:
    return open_or_build_index(list_files(folder), data_format or JsonLines(), cache, **options)


def test_samples_of_all_files_have_one_number(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 7)
    index = build(tmp_path / "a", tmp_path / "cache")
    expected = [{"shard": shard, "row": row} for shard in range(7) for row in range(10 + shard % 3)]
    assert index.rows == len(expected)
    numbers = np.random.default_rng(0).integers(0, index.rows, 200)
    assert index.read(numbers) == [expected[number] for number in numbers]
    for wrong in (-1, index.rows):
        with pytest.raises(IndexError):
            index.read(np.array([0, wrong]))


def test_a_thousand_million_samples_are_located_at_once(tmp_path: Path) -> None:
    sizes = np.random.default_rng(1).integers(0, 2_000_000, 1000)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    index = SampleIndex(JsonLines(), [], starts, "", [])
    assert index.rows > 900_000_000
    samples = np.random.default_rng(2).integers(0, index.rows, 100_000)
    numbers, rows = index.locate(samples)
    assert (starts[numbers] + rows == samples).all()
    assert (rows < sizes[numbers]).all()
    assert (rows >= 0).all()


def test_an_index_is_found_again_without_a_scan(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 4)
    lines = CountedLines()
    first = build(tmp_path / "a", tmp_path / "cache", lines)
    assert sorted(lines.scanned) == ["0000.jsonl", "0001.jsonl", "0002.jsonl", "0003.jsonl"]
    second = build(tmp_path / "a", tmp_path / "cache", lines)
    assert len(lines.scanned) == 4
    assert second.fingerprint == first.fingerprint
    assert isinstance(second.row_starts.base, memoryview | np.ndarray)
    assert not second.row_starts.flags.writeable


def test_only_files_that_changed_are_scanned_again(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 4)
    lines = CountedLines()
    before = build(tmp_path / "a", tmp_path / "cache", lines)
    (tmp_path / "a" / "0002.jsonl").write_text('{"new": 1}')
    (tmp_path / "a" / "0009.jsonl").write_text('{"new": 2}')
    lines.scanned.clear()
    after = build(tmp_path / "a", tmp_path / "cache", lines)
    assert sorted(lines.scanned) == ["0002.jsonl", "0009.jsonl"]
    assert after.fingerprint != before.fingerprint
    assert after.read(np.array([after.rows - 1])) == [{"new": 2}]


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    """Equal in another folder and at another time; different for another order."""
    for name in ("a", "b"):
        write_shards(tmp_path / name, 5)
        os.utime(tmp_path / name / "0001.jsonl", (1, 1))
    one = build(tmp_path / "a", tmp_path / "cache-a")
    other = build(tmp_path / "b", tmp_path / "cache-b")
    assert one.fingerprint == other.fingerprint
    reverse = open_or_build_index(list_files(tmp_path / "b")[::-1], JsonLines(), tmp_path / "cache-b")
    assert reverse.fingerprint != one.fingerprint
    content = (tmp_path / "b" / "0003.jsonl").read_text()
    (tmp_path / "b" / "0003.jsonl").write_text(content.replace('"row": 4', '"row": 5'))
    assert build(tmp_path / "b", tmp_path / "cache-b").fingerprint != one.fingerprint


def test_all_damaged_files_are_named_and_the_others_are_kept(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 6)
    for name in ("0001", "0004"):
        (tmp_path / "a" / f"{name}.jsonl").write_bytes(b"\0")
    lines = CountedLines()
    with pytest.raises(BadFilesError, match=r"2 of 6 files .*0001\.jsonl: a zero byte") as raised:
        build(tmp_path / "a", tmp_path / "cache", lines)
    assert [Path(error.file).name for error in raised.value.errors] == ["0001.jsonl", "0004.jsonl"]
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.errors[0].cause == raised.value.errors[0].cause
    lines.scanned.clear()
    (tmp_path / "a" / "0001.jsonl").write_text("{}")
    with pytest.raises(BadDataError, match=r"0004\.jsonl: a zero byte"):
        build(tmp_path / "a", tmp_path / "cache", lines)
    assert sorted(lines.scanned) == ["0001.jsonl", "0004.jsonl"]


def test_damaged_files_count_as_empty_where_that_is_asked_for(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 4)
    (tmp_path / "a" / "0001.jsonl").write_bytes(b"\0")
    for _ in range(2):
        index = build(tmp_path / "a", tmp_path / "cache", skip_damaged=True)
        assert index.rows == 10 + 0 + 12 + 10
        assert [(Path(one.file).name, one.cause[:11]) for one in index.damaged] == [
            ("0001.jsonl", "a zero byte")
        ]
        assert index.read(np.array([10])) == [{"shard": 2, "row": 0}]


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 4)
    seen: list[tuple[int, int]] = []
    files = list_files(tmp_path / "a")
    open_or_build_index(
        files, JsonLines(), tmp_path / "cache", lambda done, total: seen.append((done, total))
    )
    total = sum(file.size for file in files)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 1)
    (tmp_path / "cache").write_text("")
    with pytest.raises(WanmaError, match="cannot keep an index in"):
        build(tmp_path / "a", tmp_path / "cache")


@pytest.mark.parametrize("name", ["*.index", "layouts/*/*.layout"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "removed"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    write_shards(tmp_path / "a", 3)
    first = build(tmp_path / "a", tmp_path / "cache")
    rows = first.read(np.arange(first.rows))
    for path in (tmp_path / "cache" / "index").glob(name):
        content = path.read_bytes()
        path.unlink()
        if damage != "removed":
            changed = {"cut": content[:-1], "flip": content[:30] + b"?" + content[31:], "empty": b""}[damage]
            path.write_bytes(changed)
    (tmp_path / "cache" / "index" / "x").touch()
    index = build(tmp_path / "a", tmp_path / "cache")
    assert index.fingerprint == first.fingerprint
    assert index.read(np.arange(index.rows)) == rows


def test_a_layout_is_stored_as_it_is(tmp_path: Path) -> None:
    tables = {
        "a": np.arange(7, dtype="<i8"),
        "b": np.zeros((0, 2), "<i8"),
        "c": np.arange(6, dtype="u1").reshape(2, 3),
    }
    stored = Layout(7, tables, {"x": ["é", 1]}, "digest", "identity")
    path = tmp_path / "a.layout"
    path.write_bytes(b"".join(serialize(stored)))
    found = open_layout(path)
    assert (found.rows, found.facts, found.identity) == (7, {"x": ["é", 1]}, "identity")
    for name, table in tables.items():
        assert found.tables[name].dtype == table.dtype
        assert found.tables[name].tolist() == table.tolist()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LayoutFileCorruptError, match="bytes, not"):
        open_layout(path)


def start_builder(folder: Path, cache: Path, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(cache), str(log)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_builders_at_the_same_time_scan_each_file_once(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 30)
    builders = [start_builder(tmp_path / "a", tmp_path / "cache", tmp_path / "log") for _ in range(3)]
    outputs = {builder.communicate()[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0, 0]
    assert outputs == {f"{30 * 11} {build(tmp_path / 'a', tmp_path / 'expected').fingerprint}\n"}
    scanned = (tmp_path / "log").read_text().split()
    assert sorted(scanned) == [file.url for file in list_files(tmp_path / "a")]


@pytest.mark.full
def test_a_build_that_is_killed_at_any_point_goes_on(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 60, rows=2000)
    expected = build(tmp_path / "a", tmp_path / "expected")
    generator = random.Random(5)
    for attempt in range(6):
        cache, log = tmp_path / f"cache-{attempt}", tmp_path / f"log-{attempt}"
        kills = 0
        while True:
            builder = start_builder(tmp_path / "a", cache, log)
            enough = generator.randrange(5, 30)
            while builder.poll() is None:
                if log.exists() and len(log.read_text().split()) >= enough * (kills + 1):
                    builder.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.001)
            builder.communicate()
            if builder.returncode == 0:
                break
            assert builder.returncode == -signal.SIGKILL
            kills += 1
        index = build(tmp_path / "a", cache)
        assert index.fingerprint == expected.fingerprint
        assert not list(cache.rglob("*.building"))
        # A kill costs at most the files that were being scanned, one in each thread.
        assert len(log.read_text().split()) <= 60 + max(4, usable_cores()) * kills


def test_listed_files_that_are_missing_stop_the_build(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", 3)
    files: list[LocalFile] = list_files(tmp_path / "a")
    files[1].path.unlink()
    with pytest.raises(BadDataError, match=r"0001\.jsonl: the file is missing"):
        open_or_build_index(files, JsonLines(), tmp_path / "cache")


def test_a_local_file_that_changes_under_a_run_is_named_until_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_source, "WATCH_SECONDS", 0.0)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' * 3)
    status = path.stat()
    records = open_records(str(path), cache=tmp_path / "cache")
    assert records[1] == {"text": "one"}
    path.write_text('{"text": "two"}\n' * 4)
    for _ in range(2):
        with pytest.raises(WanmaError, match=r"a\.jsonl' has changed"):
            records[1]
    path.write_text('{"text": "one"}\n' * 3)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert records[1] == {"text": "one"}
