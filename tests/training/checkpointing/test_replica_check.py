"""A bit that flips in one replica: ranks see it before they make a copy, name it, and go back behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.compare import equal
from support.images import Held, workers
from support.ranks import Outcome, run_job
from support.recovering import job, messages, recover
from wanma.checkpoint.inspection.replica_hashes import ReplicaMismatch
from wanma.job.plan.plan import Plan
from wanma.training.checkpointing.replica_check import replica_mismatch_error

PLANS = [
    Plan(dp_replicate=2, micro_batch=3),
    Plan(dp_replicate=3, micro_batch=2),
    Plan(dp_shard=2, shard="optimizer", micro_batch=3),
    Plan(dp_shard=2, shard="gradients", micro_batch=3),
    Plan(dp_shard=2, shard="parameters", micro_batch=3),
    Plan(tp=2, micro_batch=6),
    Plan(tp=2, micro_batch=6, sequence_parallel=True),
    Plan(cp=2, micro_batch=6),
    Plan(pp=2, dp_replicate=2, micro_batch=1),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.daily(
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu",
    "2 ranks (tp 2), fp32, cpu0",
    "4 ranks (pp 2 × dp_replicate 2), fp32, cpu",
)
def test_ranks_that_nothing_happened_to_hold_the_same_bits_in_every_layout(
    plan: Plan, tmp_path: Path
) -> None:
    held = Held(plan.world_size)
    text = job(tmp_path, every_steps=2)
    run_job(tmp_path / "run", text, plan, workers=workers(held, range(plan.world_size)))
    assert held.steps() == {4, 5}


def flip(folder: Path, plan: Plan, held: Held, patch: str) -> str:
    """The error of the rank that speaks first: all say the same."""
    with pytest.raises(AssertionError, match="AllRanksError") as caught:
        run_job(
            folder / "run",
            job(folder),
            plan,
            patch=f"support.faults:{patch}",
            workers=workers(held, range(plan.world_size)),
        )
    return str(caught.value)


def check_recovers(folder: Path, plan: Plan, held: Held, step: int, whole: Outcome) -> None:
    run, _ = recover(folder / "run", job(folder), plan, held, step)
    assert f'"source": "memory", "step": {step},' in messages(run)
    assert run.losses == whole.losses
    equal(whole, run)


def test_of_three_replicas_the_odd_one_is_named_and_no_copy_holds_its_bit(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=3, micro_batch=2)
    whole = run_job(tmp_path / "whole", job(tmp_path, snapshots="off"), plan)
    held = Held(3)
    text = flip(tmp_path, plan, held, "a_weight_of_rank_1_flips_a_bit_in_step_4")
    assert "step 4: rank 1 (" in text
    assert "differs from most other replicas" in text
    assert held.steps() == {2, 3}, "none of step 4"
    check_recovers(tmp_path, plan, held, 3, whole)


def test_of_two_replicas_none_can_be_told_and_both_go_back(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    whole = run_job(tmp_path / "whole", job(tmp_path, snapshots="off"), plan)
    held = Held(2)
    text = flip(tmp_path, plan, held, "a_weight_of_rank_1_flips_a_bit_in_step_4")
    assert "step 4: ranks 0 (" in text
    assert "no majority shows which rank is wrong" in text
    check_recovers(tmp_path, plan, held, 3, whole)


def test_optimizer_state_is_compared_as_well(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    text = flip(tmp_path, plan, Held(2), "a_moment_of_rank_0_flips_a_bit_in_step_4")
    assert "their values of optimizer." in text


def test_a_checkpoint_is_not_made_of_replicas_that_differ(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    with pytest.raises(AssertionError, match="no majority shows"):
        run_job(
            tmp_path / "run",
            job(tmp_path, snapshots="off", every_steps=2),
            plan,
            patch="support.faults:a_weight_of_rank_1_flips_a_bit_in_step_4",
        )
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
    assert saved == ["step-00000002"]


def test_a_job_may_leave_the_comparison_out(tmp_path: Path) -> None:
    text = job(tmp_path)
    text["checkpoint"]["compare_replicas"] = False
    held = Held(2)
    run_job(
        tmp_path / "run",
        text,
        Plan(dp_replicate=2, micro_batch=3),
        patch="support.faults:a_weight_of_rank_1_flips_a_bit_in_step_4",
        workers=workers(held, range(2)),
    )
    assert held.steps() == {4, 5}


def test_what_is_said_names_step_ranks_hosts_and_tensors() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    found = [ReplicaMismatch(f"model.{name}", ((0, 1, 3), (2,))) for name in "vwxyz"]
    error = replica_mismatch_error(8, found, hosts)
    assert error.message == (
        "step 8: rank 2 (b) differs from most other replicas: "
        "their values of model.v, model.w, model.x and 2 more differ"
    )
    assert error.outlier_ranks == ("rank 2 (b)",)
    undecided = replica_mismatch_error(8, [ReplicaMismatch("model.w", ((0, 3), (1, 2)))], hosts)
    assert undecided.outlier_ranks == ()
    assert "ranks 0 (a), 1 (a), 2 (b), 3 (b)" in undecided.message


def test_buffers_of_modules_are_left_out(tmp_path: Path) -> None:
    """They may be of one rank alone: a count of what it has seen."""
    held = Held(2)
    run_job(
        tmp_path / "run",
        job(tmp_path),
        Plan(dp_replicate=2, micro_batch=3),
        patch="support.faults:each_rank_notes_its_number_in_a_buffer",
        workers=workers(held, range(2)),
    )
    assert held.steps() == {4, 5}


def test_the_hashes_are_of_bits() -> None:
    assert not torch.equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    from wanma.checkpoint.inspection.replica_hashes import hash_tensors

    assert len(set(hash_tensors([torch.tensor(0.0), torch.tensor(-0.0)]))) == 2
    assert len(set(hash_tensors([torch.tensor(float("nan"))] * 2))) == 1
