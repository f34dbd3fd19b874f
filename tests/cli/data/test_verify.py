"""`wanma data verify`: every damaged file and row is found, and nothing else."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data_command import DataCommand
from support.data_files import CASES, add_member, write_case
from support.s3_server import s3_server
from wanma.data.formats.format import BadDataError
from wanma.data.stores.listing import list_files
from wanma.data.tools.selection import openable

RECORDS = [{"text": f"horse {number}", "id": number} for number in range(3000)]


@pytest.mark.parametrize("name", CASES)
def test_whole_data_of_every_format_are_whole(name: str, data: DataCommand) -> None:
    write_case(name, data.folder / "in", 20)
    asked = () if name != "text-lines" else ("--format", "text-lines")
    option = ()
    if CASES[name].data_format.name == "webdataset":
        option = ("--option", 'fields=["json"]')  # the images of these samples are random bytes
    found = data.json("verify", "in", *asked, *option)
    assert found["damages"] == []
    assert found["rows"] >= 20
    assert not list((data.folder / ".cache").rglob("*.layout")), "nothing is kept"


def test_damaged_rows_and_files_are_listed(data: DataCommand) -> None:
    lines = [json.dumps(one).encode() for one in RECORDS]
    lines[17] = b'{"text": "cut'
    lines[2900] = b'{"text": "\xff"}'
    (data.folder / "in").mkdir()
    (data.folder / "in" / "a.jsonl").write_bytes(b"\n".join(lines))
    (data.folder / "in" / "b.jsonl").write_bytes(b"\0\0")
    ran = data("verify", "in")
    assert ran.code == 1
    assert "1 file and 2 rows; read: 3,000 rows" in ran.out
    found = data.json("verify", "in", code=1)
    assert [(Path(one["file"]).name, one["row"]) for one in found["damages"]] == [
        ("a.jsonl", 17),
        ("a.jsonl", 2900),
        ("b.jsonl", None),
    ]
    assert "invalid UTF-8" in found["damages"][1]["cause"]
    assert (found["damaged_files"], found["damaged_rows"]) == (1, 2)


def test_files_of_several_formats_are_each_verified_by_their_own(data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", RECORDS[:20])
    pq.write_table(pa.table({"x": [1, 2]}), data.folder / "in" / "b.parquet")
    (data.folder / "in" / "c.jsonl").write_bytes(b"\0\0")
    found = data.json("verify", "in", code=1)
    (damage,) = found["damages"]
    assert (damage["source"], Path(damage["file"]).name) == ("data/jsonl", "c.jsonl")
    assert (found["files"], found["rows"]) == (3, 22)
    (data.folder / "in" / "c.jsonl").unlink()
    assert data.json("verify", "in")["rows"] == 22


def test_the_format_is_that_of_the_first_whole_file_of_a_suffix(data: DataCommand) -> None:
    (data.folder / "in").mkdir()
    (data.folder / "in" / "a.jsonl").write_bytes(b"\0\0")
    data.write_lines("in/b.jsonl", RECORDS[:20])
    found = data.json("verify", "in", code=1)
    assert [Path(one["file"]).name for one in found["damages"]] == ["a.jsonl"]
    assert found["rows"] == 20


def test_processes_find_what_one_finds(data: DataCommand) -> None:
    for number in range(3):
        lines = [json.dumps(one).encode() for one in RECORDS]
        lines[number * 10 + 1] = b"{"
        path = data.folder / "in" / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\n".join(lines))
    one, two = (data.json("verify", "in", "--processes", count, code=1) for count in ("1", "2"))
    assert one == two
    assert one["damaged_rows"] == 3


def test_a_truncated_image_is_found(data: DataCommand) -> None:
    path = data.write_image("pictures/cat/1.jpg", (255, 0, 0), "JPEG")
    data.write_image("pictures/cat/2.jpg", (255, 0, 0), "JPEG")
    path.write_bytes(path.read_bytes()[:-300])
    (data.folder / "pictures" / "cat" / "3.jpg").touch()
    found = data.json("verify", "pictures", code=1)
    assert [(Path(one["file"]).name, one["row"]) for one in found["damages"]] == [("1.jpg", 0), ("3.jpg", 2)]
    assert "the image 'image' cannot be decoded" in found["damages"][0]["cause"]
    assert "empty" in found["damages"][1]["cause"]


def test_fields_of_webdataset_hold_what_their_names_say(data: DataCommand) -> None:
    image = data.write_image("1.png", (1, 2, 3)).read_bytes()
    with tarfile.open(data.folder / "a.tar", "w") as archive:
        for key, png, text in (("a", image, b"{}"), ("b", b"no image", b"{}"), ("c", image, b"{")):
            add_member(archive, f"{key}.png", png)
            add_member(archive, f"{key}.json", text)
    found = data.json("verify", "a.tar", code=1)
    assert [(one["row"], one["cause"].partition(":")[0]) for one in found["damages"]] == [
        (1, "'png' is no image"),
        (2, "the file .json cannot be decoded"),
    ]


def test_rows_of_a_job_s_table_that_training_cannot_use_are_found(data: DataCommand) -> None:
    lines = ["a,b,kind", *(f"{n},{n / 2},{n % 3}" for n in range(30))]
    lines[3], lines[8], lines[21], lines[30] = "2,,2", "many,3.5,1", "20,10.0,", "29,14.5"
    (data.folder / "a.csv").write_text("\n".join(lines) + "\n")
    (data.folder / "job.toml").write_text(
        '[model]\npreset = "gpt-10m"\n[data]\npath = "a.csv"\n'
        '[data.columns]\nfeatures = ["a", "b"]\ntarget = "kind"\n'
    )
    found = data.json("verify", "job.toml", code=1)
    assert [one["row"] for one in found["damages"]] == [2, 7, 20, 29]
    for one, field in zip(found["damages"], ("'b'", "'a'", "'kind'", "2 fields"), strict=True):
        assert field in one["cause"]


def test_numbers_that_training_cannot_use_are_found(data: DataCommand) -> None:
    pixels = np.zeros((3, 2, 2), np.float32)
    pixels[1, 0, 0] = np.nan
    tokens = np.array([[1, 2], [3, 256], [3, 257]], np.uint16)
    np.savez(data.folder / "a.npz", pixels=pixels, tokens=tokens)
    found = data.json("verify", "a.npz", "--tokenizer", "bytes", code=1)
    assert [(one["row"], one["cause"]) for one in found["damages"]] == [
        (1, "1 numbers of the array 'pixels' are NaN or infinite"),
        (2, "the token 257 in 'tokens' is outside of the vocabulary of 257"),
    ]


def test_a_token_outside_of_the_vocabulary_is_found_in_one_document_of_numpy(data: DataCommand) -> None:
    np.save(data.folder / "a.npy", np.array([1, 256, 60000, 3], np.uint16))
    found = data.json("verify", "a.npy", "--tokenizer", "bytes", code=1)
    assert [(one["row"], one["cause"]) for one in found["damages"]] == [
        (2, "the token 60000 in 'array' is outside of the vocabulary of 257")
    ]
    data.json("verify", "a.npy")


def test_a_damaged_page_of_parquet_is_found(data: DataCommand) -> None:
    table = pa.table({"text": [f"horse {number} " * 50 for number in range(400)]})
    path = data.folder / "a.parquet"
    pq.write_table(
        table, path, row_group_size=100, compression="zstd", use_dictionary=False, write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    end = column.data_page_offset + column.total_compressed_size
    content[end - 60] ^= 1
    path.write_bytes(content)
    found = data.json("verify", "a.parquet", code=1)
    (damage,) = found["damages"]
    assert (damage["row"], damage["rows"]) == (200, 100)


def test_rows_that_end_their_process_are_named(data: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format of a package whose library ends the process at one row."""
    monkeypatch.syspath_prepend(str(data.folder))
    monkeypatch.setenv("PYTHONPATH", f"{data.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (data.folder / "crashing.py").write_text(
        "import os\n"
        "from dataclasses import dataclass\n"
        "from wanma.data.formats.arrow_tables import Parquet\n"
        "class Reader:\n"
        "    def __init__(self, inner): self.inner, self.rows = inner, inner.rows\n"
        "    def read_range(self, start, end):\n"
        "        if start <= 150 < end: os._exit(9)\n"
        "        return self.inner.read_range(start, end)\n"
        "@dataclass(frozen=True)\n"
        "class Crashing(Parquet):\n"
        "    name = 'crashing'\n"
        "    def open(self, group, layout): return Reader(super().open(group, layout))\n"
    )
    package = data.folder / "crashing-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[wanma.formats]\ncrashing = crashing:Crashing\n")
    from wanma.data.formats import detection

    detection._known_formats.cache_clear()
    try:
        pq.write_table(pa.table({"id": list(range(400))}), data.folder / "a.parquet", row_group_size=100)
        found = data.json("verify", "a.parquet", "--format", "crashing", code=1)
    finally:
        detection._known_formats.cache_clear()
    (damage,) = found["damages"]
    assert damage["row"] <= 150 < damage["row"] + damage["rows"]
    assert "ends the process" in damage["cause"]


