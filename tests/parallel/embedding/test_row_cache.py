"""Tables that lie on disk train as tables in memory, bit for bit, however few of their rows memory holds."""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.compare import equal, same_bits
from support.ranks import run_here, run_job
from wanma.checkpoint.format.tensor_blocks import iterate_blocks
from wanma.checkpoint.save import file_buffer
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.embedding.row_cache import RecordLayout, RowCache
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.parameters import initialization
from wanma.planner.embedding_placement import CACHE_ENTRY_BYTES, ROW_ADDRESS_BYTES

ROWS = {"user": 150, "item": 40, "tags": 60}
WIDTH = 6
RECORD_BYTES = {"sgd": 24, "adagrad": 48, "rowwise_adagrad": 28, "adam": 72}
OPTIMIZERS = tuple(RECORD_BYTES)
LAYOUT = RecordLayout(3, ("sum",), ("count",))


def memory_bytes(slots: int, rows: int, record_bytes: int) -> int:
    return rows * ROW_ADDRESS_BYTES + slots * (record_bytes + CACHE_ENTRY_BYTES)


def open_cache(folder: Path, slots: int, rows: int = 200) -> RowCache:
    size = memory_bytes(slots, rows, LAYOUT.columns * 4)
    return RowCache(rows, LAYOUT, torch.float32, size, DiskPool(folder / "scratch"), 3, torch.device("cpu"))


# ------------------------------------------------------------------ the cache alone


@pytest.mark.parametrize("slots", [30, 45, 120, 200])
def test_rows_keep_their_values_whichever_are_in_memory(slots: int, tmp_path: Path) -> None:
    """30 slots hold the rows of one step, 45 not quite those of two."""
    generator = torch.Generator().manual_seed(slots)
    cache = open_cache(tmp_path, slots)
    expected = torch.randn(200, 3, generator=generator)
    counts = torch.zeros(200)
    cache.stored_matrix.copy_(expected)
    steps = [torch.randint(200, (30,), generator=generator).square().div(200).long() for _ in range(41)]
    cache.prefetch(0, steps[0].unique())
    for step, ids in enumerate(steps[:-1]):
        rows = ids.unique()
        cache.begin_step()
        cache.prefetch(step + 1, steps[step + 1].unique())
        assert torch.equal(cache.vectors(ids), expected[ids])
        slots_of_rows = cache.slots_to_change(rows)
        change = torch.randn(len(rows), 3, generator=generator)
        cache.matrix[slots_of_rows] += change
        cache.states["count"][slots_of_rows] += 1
        expected[rows] += change
        counts[rows] += 1
        if step % 7 == 0:
            assert torch.equal(cache.vectors(torch.arange(200)), expected)  # as a validation reads
        if step % 11 == 0:
            cache.write_back()
            assert torch.equal(cache.stored_matrix, expected)
            assert torch.equal(cache.stored_states["count"], counts)
    cache.write_back()
    assert torch.equal(cache.stored_matrix, expected)
    assert torch.equal(cache.stored_states["count"], counts)
    assert not cache.stored_states["sum"].any()


