"""wanma.global_batch: losses over the whole global batch, the same on any layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.contrastive import Deep, Pairs, Standardised, Towers, WithPairs, contrastive, plain_contrastive
from support.own import seeded
from support.own_loop import session_job, started_by_launch
from support.ranks import Outcome, run_job, run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.parallel.data_parallel.global_batch import GlobalBatchGatherer
from wanma.parallel.mesh.parallel_mesh import open_mesh


def job(global_batch: int = 7, **parallel: Any) -> dict[str, Any]:
    train = {"steps": 3, "global_batch": global_batch, "validation_samples": 17, "validate_every_steps": 2}
    model, data = {"factory": "support.contrastive:Towers"}, {"validation_fraction": 0.4}
    return session_job(model=model, data=data, train=train, parallel=parallel)


def train(folder: Path, text: dict[str, Any], plan: Plan, loss: Any, model: nn.Module) -> Outcome:
    return run_job(folder, text, plan, objects={"model": model, "data": Pairs(), "loss": loss})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A loop over the global batch on one process, by a loss that knows nothing of wanma."""
    plan = Plan(micro_batch=7, precision="fp64")
    return train(tmp_path_factory.mktemp("plain"), job(), plan, plain_contrastive, seeded(Towers))


LAYOUTS: dict[str, tuple[Plan, str]] = {
    "2 replicas over Gloo": (Plan(dp_replicate=2, micro_batch=4), "gloo"),
    "ZeRO 3 over shared memory": (Plan(dp_shard=2, shard="parameters", micro_batch=4), "auto"),
    "uneven shares": (Plan(dp_replicate=2, micro_batch=5, batch_shares=(2, 5)), "auto"),
}


