"""Token files: built once, whole or not at all, damaged ones built again."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from wanma.data.documents.document_groups import DocumentGroup
from wanma.data.documents.text_files import list_documents
from wanma.data.stores.listing import StoredFile
from wanma.data.text import encoding_task, token_file, tokenization, tokenization_process
from wanma.data.text.encoding_task import EncodingTask, ReadingSettings
from wanma.data.text.part_writer import TokenFileWriter
from wanma.data.text.token_file import (
    TokenFile,
    TokenFileCorruptError,
    open_or_build_token_file,
    open_token_file,
)
from wanma.data.text.tokenizer import BytesTokenizer, load_tokenizer
from wanma.job.errors import WanmaError

TEXTS = [f"document {number}\n" * (number + 1) for number in range(20)]


@pytest.fixture
def documents(tmp_path: Path) -> list[StoredFile]:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    return list_documents([str(folder)])


def build(documents: list[StoredFile], tmp_path: Path, **keywords: object) -> TokenFile:
    return open_or_build_token_file(documents, BytesTokenizer(), tmp_path / "cache", **keywords)  # type: ignore[arg-type]


def folders(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]


def test_every_document_is_there_in_order_with_its_end(documents: list[StoredFile], tmp_path: Path) -> None:
    file = build(documents, tmp_path)
    for text, start, end in zip(TEXTS, file.offsets[:-1], file.offsets[1:], strict=True):
        tokens = file.tokens[start:end]
        assert bytes(tokens[:-1].tolist()).decode() == text
        assert tokens[-1] == 256
    assert file.header["tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert file.tokens.dtype == np.uint16


def test_a_second_opening_builds_nothing(documents: list[StoredFile], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    build(documents, tmp_path, progress=lambda *done: seen.append(done))
    total = sum(len(text) for text in TEXTS)
    assert seen == [(0, total), (total, total)]
    seen.clear()
    build(documents, tmp_path, progress=lambda *done: seen.append(done))
    assert seen == []


def test_a_changed_document_or_tokenizer_is_another_file(documents: list[StoredFile], tmp_path: Path) -> None:
    first = build(documents, tmp_path)
    Path(documents[0].path).write_text("changed")
    second = build(list_documents([str(tmp_path / "corpus")]), tmp_path)
    assert first.folder != second.folder
    assert first.fingerprint != second.fingerprint


def test_the_fingerprint_is_of_the_content_and_not_of_its_place(
    documents: list[StoredFile], tmp_path: Path
) -> None:
    (tmp_path / "corpus").rename(tmp_path / "moved")
    moved = list_documents([str(tmp_path / "moved")])
    assert build(moved, tmp_path).fingerprint == build_at(tmp_path / "again").fingerprint


def build_at(folder: Path) -> TokenFile:
    (folder / "corpus").mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / "corpus" / f"{number:02}.txt").write_text(text)
    return build(list_documents([str(folder / "corpus")]), folder)


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_processes_build_the_same_file_as_one(
    documents: list[StoredFile], tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 500)
    if tokenizer == "words":
        backend = Backend(models.WordLevel({"document": 0, "?": 1, "3": 2}, unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.save(str(tmp_path / "words.json"))
        tokenizer = str(tmp_path / "words.json")
    loaded = load_tokenizer(tokenizer)
    seen: list[int] = []
    alone = open_or_build_token_file(documents, loaded, tmp_path / "one", process_count=1)
    several = open_or_build_token_file(
        documents, loaded, tmp_path / "two", lambda *done: seen.append(done[0]), process_count=2
    )
    assert several.fingerprint == alone.fingerprint
    assert several.tokens.tolist() == alone.tokens.tolist()
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert sorted(path.name for path in several.folder.iterdir()) == [
        "digests.bin", "header.json", "offsets.bin", "tokens.bin", "verified.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("cores", "processes"), [(1, []), (3, [3])])
def test_a_large_corpus_takes_as_many_processes_as_cores_may_be_used(
    documents: list[StoredFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    processes: list[int],
) -> None:
    """Cores that a control group does not pay for would only throttle all processes."""
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 500)
    monkeypatch.setattr(tokenization, "_BYTE_TEXT_PER_PROCESS", 1)
    monkeypatch.setattr(tokenization, "usable_cores", lambda: cores)
    encode, started = tokenization._tokenize_in_processes, []

    def encode_in_processes(*arguments: Any) -> Any:
        started.append(arguments[-1])
        return encode(*arguments)

    monkeypatch.setattr(tokenization, "_tokenize_in_processes", encode_in_processes)
    file = build(documents, tmp_path)
    assert file.header["tokens"] == sum(len(text) + 1 for text in TEXTS)
    assert started == processes


def test_an_error_in_a_process_is_told_and_leaves_nothing(
    documents: list[StoredFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 500)
    Path(documents[7].path).unlink()
    with pytest.raises(WanmaError, match=r"text\[0\]: cannot read '.*07\.txt'"):
        build(documents, tmp_path, process_count=2)
    assert folders(tmp_path) == []


def test_a_process_that_dies_is_told_and_leaves_nothing(
    documents: list[StoredFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 500)
    monkeypatch.setattr(tokenization_process, "run_task", lambda *_: os._exit(1))  # of a forked process
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WanmaError, match="exited early with code 1"):
        build(documents, tmp_path, process_count=2)
    assert folders(tmp_path) == []


def test_binary_files_found_in_a_folder_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    (folder / "b.png").write_bytes(b"\x89PNG\0\0")
    (folder / "c.txt").touch()
    file = build(list_documents([str(folder)]), tmp_path)
    assert file.header["skipped"] == {"binary": 1, "empty": 1}
    assert bytes(file.tokens[:-1].tolist()) == b"text"
    with pytest.raises(WanmaError, match=r"text\[0\]: .*b\.png is not .* an image") as error:
        build(list_documents([str(folder / "b.png")]), tmp_path)
    assert "data.images" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.parquet", b"PAR1" + bytes(range(1, 200)), "its footer cannot be read"),
        ("a.arrow", b"ARROW1\0\0", "the mark of an Arrow file"),
        ("a.txt", "text".encode("utf-16"), "UTF-16; save it as UTF-8"),
        ("a.bin", b"text\0text", "binary"),
        ("a.jsonl", b'{"body": "one"}\n{"body": "two"}\n', "have no field 'text'; their fields are body"),
        ("a.json", b'[\n {"body": "one"},\n {"id": 2}\n]', "have no field 'text'; their fields are body"),
    ],
)
def test_files_that_are_no_text_are_refused_by_their_content(
    name: str, content: bytes, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WanmaError, match=told) as error:
        build(list_documents([str(tmp_path / name)]), tmp_path)
    assert error.value.hint
    assert folders(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [b"{braces}\n{braces}\n", b'{"a": 1}\nand text', b"[1, 2]", b"PAR2 is text", b"ORC", b"one, two\n3, 4\n"],
)
def test_text_that_begins_like_something_else_is_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert bytes(build(list_documents([str(tmp_path / "a.txt")]), tmp_path).tokens[:-1].tolist()) == content


def test_a_corpus_of_binary_files_is_empty(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "b.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(WanmaError, match=r"text\[0\]: .* none of 1 files"):
        build(list_documents([str(tmp_path / "corpus")]), tmp_path)


def test_documents_that_are_not_utf8_are_replaced_and_counted_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    backend = Backend(models.WordLevel({"caf\ufffd": 0, "?": 1}, unk_token="?"))
    backend.save(str(tmp_path / "t.json"))
    documents = list_documents([str(tmp_path / "latin.txt")])
    words = open_or_build_token_file(documents, load_tokenizer(tmp_path / "t.json"), tmp_path / "cache")
    assert (words.header["not_utf8"], words.tokens.tolist()) == (1, [0, 2])
    assert build(documents, tmp_path).header["not_utf8"] == 0


def test_memory_is_built_here_whatever_the_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 10)
    for name in "ab":
        fsspec.filesystem("memory").pipe(f"/built-here/{name}", name.encode() * 20)
    file = build(list_documents(["memory://built-here"]), tmp_path, process_count=2)
    assert bytes(file.tokens[:20].tolist()) == b"a" * 20


DAMAGE = {
    "a truncated file": lambda folder: os.truncate(folder / "tokens.bin", 100),
    "a flipped byte": lambda folder: flip(folder / "tokens.bin"),
    "a flipped offset": lambda folder: flip(folder / "offsets.bin"),
    "a missing file": lambda folder: (folder / "digests.bin").unlink(),
    "no header": lambda folder: (folder / "header.json").unlink(),
    "half a header": lambda folder: (folder / "header.json").write_text('{"format": "wanma-to'),
    "another header": lambda folder: (folder / "header.json").write_text("[]"),
    "an older format": lambda folder: edit_header(folder, version=0),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_header(folder: Path, **values: object) -> None:
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**header, **values}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_told_and_mended(
    documents: list[StoredFile], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build(documents, tmp_path)
    content = whole.tokens.tolist()
    DAMAGE[damage](whole.folder)
    with pytest.raises(TokenFileCorruptError):
        open_token_file(whole.folder)
    with caplog.at_level(logging.WARNING):
        mended = build(documents, tmp_path)
    assert "is damaged" in caplog.text
    assert "is built again" in caplog.text
    assert mended.tokens.tolist() == content


def test_a_copied_cache_is_hashed_once(documents: list[StoredFile], tmp_path: Path) -> None:
    folder = build(documents, tmp_path).folder
    stamp = (folder / "verified.json").read_text()
    (folder / "verified.json").unlink()
    open_token_file(folder)
    assert (folder / "verified.json").read_text() == stamp
    (folder / "verified.json").write_text("{ half a st")
    open_token_file(folder)
    assert (folder / "verified.json").read_text() == stamp


def test_a_full_disk_is_told_and_nothing_is_left(
    documents: list[StoredFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: TokenFileWriter, number: int, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TokenFileWriter, "write_bytes", full)
    with pytest.raises(WanmaError, match=r"token files in .*: No space .* MiB free") as told:
        build(documents, tmp_path)
    assert "data.cache" in told.value.hint
    assert folders(tmp_path) == []


def test_a_disk_that_fills_up_in_a_process_is_told_alike(documents: list[StoredFile], tmp_path: Path) -> None:
    BytesTokenizer().save(tmp_path)
    (tmp_path / "part").symlink_to("/dev/full")  # every write to it fails as on a full disk
    process = tokenization._TokenizationProcess(BytesTokenizer(), tmp_path)
    try:
        task = EncodingTask(DocumentGroup("text", tuple(documents)), 0)
        with (
            pytest.raises(WanmaError, match="No space left on device"),
            token_file._explain_disk_errors(tmp_path),
        ):
            process.encode(task, tmp_path / "part", ReadingSettings())
    finally:
        process.kill()
        process.close()


def test_a_cache_that_cannot_be_made_is_told(documents: list[StoredFile], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(WanmaError, match="cannot keep token files"):
        build(documents, tmp_path)


BUILDER = """
import sys, time
from pathlib import Path
from wanma.data.documents.text_files import list_documents
from wanma.data.text.token_file import open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer
def progress(done, total):
    print("building", done, flush=True)
    time.sleep(float(sys.argv[3]))
file = open_or_build_token_file(list_documents([sys.argv[1]]), BytesTokenizer(), Path(sys.argv[2]), progress)
print(file.fingerprint, flush=True)
"""


def start_builder(tmp_path: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "corpus"), str(tmp_path / "cache"), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_several_builders_one_builds_and_all_get_the_same(
    documents: list[StoredFile], tmp_path: Path
) -> None:
    builders = [start_builder(tmp_path, 0.2) for _ in range(3)]
    outputs = [builder.communicate(timeout=60)[0].split("\n") for builder in builders]
    assert sum("building 0" in output for output in outputs) == 1
    assert len({output[-2] for output in outputs}) == 1
