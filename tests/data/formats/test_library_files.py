"""Files of the formats' own libraries are read back equal; scripts/write_library_files.py wrote them."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import library_samples
from support.data_files import list_files, plain
from support.frameworks import needs, python_of
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.detection import detect_format
from wanma.data.formats.format import BadDataError, Format
from wanma.data.formats.hugging_face import HuggingFaceDataset
from wanma.data.formats.megatron import Megatron
from wanma.data.formats.tar_samples import TarSamples
from wanma.data.formats.tfrecord import TFRecord
from wanma.data.index.build import open_or_build_index

FILES = Path(__file__).with_name("library_files")
REPOSITORY = Path(__file__).parents[3]
PEERS = REPOSITORY / ".venv-peers" / "bin" / "python"
MEGATRON_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def read(folder: Path, tmp_path: Path, data_format: Format, pattern: str = "*") -> list[dict[str, Any]]:
    files = [file for file in list_files(folder) if file.path.match(pattern)]
    assert detect_format(files).name == data_format.name
    index = open_or_build_index(files, data_format, tmp_path)
    return index.read(np.arange(index.rows))


def test_webdataset(tmp_path: Path) -> None:
    found = read(FILES / "webdataset", tmp_path, TarSamples())
    expected = library_samples.webdataset_samples()
    assert [sample["__key__"] for sample in found] == [sample["__key__"] for sample in expected]
    for sample, one in zip(found, expected, strict=True):
        assert bytes(sample["cls"]) == str(one["cls"]).encode()
        assert bytes(sample["txt"]).decode() == one["txt"]
        array = np.load(io.BytesIO(sample["npy"]), allow_pickle=False)
        assert array.tolist() == one["npy"].tolist()


@pytest.mark.parametrize("dtype", MEGATRON_TYPES)
@pytest.mark.parametrize("unit", ["document", "sequence"])
def test_megatron(dtype: str, unit: Any, tmp_path: Path) -> None:
    found = read(FILES / "megatron", tmp_path, Megatron(unit=unit), f"{dtype}.*")
    check_megatron(found, unit, dtype)


def test_megatron_with_modes(tmp_path: Path) -> None:
    found = read(FILES / "megatron", tmp_path, Megatron(unit="sequence"), "modes.*")
    check_megatron(found, "sequence", "int32")


def check_megatron(found: list[dict[str, Any]], unit: str, dtype: str) -> None:
    documents = library_samples.megatron_documents()
    if unit == "document":
        expected = [[token for sequence in document for token in sequence] for document in documents]
    else:
        expected = [sequence for document in documents for sequence in document]
    assert [plain(sample["tokens"]) for sample in found] == [
        plain(np.array(tokens, dtype)) for tokens in expected
    ]


@pytest.mark.parametrize("compression", ["plain", "GZIP", "ZLIB"])
def test_tfrecord(compression: str, tmp_path: Path) -> None:
    check_tfrecord(read(FILES / "tfrecord", tmp_path, TFRecord(), f"{compression}.*"))


def check_tfrecord(found: list[dict[str, Any]]) -> None:
    expected = library_samples.tfrecord_samples()
    for sample in expected:  # TensorFlow does not store the type of an empty list
        if not len(sample["floats"]):
            sample["floats"] = np.empty(0, "f4")
    assert plain(found) == plain(expected)


def test_saved_data_set_of_hugging_face(tmp_path: Path) -> None:
    rows = library_samples.table_rows()
    folder = FILES / "datasets"
    for name, data_format, expected in (
        ("saved", HuggingFaceDataset(), rows),
        ("selected", HuggingFaceDataset(), [rows[3], rows[1]]),
        ("splits", HuggingFaceDataset(split="train"), rows[:-3]),
        ("splits", HuggingFaceDataset(split="test"), rows[-3:]),
        ("parquet", Parquet(), rows),
    ):
        check_rows(read(folder / name, tmp_path, data_format), expected)
    for name, data_format, fact in (
        ("splits", HuggingFaceDataset(), "2 splits: test, train"),
        ("parquet", Parquet(columns=("missing",)), "no column 'missing'"),
    ):
        with pytest.raises(BadDataError, match=fact):
            read(folder / name, tmp_path, data_format)
    check_rows(
        read(folder / "parquet", tmp_path, Parquet(columns=("id",))), [{"id": row["id"]} for row in rows]
    )


def check_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row in found:
        if "tokens" in row:
            assert row["tokens"].dtype == np.int64
            row["tokens"] = row["tokens"].tolist()
    assert found == expected


def write(python: Path, library: str, folder: Path) -> None:
    command = [
        str(python),
        str(REPOSITORY / "tests" / "scripts" / "write_library_files.py"),
        library,
        str(folder),
    ]
    environment = {"PYTHONPATH": str(REPOSITORY / "tests"), "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    subprocess.run(command, check=True, env=environment, capture_output=True)


@pytest.mark.full
@needs("tensorflow")
def test_tfrecord_of_the_installed_tensorflow(tmp_path: Path) -> None:
    write(python_of("tensorflow"), "tfrecord", tmp_path / "files")
    for name in ("plain", "GZIP", "ZLIB"):
        check_tfrecord(read(tmp_path / "files", tmp_path, TFRecord(), f"{name}.*"))


@pytest.mark.full
@pytest.mark.skipif(not PEERS.exists(), reason="needs datasets: make peers")
def test_data_sets_of_the_installed_datasets(tmp_path: Path) -> None:
    write(PEERS, "datasets", tmp_path / "files")
    found = read(tmp_path / "files" / "saved", tmp_path, HuggingFaceDataset())
    check_rows(found, library_samples.table_rows())
    files = [file for file in list_files(tmp_path / "files" / "saved") if file.path.suffix == ".arrow"]
    index = open_or_build_index(files, ArrowTables(), tmp_path)
    check_rows(index.read(np.arange(index.rows)), library_samples.table_rows())