@pytest.mark.parametrize(("plan", "collectives"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_contrastive_loss_gives_the_numbers_of_a_plain_loop(
    plan: Plan, collectives: str, plain: Outcome, tmp_path: Path
) -> None:
    shared = train(
        tmp_path,
        job(collectives=collectives),
        plan.with_changes(precision="fp64"),
        contrastive,
        seeded(Towers),
    )
    same_numbers(plain, shared, 1e-10)
    assert len(shared.validation_losses) == 2
    assert shared.validation_losses == pytest.approx(plain.validation_losses, rel=1e-10)


def test_ranks_without_samples_take_part_and_count_nothing(tmp_path: Path) -> None:
    """Two samples on three ranks: the third has one padding row."""
    alone = train(tmp_path / "1", job(2), Plan(micro_batch=2, precision="fp64"), contrastive, seeded(Towers))
    plan = Plan(dp_replicate=3, micro_batch=2, precision="fp64")
    three = train(tmp_path / "3", job(2), plan, contrastive, seeded(Towers))
    same_numbers(alone, three, 1e-10)


def test_a_model_may_standardise_over_the_global_batch(tmp_path: Path) -> None:
    plan = Plan(micro_batch=7, precision="fp64")
    alone = train(tmp_path / "1", job(), plan, contrastive, seeded(Standardised))
    two = train(
        tmp_path / "2",
        job(),
        plan.with_changes(dp_shard=2, shard="optimizer"),
        contrastive,
        seeded(Standardised),
    )
    same_numbers(alone, two, 1e-10)


def test_blocks_that_run_again_in_backward_gather_again(tmp_path: Path) -> None:
    plan = Plan(micro_batch=7, precision="fp64")
    alone = train(tmp_path / "1", job(), plan, contrastive, seeded(Deep))
    two = plan.with_changes(dp_shard=2, shard="parameters", recompute="full")
    same_numbers(alone, train(tmp_path / "2", job(), two, contrastive, seeded(Deep)), 1e-10)


def test_micro_batches_that_come_one_after_the_other_are_refused_with_a_way_out(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=2, precision="fp64")
    with pytest.raises(AssertionError, match="7 samples in 2 micro-batches") as error:
        train(tmp_path, job(), plan, contrastive, seeded(Towers))
    assert "parallel.micro_batch = 4" in str(error.value)


def in_a_session(worker: WorkerContext, text: dict[str, Any], folder: Path) -> list[float]:
    with started_by_launch(worker, folder), wanma.session(text) as session:
        model = session.prepare(seeded(Towers))

        def losses(batch: wanma.Batch) -> Tensor:
            return contrastive(model(*batch.inputs), batch.targets)

        for batch in session.batches(Pairs(), validate=losses):
            session.step(losses(batch))
        with pytest.raises(wanma.WanmaError, match="between two batches"):
            wanma.global_batch(torch.ones(2, 3))
    return []


def test_a_session_gathers_the_global_batch_too(plain: Outcome, tmp_path: Path) -> None:
    run_ranks(in_a_session, 2, (job(dp_shard=2), tmp_path / "run"))
    same_numbers(plain, Outcome(tmp_path / "run"), 1e-10)
    assert Outcome(tmp_path / "run").validation_losses == pytest.approx(plain.validation_losses, rel=1e-10)


def with_pairs(worker: WorkerContext, text: dict[str, Any], folder: Path) -> None:
    with started_by_launch(worker, folder), wanma.session(text) as session:
        model = session.prepare(seeded(WithPairs))
        for batch in session.batches(Pairs()):
            session.step(contrastive(model(*batch.inputs)[0], batch.targets))


def test_a_matrix_of_pairs_that_no_loss_uses_is_no_coupling(tmp_path: Path) -> None:
    """Three samples on two ranks, one of which has a single row."""
    text = job(3, dp_shard=2)
    del text["train"]["validate_every_steps"]
    run_ranks(with_pairs, 2, (text, tmp_path / "2"), seconds=60)
    alone = train(tmp_path / "1", job(3), Plan(micro_batch=3, precision="fp64"), contrastive, seeded(Towers))
    same_numbers(alone, Outcome(tmp_path / "2"), 1e-10)


# ------------------------------------------------------------------ the call itself


def test_without_a_run_the_batch_is_the_global_batch() -> None:
    x = torch.randn(3, 2)
    assert wanma.global_batch(x) is x
    assert wanma.global_rows(x).tolist() == [0, 1, 2]


def gathered(worker: WorkerContext) -> list[Any]:
    """Parts of tensors of several kinds for two ranks with three samples."""
    plan = Plan(dp_replicate=2, micro_batch=2)
    with open_mesh(worker, plan, 30.0) as grid:
        rows = 2 - worker.rank
        first = 2 * worker.rank
        numbers = torch.arange(first, first + rows)
        with GlobalBatchGatherer(grid, 3).provide(plan, 3):
            whole = [
                wanma.global_batch(numbers.to(dtype))
                for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64)
            ]
            low = torch.ones(rows, 2, 2, dtype=torch.bfloat16, requires_grad=True)
            (wanma.global_batch(low).sum() * (worker.rank + 1)).backward()
            x = numbers.double().requires_grad_()
            (first_order,) = torch.autograd.grad(wanma.global_batch(x).pow(3).sum(), x, create_graph=True)
            (second_order,) = torch.autograd.grad(first_order.sum(), x)
            with pytest.raises(wanma.WanmaError, match="rows"):
                wanma.global_batch(torch.ones(3, 2))
            return [
                [one.tolist() for one in whole],
                wanma.global_rows(x).tolist(),
                low.grad.flatten().tolist() if low.grad is not None else None,
                first_order.tolist(),
                second_order.tolist(),
            ]


def test_rows_of_any_dtype_come_in_order_and_gradients_go_back_to_their_ranks() -> None:
    (whole, own, low, first, second), (whole_1, own_1, low_1, first_1, second_1) = run_ranks(
        gathered, 2, (), is_reused=True
    )
    assert whole == whole_1 == [[0, 1, 2], [False, True, True], [0.0, 1.0, 2.0], [0j, 1 + 0j, 2 + 0j]]
    assert (own, own_1) == ([0, 1], [2])
    assert (low, low_1) == ([3.0] * 8, [3.0] * 4)  # 1 from the first rank, 2 from the second
    assert first + first_1 == [0.0, 6.0, 24.0]  # both ranks' sums: 2 × 3 x²
    assert second + second_1 == [0.0, 12.0, 24.0]  # its derivative: 12 x


@pytest.mark.full
def test_the_example_gives_the_same_numbers_on_one_rank_and_on_two(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "contrastive.py"
    for ranks in ("1", "2"):
        subprocess.run([sys.executable, str(example), ranks], cwd=tmp_path, check=True, timeout=120)
    one, two = (Outcome(tmp_path / "runs" / f"contrastive-{ranks}") for ranks in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=2e-4)
    assert one.losses[-1] < one.losses[0] / 2
