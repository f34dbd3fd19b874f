"""HDFS over WebHDFS: our reader, and Hadoop's own client, which says that the stand-in is honest."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hadoop import HadoopClient, needs_hadoop
from support.webhdfs import Operation, WebHdfs, webhdfs
from wanma.data.documents.text_files import list_documents, read_chunks
from wanma.data.stores import filesystems, remote_file
from wanma.data.stores.listing import list_files
from wanma.data.stores.remote_file import RemoteFile
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy

CONTENT = random.Random(3).randbytes(500_000)
QUICK = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.01)


@pytest.fixture
def hdfs(tmp_path: Path) -> Iterator[WebHdfs]:
    root = tmp_path / "root"
    (root / "data" / "sub").mkdir(parents=True)
    (root / "data" / "a b.bin").write_bytes(CONTENT)
    (root / "data" / "sub" / "text.txt").write_text("one\ntwo\n")
    with webhdfs(root) as servers:
        yield servers


def test_files_have_the_host_in_their_url_and_a_version_without_reading(hdfs: WebHdfs) -> None:
    files = list_files([hdfs.url("data")], "data.text")
    assert [(file.url, file.size) for file in files] == [
        (hdfs.url("data/a b.bin"), len(CONTENT)),
        (hdfs.url("data/sub/text.txt"), 8),
    ]
    assert all(file.version.startswith("modificationTime:") for file in files)
    assert "OPEN" not in {operation.name for operation in hdfs.operations}


def test_ranges_are_read_from_the_datanode(hdfs: WebHdfs) -> None:
    (file,) = list_files([hdfs.url("data/a b.bin")], "data.text")
    ranges = [(400_000, 400_100), (0, 7)]
    found = RemoteFile(file).read_ranges(ranges)
    assert found == [CONTENT[start:end] for start, end in ranges]
    assert sum(operation.is_datanode for operation in hdfs.operations) == 2


@pytest.mark.parametrize(
    ("is_datanode", "fault"),
    [
        (True, (500, "IOException")),
        (True, (403, "StandbyException")),
        (False, (403, "StandbyException")),
        (False, (503, "RetriableException")),
    ],
)
def test_a_failure_of_either_node_is_never_taken_for_content(
    hdfs: WebHdfs, is_datanode: bool, fault: tuple[int, str]
) -> None:
    (file,) = list_files([hdfs.url("data/a b.bin")], "data.text")
    left = [fault]

    def choose(operation: Operation) -> tuple[int, str] | None:
        is_hit = operation.name == "OPEN" and operation.is_datanode == is_datanode
        return left.pop() if is_hit and left else None

    hdfs.fault = choose
    assert RemoteFile(file, QUICK).read(5, 105) == CONTENT[5:105]
    assert not left


def test_a_file_that_changes_or_goes_is_named(hdfs: WebHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = list_files([hdfs.url("data/a b.bin")], "data.text")
    source = RemoteFile(file, QUICK)
    assert source.read(0, 4) == CONTENT[:4]
    (hdfs.root / "data" / "a b.bin").write_bytes(CONTENT[:1000])
    with pytest.raises(WanmaError, match=r"a b.bin' has changed"):
        source.read(500_000 - 10, 500_000)
    with pytest.raises(WanmaError, match=r"a b.bin' has .* size was 500,000"):
        source.read(990, 1010)
    monkeypatch.setattr(remote_file, "RECHECK_SECONDS", 0.0)
    (hdfs.root / "data" / "a b.bin").unlink()
    with pytest.raises(WanmaError, match=r"cannot read '.*a b.bin'"):
        source.read(0, 4)


def test_text_is_read(hdfs: WebHdfs) -> None:
    (document,) = list_documents([hdfs.url("data/sub/*.txt")])
    assert list(read_chunks(document)) == [b"one\ntwo\n"]


@pytest.fixture
def _no_native_library(hdfs: WebHdfs, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without libjvm, and the stand-in at the port at which a NameNode is by default."""
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setattr(filesystems, "_NAMENODE_HTTP_PORT", int(hdfs.namenode.rpartition(":")[2]))
    filesystems._tell_of_webhdfs.cache_clear()
    yield
    filesystems._tell_of_webhdfs.cache_clear()


@pytest.mark.usefixtures("_no_native_library")
def test_hdfs_goes_by_webhdfs_where_no_native_library_is(
    hdfs: WebHdfs, caplog: pytest.LogCaptureFixture
) -> None:
    (whole,) = list_files(["hdfs://me@127.0.0.1:8020/data/a b.bin"], "data.text")
    (found,) = list_files(["hdfs://me@127.0.0.1:8020/data/*.bin"], "data.text")
    assert whole.url == found.url == "hdfs://me@127.0.0.1:8020/data/a b.bin"
    assert RemoteFile(found).read(7, 107) == CONTENT[7:107]
    (message,) = (record.getMessage() for record in caplog.records)
    assert hdfs.namenode in message
    assert "webhdfs://HOST:PORT" in message
    assert "dlopen" not in message


@pytest.mark.usefixtures("_no_native_library")
def test_hdfs_without_a_host_is_one_message() -> None:
    with pytest.raises(WanmaError, match="'hdfs:///data' names no host") as raised:
        list_files(["hdfs:///data"], "data.text")
    assert "dlopen" not in raised.value.message
    assert "webhdfs://HOST:PORT" in raised.value.hint


@pytest.mark.full
@needs_hadoop
def test_the_hadoop_client_reads_and_writes_what_we_read(hdfs: WebHdfs, tmp_path: Path) -> None:
    client = HadoopClient(tmp_path / "client")
    client.run("-get", hdfs.url("data/a b.bin"), str(tmp_path / "down.bin"))
    assert (tmp_path / "down.bin").read_bytes() == CONTENT
    client.run("-put", "-f", str(tmp_path / "down.bin"), hdfs.url("data/up.bin"))
    listed = client.run("-ls", hdfs.url("data"))
    assert "up.bin" in listed
    (file,) = list_files([hdfs.url("data/up.bin")], "data.text")
    assert RemoteFile(file).read(0, len(CONTENT)) == CONTENT
    client.run("-mv", hdfs.url("data/up.bin"), hdfs.url("data/moved.bin"))
    client.run("-rm", "-skipTrash", hdfs.url("data/moved.bin"))
    with pytest.raises(subprocess.CalledProcessError, match="No such file"):
        client.run("-cat", hdfs.url("data/moved.bin"))
    assert [file.url for file in list_files([hdfs.url("data/*.bin")], "x")] == [hdfs.url("data/a b.bin")]
