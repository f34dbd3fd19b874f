"""Ranks that need the same samples share their reading: read once, and not one bit of training changes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.compare import same_bits
from support.huggingface import write_config
from support.ranks import run_job
from support.text import SMALL_DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.training.run.shared_reading import content_of, divide_reading

STEPS, BATCH = 4, 6


def small_job(folder: Path, **data: Any) -> dict[str, Any]:
    train = {"precision": "fp64", "steps": STEPS, "global_batch": BATCH, "deterministic": True}
    train |= {"validation_samples": 3, "validate_every_steps": 2}
    return text_job(folder, {**SMALL_DECODER, "layers": 3, "dropout": 0.1}, data=data, **train)


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [
        (Plan(tp=2, micro_batch=3, precision="fp64"), ()),
        (Plan(pp=2, micro_batch=2, precision="fp64"), ()),
        (Plan(pp=2, micro_batch=2, precision="fp64"), (1, 1)),
        (Plan(cp=2, micro_batch=2, precision="fp64"), ()),
        (Plan(pp=2, tp=2, micro_batch=3, schedule="gpipe", precision="fp64"), ()),
        (Plan(pp=2, tp=2, micro_batch=3, precision="fp64"), (2, 2)),
        (Plan(dp_replicate=2, tp=2, micro_batch=2, precision="fp64"), ()),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (tp 2), fp64, cpu-()",
    "2 ranks (pp 2), fp64, cpu-()",
    "2 ranks (pp 2), fp64, cpu-(1, 1)",
)
def test_samples_are_read_once_and_training_is_the_same_to_the_bit(
    plan: Plan, nodes: tuple[int, ...], tmp_path: Path
) -> None:
    workers = {rank: {"local_world_sizes": nodes} for rank in range(plan.world_size)}
    each, shared = (
        run_job(tmp_path / key, small_job(tmp_path, shared_reading=key), plan, workers=workers)
        for key in ("never", "always")
    )
    same_bits(each, shared)
    assert shared.validation_losses == each.validation_losses
    samples = STEPS * BATCH
    assert each.steps[-1]["samples_read"] == samples * plan.pp * plan.tp * plan.cp
    assert shared.steps[-1]["samples_read"] == samples
    groups = plan.data_parallel_size
    expected = f"data: {groups} of {plan.world_size} ranks read, each for {plan.world_size // groups} ranks"
    assert expected in shared.messages
    assert expected not in each.messages


def test_a_middle_stage_of_a_pipeline_reads_no_tokens(tmp_path: Path) -> None:
    plan = Plan(pp=3, micro_batch=2, precision="fp64")
    each = run_job(tmp_path / "auto", small_job(tmp_path), plan)
    assert each.steps[-1]["samples_read"] == 2 * STEPS * BATCH
    assert "data: 1 ranks of middle pipeline stages read nothing" in each.messages
    one = run_job(tmp_path / "one", small_job(tmp_path), Plan(micro_batch=2, precision="fp64"))
    assert each.losses == pytest.approx(one.losses, rel=1e-10)
    assert each.validation_losses == pytest.approx(one.validation_losses, rel=1e-10)


@pytest.mark.full
def test_a_middle_stage_with_document_masks_reads_them(tmp_path: Path) -> None:
    plan = Plan(pp=3, micro_batch=2, precision="fp64")
    runs = [
        run_job(tmp_path / key, small_job(tmp_path, document_masks=True, shared_reading=key), plan)
        for key in ("auto", "always")
    ]
    same_bits(*runs)
    assert [run.steps[-1]["samples_read"] for run in runs] == [3 * STEPS * BATCH, STEPS * BATCH]


class Told:
    """Sequences of words; each reading is told to a file, with the process."""

    def __init__(self, file: Path) -> None:
        generator = torch.Generator().manual_seed(7)
        self.file = file
        self.tokens = torch.randint(320, (40, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return {"input": self.tokens[index], "labels": self.tokens[index]}


@pytest.mark.parametrize(
    "plan",
    [Plan(tp=2, micro_batch=3, precision="fp64"), Plan(pp=2, micro_batch=3, precision="fp64")],
    ids=str,
)
@pytest.mark.daily("2 ranks (tp 2), fp64, cpu")
def test_of_a_dataset_with_several_workers_one_rank_alone_reads(plan: Plan, tmp_path: Path) -> None:
    job = {
        **small_job(tmp_path),
        "model": {"huggingface": str(write_config(tmp_path / "llama", "llama"))},
        "data": {"factory": "any:thing", "workers": 2, "validation_fraction": 0},
    }
    job["train"] = {**job["train"], "validate_every_steps": 0}
    read, runs = {}, {}
    for key in ("auto", "never"):
        job["data"] = {**job["data"], "shared_reading": key}
        file = tmp_path / f"{key}.txt"
        runs[key] = run_job(tmp_path / key, job, plan, {"data": Told(file)})
        read[key] = Counter(line.split()[0] for line in file.read_text().splitlines())
    same_bits(runs["never"], runs["auto"])
    assert len(read["never"]) == len(read["auto"]) == 2
    training = STEPS * BATCH
    (_, most), (_, least) = read["auto"].most_common()
    assert most - least == training  # both read a few before the first step: fingerprint and checks
    assert least < training
    assert len(set(read["never"].values())) == 1


def test_an_error_of_reading_is_one_message_of_the_rank_that_reads(tmp_path: Path) -> None:
    class Bad(Told):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if len(self.file.read_text().splitlines()) > 30:
                raise ValueError(f"row {index} is worn out")
            return super().__getitem__(index)

    file = tmp_path / "read.txt"
    file.touch()
    job = {
        **small_job(tmp_path),
        "model": {"huggingface": str(write_config(tmp_path / "llama", "llama"))},
        "data": {"factory": "any:thing", "workers": 2, "validation_fraction": 0},
    }
    job["train"] = {**job["train"], "validate_every_steps": 0, "steps": 50}
    plan = Plan(tp=2, micro_batch=3, precision="fp64")
    with pytest.raises(AssertionError, match=r"of Bad failed: .* row \d+ is worn"):
        run_job(tmp_path / "run", job, plan, {"data": Bad(file)})


GRID = Plan(pp=4, dp_replicate=2, tp=2, micro_batch=1)
"""Ranks 0 to 3 hold the first stage: two data ranks of two tensor ranks each."""


def test_each_part_of_a_pipeline_needs_what_its_stages_use() -> None:
    assert [content_of(GRID, rank) for rank in range(0, 16, 4)] == ["complete", "rows", "rows", "targets"]
    v_shaped = Plan(pp=2, virtual_stages=2, schedule="zbv", micro_batch=1)
    assert [content_of(v_shaped, rank) for rank in range(2)] == ["complete", "rows"]
    assert content_of(Plan(tp=2), 1) == "complete"


def test_one_rank_of_a_group_reads_for_all_on_its_node_and_for_nodes_without_inputs() -> None:
    on_one = divide_reading(GRID, (), is_shared=True, reads_rows=True)
    assert on_one.readers == (0, 0, 2, 2) * 4
    assert on_one.describe() == "2 of 16 ranks read, each for 8 ranks"
    by_stage = divide_reading(GRID, (4, 4, 4, 4), is_shared=True, reads_rows=True)
    assert by_stage.readers == (0, 0, 2, 2) * 4
    assert [by_stage.is_local(rank) for rank in (1, 3, 4, 15)] == [True, True, False, False]
    assert by_stage.has_remote_consumers(0)
    unread = divide_reading(GRID, (4, 4, 4, 4), is_shared=True, reads_rows=False)
    assert unread.readers == (0, 0, 2, 2, *[None] * 8, 0, 0, 2, 2)
    assert unread.describe() == (
        "2 of 16 ranks read, each for 4 ranks; 8 ranks of middle pipeline stages read nothing"
    )


def test_a_tensor_group_over_two_nodes_reads_once_on_each() -> None:
    division = divide_reading(Plan(tp=4, micro_batch=1), (2, 2), is_shared=True, reads_rows=True)
    assert division.readers == (0, 0, 2, 2)
    assert not division.has_remote_consumers(0)
    assert division.describe() == "2 of 4 ranks read, each for 2 ranks"


def test_without_sharing_each_reads_by_itself() -> None:
    division = divide_reading(GRID, (8, 8), is_shared=False, reads_rows=True)
    assert division.readers == tuple(range(16))
    assert division.describe() == ""
    assert not division.is_shared
