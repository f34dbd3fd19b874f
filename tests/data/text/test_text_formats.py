"""Text of any format: the tokens of the same documents as plain text, and formats that hold tokens."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from support.data_files import compress
from support.text_formats import TEXT_CASES, build_token_file, json_lines, write_megatron, write_plain
from wanma.data.documents.text_files import list_documents, read_chunks
from wanma.data.opening import open_dataset
from wanma.data.stores import byte_source
from wanma.data.text import encoding_task
from wanma.data.text.encoding_task import ReadingSettings
from wanma.data.text.token_file import TokenFile
from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

LONG = "".join(f"{number} a long document\n" for number in range(60_000))
DOCUMENTS = [
    "one",
    'quotes " and , commas',
    "lines\nof\r\ntext\n",
    "万马 é \U0001f40e",
    " ",
    "same",
    "same",
    *[" ".join(random.Random(seed).choices("abcdefg", k=seed)) for seed in range(1, 20)],
]


def build(entries: Sequence[str | Path], cache: Path, field: str = "text", **keywords: Any) -> TokenFile:
    return build_token_file(entries, cache, settings=ReadingSettings(field), **keywords)


def texts(file: TokenFile) -> list[str]:
    bounds = zip(file.offsets[:-1], file.offsets[1:], strict=True)
    return [bytes(file.tokens[start : end - 1].tolist()).decode() for start, end in bounds]


@pytest.fixture
def plain(tmp_path: Path) -> TokenFile:
    (tmp_path / "plain").mkdir()
    write_plain(tmp_path / "plain", DOCUMENTS)
    return build([tmp_path / "plain"], tmp_path / "plain-cache")


@pytest.mark.parametrize("name", TEXT_CASES)
def test_each_format_gives_the_token_file_of_the_same_documents_as_plain_text(
    name: str, plain: TokenFile, tmp_path: Path
) -> None:
    case = TEXT_CASES[name]
    (tmp_path / "corpus").mkdir()
    case.write(tmp_path / "corpus", DOCUMENTS)
    file = build([tmp_path / "corpus"], tmp_path / "cache", field=case.field)
    assert texts(file) == DOCUMENTS
    assert file.fingerprint == plain.fingerprint
    assert file.digests.tolist() == plain.digests.tolist()
    assert [path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()] == [
        file.folder.name
    ]
    assert sorted(path.name for path in file.folder.iterdir()) == [
        "digests.bin", "header.json", "offsets.bin", "tokens.bin", "verified.json",
    ]  # fmt: skip


def test_a_long_document_has_the_same_tokens_from_any_format(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0, "long": 1, "document": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json")
    for name in ("plain", "parquet"):
        (tmp_path / name).mkdir()
    write_plain(tmp_path / "plain", [LONG, "a"])
    TEXT_CASES["parquet"].write(tmp_path / "parquet", [LONG, "a"])
    files = [
        build([tmp_path / name], tmp_path / "cache", tokenizer=tokenizer) for name in ("plain", "parquet")
    ]
    assert len(LONG) > 1 << 20
    assert files[0].fingerprint == files[1].fingerprint


@pytest.mark.parametrize("name", ["jsonl", "parquet", "tar", "arrow"])
def test_a_large_file_is_cut_into_tasks_and_encoded_by_processes(
    name: str, plain: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_task, "_UNCUT_GROUP_BYTES", 100)
    monkeypatch.setattr(encoding_task, "_ROW_TASK_BYTES", 200)
    case = TEXT_CASES[name]
    (tmp_path / "corpus").mkdir()
    case.write(tmp_path / "corpus", DOCUMENTS)
    seen: list[tuple[int, int]] = []
    file = build(
        [tmp_path / "corpus"],
        tmp_path / "cache",
        field=case.field,
        process_count=2,
        progress=lambda *done: seen.append(done),
    )
    assert file.fingerprint == plain.fingerprint
    assert len(seen) > 3
    assert seen == sorted(seen)


def test_formats_are_mixed_in_the_order_of_the_entries(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.jsonl.zst").write_bytes(compress(json_lines(["second", "third"]), "zstd"))
    pq.write_table(pa.table({"text": ["fourth"]}), tmp_path / "c.parquet")
    write_megatron(tmp_path / "d.bin", [[102, 105, 102, 116, 104, 256]])
    (tmp_path / "e.txt").write_text("sixth")
    file = build([tmp_path], tmp_path.parent / "cache")
    assert texts(file) == ["first", "second", "third", "fourth", "fifth", "sixth"]
    assert file.header["formats"] == {"text": 2, "jsonl": 1, "parquet": 1, "megatron": 1}


def test_a_large_frame_of_zstd_is_found_by_its_first_block(tmp_path: Path) -> None:
    """Its first block ends behind the first bytes that are read of other files."""
    generator = random.Random(1)
    lines = [generator.randbytes(300).hex() for _ in range(2000)]
    (tmp_path / "a.jsonl.zst").write_bytes(compress(json_lines(lines), "zstd"))
    assert texts(build([tmp_path / "a.jsonl.zst"], tmp_path / "cache")) == lines


def test_plain_text_is_decompressed_by_its_content(tmp_path: Path) -> None:
    for name, codec in (("a.txt.zst", "zstd"), ("b.txt", "zstd"), ("c", "gzip")):
        (tmp_path / name).write_bytes(compress(name.encode() * 3, codec))
    found = [b"".join(read_chunks(document)) for document in list_documents([str(tmp_path)])]
    assert found == [b"a.txt.zst" * 3, b"b.txt" * 3, b"c" * 3]


def tokens_of(documents: Sequence[str], end: bool) -> list[list[int]]:
    return [[*text.encode(), *([256] if end else [])] for text in documents]


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
@pytest.mark.parametrize("end", [True, False])
def test_tokens_of_megatron_are_those_of_the_text(
    dtype: str, end: bool, plain: TokenFile, tmp_path: Path
) -> None:
    write_megatron(tmp_path / "a.bin", tokens_of(DOCUMENTS, end), dtype)
    file = build([tmp_path / "a.bin", tmp_path / "a.idx"], tmp_path / "cache")
    assert file.tokens.tolist() == plain.tokens.tolist()
    assert file.offsets.tolist() == plain.offsets.tolist()
    is_mapped = end and dtype == "<u2"
    assert (file.folder / "tokens.bin").exists() is not is_mapped
    expected = tmp_path / "a.bin" if is_mapped else file.folder / "tokens.bin"
    assert Path(file.tokens.filename) == expected


def test_mapped_tokens_have_the_fingerprint_of_copied_ones_and_are_verified(tmp_path: Path) -> None:
    for name, dtype in (("u2", "<u2"), ("i8", "<i8")):
        write_megatron(tmp_path / f"{name}.bin", tokens_of(DOCUMENTS, end=True), dtype)
    mapped, copied = (build([f"{tmp_path}/{name}.*"], tmp_path / "cache") for name in ("u2", "i8"))
    assert mapped.fingerprint == copied.fingerprint
    (mapped.folder / "verified.json").unlink()
    again = build([f"{tmp_path}/u2.*"], tmp_path / "cache")
    assert again.tokens.tolist() == copied.tokens.tolist()
    content = bytearray((tmp_path / "u2.bin").read_bytes())
    content[2] ^= 1
    (tmp_path / "u2.bin").write_bytes(content)
    changed = build([f"{tmp_path}/u2.*"], tmp_path / "cache")
    assert changed.folder != mapped.folder, "a changed file is another corpus"
    assert changed.tokens[1] != copied.tokens[1]


def test_a_token_outside_the_vocabulary_names_file_row_and_tokenizer(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", [[1, 2, 256], [3, 50_000, 256]])
    with pytest.raises(
        JobError, match=r"text\[0\]: .* row 1: .* 50000 .* 257 "
    ):  # fmt: skip
        build([tmp_path / "a.*"], tmp_path / "cache")


def test_mapped_tokens_that_change_under_a_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_source, "WATCH_SECONDS", 0.0)
    path = tmp_path / "rows.npy"
    np.save(path, np.tile(np.array([97, 98, 256], "u2"), (40, 1)))
    section = DataSection(
        text=[str(path)], cache=str(tmp_path / "cache"), sequence_length=8, validation_fraction=0
    )
    data = open_dataset(section, TrainSection())
    assert data.batch([0]).rows == 1
    with path.open("ab") as file:
        file.write(b"a0")
    with pytest.raises(WanmaError, match=r"rows\.npy' has changed"):
        data.batch([0])


def test_arrays_of_numpy_are_documents_of_tokens(tmp_path: Path) -> None:
    rows = np.array([[97, 98, 256], [99, 100, 256]])
    np.save(tmp_path / "rows.npy", rows.astype("u2"))
    np.save(tmp_path / "flat.npy", rows.reshape(-1).astype("i4"))
    np.savez(tmp_path / "a.npz", input_ids=rows, mask=np.ones(5))
    np.savez_compressed(tmp_path / "b.npz", ids=rows[0])
    assert texts(build([tmp_path / "rows.npy"], tmp_path / "cache")) == ["ab", "cd"]
    flat = build([tmp_path / "flat.npy"], tmp_path / "cache")
    assert flat.tokens.tolist() == rows.reshape(-1).tolist()
    assert flat.header["documents"] == 1
    assert texts(build([tmp_path / "a.npz"], tmp_path / "cache")) == ["ab", "cd"]
    assert texts(build([tmp_path / "b.npz"], tmp_path / "cache")) == ["ab"]
    assert texts(build([f"{tmp_path}/r*.npy"], tmp_path / "cache")) == ["ab", "cd"]
    np.save(tmp_path / "weights.npy", np.ones(3))
    with pytest.raises(JobError, match=r"weights\.npy: its array 'array'") as error:
        build([tmp_path / "weights.npy"], tmp_path / "cache")
    assert "data.columns" in error.value.hint


@pytest.mark.parametrize("name", ["jsonl", "json-list", "csv", "parquet", "arrow", "tar", "tfrecord"])
def test_a_missing_field_is_refused_with_those_that_there_are(name: str, tmp_path: Path) -> None:
    TEXT_CASES[name].write(tmp_path, ["one", "two"])
    expected = "json, txt" if name == "tar" else "text"
    with pytest.raises(JobError, match=rf"no field 'body'; .*{expected}") as error:
        build([f"{tmp_path}/[ais]*"], tmp_path.parent / "cache", field="body")
    assert "data.columns" in error.value.hint


def test_files_found_beside_text_that_hold_no_documents_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    (tmp_path / "c.json").write_text('[{"x": 1}]')
    (tmp_path / "c2.json").write_text('[{"y": 1}]')
    (tmp_path / "c3.json").write_text('[{"text": 1}]')
    for number in range(4):
        (tmp_path / f"z{number}.txt").write_text("z")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "d.parquet")
    np.save(tmp_path / "e.npy", np.ones(3, "i4"))
    with caplog.at_level(logging.WARNING):
        file = build([tmp_path], tmp_path.parent / "cache")
    expected = ["text", "x,y\n1,2\n", '[{"x": 1}]', '[{"y": 1}]', '[{"text": 1}]', *"zzzz"]
    assert sorted(texts(file)) == sorted(expected), "JSON and CSV are plain text, as before"
    assert file.header["skipped"]["binary"] == 2
    assert "1 files of the format parquet" in caplog.text
    assert "their fields are x" in caplog.text
    assert "1 files of the format numpy, such as" in caplog.text
    with pytest.raises(JobError, match=r"b\.csv .* 'text'; .* x, y"):
        build([tmp_path / "b.csv"], tmp_path.parent / "cache")


def test_a_part_without_the_field_beside_parts_with_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n')
    with pytest.raises(JobError, match=r"b\.jsonl have no field 'text'"):
        build([f"{tmp_path}/*.jsonl"], tmp_path / "cache")


def test_a_bin_file_of_megatron_without_its_index_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", [[1, 256]])
    with pytest.raises(WanmaError, match=r"a\.idx: the file \.bin"):
        build([tmp_path / "a.idx"], tmp_path / "cache")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(WanmaError, match=r"a\.bin is not plain text: binary"):
        build([tmp_path / "a.bin"], tmp_path / "cache")


def test_a_data_set_of_several_splits_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        TEXT_CASES["huggingface"].write(tmp_path / split, ["one"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(JobError, match=r"text\[0\]: .* 2 splits: test, train"):
        build([tmp_path], tmp_path.parent / "cache")
    assert texts(build([tmp_path / "train"], tmp_path.parent / "cache")) == ["one"]


def test_data_beside_text_whose_description_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    missing = "data-00000-of-00001.arrow"
    (tmp_path / "saved").mkdir()
    TEXT_CASES["huggingface"].write(tmp_path / "saved", ["one"])
    (tmp_path / "saved" / missing).unlink()
    (tmp_path / "a.txt").write_text("text " * 1000)
    with pytest.raises(JobError, match=rf"data\.text\[0\]: .*{missing}"):
        build([tmp_path], tmp_path.parent / "cache")