def test_rows_that_no_step_announced_change_too(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, 10)
    for first in range(0, 200, 10):
        cache.matrix[cache.slots_to_change(torch.arange(first, first + 10))] = float(first)
    cache.write_back()
    assert torch.equal(cache.stored_matrix[:, 0], torch.arange(200) // 10 * 10.0)


def count_reads(cache: RowCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    read = cache._read

    def counted(rows: Tensor, slots: Tensor) -> None:
        counts.append(len(rows))
        read(rows, slots)

    monkeypatch.setattr(cache, "_read", counted)
    return counts


def test_rows_that_are_used_often_stay_and_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(tmp_path, 30)
    counts = count_reads(cache, monkeypatch)
    frequent = torch.arange(10)
    for step in range(19):
        once = torch.arange(10 + 10 * step, 20 + 10 * step)
        cache.prefetch(step, torch.cat([frequent, once]))
        cache.begin_step()
    assert sum(counts) == 10 + 19 * 10


def test_a_lookup_does_not_wait_for_the_rows_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path, 40)
    cache.stored_matrix.copy_(torch.arange(200.0)[:, None].expand(200, 3))
    present, following = torch.arange(20), torch.arange(10, 30)
    cache.prefetch(0, present)
    cache.begin_step()
    may_read, read = threading.Event(), cache._read

    def late(rows: Tensor, slots: Tensor) -> None:
        assert may_read.wait(60)
        read(rows, slots)

    monkeypatch.setattr(cache, "_read", late)
    cache.prefetch(1, following)
    assert cache.vectors(present)[:, 0].tolist() == present.tolist()
    cache.matrix[cache.slots_to_change(present)] += 1
    may_read.set()
    cache.begin_step()
    assert cache.vectors(following)[:, 0].tolist() == [*range(11, 21), *range(20, 30)]


def test_a_step_with_more_rows_than_memory_holds_is_one_error(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, 20)
    cache.prefetch(0, torch.arange(25))
    with pytest.raises(WanmaError, match=r"rank 3: parallel\.embedding_memory_bytes.*20 rows.*5 rows more"):
        cache.begin_step()


def test_memory_for_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"rank 3: parallel\.embedding_memory_bytes"):
        open_cache(tmp_path, 0)
    assert not (tmp_path / "scratch").exists()


# ------------------------------------------------------------------ runs


def job(folder: Path, optimizer: str, **train: Any) -> dict[str, Any]:
    """A DLRM with bags, whose tables have many more rows than a step uses."""
    generator = np.random.default_rng(0)
    rows = ["user,item,rating,tags"]
    for n in range(120):
        tags = "|".join(map(str, generator.integers(0, ROWS["tags"], generator.integers(0, 5))))
        rows.append(f"{generator.integers(ROWS['user'])},{n % 40},{n % 2},{tags}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    return {
        "model": {
            "family": "recommender",
            "kind": "dlrm",
            "recommender": {"embedding": WIDTH, "top": [9], "tables": ROWS},
        },
        "data": {
            "kind": "interactions",
            "path": str(folder / "log.csv"),
            "cache": str(folder / "cache"),
            "columns": {"sparse": ["tags"]},
            "interactions": {"target": "click", "positive_from": 1},
        },
        "train": {
            "steps": 8,
            "global_batch": 9,
            "learning_rate": 0.05,
            "schedule": "constant",
            "validation_samples": 12,
            "embedding_optimizer": optimizer,
            **train,
        },
        "checkpoint": {"every_steps": 2},
        "observe": {"console": "quiet"},
    }


def in_memory(sharding: str, ranks: int) -> Plan:
    return Plan(dp_replicate=ranks, embedding=sharding, micro_batch=3)  # type: ignore[arg-type]


def on_disk(sharding: str, ranks: int, optimizer: str, slots: int = 60) -> Plan:
    rows = sum(ROWS.values()) if ranks == 1 else 150  # at most, of a rank
    size = memory_bytes(slots, rows, RECORD_BYTES[optimizer])
    return in_memory(sharding, ranks).with_changes(embedding_memory_bytes=size)


@pytest.mark.parametrize(
    ("optimizer", "sharding", "ranks"),
    [
        case
        if case[2] == 1 or case in {("adam", "row_wise", 2), ("rowwise_adagrad", "table_wise", 2)}
        else pytest.param(*case, marks=pytest.mark.full)
        for case in (
            *((optimizer, "row_wise", 1) for optimizer in OPTIMIZERS),
            *(
                (optimizer, sharding, 2)
                for optimizer in OPTIMIZERS
                for sharding in ("row_wise", "table_wise")
            ),
            ("adagrad", "replicated", 2),
        )
    ],
)
def test_a_run_has_the_bits_of_tables_in_memory(
    optimizer: str, sharding: str, ranks: int, tmp_path: Path
) -> None:
    run = run_here if ranks == 1 else run_job
    one = run(tmp_path / "one", job(tmp_path, optimizer), in_memory(sharding, ranks))
    other = run(tmp_path / "other", job(tmp_path, optimizer), on_disk(sharding, ranks, optimizer))
    same_bits(one, other)
    assert not (tmp_path / "other" / "scratch").exists()


