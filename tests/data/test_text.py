"""Meaning of a text entry, and its refusals."""

import gzip
import os
import sysconfig
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from hypothesis import assume, given
from hypothesis import strategies as st

import wanma.data.stores.listing
import wanma.data.text.tokenizer
from support.failing_storage import FailingFileSystem, register
from wanma.data.documents.text_files import _chunk_end, list_documents, read_chunks
from wanma.data.formats.compression import detect_compression
from wanma.data.formats.format import BadDataError
from wanma.data.stores.filesystems import is_remote_entry
from wanma.data.stores.remote_file import open_file
from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import JobError, WanmaError
from wanma.job.retry import RetryPolicy


def names(entries: list[str], root: Path) -> list[str]:
    return [os.path.relpath(document.path, root) for document in list_documents(entries)]


def content(entry: str, size: int = 1 << 20) -> list[bytes]:
    return list(read_chunks(list_documents([entry])[0], size))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.txt", ".git/config", "sub/.hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_a_folder_means_its_files_below_sorted_without_hidden_ones(corpus: Path) -> None:
    assert names([str(corpus)], corpus) == ["a.md", "b.txt", "sub/c.txt"]


def test_a_linked_folder_is_read_once_even_in_a_circle(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "d.txt").write_text("d")
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "sub" / "circle").symlink_to(corpus)
    assert names([str(corpus)], corpus) == ["a.md", "b.txt", "linked/d.txt", "sub/c.txt"]


def test_a_glob_crosses_folders_with_two_stars(corpus: Path) -> None:
    assert names([f"{corpus}/*.txt"], corpus) == ["b.txt"]
    assert names([f"{corpus}/**/*.txt"], corpus) == ["b.txt", "sub/c.txt"]


def test_a_name_with_glob_characters_is_found_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert names([f"{tmp_path}/a[1].txt"], tmp_path) == ["a[1].txt"]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[FailingFileSystem]:
    """Storage that a test makes fail, tried again without long pauses."""
    quick = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.001)
    for module in (wanma.data.stores.listing, wanma.data.text.tokenizer):
        monkeypatch.setattr(module, "STORAGE_RETRY_POLICY", quick)
    monkeypatch.setattr(open_file, "__defaults__", (quick,))
    return register()


def test_a_corpus_and_a_tokenizer_behind_a_network_that_fails_now_and_then_are_read(
    tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"third\nfourth\n"))
    (tmp_path / "tokenizer.json").write_text('{"wanma_tokenizer": "bytes"}')
    failing.fails = staticmethod(lambda call: OSError("reset") if call.number in (1, 4, 8, 9, 13) else None)
    documents = list_documents([f"failing://{tmp_path}/*.txt*"])
    assert [b"".join(read_chunks(document, 6)) for document in documents] == [
        *(b"first\nsecond\n", b"third\nfourth\n")
    ]
    assert load_tokenizer(f"failing://{tmp_path}").fingerprint == load_tokenizer("bytes").fingerprint
    assert {"ls", "open", "read", "cat_file"} <= set(failing.calls)
    assert len(failing.calls) > 13, "all failures have happened"


