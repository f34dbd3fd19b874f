"""Saving: what a save holds, what stays afterwards, and what a failed one leaves behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.command import small_disk as mounted_disk
from wanma.checkpoint.load.reader import (
    find_defects,
    find_newest_valid,
    load_full_tensors,
    load_tensors,
    read_training_state,
)
from wanma.checkpoint.save import checkpointer as writer
from wanma.checkpoint.save import file_writer
from wanma.checkpoint.save.checkpointer import Checkpointer, SaveResult
from wanma.job.errors import WanmaError
from wanma.job.retry import RetryPolicy
from wanma.job.run.folder_claims import FolderClaims
from wanma.job.run.generation_claims import Claim


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((64, 32), value), "optimizer.step": torch.tensor(int(value))}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved(checkpointer: Checkpointer, step: int, metric: float | None = None) -> SaveResult:
    checkpointer.save(step, tensors(step), {"step": step}, metric=metric)
    (result,) = checkpointer.wait()
    return result


def test_a_save_reads_back_bitwise_with_its_state(tmp_path: Path) -> None:
    content = {
        "fp32": torch.randn(7, 5),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "fp64": torch.randn(3, dtype=torch.float64),
        "bf16": torch.randn(9, 2, dtype=torch.bfloat16),
        "fp16": torch.randn(5).half(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(6, 4).t(),
    }
    state = {"step": 5, "schedule": {"base": 1e-3}, "list": [1, "ü", None]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, content, state, rank_state={"random": [1, 2]})
    path = find_newest_valid(tmp_path)
    assert path == tmp_path / "step-00000005"
    assert names(path) == ["manifest.json", "rank-00000.safetensors"]
    assert read_training_state(path) == state
    target = {name: torch.zeros_like(tensor) for name, tensor in content.items()}
    assert load_tensors(path, target) == (state, {"random": [1, 2]})
    full = load_full_tensors(path)
    for name, tensor in content.items():
        for loaded in (target[name], full[name]):
            assert loaded.dtype == tensor.dtype
            assert loaded.shape == tensor.shape
            assert (
                loaded.contiguous()
                .view(-1)
                .view(torch.uint8)
                .equal(tensor.contiguous().view(-1).view(torch.uint8))
            )


def test_a_save_of_unchanging_tensors_has_the_same_files(tmp_path: Path) -> None:
    content = {
        "bf16": torch.randn(9, 2, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    files = []
    with Checkpointer(tmp_path) as checkpointer:
        for step, is_unchanging in enumerate((False, True, True, False)):
            # A copy is needed of the last one.
            one = content | {"own": torch.ones(6, 4).t() if step == 2 else torch.ones(4, 6)}
            pending = checkpointer.save(step, one, {}, is_unchanging=is_unchanging)
            checkpointer.wait()
            files.append((tmp_path / f"step-{step:08d}" / "rank-00000.safetensors").read_bytes())
            assert pending.bytes == len(files[0])
    assert len(set(files)) == 1


def test_tensors_and_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    content, state = tensors(1.0), {"samples": [1]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, content, state)
        content["model.weight"].fill_(9.0)
        state["samples"].append(2)
    path = tmp_path / "step-00000001"
    assert load_full_tensors(path)["model.weight"].unique().tolist() == [1.0]
    assert read_training_state(path) == {"samples": [1]}


def test_the_ticket_and_the_result_tell_what_a_save_cost(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(1, tensors(), {})
        (result,) = checkpointer.wait()
    size = (tmp_path / "step-00000001" / "rank-00000.safetensors").stat().st_size
    assert ticket.bytes == result.bytes == result.total_bytes == size
    assert ticket.stall_seconds == result.stall_seconds > 0
    assert result.write_seconds > 0
    assert result.error is None


def test_buffers_are_used_again_and_follow_a_change_of_the_tensors(tmp_path: Path) -> None:
    memories = []
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        for step, shape in ((1, (8, 8)), (2, (8, 8)), (3, (100, 7)), (4, (2,))):
            checkpointer.save(step, {"w": torch.full(shape, float(step))}, {})
            memories.append(checkpointer._buffer._memory)
    assert memories[0] is memories[1] is not memories[2]
    assert memories[2] is memories[3]
    for step, shape in ((1, (8, 8)), (2, (8, 8)), (3, (100, 7)), (4, (2,))):
        assert load_full_tensors(tmp_path / f"step-{step:08d}")["w"].equal(torch.full(shape, float(step)))


@pytest.mark.gpu
def test_tensors_on_a_gpu_go_through_pinned_memory_and_come_back(tmp_path: Path) -> None:
    content = {name: tensor.cuda() for name, tensor in tensors(3.0).items()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, content, {})
        content["model.weight"].fill_(9.0)
        assert checkpointer._buffer._memory.is_pinned()
    load_tensors(tmp_path / "step-00000001", content)
    assert content["model.weight"].unique().tolist() == [3.0]


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = writer.write_file

    def slow(path: Path, content: memoryview, **keywords: Any) -> str:
        gate.wait(60)
        return real(path, content, **keywords)

    monkeypatch.setattr(writer, "write_file", slow)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, tensors(1), {})
        assert checkpointer.poll() == []
        join = checkpointer._join_thread

        def wait() -> None:
            threading.Timer(0.3, gate.set).start()  # from when the second save waits, however late that is
            join()

        monkeypatch.setattr(checkpointer, "_join_thread", wait)
        ticket = checkpointer.save(2, tensors(2), {})
        assert ticket.stall_seconds > 0.2
    assert load_full_tensors(tmp_path / "step-00000001")["optimizer.step"] == 1
    assert load_full_tensors(tmp_path / "step-00000002")["optimizer.step"] == 2


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, float("nan"))):
            saved(checkpointer, step, metric)
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]
    # A later process knows the best one from its manifest.
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        saved(checkpointer, 60, 1.5)
        assert names(tmp_path) == ["step-00000020", "step-00000060"]
        saved(checkpointer, 70, 0.5)
    assert names(tmp_path) == ["step-00000070"]


def test_without_keep_best_only_the_newest_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_best=False) as checkpointer:
        for step, metric in ((10, 1.0), (20, 2.0), (30, 3.0)):
            saved(checkpointer, step, metric)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_damaged_later_checkpoint_does_not_push_out_the_good_ones(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        saved(checkpointer, 90)
    (tmp_path / "step-00000090" / "manifest.json").write_text("damaged")
    with Checkpointer(tmp_path, keep=1) as checkpointer:  # the run went back and continues from before
        assert saved(checkpointer, 50).error is None
        assert find_newest_valid(tmp_path) == tmp_path / "step-00000050"
        assert saved(checkpointer, 90).error is None
    assert names(tmp_path) == ["step-00000090"]
    assert find_defects(tmp_path / "step-00000090") == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, tensors(1), {"try": 1})
        checkpointer.save(5, tensors(2), {"try": 2})
    assert names(tmp_path) == ["step-00000005"]
    assert read_training_state(tmp_path / "step-00000005") == {"try": 2}


def test_killed_while_replacing_a_step_the_older_one_is_found_and_restored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, 5)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced-0-2")
    assert find_newest_valid(tmp_path) == tmp_path / "step-00000005.replaced-0-2"
    Checkpointer(tmp_path)
    assert find_newest_valid(tmp_path) == tmp_path / "step-00000005"


def test_a_new_start_removes_what_killed_runs_left_and_nothing_else(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, 5)
    for name in (
        "step-00000009.partial-0-1",
        "step-00000001.removed-5",
        "step-00000005.replaced-0-1",
        "mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    assert Checkpointer(tmp_path, generation=1).removed_saves == ["step-00000009.partial-0-1"]
    assert names(tmp_path) == ["mine", "step-00000005"]


# ---------------------------------------------------------------- several ranks


def test_ranks_share_the_writing_and_rank_zero_commits(tmp_path: Path) -> None:
    ranks = [Checkpointer(tmp_path, rank, 3) for rank in range(3)]
    content = {f"w{number}": torch.full((100,), float(number)) for number in range(6)}
    for rank, checkpointer in enumerate(ranks):
        checkpointer.save(7, content, {"step": 7}, rank_state={"rank": rank})
    results = [result for checkpointer in ranks for result in checkpointer.wait()]
    assert [result.path for result in results] == [tmp_path / "step-00000007"] * 3
    assert len({result.bytes for result in results}) == 1  # two tensors of six each
    assert [result.total_bytes for result in results] == [3 * results[0].bytes, None, None]
    assert names(tmp_path / "step-00000007") == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    ]
    target = {name: torch.zeros(100) for name in content}
    assert load_tensors(tmp_path / "step-00000007", target, rank=2, world_size=3)[1] == {"rank": 2}
    assert load_tensors(tmp_path / "step-00000007", target, rank=1, world_size=2)[1] is None
    assert all(target[name].equal(content[name]) for name in content)


def test_pipeline_stages_save_and_load_their_own_names(tmp_path: Path) -> None:
    stages = [{"layers.0": torch.ones(3)}, {"layers.1": torch.full((3,), 2.0)}]
    ranks = [Checkpointer(tmp_path, rank, 2, replicas=[rank]) for rank in range(2)]
    for checkpointer, stage in zip(ranks, stages, strict=True):
        checkpointer.save(1, stage, {})
    for checkpointer in ranks:
        checkpointer.close()
    path = tmp_path / "step-00000001"
    assert {name: tensor[0].item() for name, tensor in load_full_tensors(path).items()} == {
        "layers.0": 1.0,
        "layers.1": 2.0,
    }
    mine = {"layers.1": torch.zeros(3)}
    load_tensors(path, mine, names_on_other_ranks=["layers.0"])
    assert mine["layers.1"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(WanmaError, match=r"layers\.0: only in the checkpoint"):
        load_tensors(path, mine)


def test_a_rank_that_never_comes_is_named_and_the_save_before_stays(tmp_path: Path) -> None:
    ranks = [Checkpointer(tmp_path, rank, 3, deadline_seconds=0.3) for rank in range(3)]
    for checkpointer in ranks:
        checkpointer.save(1, tensors(1), {})
    for checkpointer in ranks:
        checkpointer.wait()
    for checkpointer in ranks[:2]:  # rank 2 is dead
        checkpointer.save(2, tensors(2), {})
    for checkpointer in ranks[:2]:
        (result,) = checkpointer.wait()
        assert result.path is None
        assert "rank 2 did not finish writing" in str(result.error)
        assert "earlier checkpoints are unchanged" in str(result.error)
    assert find_newest_valid(tmp_path) == tmp_path / "step-00000001"
    ranks[0].close()
    assert names(tmp_path) == ["step-00000001"]


def test_a_failure_of_one_rank_reaches_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writer.write_file

    def failing(path: Path, content: memoryview, **keywords: Any) -> str:
        if path.name == "rank-00001.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, content, **keywords)

    # Whoever waits for the deadline does not end in the time of a test.
    ranks = [Checkpointer(tmp_path, rank, 2, deadline_seconds=1000) for rank in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_file", failing)
        for checkpointer in ranks:
            checkpointer.save(1, tensors(1), {})
        results = [checkpointer.wait()[0] for checkpointer in ranks]
    for result in results:
        assert "rank 1: Input/output error" in str(result.error)
    for checkpointer in ranks:  # training went on, the disk is well again
        checkpointer.save(2, tensors(2), {})
    assert [checkpointer.wait()[0].error for checkpointer in ranks] == [None, None]
    assert names(tmp_path) == ["step-00000002"]


def test_a_rank_that_is_still_writing_when_the_others_have_moved_on_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), writer.write_file

    def uneven(path: Path, content: memoryview, **keywords: Any) -> str:
        if path.parent.name == "step-00000001.partial-0-1":
            if path.name == "rank-00000.safetensors":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            gate.wait(10)
        return real(path, content, **keywords)

    monkeypatch.setattr(writer, "write_file", uneven)
    (tmp_path / "step-00000001").mkdir()  # of an earlier run: not to be taken for this save
    ranks = [Checkpointer(tmp_path, rank, 2, keep=1) for rank in range(2)]
    for checkpointer in ranks:
        checkpointer.save(1, tensors(1), {})
    assert "rank 0: Input/output error" in str(ranks[0].wait()[0].error)
    ranks[0].save(2, tensors(2), {})  # removes the folder of the failed save
    while (tmp_path / "step-00000001.partial-0-1").exists():
        time.sleep(0.01)
    gate.set()
    assert "rank 0 aborted the save" in str(ranks[1].wait()[0].error)
    ranks[1].save(2, tensors(2), {})
    assert [checkpointer.wait()[0].error for checkpointer in ranks] == [None, None]
    assert names(tmp_path) == ["step-00000002"]


def test_a_rank_that_comes_late_to_a_failed_last_save_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, content: memoryview, **keywords: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(writer, "write_file", failing)
    ranks = [Checkpointer(tmp_path, rank, 2) for rank in range(2)]
    ranks[0].save(1, tensors(1), {})
    assert ranks[0].wait()[0].error is not None
    closing = threading.Thread(target=ranks[0].remove_failed_saves)  # at the end of the run
    closing.start()
    closing.join(0.2)
    ranks[1].save(1, tensors(1), {})
    assert "No space left on device" in str(ranks[1].wait()[0].error)
    closing.join()
    assert names(tmp_path) == []


def test_a_rank_does_not_take_an_older_save_of_the_step_for_the_one_it_waits_for(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    checkpointer = Checkpointer(tmp_path, 1, 2, replicas=[1])
    checkpointer.save(1, tensors(), {})
    partial = tmp_path / "step-00000001.partial-0-1"
    while not (partial / "table-00001.json").exists():
        time.sleep(0.001)
    partial.rename(tmp_path / "gone")  # rank 0 gave up
    (result,) = checkpointer.wait()
    assert "rank 0 aborted the save" in str(result.error)


def test_a_rank_that_cannot_even_start_tells_the_others(tmp_path: Path) -> None:
    ranks = [Checkpointer(tmp_path, rank, 2, deadline_seconds=60) for rank in range(2)]
    with pytest.raises(WanmaError, match="complex64"):
        ranks[1].save(1, {"w": torch.zeros(1, dtype=torch.complex64)}, {})
    ranks[0].save(1, tensors(), {})
    (result,) = ranks[0].wait()
    assert "rank 1: tensor w has dtype" in str(result.error)


def test_ranks_that_disagree_about_a_tensor_do_not_commit(tmp_path: Path) -> None:
    ranks = [Checkpointer(tmp_path, rank, 2, replicas=[rank]) for rank in range(2)]
    ranks[0].save(1, {"w": torch.zeros(2)}, {})
    ranks[1].save(1, {"w": torch.zeros(3)}, {})
    for checkpointer in ranks:
        (result,) = checkpointer.wait()
        assert "rank 1 holds tensor w as" in str(result.error)
    assert find_newest_valid(tmp_path) is None


# ---------------------------------------------------------------- failures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.root
def test_a_full_disk_fails_the_save_leaves_the_one_before_and_frees_its_own_part(small_disk: Path) -> None:
    checkpointer = Checkpointer(small_disk)
    assert saved(checkpointer, 1).error is None
    checkpointer.save(2, {"w": torch.zeros(600_000)}, {})
    (result,) = checkpointer.wait()
    assert result.path is None
    assert "step 2 was not saved: rank 0: No space" in str(result.error)
    assert "rank-00000.safetensors" in str(result.error)
    assert "free space" in result.error.hint
    assert names(small_disk) == ["step-00000001"]
    assert saved(checkpointer, 3).error is None  # training went on
    assert names(small_disk) == ["step-00000001", "step-00000003"]


def test_a_write_error_is_reported_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path)

    def full(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        result = saved(checkpointer, 1)
    assert "No space left on device" in str(result.error)
    assert "rank-00000.safetensors" in str(result.error)
    assert names(tmp_path) == []


def explode(path: Path, content: memoryview, **keywords: Any) -> str:
    raise ZeroDivisionError("exploded")


def test_a_failure_that_nobody_asked_about_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_file", explode)
        checkpointer.save(1, tensors(), {})
        checkpointer._join_thread()
    with pytest.raises(WanmaError, match=r"step 1 was not saved.*ZeroDivisionError"):
        checkpointer.save(2, tensors(), {})
    assert saved(checkpointer, 3).error is None
    checkpointer.close()


def test_a_failure_that_nobody_asked_about_is_raised_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "write_file", explode)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, tensors(), {})
    with pytest.raises(WanmaError, match="step 1 was not saved"):
        checkpointer.close()


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WanmaError) as caught:
        Checkpointer(tmp_path / "file" / "checkpoints")
    assert "--run-dir" in caught.value.hint


def test_state_that_is_no_json_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(WanmaError, match=r"training state .* JSON"):
        checkpointer.save(1, tensors(), {"loss": float("nan")})
    assert names(tmp_path) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize(("number", "tries"), [(errno.EIO, 2), (errno.ESTALE, 2), (errno.ENOSPC, 1)])
def test_a_disk_that_fails_for_a_moment_is_written_to_again_and_a_full_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    monkeypatch.setattr(
        file_writer, "_RETRY_POLICY", RetryPolicy(max_attempts=2, initial_backoff_seconds=0.001)
    )
    fsync, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "rank-00000.safetensors":
            calls.append(descriptor)
            if len(calls) == 1:
                raise OSError(number, "injected")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with Checkpointer(tmp_path) as checkpointer:
        result = saved(checkpointer, 1)
    assert len(calls) == tries
    assert (result.error is None) == (tries == 2)
    if tries == 2:
        assert find_defects(tmp_path / "step-00000001") == []


def test_ranks_whose_run_others_carry_on_commit_nothing_more(tmp_path: Path) -> None:
    claim = Claim(1, "10.0.0.1:29500", "one", "host")
    FolderClaims(tmp_path).create(claim)
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, check_fence=FolderClaims(tmp_path).fence(1).check) as checkpointer:
        assert saved(checkpointer, 10).error is None
        FolderClaims(tmp_path).create(replace(claim, generation=2, coordinator="other"))
        failed = saved(checkpointer, 20)
    assert "superseded by generation 2" in str(failed.error)
    assert names(folder) == ["step-00000010"]
