"""`wanma data convert`: what is written reads back equal, whole or not at all, and goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from support.data_command import DataCommand
from support.data_files import CASES, write_case
from support.grids import rotated
from support.s3_server import s3_server
from wanma.data.text.tokenizer import BytesTokenizer

RECORDS: list[dict[str, Any]] = [
    {
        "text": f"horse {number} é马" * (number % 7),
        "id": number,
        "score": number / 3 if number % 5 else number,
        "meta": {"url": None if number % 2 else f"u{number}", "tags": ["a", "b"][: number % 3]},
        "maybe": None if number % 4 else "there",
    }
    for number in range(500)
]
UNHELD = {
    "jsonl": {"images", "webdataset", "tfrecord", "parquet", "arrow", "huggingface", "mds"},
    "parquet": {"jsonl", "json-list"},
    "webdataset": {"tfrecord"},
    "mds": {"tfrecord"},
}
"""Formats whose samples hold bytes in places that the output has not, by output."""


def fingerprint(data: DataCommand, *arguments: str) -> str:
    (source,) = data.json("stats", *arguments)["sources"]
    return str(source["fingerprint"])


@pytest.mark.parametrize("form", ["jsonl", "parquet", "webdataset", "mds"])
def test_the_content_is_equal_after_every_conversion(form: str, data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    done = data.json("convert", "a.jsonl", "--to", form, "out", "--shard-size", "10kB")
    assert done["rows"] == 500
    assert done["shards"] > 3
    pattern = "shard.*" if form == "mds" else "part-*"
    assert len(list((data.folder / "out").glob(pattern))) == done["shards"]
    assert fingerprint(data, "out") == fingerprint(data, "a.jsonl") == done["fingerprint"]
    assert not (data.folder / "out.partial").exists()


@pytest.mark.parametrize(
    ("first", "second"),
    list(pairwise(["jsonl", "mds", "parquet", "webdataset", "mds", "jsonl"])),
)
def test_conversions_follow_each_other(first: str, second: str, data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    data.json("convert", "a.jsonl", "--to", first, "one")
    data.json("convert", "one", "--to", second, "two", "--shard-size", "9kB", "--exclude", "__key__")
    assert fingerprint(data, "two") == fingerprint(data, "a.jsonl")


@pytest.mark.parametrize(("name", "form"), rotated(CASES, ["jsonl", "parquet", "webdataset", "mds"]))
def test_every_format_is_converted_or_refused_with_the_field(name: str, form: str, data: DataCommand) -> None:
    write_case(name, data.folder / "in", 20)
    asked = ("--format", "text-lines") if name == "text-lines" else ()
    ran = data("convert", "in", "--to", form, "out", *asked)
    if ran.code:
        assert CASES[name].data_format.name in UNHELD[form], ran.text
        assert "field" in ran.told_once()
        assert not (data.folder / "out").exists()
        return
    is_changed = name == "images" or (form in ("webdataset", "mds") and "image" in ran_fields(data, asked))
    if not is_changed:  # paths do not count, or images lose their mapping
        assert fingerprint(data, "in", *asked) == fingerprint(data, "out")


def ran_fields(data: DataCommand, asked: tuple[str, ...]) -> list[str]:
    return [one["name"] for one in data.json("inspect", "in", *asked)[0]["fields"]]


def test_images_become_files_of_webdataset(data: DataCommand) -> None:
    data.write_image("pictures/cat/1.jpg", (255, 0, 0), "JPEG")
    data.write_image("pictures/dog/2.png", (0, 0, 255))
    assert data("convert", "pictures", "--to", "webdataset", "out").code == 0
    listed = subprocess.run(
        ["tar", "tf", data.folder / "out" / "part-00000.tar"], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == [
        "000000000.image.jpg",
        "000000000.json",
        "000000001.image.png",
        "000000001.json",
    ]
    (source,) = data.json("inspect", "out")
    assert source["shown"][1]["fields"]["class"] == "dog"
    assert "PNG, 6 x 4, RGB" in source["shown"][1]["fields"]["image"]


@pytest.mark.parametrize(("compression", "suffix"), [("gzip", ".gz"), ("zstd", ".zst")])
def test_compressed_lines_need_no_plain_copy(compression: str, suffix: str, data: DataCommand) -> None:
    records = [{"text": str(number) * 200_000} for number in range(60)]  # 12 MB: three frames
    data.write_lines("a.jsonl", records)
    done = data.json("convert", "a.jsonl", "--to", "jsonl", "--compression", compression, "out")
    assert [path.name for path in (data.folder / "out").glob("part*")] == [f"part-00000.jsonl{suffix}"]
    assert done["size"] < 1_000_000
    assert fingerprint(data, "out") == fingerprint(data, "a.jsonl")
    assert not list((data.folder / ".cache").rglob("*.plain"))


def test_megatron_holds_the_tokens_and_ends_of_documents(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS[:20])
    done = data.json(
        "convert", "a.jsonl", "--to", "megatron", "out", "--tokenizer", "bytes", "--shard-size", "300B"
    )
    assert done["shards"] > 1
    names = sorted(path.suffix for path in (data.folder / "out").glob("part-00000*"))
    assert names == [".bin", ".idx"]
    tokens = np.concatenate(
        [np.fromfile(path, "<u2") for path in sorted((data.folder / "out").glob("*.bin"))]
    )
    encode = BytesTokenizer().encode
    expected = np.concatenate([[*encode(one["text"]), 256] for one in RECORDS[:20]])
    assert tokens.tolist() == expected.tolist()
    (source,) = data.json("stats", "out")["sources"]
    assert source["rows"] == 20


def test_tokens_are_written_as_they_are(data: DataCommand) -> None:
    case = next(name for name in CASES if CASES[name].data_format.name == "megatron")
    write_case(case, data.folder / "in", 20)
    data.json("convert", "in", "--to", "megatron", "out")
    assert fingerprint(data, "in") == fingerprint(data, "out")


def test_chosen_fields_are_written(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    data.json("convert", "a.jsonl", "--to", "parquet", "out", "--fields", "text,id", "--exclude", "id")
    assert pq.read_schema(data.folder / "out" / "part-00000.parquet").names == ["text"]


def test_processes_write_the_same_files(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    contents = []
    for out, processes in (("one", "1"), ("two", "2")):
        data.json(
            "convert", "a.jsonl", "--to", "webdataset", out, "--shard-size", "10kB", "--processes", processes
        )
        contents.append({path.name: path.read_bytes() for path in (data.folder / out).glob("part-*")})
    assert contents[0] == contents[1]


def test_a_damaged_row_stops_it_unless_it_may_be_left_out(data: DataCommand) -> None:
    lines = [json.dumps(one) for one in RECORDS]
    lines[300] = "{"
    (data.folder / "a.jsonl").write_text("\n".join(lines))
    command = ("convert", "a.jsonl", "--to", "parquet", "out")
    ran = data(*command)
    assert ran.code == 1
    assert "a.jsonl: row 300" in ran.told_once()
    assert "--skip-damaged" in ran.text
    assert not (data.folder / "out").exists()
    (data.folder / "out.partial").rename(data.folder / "other")
    ran = data(*command, "--skip-damaged")
    ran.check()
    assert "left out: 0 damaged files and 1 damaged row" in ran.out
    assert data.json("stats", "out")["sources"][0]["rows"] == 499


def test_a_field_that_no_column_holds_is_named(data: DataCommand) -> None:
    data.write_lines("a.jsonl", [{"x": 1}, {"x": "text"}])
    ran = data("convert", "a.jsonl", "--to", "parquet", "out")
    assert ran.code == 1
    assert "the field 'x'" in ran.told_once()


def test_a_number_that_json_has_not_is_refused(data: DataCommand) -> None:
    np.savez(data.folder / "a.npz", x=np.array([1.0, np.nan]))
    ran = data("convert", "a.npz", "--to", "jsonl", "out")
    assert ran.code == 1
    assert "row 1" in ran.told_once()


def test_an_existing_output_is_not_overwritten(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    (data.folder / "out").mkdir()
    (data.folder / "out" / "mine").touch()
    ran = data("convert", "a.jsonl", "--to", "parquet", "out")
    assert ran.code == 2
    assert "out exists already" in ran.told_once()
    first = data.json("convert", "a.jsonl", "--to", "parquet", "other")
    again = data.json("convert", "a.jsonl", "--to", "parquet", "other")
    assert again["fingerprint"] == first["fingerprint"]
    assert again["resumed_shards"] == again["shards"]
    ran = data("convert", "a.jsonl", "--to", "jsonl", "other")
    assert ran.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "parquet", "--compression", "zstd"), "--compression is for --to jsonl"),
        (("--to", "jsonl", "--tokenizer", "bytes"), "--tokenizer is for --to megatron"),
        (("--to", "megatron", "--fields", "a"), "--to megatron writes tokens alone"),
        (("--to", "megatron"), "give --tokenizer"),
        (("--to", "mds", "--compression", "gzip"), "--to mds is compressed by zstd, not by gzip"),
        (("--to", "litdata"), "invalid choice: 'litdata'"),
        (("--to", "jsonl", "--shard-size", "many"), "'many' is not a size, such as 256MB"),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], message: str, data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS[:5])
    ran = data("convert", "a.jsonl", "out", *arguments)
    assert ran.code != 0
    assert message in ran.told_once()


def test_a_url_is_no_output(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS[:5])
    ran = data("convert", "a.jsonl", "--to", "jsonl", "s3://bucket/out")
    assert ran.code == 2
    assert "no local folder" in ran.told_once()


def test_a_killed_conversion_goes_on(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    program = (
        "import sys, time\n"
        "from wanma.data.tools import conversion\n"
        "write = conversion.convert_shard\n"
        "def slow(*arguments):\n"
        "    if arguments[2].number == 3: time.sleep(600)\n"
        "    return write(*arguments)\n"
        "conversion.convert_shard = slow\n"
        "from wanma.cli.main import main\n"
        "main(['data', *sys.argv[1:]])\n"
    )
    command = ["convert", "a.jsonl", "--to", "parquet", "out", "--shard-size", "10kB", "--processes", "1"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(data.folder / ".cache")}
    process = subprocess.Popen([sys.executable, "-c", program, *command], cwd=data.folder, env=environment)
    partial = data.folder / "out.partial"
    try:
        deadline = time.monotonic() + 120
        while len(list(partial.glob("part-*"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (data.folder / "out").exists()
    ran = data("convert", "a.jsonl", "--to", "jsonl", "out", "--shard-size", "10kB")
    assert ran.code == 2
    assert "holds an unfinished conversion" in ran.told_once()
    (partial / ".part-00001.parquet.json").write_text("")  # as a failing node leaves it
    done = data.json(*command)
    assert done["resumed_shards"] == 2
    assert fingerprint(data, "out") == fingerprint(data, "a.jsonl")
    assert sorted(path.name for path in (data.folder / "out").iterdir() if path.name.startswith(".")) == [
        ".wanma-conversion.json"
    ]


def test_a_shard_that_reads_back_otherwise_does_not_count(
    data: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that changes a value: nothing appears under the name of the output."""
    from wanma.data.tools import shard_writers

    data.write_lines("a.jsonl", RECORDS[:5])
    monkeypatch.setattr(shard_writers, "json_value", lambda name, value: 0 if name == "id" else value)
    ran = data("convert", "a.jsonl", "--to", "jsonl", "out")
    assert ran.code == 1
    assert "does not read back as it was written" in ran.told_once()
    assert not (data.folder / "out").exists()


