"""Encoding of many documents of token ids at once: the same tokens, lengths and hashes as one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.documents.text_files import list_documents
from wanma.data.formats.arrow_tables import TableReader
from wanma.data.formats.format import BadDataError
from wanma.data.text.document_encoding import document_digest, encode_document, encode_lists
from wanma.data.text.encoding_task import ReadingSettings
from wanma.data.text.token_file import TokenFile, open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer

TOKENIZER = BytesTokenizer()
END = TOKENIZER.end_of_document_id
IDS = st.lists(st.lists(st.sampled_from([0, 1, 255, END]), max_size=4), max_size=8)
ROWS = [[1, 2, END], [], [END], [3], [4, END, 5], [END, END], list(range(200)), [7]]


def together(rows: list[list[int]], dtype: str) -> Any:
    values = np.array([one for row in rows for one in row], dtype)
    return encode_lists((values, np.cumsum([0, *map(len, rows)])), TOKENIZER)


@given(IDS, st.sampled_from(["<u2", "<i4", "<i8", "<u8"]))
def test_lists_are_encoded_as_one_by_one(rows: list[list[int]], dtype: str) -> None:
    found = together(rows, dtype)
    expected = []
    for row in rows:
        document = np.array(row, dtype)
        if tokens := [one for piece in encode_document(document, TOKENIZER) for one in piece.tolist()]:
            expected.append(([*tokens, END], document_digest(document, TOKENIZER)))
    if found is None:
        assert not any(rows)
        return
    tokens, lengths, digests = found
    parts = np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    assert tokens.dtype == TOKENIZER.dtype
    assert [(one.tolist(), digest) for one, digest in zip(parts, digests.tolist(), strict=True)] == expected


@pytest.mark.parametrize("row", [[-1], [END + 1], [0.5]])
def test_what_is_no_token_is_left_to_the_reading_row_by_row(row: list[Any]) -> None:
    assert together([[1], row], "<f8" if isinstance(row[0], float) else "<i8") is None


def build(path: Path, cache: Path) -> TokenFile:
    settings = ReadingSettings("ids", "skip")
    return open_or_build_token_file(list_documents([str(path)]), TOKENIZER, cache, settings=settings)


def write(path: Path, rows: list[Any], kind: pa.DataType) -> None:
    table = pa.table({"number": range(len(rows)), "ids": pa.array(rows, kind)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
        return
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=3)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2)])
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_tables_of_ids_give_the_token_file_of_json_lines(
    name: str, kind: pa.DataType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[1, END], [3, 4], [END, END], [5, 6]] * 3 if pa.types.is_fixed_size_list(kind) else ROWS
    write(tmp_path / name, rows, kind)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))
    expected = build(tmp_path / "a.jsonl", tmp_path / "cache")
    monkeypatch.setattr(TableReader, "read", None)  # no row by itself
    found = build(tmp_path / name, tmp_path / "cache")
    assert found.fingerprint == expected.fingerprint
    assert found.header["skipped"] == expected.header["skipped"]


def test_damage_within_a_table_of_ids_is_listed_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TableReader._group

    def read_group(reader: TableReader, number: int) -> Any:
        if number == 1:
            raise BadDataError("a.parquet", "damaged")
        return read(reader, number)

    monkeypatch.setattr(TableReader, "_group", read_group)
    write(tmp_path / "a.parquet", ROWS, pa.list_(pa.int64()))
    assert [row for _, row, _ in build(tmp_path / "a.parquet", tmp_path / "cache").bad_rows] == [3, 4, 5]


@pytest.mark.parametrize("bad", [None, [1, None], [END + 1]])
def test_a_bad_row_among_ids_is_listed_and_the_others_are_kept(bad: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [*ROWS, bad, *ROWS], pa.list_(pa.int64()))
    found = build(tmp_path / "a.parquet", tmp_path / "cache")
    assert [row for _, row, _ in found.bad_rows] == [len(ROWS)]
    assert found.header["documents"] == 2 * sum(row not in ([], [END]) for row in ROWS)