def test_an_increment_of_tables_on_disk_has_all_rows_that_changed(tmp_path: Path) -> None:
    text = job(tmp_path, "adam")
    one = run_here(tmp_path / "one", text, in_memory("row_wise", 1))
    text["checkpoint"] |= {"full_every": 9}
    other = run_here(tmp_path / "other", text, on_disk("row_wise", 1, "adam"))
    same_bits(one, other)
    assert [*(tmp_path / "other" / "checkpoints" / "step-00000008").glob("base-*")]


def test_two_groups_of_tables_share_the_memory(tmp_path: Path) -> None:
    text = job(tmp_path, "adagrad")
    text["model"]["kind"] = "matrix_factorization"
    text["model"]["recommender"] = {"embedding": WIDTH, "tables": {"user": 150, "item": 40}}
    text["data"]["interactions"] = {"target": "click", "negatives": 3}
    text["data"]["columns"] = {}
    one = run_here(tmp_path / "one", text, in_memory("row_wise", 1))
    other = run_here(tmp_path / "other", text, on_disk("row_wise", 1, "adagrad", slots=90))
    same_bits(one, other)


def test_tables_are_drawn_and_saved_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = run_here(tmp_path / "one", job(tmp_path, "adam"), in_memory("row_wise", 1))
    for module in (initialization, file_buffer):
        monkeypatch.setattr(module, "iterate_blocks", partial(iterate_blocks, max_elements=64))
    same_bits(one, run_here(tmp_path / "other", job(tmp_path, "adam"), on_disk("row_wise", 1, "adam")))


@pytest.mark.parametrize("slots", [None, 45])
def test_a_run_goes_on_with_another_memory_or_without(slots: int | None, tmp_path: Path) -> None:
    one = run_here(tmp_path / "one", job(tmp_path, "adam"), in_memory("row_wise", 1))
    folder = tmp_path / "two"
    run_here(folder, job(tmp_path, "adam", steps=4), on_disk("row_wise", 1, "adam"))
    after = in_memory("row_wise", 1) if slots is None else on_disk("row_wise", 1, "adam", slots)
    same_bits(one, run_here(folder, job(tmp_path, "adam"), after))


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    one = run_here(tmp_path / "one", job(tmp_path, "adam"), in_memory("row_wise", 1))
    folder, plan = tmp_path / "two", on_disk("row_wise", 1, "adam")
    text = job(tmp_path, "adam")
    with pytest.raises(AssertionError, match="rank 0 ended without an answer"):
        run_job(folder, text, plan, patch="support.faults:rank_0_is_killed_in_step_4")
    assert list((folder / "scratch").iterdir()) == []  # the kernel has freed the rows
    again = run_here(folder, text, plan)
    assert again.losses[-4:] == one.losses[-4:]
    equal(one, again)


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = run_here(tmp_path / "one", job(tmp_path, "adagrad"), in_memory("row_wise", 1))
    folder, plan = tmp_path / "two", on_disk("row_wise", 1, "adagrad")
    run_here(folder, job(tmp_path, "adagrad", steps=4), plan)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(WanmaError, match=r"rank 0: parallel\.embedding_memory_bytes.*No space") as error:
            run_here(folder, job(tmp_path, "adagrad"), plan)
    assert "cluster.scratch" in error.value.hint
    same_bits(one, run_here(folder, job(tmp_path, "adagrad"), plan))


def test_a_disk_that_is_full_at_the_first_checkpoint_names_key_and_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, sizes = os.posix_fallocate, list[int]()

    def full_after_the_rows(descriptor: int, offset: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_after_the_rows)
    with pytest.raises(WanmaError, match=r"rank 0.*cluster\.scratch.*No space") as error:
        run_here(tmp_path / "run", job(tmp_path, "adagrad"), on_disk("row_wise", 1, "adagrad"))
    assert "cluster.scratch" in error.value.hint
    assert sizes[0] == sum(ROWS.values()) * RECORD_BYTES["adagrad"]
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


def test_a_run_with_too_little_memory_names_key_and_rank(tmp_path: Path) -> None:
    plan = on_disk("row_wise", 1, "adam", slots=12)
    with pytest.raises(WanmaError, match=r"rank 0: parallel\.embedding_memory_bytes has room for 12 rows"):
        run_here(tmp_path / "run", job(tmp_path, "adam"), plan)
