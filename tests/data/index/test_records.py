"""Records of any store and format by their numbers, as a map-style dataset."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from support.data_files import CASES, plain, write_case
from support.s3_server import s3_server
from wanma.data.formats.format import BadDataError
from wanma.data.formats.json_records import JsonLines
from wanma.data.index.records import open_records
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


@pytest.mark.parametrize("name", CASES)
def test_records_of_each_format_come_by_number(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    expected = write_case(name, tmp_path / "data", 20)
    records = open_records(str(tmp_path / "data"), case.data_format, cache=tmp_path / "cache")
    assert len(records) == len(expected)
    assert [plain(record) for record in records.read(range(len(expected)))] == plain(expected)
    assert plain(records[7]) == plain(expected[7])
    with pytest.raises(IndexError):
        records[len(expected)]


def test_a_pickled_copy_reads_the_same(tmp_path: Path) -> None:
    expected = write_case("jsonl", tmp_path / "data", 9)
    records = open_records([str(tmp_path / "data" / "*.jsonl")], "jsonl", cache=tmp_path / "cache")
    copy = pickle.loads(pickle.dumps(records))
    assert (len(copy), copy.fingerprint) == (9, records.fingerprint)
    assert copy[8] == expected[8]


def test_damaged_files_are_refused_or_listed(tmp_path: Path) -> None:
    write_case("tar-gnu", tmp_path / "data", 9)
    content = (tmp_path / "data" / "a.tar").read_bytes()
    (tmp_path / "data" / "b.tar").write_bytes(content[:1000])
    with pytest.raises(BadDataError, match=r"b\.tar: .*truncated"):
        open_records(str(tmp_path / "data"), cache=tmp_path / "cache")
    records = open_records(str(tmp_path / "data"), cache=tmp_path / "cache", skip_damaged=True)
    ((file, cause),) = records.damaged
    assert file.endswith("b.tar")
    assert "truncated" in cause


def test_an_entry_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        open_records(str(tmp_path / "nothing"), cache=tmp_path)


def test_a_dataset_over_records_of_a_store_trains_in_our_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(monkeypatch) as s3:
        url = s3.put("points/a.jsonl", b"".join(b'{"x": [%d, 1], "y": %d}\n' % (n, n % 3) for n in range(12)))
        records = open_records(url, JsonLines(), cache=tmp_path)

        class Points:
            def __len__(self) -> int:
                return len(records)

            def __getitem__(self, number: int) -> tuple[list[int], int]:
                record = records[number]
                return record["x"], record["y"]

        data = open_dataset(
            DataSection(validation_fraction=0), TrainSection(steps=2, global_batch=6), Points()
        )
        batch = data.batch(range(12))
    assert sorted(batch.inputs[0][:, 0].tolist()) == list(range(12))
    assert batch.targets.tolist() == [x % 3 for x in batch.inputs[0][:, 0].tolist()]