def test_storage_that_fails_for_good_is_told_with_the_key_and_the_file(
    tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (document,) = list_documents([f"failing://{tmp_path}/a.txt"])
    failing.fails = staticmethod(lambda call: RuntimeError("odd") if call.name == "cat_file" else None)
    with pytest.raises(WanmaError, match=r"data.text\[0\]: .*a.txt.: odd"):
        list(read_chunks(document))
    assert failing.calls.count("cat_file") == 4
    failing.fails = staticmethod(lambda call: PermissionError("no") if call.name == "cat_file" else None)
    with pytest.raises(WanmaError, match="no permission"):
        list(read_chunks(document))
    assert failing.calls.count("cat_file") == 5, "once more: it would be refused again"


def test_storage_that_does_not_know_what_to_say_of_a_pattern_is_searched(
    corpus: Path, failing: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = failing.info

    def refusing(self: FailingFileSystem, path: str, **keywords: object) -> object:
        if "*" in os.fspath(path):
            raise OSError("400, Bad Request")
        return info(self, path, **keywords)

    monkeypatch.setattr(failing, "info", refusing)
    assert names([f"failing://{corpus}/*.txt"], corpus) == ["b.txt"]
    monkeypatch.setattr(failing, "info", lambda *_, **__: 1 / 0)
    with pytest.raises(WanmaError, match="division by zero"):
        list_documents([f"failing://{corpus}/b.txt"])


def test_the_standard_library_is_there_in_order_without_tests_and_installed_packages() -> None:
    documents = list_documents(["stdlib"])
    root = sysconfig.get_paths()["stdlib"]
    found = [os.path.relpath(document.path, root) for document in documents]
    assert found == sorted(found)
    assert {"argparse.py", "json/decoder.py"} <= set(found)
    assert not [n for n in found if "site-packages" in n or n.startswith("test/") or "_sysconfigdata" in n]
    assert sum(document.size for document in documents) > 5_000_000


@given(text=st.text(max_size=200), size=st.integers(1, 64))
def test_pieces_join_to_the_content_and_never_cut_a_character(text: str, size: int) -> None:
    fsspec.filesystem("memory").pipe("/pieces.txt", text.encode())
    if text:
        pieces = content("memory://pieces.txt", size)
        assert "".join(piece.decode("utf-8") for piece in pieces) == text


@given(st.binary(max_size=300), st.integers(1, 20))
def test_pieces_of_any_bytes_join_to_the_content(raw: bytes, size: int) -> None:
    assume(not detect_compression(raw + b"x"))  # such bytes are decompressed
    fsspec.filesystem("memory").pipe("/raw.bin", raw + b"x")
    assert b"".join(content("memory://raw.bin", size)) == raw + b"x"


def test_a_piece_ends_after_the_last_line() -> None:
    assert _chunk_end(b"one\ntwo\nthr") == 8
    assert [_chunk_end("aé€".encode()[:size]) for size in range(1, 7)] == [1, 1, 3, 3, 3, 6]


@pytest.mark.parametrize(
    ("entry", "fact"),
    [
        ("/no/such/file.txt", r"\[1\]: '/no/such/file.txt' does not exist"),
        ("/no/such/*.txt", r"\[1\]: no file matches '/no/such/\*\.txt'"),
        ("nosuch://bucket/x", r"\[1\]: 'nosuch://bucket/x' is not"),
        ("folder", r"\[1\]: .*folder"),
        ("empty.txt", ": .* 0 bytes in all"),
    ],
)
def test_what_holds_no_text_is_refused_by_its_key(
    entry: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(JobError, match=rf"data\.sources\[2\]\.text{fact}"):
        list_documents(["empty.txt", entry], "data.sources[2].text")


def test_an_unreadable_file_names_itself_and_its_key(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = list_documents([str(corpus / "b.txt")])[0]

    def refuse(*args: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied", document.path)

    monkeypatch.setattr("wanma.data.stores.remote_file.MappedFile", refuse)
    with pytest.raises(WanmaError, match=r"text\[0\]: no permission .*b\.txt'"):
        list(read_chunks(document))


def test_a_folder_that_may_not_be_entered_is_not_silently_left_out(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("sub"):  # by hand, because root may enter everything
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(WanmaError, match=r"data\.text\[0\]"):
        list_documents([str(corpus)])


def test_a_broken_compressed_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(os.urandom(5000))[:3000])
    with pytest.raises(BadDataError, match=r"x\.gz: damaged gzip data"):
        content(str(tmp_path / "x.gz"))


def test_asynchronous_storage_is_known_by_its_url() -> None:
    class Remote(AsyncFileSystem):
        protocol = "wanma-remote"

    fsspec.register_implementation("wanma-remote", Remote, clobber=True)
    assert is_remote_entry("webhdfs://host/x")
    assert is_remote_entry("wanma-remote://bucket/x")
    assert is_remote_entry("simplecache::wanma-remote://bucket/x")
    assert not is_remote_entry("memory://x")
    assert not is_remote_entry("/tmp/x")
    assert not is_remote_entry("stdlib")
