"""Checkpoints at a URL: whole there or not there, whatever fails on the way."""

from __future__ import annotations

import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.failing_storage import Call, FailingFileSystem, register
from wanma.checkpoint.inspection.integrity_scan import scan_checkpoint
from wanma.checkpoint.load.reader import find_defects, load_full_tensors
from wanma.checkpoint.remote.remote_checkpoints import RemoteCheckpointDamagedError, RemoteCheckpoints
from wanma.checkpoint.remote.remote_storage import RemoteStorage, check_url
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import RetentionPolicy
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.retry import RetryPolicy

QUICK = RetryPolicy(max_attempts=3, initial_backoff_seconds=0.001)
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
def failing() -> Iterator[type[FailingFileSystem]]:
    yield register()
    FailingFileSystem.reset()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of two ranks; that of step 2 is the best."""
    folder = tmp_path / "here"
    ranks = [Checkpointer(folder, rank, 2, keep=9) for rank in range(2)]
    for step, metric in ((1, 3.0), (2, 1.0), (3, 2.0)):
        for checkpointer in ranks:
            tensors = {name: torch.full((40, 10), float(step)) for name in ("model.a", "model.b")}
            checkpointer.save(step, tensors, {"step": step}, metric=metric)
    for checkpointer in ranks:
        checkpointer.close()
    return folder


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def remote(url: str, patience: RetryPolicy = QUICK) -> RemoteCheckpoints:
    return RemoteCheckpoints(RemoteStorage(url, patience))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("kind", ["file", "memory", "folder"])
def test_what_was_uploaded_comes_back_bit_for_bit(folder: Path, tmp_path: Path, kind: str) -> None:
    url = {"file": f"file://{tmp_path}/there/run", "memory": f"memory://{tmp_path.name}/run/"}.get(
        kind, f"{tmp_path}/there/run"
    )
    for step in (1, 3, 2):
        assert remote(url).upload(at(folder, step), step) > 0
    assert remote(url).upload(at(folder, 3), 3) == 0  # is there already
    assert remote(url).steps() == [3, 2, 1]
    told: list[str] = []
    path = remote(url).download_newest_valid(tmp_path / "back", told.append)
    assert path == tmp_path / "back" / "step-00000003"
    assert told == []
    assert names(tmp_path / "back") == ["step-00000003"]
    for file in at(folder, 3).iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    assert find_defects(path) == []
    assert load_full_tensors(path)["model.a"].unique().tolist() == [3.0]


def test_a_url_that_nobody_has_written_to_has_no_checkpoint(tmp_path: Path) -> None:
    assert remote(f"file://{tmp_path}/nothing").download_newest_valid(tmp_path / "back", print) is None
    assert names(tmp_path / "back") == []


def test_the_manifest_is_uploaded_last(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    remote(f"failing://{tmp_path}/there").upload(at(folder, 1), 1)
    sent = [call for call in failing.calls if call in ("put_file", "pipe_file")]
    assert sent[-1] == "pipe_file"
    assert sent.count("pipe_file") == 1


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "cannot copy"])
def test_what_an_increment_links_is_copied_within_the_storage(
    tmp_path: Path, failing: type[FailingFileSystem], monkeypatch: pytest.MonkeyPatch, *, copies: bool
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    table, changed = torch.zeros(4000, 8), torch.zeros(4000, dtype=torch.bool)
    with Checkpointer(here, keep=9) as checkpointer:
        for step in (1, 2, 3):
            table[step] += step
            changed[step] = True
            rows = None if step == 1 else {"table": changed}
            checkpointer.save(step, {"table": table}, {"step": step}, changed_rows=rows)
            checkpointer.wait()
    copy_file = failing.cp_file

    def copy_to_the_storage(self: FailingFileSystem, source: str, target: str, **keywords: object) -> None:
        if source.startswith(str(there)):
            raise NotImplementedError
        copy_file(self, source, target, **keywords)

    with monkeypatch.context() as patched:
        if not copies:
            patched.setattr(failing, "cp_file", copy_to_the_storage)
        sent = {step: remote(f"failing://{there}").upload(at(here, step), step) for step in (1, 3, 2)}
    assert sent[1] > table.nbytes
    assert all((sent[step] < 3000) == copies for step in (2, 3))
    shutil.rmtree(at(there, 1))
    path = remote(f"failing://{there}").download(3, tmp_path / "back")
    assert find_defects(path) == []
    assert torch.equal(load_full_tensors(path)["table"], table)


def test_storage_that_goes_away_at_any_moment_leaves_the_newest_whole_one(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    """As if the process were killed between any two operations of the second upload."""
    ended = False
    for moment in range(1, 40):
        there = tmp_path / f"there-{moment}"
        failing.reset()
        remote(f"file://{there}").upload(at(folder, 1), 1)
        failing.fails = lambda call, moment=moment: (
            ConnectionError("the link is down") if call.number >= moment else None
        )
        try:
            remote(f"failing://{there}", ONCE).upload(at(folder, 2), 2)
        except WanmaError as error:
            assert "the link is down" in error.message  # noqa: PT017  # until it no longer fails
        else:
            ended = True
        failing.reset()
        back = tmp_path / f"back-{moment}"
        path = remote(f"file://{there}").download_newest_valid(back, print)
        assert find_defects(path) == []
        assert path.name == (
            "step-00000002" if (at(there, 2) / "manifest.json").exists() else "step-00000001"
        )
        assert names(back) == [path.name]
        if ended:
            break
    assert ended
    assert moment > 5


def test_failures_that_pass_are_tried_again(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    failing.fails = lambda call: TimeoutError("slow") if call.number % 5 == 1 else None
    failing.truncates = lambda call: call.number % 7 == 2
    patience = RetryPolicy(max_attempts=30, initial_backoff_seconds=0.0001, max_backoff_seconds=0.001)
    url = f"failing://{tmp_path}/there"
    remote(url, patience).upload(at(folder, 1), 1)
    path = remote(url, patience).download(1, tmp_path / "back")
    failing.reset()
    assert find_defects(path) == []
    assert find_defects(at(tmp_path / "there", 1)) == []


@pytest.mark.parametrize("operation", ["put_file", "pipe_file"])
def test_an_upload_that_arrives_truncated_is_an_error_and_does_not_count(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem], operation: str
) -> None:
    failing.truncates = lambda call: call.name == operation
    with pytest.raises(WanmaError, match=r"bytes.*after 3 tries"):
        remote(f"failing://{tmp_path}/there").upload(at(folder, 1), 1)
    told: list[str] = []
    assert remote(f"file://{tmp_path}/there").download_newest_valid(tmp_path / "back", told.append) is None
    assert len(told) == 1
    assert told[0].endswith("; it is skipped")


def test_a_scan_reads_on_where_storage_fails_now_and_then(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    remote(f"file://{tmp_path}/there").upload(at(folder, 1), 1)
    reads: Counter[int] = Counter()

    def every_third_of_a_thread(call: Call) -> Exception | None:
        if call.name not in ("open", "read"):
            return None
        thread = threading.get_ident()
        reads[thread] += 1
        return TimeoutError("slow") if reads[thread] % 3 == 0 else None

    failing.fails = every_third_of_a_thread
    found = scan_checkpoint(
        "step-00000001", RemoteStorage(f"failing://{tmp_path}/there/step-00000001", QUICK)
    )
    assert found.defects == ()
    assert reads.total() > 6
    failing.fails = lambda call: TimeoutError("slow") if call.name == "read" else None
    found = scan_checkpoint(
        "step-00000001", RemoteStorage(f"failing://{tmp_path}/there/step-00000001", QUICK)
    )
    assert "TimeoutError: slow (after 3 tries" in found.defects[0].cause


def test_a_download_that_arrives_truncated_is_an_error_and_leaves_nothing(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    remote(f"file://{tmp_path}/there").upload(at(folder, 1), 1)
    failing.truncates = lambda call: call.name == "get_file"
    with pytest.raises(WanmaError, match=r"failing://.*bytes arrived"):
        remote(f"failing://{tmp_path}/there").download(1, tmp_path / "back")
    assert names(tmp_path / "back") == []


def test_a_flipped_bit_there_is_found_told_and_the_one_before_is_taken(folder: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    for step in (1, 2):
        remote(url).upload(at(folder, step), step)
    file = at(tmp_path / "there", 2) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    told: list[str] = []
    path = remote(url).download_newest_valid(tmp_path / "back", told.append)
    assert path == at(tmp_path / "back", 1)
    assert told == [
        f"{url}/step-00000002/rank-00001.safetensors is damaged: its content differs from its SHA-256; "
        "it is skipped"
    ]
    assert names(tmp_path / "back") == ["step-00000001"]


def test_every_kind_of_damage_there_is_named(folder: Path, tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/there", tmp_path / "there"

    def reason() -> str:
        with pytest.raises(RemoteCheckpointDamagedError) as caught:
            remote(url).download(1, tmp_path / "back")
        assert names(tmp_path / "back") == []
        return caught.value.message.removeprefix(f"{url}/step-00000001")

    remote(url).upload(at(folder, 1), 1)
    file, manifest = (at(there, 1) / name for name in ("rank-00000.safetensors", "manifest.json"))
    whole = manifest.read_bytes()
    file.write_bytes(file.read_bytes()[:-1])
    assert "bytes instead of" in reason()
    file.unlink()
    assert reason() == "/rank-00000.safetensors is missing"
    manifest.write_bytes(whole[: len(whole) // 2])
    assert reason() == ": manifest.json is damaged: its content differs from its SHA-256"
    manifest.unlink()
    assert reason() == " was not uploaded completely: it has no manifest.json"


def test_a_step_saved_again_replaces_what_is_there(folder: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    one = remote(url)
    one.upload(at(folder, 1), 1)
    assert one.upload(at(folder, 2), 1) > 0  # another content under that step
    assert (at(tmp_path / "there", 1) / "manifest.json").read_bytes() == (
        at(folder, 2) / "manifest.json"
    ).read_bytes()
    assert find_defects(at(tmp_path / "there", 1)) == []


def test_a_replacement_that_breaks_off_leaves_no_manifest_beside_other_files(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    for moment in range(1, 30):
        there = tmp_path / f"there-{moment}"
        remote(f"file://{there}").upload(at(folder, 1), 1)
        failing.reset()
        failing.fails = lambda call, moment=moment: ConnectionError("down") if call.number >= moment else None
        try:
            remote(f"failing://{there}", ONCE).upload(at(folder, 2), 1)
        except WanmaError:
            assert find_defects(at(there, 1)) == [] or not (at(there, 1) / "manifest.json").exists()
        else:
            assert find_defects(at(there, 1)) == []
            break
    assert moment > 5


def test_uploaded_ones_are_kept_by_the_same_rules_and_half_uploads_go(folder: Path, tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/there", tmp_path / "there"
    one = remote(url)
    for step in (1, 2, 3):
        one.upload(at(folder, step), step)
    for step in (0, 9):
        at(there, step).mkdir()
        (at(there, step) / "rank-00000.safetensors").write_bytes(b"half")
    (there / "mine").mkdir()
    assert remote(url).prune(RetentionPolicy(1, keep_best=True), last_step=3, local_steps=[1, 2, 3]) == [1, 0]
    assert names(there) == ["mine", "step-00000002", "step-00000003", "step-00000009"]


def test_a_half_upload_of_what_is_still_on_disk_waits_to_be_completed(folder: Path, tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/there", tmp_path / "there"
    for step in (1, 2, 3):
        remote(url).upload(at(folder, step), step)
    (at(there, 1) / "manifest.json").unlink()
    assert remote(url).prune(RetentionPolicy(1, keep_best=False), last_step=3, local_steps=[1, 2, 3]) == [2]
    assert names(there) == ["step-00000001", "step-00000003"]


# ---------------------------------------------------------------- URLs


def test_a_missing_package_is_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):  # a test before this one may have opened such a file system
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(WanmaError) as caught:
        check_url("s3://bucket/run", "checkpoint.upload")
    assert caught.value.message == (
        "checkpoint.upload = 's3://bucket/run' needs the package `s3fs`, which is not installed."
    )
    assert caught.value.hint == "pip install 'wanma[s3]'"
    assert caught.value.exit_code == EXIT_USAGE


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(WanmaError, match="protocol 's4'"):
        check_url("s4://bucket/run", "checkpoint.upload")


@pytest.mark.parametrize(
    "url", ["ftp://me:hunter2@host/run", "https://account/run?sig=hunter2", "s3://key:hunter2@bucket"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(WanmaError) as caught:
        check_url(url, "checkpoint.upload")
    assert "hunter2" not in str(caught.value)
    assert "AWS_PROFILE" in caught.value.hint


def test_credentials_in_the_message_of_a_storage_library_are_left_out(
    folder: Path, tmp_path: Path, failing: type[FailingFileSystem]
) -> None:
    failing.fails = lambda _: ConnectionError("GET https://me:hunter2@host/a?X-Signature=hunter2&b=1 failed")
    with pytest.raises(WanmaError) as caught:
        remote(f"failing://{tmp_path}/there", ONCE).upload(at(folder, 1), 1)
    assert "GET https://***@host/a?*** failed" in caught.value.message
    assert "hunter2" not in str(caught.value)
