"""Law 1 where targets are missing unevenly: the sum of losses is divided once, by the real targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, PartlyLabelled, Plain, Tagger, seeded
from support.own_loop import session_job
from support.ranks import run_job
from support.recovering import messages
from support.text import SMALL_DECODER, short_texts, text_job
from wanma.data.batch import IGNORE_INDEX
from wanma.job.plan.plan import Plan

STEPS = 4


def documents_job(folder: Path, **train: Any) -> dict[str, Any]:
    """Documents of a few bytes, several in each sequence, each of which sees only itself."""
    keys = {"precision": "fp64", "steps": STEPS, "validation_samples": 3, **train}
    data = {"document_masks": True}
    return text_job(folder, SMALL_DECODER, text=short_texts(folder), sequence_length=24, data=data, **keys)


def labels_job(**train: Any) -> dict[str, Any]:
    """Sequences of which some have no target at all."""
    model, data = {"factory": "support.own:Tagger"}, {"factory": "support.own:PartlyLabelled"}
    return session_job(model=model, data=data, train={"steps": STEPS, "validation_samples": 5, **train})


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2, micro_batch=2),
        Plan(dp_shard=4, shard="parameters", micro_batch=1),
        Plan(tp=2, micro_batch=5),
        Plan(pp=2, dp_replicate=2, micro_batch=1),
    ],
    ids=str,
)
@pytest.mark.daily("2 ranks (dp_replicate 2), fp32, cpu", "2 ranks (tp 2), fp32, cpu")
def test_document_masks_give_the_numbers_of_one_process(plan: Plan, tmp_path: Path) -> None:
    job = documents_job(tmp_path, global_batch=5)
    one = one_process(tmp_path / "one", job, 5)
    same_numbers(one, spread_over(tmp_path / "run", job, plan))


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e3], ids=["unclipped", "clipped", "clip out of reach"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=2),
        Plan(dp_replicate=2, micro_batch=1),
        Plan(dp_shard=2, shard="gradients", micro_batch=2),
        Plan(dp_replicate=2, dp_shard=2, shard="parameters", micro_batch=1),
    ],
    ids=str,
)
@pytest.mark.daily(
    "1 rank (one process), fp32, cpu-unclipped",
    "2 ranks (dp_replicate 2), fp32, cpu-clipped",
    "2 ranks (dp_shard 2), gradients sharded, fp32, cpu-unclipped",
    "4 ranks (dp_replicate 2 × dp_shard 2), parameters sharded, fp32, cpu-clip out of reach",
)
def test_missing_targets_count_nowhere(plan: Plan, clip: float, tmp_path: Path, reference: Any) -> None:
    job = labels_job(global_batch=7, gradient_clip=clip)
    same_numbers(reference(job, 7), spread_over(tmp_path / "run", job, plan))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def run(job: dict[str, Any], micro_batch: int) -> Any:
        if str(job) not in made:
            made[str(job)] = one_process(tmp_path_factory.mktemp("one"), job, micro_batch)
        return made[str(job)]

    return run


@pytest.mark.parametrize(
    "plan",
    [
        # Three samples for two ranks of micro-batches of one: rank 1's second micro-batch has no rows.
        Plan(dp_replicate=2, micro_batch=1),
        Plan(dp_shard=2, shard="optimizer", micro_batch=1),
        Plan(dp_shard=2, shard="parameters", micro_batch=1),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_replicate 2), fp32, cpu", "2 ranks (dp_shard 2), parameters sharded, fp32, cpu"
)
def test_a_micro_batch_without_rows_takes_part_without_counting(plan: Plan, tmp_path: Path) -> None:
    assert [len(rows) for rows in plan.micro_batches(3, 1)] == [1, 0]
    job = labels_job(global_batch=2, batch_ramp=[[1, 3], [3, 5]])
    one = one_process(tmp_path / "one", job, 5)
    assert [step["samples"] for step in one.steps] == [2, 5, 8, 13]
    same_numbers(one, spread_over(tmp_path / "run", job, plan))


def test_the_loss_is_the_mean_over_the_targets_of_the_whole_batch(tmp_path: Path) -> None:
    """Against torch alone: the first step's loss, before any update, of whatever rows have targets."""
    data = PartlyLabelled(size=8)
    job = labels_job(global_batch=8, steps=1)
    job["data"] = {"validation_fraction": 0.0}
    torch.manual_seed(5)
    model = Tagger().double()
    run = spread_over(
        tmp_path / "run",
        job,
        Plan(dp_shard=2, shard="parameters", micro_batch=3),
        objects={"model": model, "data": data},
    )
    logits = model(data.inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), data.targets.flatten(), ignore_index=IGNORE_INDEX)
    expected.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert run.losses == pytest.approx([expected.item()], rel=1e-12)
    assert run.norms == pytest.approx([norm.item()], rel=1e-12)


def test_a_batch_without_any_target_is_an_error_that_names_the_step(tmp_path: Path) -> None:
    job = labels_job(global_batch=2, steps=1)
    job["data"] = {"factory": "support.own:Unlabelled"}
    with pytest.raises(AssertionError, match=r"step 1: no sample .* a target: sample \d+ of Unlabelled"):
        spread_over(tmp_path / "run", job, Plan(dp_replicate=2, micro_batch=1))


def test_a_batch_without_any_target_is_skipped_where_the_job_says_so(tmp_path: Path) -> None:
    job = labels_job(global_batch=2, steps=2)
    job["data"] = {"factory": "support.own:Unlabelled"}
    job["train"]["non_finite"] = "skip"
    job["checkpoint"] = {"every_steps": 1}
    run = run_job(tmp_path, job, Plan(dp_replicate=2, micro_batch=1))
    first, second = run.tensors(1), run.tensors(2)
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("model."))
    assert run.losses == [None, None]
    assert "step 2: skipped, no sample of the global batch has a target: sample" in messages(run)


def test_a_rank_without_samples_gives_a_loss_targets_that_it_knows(tmp_path: Path) -> None:
    job = {
        "model": {"factory": "support.own:Plain"},
        "train": {"precision": "fp64", "steps": 1, "global_batch": 1},
        "checkpoint": {"every_steps": 0},
    }
    loss = torch.nn.CrossEntropyLoss(ignore_index=255, reduction="none")
    objects = {"model": seeded(Plain), "data": Numbers(), "loss": loss}
    one = one_process(tmp_path / "one", job, 1, objects=objects)
    same_numbers(
        one, spread_over(tmp_path / "two", job, Plan(dp_replicate=2, micro_batch=1), objects=objects)
    )
