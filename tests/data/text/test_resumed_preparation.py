"""Preparation that was killed: the next builder goes on with the parts that are whole."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wanma.data.documents.text_files import list_documents
from wanma.data.stores.file_locks import exclusive_lock
from wanma.data.stores.listing import StoredFile
from wanma.data.text import encoding_task, tokenization
from wanma.data.text.part_writer import PartWriter, TokenFileWriter
from wanma.data.text.token_file import TokenFile, open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer
from wanma.job.errors import WanmaError

BUILDER = """
import sys, time
from pathlib import Path
from wanma.data.documents.text_files import list_documents
from wanma.data.text import encoding_task
from wanma.data.text.token_file import open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer
encoding_task.TASK_BYTES = 100
def progress(done, total):
    print(done, flush=True)
    time.sleep(0.02)
open_or_build_token_file(
    list_documents([sys.argv[1]]), BytesTokenizer(), Path(sys.argv[2]), progress, int(sys.argv[3])
)
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[StoredFile]:
    """Documents of some twenty tasks, and a file of rows."""
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 100)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"document {number}\n" * 8)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(100)))
    return list_documents([str(folder)])


def build(corpus: list[StoredFile], cache: Path, count: int | None = 1) -> TokenFile:
    return open_or_build_token_file(corpus, BytesTokenizer(), cache, process_count=count)


def building_folder(cache: Path) -> Path:
    (folder,) = (path for path in (cache / "tokens").iterdir() if path.name.endswith(".building"))
    return folder


def count_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    run = tokenization.run_task

    def counted(task: Any, *arguments: Any) -> Any:
        names.append(task.name)
        return run(task, *arguments)

    monkeypatch.setattr(tokenization, "run_task", counted)
    return names


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_preparation_goes_on_where_it_was(
    corpus: list[StoredFile], tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(corpus, tmp_path / "whole")
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "corpus"), str(tmp_path / "cache"), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        done = [int(killed.stdout.readline()) for _ in range(9)]
        killed.send_signal(signal.SIGKILL)
    assert done[-1] > 0
    names = count_tasks(monkeypatch)
    file = build(corpus, tmp_path / "cache")
    assert file.fingerprint == whole.fingerprint
    assert file.header["skipped"] == whole.header["skipped"]
    assert 0 < len(names) <= 21 - 7
    assert [path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()] == [
        file.folder.name
    ]


def interrupt(corpus: list[StoredFile], cache: Path, tasks: int) -> Path:
    """Begin to build, and stop after some tasks."""
    left = [tasks]

    def stop(done: int, _: int) -> None:
        if done:
            left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_or_build_token_file(corpus, BytesTokenizer(), cache, stop, 1)
    return building_folder(cache)


DAMAGE = {
    "the file of tokens lost its end": lambda folder: cut(folder / "tokens.bin", 30),
    "the file of lengths lost its end": lambda folder: cut(folder / "offsets.bin", 3),
    "the journal lost its end": lambda folder: cut(folder / "journal.jsonl", 30),
    "a byte of the tokens changed": lambda folder: flip(folder / "tokens.bin"),
    "tokens without a line in the journal": lambda folder: append(folder / "tokens.bin"),
    "the journal is gone": lambda folder: (folder / "journal.jsonl").unlink(),
    "the tokens are gone": lambda folder: (folder / "tokens.bin").unlink(),
}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"half a part")


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_contradict_the_journal_are_cut_back(
    corpus: list[StoredFile], tmp_path: Path, damage: str
) -> None:
    whole = build(corpus, tmp_path / "whole")
    DAMAGE[damage](interrupt(corpus, tmp_path / "cache", 6))
    file = build(corpus, tmp_path / "cache")
    assert file.fingerprint == whole.fingerprint
    assert file.offsets.tolist() == whole.offsets.tolist()
    assert not list(file.folder.glob("part*"))


def test_parts_of_other_tasks_are_not_used(
    corpus: list[StoredFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(corpus, tmp_path / "whole")
    interrupt(corpus, tmp_path / "cache", 6)
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 250)
    assert build(corpus, tmp_path / "cache").fingerprint == whole.fingerprint


def test_a_store_that_fails_leaves_the_work_that_is_done(
    corpus: list[StoredFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = tokenization.run_task, []

    def fail_once(task: Any, *arguments: Any) -> Any:
        calls.append(task.name)
        if len(calls) == 10:
            raise WanmaError("the store is down")
        return run(task, *arguments)

    monkeypatch.setattr(tokenization, "run_task", fail_once)
    with pytest.raises(WanmaError, match="the store is down"):
        build(corpus, tmp_path / "cache")
    build(corpus, tmp_path / "cache")
    assert len(calls) == 10 + 21 - 9


def test_older_token_files_of_plain_text_stay_in_use(corpus: list[StoredFile], tmp_path: Path) -> None:
    """Their folder is named by the documents and the tokenizer, as before there were formats."""
    keys = [[file.url, file.size, file.version, file.is_named] for file in corpus]
    text = json.dumps(["wanma-tokens", 1, "bytes", keys])
    assert build(corpus, tmp_path).folder.name == hashlib.sha256(text.encode()).hexdigest()[:32]
    (folder,) = (path for path in (tmp_path / "tokens").iterdir() if path.is_dir())
    header = json.loads((folder / "header.json").read_text())
    for name in ("formats", "bad_rows"):  # that older headers lack
        del header[name]
    (folder / "header.json").write_text(json.dumps(header))
    file = build(corpus, tmp_path)
    assert (file.bad_row_count, file.bad_rows) == (0, [])


def test_a_discarded_document_leaves_nothing_in_its_part(tmp_path: Path) -> None:
    dtype = np.dtype("<u2")
    with PartWriter(tmp_path / "part", dtype, 256) as part:
        part.write(np.array([1, 2]))
        assert part.end_document(7)
        part.write(np.array([3]))
        part.discard_document()
        assert not part.end_document(8), "nothing is no document"
        part.write(np.array([4]))
        assert part.end_document(9)
    with TokenFileWriter(tmp_path, dtype, {}) as writer:
        writer.append(tmp_path / "part", "task", {})
    assert np.fromfile(tmp_path / "tokens.bin", dtype).tolist() == [1, 2, 256, 4, 256]
    assert np.fromfile(tmp_path / "offsets.bin", "<i8").tolist() == [0, 3, 5]
    assert np.fromfile(tmp_path / "digests.bin", "<u8").tolist() == [7, 9]
    content = (tmp_path / "offsets.bin").read_bytes()
    assert writer.hashes["offsets.bin"] == hashlib.sha256(content).hexdigest()


def test_an_unfinished_token_file_that_nobody_goes_on_with_is_removed(tmp_path: Path) -> None:
    """By the next build in the same cache, unless its builder lives or has been at work in the last days."""
    tokens, corpus = tmp_path / "cache" / "tokens", tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("text")
    for name, days in (("old", 8), ("locked", 8), ("young", 6)):
        folder = tokens / f"{name}.building"
        folder.mkdir(parents=True)
        (folder / "part-0").touch()
        for path in (folder / "part-0", folder):
            os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    with exclusive_lock(tokens / "locked.lock", 0):
        build(list_documents([str(corpus)]), tmp_path / "cache")
    assert sorted(path.stem for path in tokens.glob("*.building")) == ["locked", "young"]
