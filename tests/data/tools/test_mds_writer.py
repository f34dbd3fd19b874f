"""MDS as output: the bytes are those of mosaicml-streaming, the encodings follow from all rows."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import itertools
import json
import os
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support import library_samples
from support.data_command import DataCommand
from support.data_files import list_files, plain
from support.labelled_images import picture
from wanma.data.formats.mds import Mds
from wanma.data.index.build import open_or_build_index
from wanma.data.tools.mds_writer import MdsColumns, MdsWriter, choose_columns, find_kinds, join_kinds

LIBRARY_FILES = Path(__file__).parents[1] / "formats" / "library_files" / "mds"
REPOSITORY = Path(__file__).parents[3]
READERS = REPOSITORY / ".venv-readers" / "bin" / "python"


@pytest.fixture
def data(tmp_path: Path) -> DataCommand:
    return DataCommand(tmp_path)


def columns_of(*records: dict[str, Any]) -> dict[str, str]:
    half = len(records) // 2
    return dict(
        choose_columns(join_kinds([find_kinds(records[:half]), find_kinds(records[half:])])).encodings
    )


def test_samples_have_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    """The columns whose encodings this writer uses, of the same samples, in a shard by the library."""
    used = (
        "array",
        "array_dtype",
        "array_fixed",
        "bytes",
        "decimal",
        "float64",
        "int",
        "json",
        "str",
        "str_int",
    )
    encodings = {name: library_samples.MDS_COLUMNS[name] for name in used}
    index = json.loads((LIBRARY_FILES / "plain" / "index.json").read_text())
    samples = iter(library_samples.mds_samples())
    for shard in index["shards"]:
        content = (LIBRARY_FILES / "plain" / shard["raw_data"]["basename"]).read_bytes()
        expected = [columns_in(one, shard) for one in samples_in(content)]
        path = tmp_path / shard["raw_data"]["basename"]
        with MdsWriter(path, MdsColumns(encodings), "", path.name) as writer:
            for _ in expected:
                writer.write(next(samples))
            writer.close()
        found = [columns_in(one, writer.entry) for one in samples_in(path.read_bytes())]
        for one, wanted in zip(found, expected, strict=True):
            assert one == {name: wanted[name] for name in sorted(used)}
        assert {**shard, **writer.entry}.keys() == shard.keys()
        head = {
            key: writer.entry[key] for key in writer.entry if key not in ("raw_data", "samples", "zip_data")
        }
        assert path.read_bytes()[4 + 4 * (len(found) + 1) :].startswith(
            json.dumps(head, sort_keys=True).encode()
        )


def samples_in(content: bytes) -> list[bytes]:
    """Samples of a shard by its table of positions."""
    count = int.from_bytes(content[:4], "little")
    offsets = np.frombuffer(content[4 : 4 + 4 * (count + 1)], "<u4")
    return [content[start:end] for start, end in itertools.pairwise(offsets)]


def columns_in(sample: bytes, shard: dict[str, Any]) -> dict[str, bytes]:
    """Bytes of each column of a sample: sizes of those that vary, then all."""
    varying = [size is None for size in shard["column_sizes"]]
    given = iter(np.frombuffer(sample[: 4 * sum(varying)], "<u4").tolist())
    position, found = 4 * sum(varying), {}
    for name, size in zip(shard["column_names"], shard["column_sizes"], strict=True):
        end = position + (next(given) if size is None else size)
        found[name] = sample[position:end]
        position = end
    assert position == len(sample)
    return found


def test_encodings_follow_from_the_values_of_all_rows() -> None:
    assert columns_of({"a": 1}, {"a": -(2**63)}) == {"a": "int"}
    assert columns_of({"a": 1}, {"a": 2**63}) == {"a": "str_int"}
    assert columns_of({"a": 1}, {"a": 0.5}) == {"a": "float64"}
    assert columns_of({"a": True}, {"a": False}) == {"a": "json"}
    assert columns_of({"a": "x"}, {"a": None}) == {"a": "json"}
    assert columns_of({"a": "x", "b": 1}, {"a": "y"}) == {"a": "str", "b": "json"}
    assert columns_of({"a": Decimal("1.5")}) == {"a": "str_decimal"}
    assert columns_of({"a": datetime.date(2026, 1, 2)}, {"a": "x"}) == {"a": "str"}
    assert columns_of({"a": picture(1, "jpeg")}, {"a": picture(2, "jpeg")}) == {"a": "jpeg"}
    assert columns_of({"a": picture(1, "jpeg")}, {"a": picture(2)}) == {"a": "bytes"}
    assert columns_of({"a": np.int64(3)}, {"a": 3}) == {"a": "int"}
    same, other = np.zeros((2, 3), "f4"), np.zeros((1, 3), "f4")
    assert columns_of({"a": same}, {"a": same}) == {"a": "ndarray:float32:2,3"}
    assert columns_of({"a": same}, {"a": other}) == {"a": "ndarray:float32"}
    assert columns_of({"a": same}, {"a": other.astype("i8")}) == {"a": "ndarray"}
    assert columns_of({"a": same}, {"a": np.zeros(0, "f4")}) == {"a": "json"}, (
        "the library has no empty array"
    )
    assert columns_of(*({"a": np.zeros(n + 1, "u2")} for n in range(50))) == {"a": "ndarray:uint16"}
    assert columns_of({"a": [1]}, {"a": {"b": 2}}) == {"a": "json"}


@pytest.mark.parametrize("values", [(b"x", None), (b"x", "x"), (picture(1), 5)])
def test_bytes_beside_other_values_are_refused_with_the_field(values: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"the field 'a' .*no encoding of MDS holds both"):
        columns_of({"a": values[0]}, {"a": values[1]})


def write_table(path: Path, count: int = 40) -> list[dict[str, Any]]:
    """Write rows with all kinds of columns."""
    rows = [
        {
            "image": picture(number, "jpeg"),
            "number": number,
            "score": number / 3,
            "text": f"马 {number}" * (number % 4),
            "tags": [f"t{one}" for one in range(number % 3)],
            "maybe": None if number % 2 else number,
            "raw": bytes(range(number)),
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return rows


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_the_index_describes_the_files_with_their_hashes(data: DataCommand, compression: str) -> None:
    rows = write_table(data.folder / "a.parquet")
    options = ("--compression", compression) if compression else ()
    done = data.json("convert", "a.parquet", "--to", "mds", "out", "--shard-size", "2kB", *options)
    assert done["shards"] > 2
    out = data.folder / "out"
    index = json.loads((out / "index.json").read_text())
    assert (index["version"], len(index["shards"])) == (2, done["shards"])
    for number, shard in enumerate(index["shards"]):
        assert shard["raw_data"]["basename"] == f"shard.{number:05d}.mds"
        kind = "zip_data" if compression else "raw_data"
        content = (out / shard[kind]["basename"]).read_bytes()
        assert (out / f"shard.{number:05d}.mds").exists() == (not compression)
        check_hashes(content, shard[kind])
        if compression:
            assert shard["zip_data"]["basename"] == f"shard.{number:05d}.mds.zstd"
            assert content[4] & 0xE0, "the frame tells its plain size, which the library's reader needs"
            content = pa.decompress(content, shard["raw_data"]["bytes"], "zstd", asbytes=True)
            check_hashes(content, shard["raw_data"])
        else:
            assert shard["zip_data"] is None
    assert sum(shard["samples"] for shard in index["shards"]) == 40
    names = {path.name for path in out.iterdir()}
    assert names == {
        "index.json",
        ".wanma-conversion.json",
        *(shard[kind]["basename"] for shard in index["shards"]),
    }
    files = [file for file in list_files(out) if not file.path.name.startswith(".")]
    found = open_or_build_index(files, Mds(), data.folder / "c").read(np.arange(40))
    assert plain(found) == plain(rows)


def check_hashes(content: bytes, described: dict[str, Any]) -> None:
    import xxhash

    assert described["bytes"] == len(content)
    assert described["hashes"] == {
        "sha1": hashlib.sha1(content).hexdigest(),
        "xxh3_64": xxhash.xxh3_64(content).hexdigest(),
    }


def test_an_interrupted_conversion_goes_on_with_its_entries(
    data: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wanma.data.tools import conversion

    write_table(data.folder / "a.parquet")
    command = ("convert", "a.parquet", "--to", "mds", "out", "--shard-size", "2kB", "--processes", "1")
    whole = data.json(*command)
    expected = {path.name: path.read_bytes() for path in (data.folder / "out").iterdir()}
    (data.folder / "out").rename(data.folder / "first")
    write, count = conversion.convert_shard, 0

    def write_two(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "convert_shard", write_two)
        with contextlib.suppress(KeyboardInterrupt):
            data(*command)
    assert not (data.folder / "out").exists()
    again = data.json(*command)
    assert again["resumed_shards"] == 2
    assert again["fingerprint"] == whole["fingerprint"]
    found = {path.name: path.read_bytes() for path in (data.folder / "out").iterdir()}
    del expected[".wanma-conversion.json"], found[".wanma-conversion.json"]
    assert found == expected


def test_a_shard_beyond_32_bits_is_refused(data: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    from wanma.data.tools import mds_writer

    monkeypatch.setattr(mds_writer, "_MAX_SHARD_BYTES", 1000)
    write_table(data.folder / "a.parquet")
    ran = data("convert", "a.parquet", "--to", "mds", "out")
    assert ran.code == 1
    assert "positions have 32 bits" in ran.told_once()
    assert "smaller --shard-size" in ran.text


if READERS.exists():  # an environment of benchmarks/suites/environments/readers.txt

    @pytest.mark.full
    @pytest.mark.parametrize("compression", ["", "zstd"])
    @pytest.mark.parametrize("algorithm", ["sha1", "xxh3_64"])
    def test_mosaicml_streaming_reads_the_shards(data: DataCommand, compression: str, algorithm: str) -> None:
        rows = write_table(data.folder / "a.parquet")
        options = ("--compression", compression) if compression else ()
        assert data("convert", "a.parquet", "--to", "mds", "out", "--shard-size", "2kB", *options).code == 0
        script = REPOSITORY / "tests" / "scripts" / "read_mds.py"
        done = subprocess.run(
            [str(READERS), str(script), str(data.folder / "out"), algorithm],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={"HOME": str(data.folder), "PATH": os.environ["PATH"]},
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(found) == len(rows)
        for one, row in zip(found, rows, strict=True):
            image = Image.open(io.BytesIO(row["image"]))
            digest = hashlib.sha256(image.tobytes()).hexdigest()
            assert one.pop("image") == ["image", "RGB", *image.size, digest]
            assert one.pop("raw") == ["bytes", row["raw"].hex()]
            assert one == {name: row[name] for name in one}