def test_a_folder_of_another_process_is_not_touched(data: DataCommand) -> None:
    import fcntl

    data.write_lines("a.jsonl", RECORDS[:5])
    (data.folder / "out.partial").mkdir()
    with (data.folder / "out.partial" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = data("convert", "a.jsonl", "--to", "jsonl", "out")
    assert ran.code == 1
    assert "another process converts to out now" in ran.told_once()


def test_the_message_of_a_missing_row_names_its_file(data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", [{"text": "a"}])
    data.write_lines("in/b.jsonl", [{"id": 1}])
    ran = data("convert", "in", "--to", "megatron", "out", "--tokenizer", "bytes")
    assert ran.code == 1
    assert f"{Path('in') / 'b.jsonl'}: row 0" in ran.told_once()


def test_splits_are_not_joined_by_a_conversion(data: DataCommand) -> None:
    for number, name in enumerate(["train/cat", "train/dog", "val/cat"]):
        data.write_image(f"pictures/{name}/{number}.png", (number, 0, 0))
    ran = data("convert", "pictures", "--to", "webdataset", "out")
    assert ran.code == 2
    assert "the data are splits (train, validation), which one output would join" in ran.told_once()
    assert data.json("convert", "pictures/train", "--to", "webdataset", "out")["rows"] == 2


def test_files_of_several_formats_are_not_joined_by_a_conversion(data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", RECORDS[:5])
    (data.folder / "in" / "b.csv").write_text("id,text\n1,one\n")
    ran = data("convert", "in", "--to", "parquet", "out")
    assert ran.code == 2
    assert "the files have several formats (jsonl, csv)" in ran.told_once()
    assert data.json("convert", "in/*.jsonl", "--to", "parquet", "out")["rows"] == 5


def test_objects_of_s3_are_converted(data: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    content = data.write_lines("a.jsonl", RECORDS).read_bytes()
    with s3_server(monkeypatch) as s3:
        s3.put("folder/a.jsonl", content)
        done = data.json("convert", "s3://bucket/folder", "--to", "parquet", "out", "--processes", "2")
    assert done["fingerprint"] == fingerprint(data, "out") == fingerprint(data, "a.jsonl")
