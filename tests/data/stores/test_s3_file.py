"""Ranges of objects, from moto's S3 server over HTTP, behind a proxy that fails."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from support.faulty_proxy import EXPIRED, SLOW_DOWN, Fault, Request
from support.s3_server import S3Server
from wanma.data.stores import range_requests, remote_file
from wanma.data.stores.client import store_traffic
from wanma.data.stores.listing import StoredFile, list_files
from wanma.data.stores.remote_file import RemoteFile
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy

CONTENT = random.Random(1).randbytes(3_000_000)
QUICK = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.01, deadline_seconds=60)


@pytest.fixture
def file(s3: S3Server) -> StoredFile:
    (file,) = list_files([s3.put("folder/shard.bin", CONTENT)], "data.text")
    s3.proxy.requests.clear()
    return file


def once(fault: Fault, count: int = 1) -> object:
    """A fault of the first `count` ranged requests."""
    left = [fault] * count

    def choose(request: Request) -> Fault | None:
        return left.pop() if left and request.is_ranged else None

    return choose


def test_ranges_come_in_their_order_by_few_requests(s3: S3Server, file: StoredFile) -> None:
    ranges = [(2_900_000, 2_900_010), (0, 5), (5, 5), (1000, 2000), (2_999_990, 4_000_000)]
    found = RemoteFile(file).read_ranges(ranges)
    assert [bytes(part) for part in found] == [CONTENT[start:end] for start, end in ranges]
    assert len(s3.proxy.ranged_requests) == 3, "two of them lie close together"


def test_a_long_range_is_read_by_several_requests_at_once(
    s3: S3Server, file: StoredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = remote_file.split_range
    monkeypatch.setattr(remote_file, "split_range", lambda start, end: split(start, end, 300_000))
    barrier = threading.Barrier(10, timeout=20)  # passes only when ten requests are there together

    def wait(request: Request) -> None:
        if request.is_ranged:
            barrier.wait()

    s3.proxy.fault = wait
    assert RemoteFile(file).read(0, len(CONTENT)) == CONTENT


@pytest.mark.parametrize(
    "fault",
    [
        Fault(500, b"<Error><Code>InternalError</Code><Message>odd</Message></Error>"),
        Fault(cut_at=1000),
        Fault(loses_tail=True),
        SLOW_DOWN,
        Fault(429, b""),
    ],
    ids=["500", "cut", "short", "slow down", "429"],
)
def test_a_passing_failure_is_not_seen(s3: S3Server, file: StoredFile, fault: Fault) -> None:
    s3.proxy.fault = once(fault, 2)
    assert RemoteFile(file, QUICK).read(10, 500_000) == CONTENT[10:500_000]
    assert len(s3.proxy.ranged_requests) == 3
    assert store_traffic() == {
        ("store_requests", "s3"): 3,
        ("store_bytes", "s3"): 499_990 if not fault.loses_tail else 999_980,
    }


def test_a_body_that_stalls_is_given_up_at_the_deadline_of_the_request(
    s3: S3Server, file: StoredFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_requests, "REQUEST_SECONDS", 1.0)
    s3.proxy.fault = once(Fault(pause_seconds=20))
    assert RemoteFile(file, QUICK).read(0, 500_000) == CONTENT[:500_000]
    assert len(s3.proxy.ranged_requests) == 2


def test_all_threads_wait_when_the_store_asks_for_it(s3: S3Server, file: StoredFile) -> None:
    s3.proxy.fault = once(Fault(503, SLOW_DOWN.body, {"Retry-After": "1"}))
    start = time.monotonic()
    RemoteFile(file, QUICK).read(0, 10)
    assert time.monotonic() - start >= 1, "a second, which the store names"


def test_a_store_that_is_down_is_one_error_with_the_number_of_tries(s3: S3Server, file: StoredFile) -> None:
    s3.proxy.fault = lambda _: Fault(500, b"<Error><Code>InternalError</Code><Message>odd</Message></Error>")
    with pytest.raises(WanmaError, match=r"data.text\[0\]: .*shard.bin': .*4 tries"):
        RemoteFile(file, QUICK).read(0, 10)


def test_an_object_that_changes_under_a_run_is_named(s3: S3Server, file: StoredFile) -> None:
    source = RemoteFile(file, QUICK)
    assert source.read(0, 10) == CONTENT[:10]
    s3.put("folder/shard.bin", CONTENT[::-1])
    with pytest.raises(WanmaError, match=r"shard.bin' has changed .* ETag was"):
        source.read(20, 30)
    s3.put("folder/shard.bin", b"short")
    with pytest.raises(WanmaError, match=r"shard.bin' has changed"):
        source.read(1_000_000, 1_000_010)


def test_an_object_that_is_gone_is_named_without_another_try(s3: S3Server, file: StoredFile) -> None:
    s3.proxy.fault = lambda _: Fault(404, b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>")
    with pytest.raises(WanmaError, match=r"cannot read '.*shard.bin'"):
        RemoteFile(file, QUICK).read(0, 10)
    assert len(s3.proxy.ranged_requests) == 1


def test_content_that_differs_from_its_md5_is_read_again(s3: S3Server) -> None:
    (file,) = list_files([s3.put("small", b"right")], "data.text")
    s3.proxy.fault = once(Fault(206, b"wrong", {"ETag": file.version.removeprefix("ETag:")}))
    assert RemoteFile(file, QUICK).read(0, 5) == b"right"


def test_expired_credentials_are_read_again_once(
    s3: S3Server, file: StoredFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    credentials.write_text(text.format("old"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    type(file.filesystem).clear_instance_cache()
    (file,) = list_files([file.url], "data.text")
    s3.proxy.fault = lambda request: EXPIRED if "Credential=old" in str(request.headers) else None
    source = RemoteFile(file, QUICK)
    with pytest.raises(WanmaError, match=r"no permission to read .*expired") as raised:
        source.read(0, 10)
    assert "renew expired credentials" in raised.value.hint
    credentials.write_text(text.format("new"))
    assert source.read(0, 10) == CONTENT[:10]


def test_no_error_shows_credentials(
    s3: S3Server, file: StoredFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "failed at http://user:hunter2@host/x?X-Amz-Signature=hunter2"
    body = f"<Error><Code>Odd</Code><Message>{text}</Message></Error>"
    s3.proxy.fault = lambda _: Fault(418, body.encode())
    with pytest.raises(WanmaError) as raised:
        RemoteFile(file, QUICK).read(0, 10)
    shown = "".join(traceback.format_exception(raised.value)) + caplog.text
    assert "failed at" in shown
    assert "hunter2" not in shown


def _read_in_child(file: StoredFile, source: RemoteFile, answers: object) -> None:
    found = bytes(source.read(0, 1000)), store_traffic()["store_requests", "s3"]
    gc.collect()
    answers.send(found)  # type: ignore[attr-defined]


def test_a_forked_process_reads_with_its_own_client(s3: S3Server, file: StoredFile) -> None:
    source = RemoteFile(file)
    source.read(0, 10)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(file, source, theirs))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv() == (CONTENT[:1000], 1)
    child.join(60)
    assert child.exitcode == 0
    assert source.read(10, 20) == CONTENT[10:20]
    assert len(s3.proxy.ranged_requests) == 3, "the parent's connection still works"


_FINALIZED_PROGRAM = """
import os, sys, weakref
from fsspec.implementations.memory import MemoryFileSystem
from wanma.data.stores import client

class Store(MemoryFileSystem):
    cachable = False

def close(sign):
    print(sign, "closed by", "child" if os.getpid() != parent else "parent", flush=True)

parent, store = os.getpid(), Store()
weakref.finalize(store, close, "store")
if not os.fork():
    del store
    sys.exit(0)
os.wait()
"""


def test_filesystems_are_closed_by_the_process_that_made_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FINALIZED_PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert (ran.stdout, ran.returncode) == ("store closed by parent\n", 0), ran.stderr


def test_a_folder_is_listed_with_sizes_and_versions_and_seen_anew(s3: S3Server) -> None:
    s3.put("many/b", b"1")
    s3.put("many/a", b"22")
    files = list_files(["s3://bucket/many"], "data.text")
    assert [(file.url, file.size) for file in files] == [("s3://bucket/many/a", 2), ("s3://bucket/many/b", 1)]
    s3.put("many/b", b"333")
    again = list_files(["s3://bucket/many"], "data.text")
    assert again[1].size == 3
    assert again[1].version != files[1].version
    assert all(file.version.startswith("ETag:") for file in again)
