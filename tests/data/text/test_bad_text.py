"""Bad rows and files of text: refused, or skipped, counted and listed, alike in any number of processes."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data_files import add_member, compress
from support.ranks import run_here
from support.text_formats import build_token_file, json_lines, write_megatron
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.text import encoding_task
from wanma.data.text.encoding_task import ReadingSettings
from wanma.data.text.token_file import TokenFile
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


def build(entries: Sequence[Path], cache: Path, settings: ReadingSettings, count: int = 1) -> TokenFile:
    return build_token_file(entries, cache, settings=settings, process_count=count)


def skipping(limit: int = 100, field: str = "text") -> ReadingSettings:
    return ReadingSettings(field, "skip", limit)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files with bad rows of every kind, and one that is truncated."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [
        b'{"text": "good"}',
        b'{"body": "no field"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "half", ',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b'{"text": "better"}',
    ]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "b.jsonl.zst").write_bytes(compress(json_lines(["lost"] * 200), "zstd")[:-5])
    pq.write_table(pa.table({"text": ["one", None, "two"]}), folder / "c.parquet")
    with tarfile.open(folder / "d.tar", "w") as archive:
        add_member(archive, "0.text", b"fine")
        add_member(archive, "1.text", "café".encode("latin-1"))
        add_member(archive, "2.cls", b"1")
    (folder / "e.txt").write_text("plain")
    return folder


EXPECTED = [
    ("a.jsonl", 1, "it has no field 'text'; its fields are body"),
    ("a.jsonl", 2, "the field 'text' is of type int, neither text nor token ids"),
    ("a.jsonl", 3, "the field 'text' is null, neither text nor token ids"),
    ("a.jsonl", 4, "Expecting property name"),
    ("a.jsonl", 5, "invalid UTF-8 at its byte 10"),
    ("a.jsonl", 6, "the field 'text' holds half a surrogate pair"),
    ("b.jsonl.zst", None, "damaged zstd data"),
    ("c.parquet", 1, "the field 'text' is null"),
    ("d.tar", 1, "the field 'text': invalid UTF-8 at its byte 3"),
    ("d.tar", 2, "the sample '2' has no file .text"),
]


@pytest.mark.parametrize("count", [1, 2])
def test_bad_rows_are_skipped_and_listed_by_file_and_row(
    corpus: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 10)
    file = build([corpus], tmp_path / "cache", skipping(), count)
    assert bytes(file.tokens[file.tokens != 256].tolist()).decode() == "goodbetteronetwofineplain"
    assert file.bad_row_count == len(EXPECTED)
    for (url, row, cause), (name, expected_row, expected) in zip(file.bad_rows, EXPECTED, strict=True):
        assert (Path(url).name, row) == (name, expected_row)
        assert expected in cause
    assert file.header["skipped"]["empty"] == 1, "an empty text is an empty document, as an empty file is"


@pytest.mark.parametrize("policy", [None, "refuse"])
def test_the_first_bad_row_is_refused(corpus: Path, tmp_path: Path, policy: str | None) -> None:
    with pytest.raises(JobError, match=r"text\[0\]: .*a\.jsonl: row 1: .* 'text'") as error:
        build([corpus], tmp_path / "cache", ReadingSettings(bad_data=policy))
    assert "data.bad_data = 'skip'" in error.value.hint
    assert [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()] == []


def test_more_bad_rows_than_the_limit_are_refused_now_and_later(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"bad_data_limit: .* 9 .*a\.jsonl: row 1"):
        build([corpus], tmp_path / "cache", skipping(9))
    build([corpus], tmp_path / "cache", skipping(10))
    with pytest.raises(JobError, match=r"data\.bad_data_limit: more than 9 rows"):
        build([corpus], tmp_path / "cache", skipping(9))


def test_rows_that_are_all_bad_are_named_by_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": null}\n')
    with pytest.raises(JobError, match=r"empty: .* 2 .*a\.jsonl: row 0: .* int") as error:
        build([tmp_path / "a.jsonl"], tmp_path / "cache", skipping())
    assert "data.columns" in error.value.hint


def test_a_file_of_bad_rows_is_not_read_far_beyond_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + '{"text": 1}\n' * 100_000)
    with pytest.raises(JobError, match="more than 3 rows"):
        build([tmp_path / "a.jsonl"], tmp_path / "cache", skipping(3))


def test_a_damaged_file_of_plain_text_leaves_no_token(tmp_path: Path) -> None:
    content = "".join(f"{number} line\n" for number in range(300_000)).encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content)[:-100])
    (tmp_path / "b.txt").write_text("whole")
    file = build([tmp_path / "a.txt.gz", tmp_path / "b.txt"], tmp_path / "cache", skipping())
    assert bytes(file.tokens[:-1].tolist()) == b"whole"
    assert [(Path(url).name, row) for url, row, _ in file.bad_rows] == [("a.txt.gz", None)]
    with pytest.raises(JobError, match=r"text\[0\]: .*a\.txt\.gz: damaged"):
        build([tmp_path / "a.txt.gz"], tmp_path / "cache", ReadingSettings())


def test_invalid_utf8_of_plain_text_is_kept_unless_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    files = [tmp_path / "latin.txt"]
    for settings in (ReadingSettings(), skipping()):
        file = build(files, tmp_path / "cache", settings)
        assert bytes(file.tokens[:-1].tolist()) == b"caf\xe9"
        assert file.bad_rows == []
    with pytest.raises(JobError, match=r"latin\.txt: invalid UTF-8"):
        build(files, tmp_path / "cache", ReadingSettings(bad_data="refuse"))


def test_token_ids_outside_the_vocabulary_are_skipped(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", [[1, 256], [3, 50_000, 256], [5, 256]])
    file = build([tmp_path / "a.bin", tmp_path / "a.idx"], tmp_path / "cache", skipping())
    assert file.tokens.tolist() == [1, 256, 5, 256]
    assert [row for _, row, _ in file.bad_rows] == [1]


def test_skipped_rows_are_in_the_report_of_the_data(corpus: Path, tmp_path: Path) -> None:
    section = DataSection(
        text=[str(corpus)], sequence_length=4, bad_data="skip", cache=str(tmp_path / "cache"),
        validation_fraction=0,
    )  # fmt: skip
    prepare_job_data(section)
    (source,) = open_dataset(section, TrainSection()).describe()["sources"]
    assert source["bad_rows"]["count"] == len(EXPECTED)
    assert source["bad_rows"]["listed"][0][1:] == [1, "it has no field 'text'; its fields are body"]
    json.dumps(source)


def test_rows_that_were_left_out_are_in_the_records_of_the_run(corpus: Path, tmp_path: Path) -> None:
    keys = {"text": [str(corpus)], "cache": str(tmp_path / "cache"), "sequence_length": 4}
    job = {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {**keys, "validation_fraction": 0, "bad_data": "skip"},
        "train": {"steps": 1, "global_batch": 1},
    }
    outcome = run_here(tmp_path / "run", job, Plan(micro_batch=1))
    (text,) = (one for one in outcome.messages if "bad rows" in one)
    assert f"{len(EXPECTED)} bad rows or files" in text
    assert "a.jsonl: row 1: it has no field 'text'" in text