def test_a_file_that_is_gone_or_has_changed_is_bad_data(data: DataCommand) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        data.write_lines(name, RECORDS[:3])
    gone, changed = map(
        openable, list_files([str(data.folder / "a.jsonl"), str(data.folder / "b.jsonl")], "entry")
    )
    (data.folder / "a.jsonl").unlink()
    data.write_lines("b.jsonl", RECORDS[:4])
    with pytest.raises(BadDataError, match=r"a\.jsonl: No such file"):
        gone.open()
    with pytest.raises(BadDataError, match=r"b\.jsonl: has changed since"):
        changed.open()


def test_several_processes_read_from_s3(data: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as s3:
        for number in range(4):
            s3.put(f"folder/{number}.jsonl", b'{"text": "a"}\n{"text"\n')
        found = data.json("verify", "s3://bucket/folder", "--processes", "2", code=1)
    assert [one["row"] for one in found["damages"]] == [1, 1, 1, 1]


def test_data_without_a_row_are_not_whole(data: DataCommand) -> None:
    (data.folder / "a.jsonl").touch()
    (data.folder / "b.csv").write_text("x,y\n")
    for arguments, cause in (
        (("a.jsonl", "--format", "jsonl"), "it is empty"),
        (("b.csv",), "it holds no row"),
    ):
        found = data.json("verify", *arguments, code=1)
        assert [(one["row"], one["cause"]) for one in found["damages"]] == [(None, cause)]
    data.write_lines("c.jsonl", RECORDS)
    assert data.json("verify", "a.jsonl", "c.jsonl")["damages"] == [], "an empty part of a data set"
