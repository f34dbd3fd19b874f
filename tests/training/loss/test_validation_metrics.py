"""Validation metrics of the user's: the same numbers on every layout, or a refusal before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wanma
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from support.ranks import Outcome, run_here, run_job
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.training.loss.validation_metrics import Metrics, ReportedMetrics, sum_and_count

SAMPLES = 11


def job(**train: Any) -> dict[str, Any]:
    """Validates after the last step, on samples that no layout below divides evenly."""
    return session_job(
        train={"steps": 2, "validation_samples": SAMPLES, **train}, data={"validation_fraction": 0.25}
    )


def among_two(output: Tensor, targets: Tensor) -> Tensor:
    """A value per sample."""
    return (output.topk(2).indices == targets[:, None]).any(1)


def of_class_one(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Recall of one class: what counts is a mask."""
    return output.argmax(1) == 1, targets == 1


def weighted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    weights = 1.0 + targets
    return weights * output[:, 0], weights


def norm_and_number(output: Tensor, targets: Tensor) -> tuple[float, int]:
    """A sum and a count."""
    return float(output.norm(dim=1).sum()), len(targets)


METRICS = {
    "among_two": among_two,
    "recall": of_class_one,
    "weighted": weighted,
    "norm": norm_and_number,
}


def trained(folder: Path, plan: Plan, model: nn.Module, metrics: dict[str, Any] = METRICS) -> dict[str, Any]:
    run = run_here if plan.world_size == 1 else run_job
    return run(folder, job(), plan, {"model": model, "data": Numbers(), "metrics": metrics}).validations[-1]


def plan_of(**sizes: Any) -> Plan:
    return Plan(precision="fp64", **sizes)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
    assert other["accuracy"] == one["accuracy"]
    assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-10)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("one"), plan_of(micro_batch=SAMPLES), seeded(sequential))


def test_the_numbers_are_those_of_all_samples_at_once(one: dict[str, Any], tmp_path: Path) -> None:
    cut = trained(tmp_path, plan_of(micro_batch=2), seeded(sequential))
    assert set(one["metrics"]) == set(METRICS)
    assert one["targets"] == SAMPLES
    assert one["accuracy"] * SAMPLES == pytest.approx(round(one["accuracy"] * SAMPLES))
    assert one["metrics"]["among_two"] >= one["accuracy"]
    same(one, cut)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(dp_replicate=2, micro_batch=2),
        plan_of(pp=2, micro_batch=3),
        plan_of(dp_shard=2, shard="parameters", micro_batch=4),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_one_process(plan: Plan, one: dict[str, Any], tmp_path: Path) -> None:
    same(one, trained(tmp_path, plan, seeded(sequential)))


def mean_of_the_batch(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(1) == targets).float().mean()


def spread_of_the_batch(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return output.std() * len(targets), len(targets)


def broken(output: Tensor, targets: Tensor) -> Tensor:
    return output[:, 7] == targets


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (mean_of_the_batch, r"metric 'mine' returned Tensor of shape \(\) for .* which cannot be summed"),
        (spread_of_the_batch, r"metric 'mine' depends on the division"),
        (
            broken,
            r"metric 'mine' failed: IndexError: index 7 is out of [^\n]*\n"
            r".*test_validation_metrics.py:\d+ in broken",
        ),
    ],
)
def test_what_cannot_be_added_up_is_refused_before_the_first_step(
    metric: Any, told: str, tmp_path: Path
) -> None:
    objects = {"model": seeded(Plain), "data": Numbers(), "metrics": {"mine": metric}}
    with pytest.raises(WanmaError, match=told):
        run_here(tmp_path, job(), plan_of(micro_batch=4), objects)
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_loop_of_ones_own_gives_metrics_beside_its_losses(one: dict[str, Any], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with wanma.session(job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(sequential))

        def validate(batch: wanma.Batch) -> tuple[Tensor, dict[str, Any]]:
            output = model(*batch.inputs)
            metrics = {name: metric(output, batch.targets) for name, metric in METRICS.items()}
            right = output.argmax(1) == batch.targets
            return session.losses(output, batch), {**metrics, "accuracy": right}

        for batch in session.batches(Numbers(), validate=validate):
            session.step(session.losses(model(*batch.inputs), batch))
    torch.set_num_threads(threads)
    same(one, Outcome(tmp_path).validations[-1])


def test_a_job_names_metrics_by_their_path(tmp_path: Path) -> None:
    named = job(metrics={"top2": f"{__name__}:among_two"})
    objects = {"model": seeded(sequential), "data": Numbers()}
    found = run_here(tmp_path, named, plan_of(micro_batch=4), objects).validations[-1]
    assert set(found["metrics"]) == {"top2"}


def test_values_that_are_of_no_sample_are_refused() -> None:
    for value, fact in (
        (0.5, "float for 3 "),
        (torch.ones(2), r"Tensor of shape \(2,\) for 3 "),
        ((torch.ones(3), "all"), "not a mask"),
    ):
        with pytest.raises(WanmaError, match=fact):
            sum_and_count("f", value, 3)
    assert sum_and_count("f", (torch.tensor(4.0), 2), 3) == (4.0, 2.0)


def test_rows_that_fill_up_reach_no_metric() -> None:
    seen: list[tuple[int, int]] = []

    def spy(output: dict[str, Tensor], targets: Tensor) -> Tensor:
        seen.append((len(output["logits"]), len(targets)))
        return targets.float()

    metrics = Metrics({"spy": spy})
    metrics.reset()
    output = {"logits": torch.zeros(3, 4)}
    metrics.add(output, torch.tensor([1, 2, -100]), torch.tensor([True, True, False]))
    metrics.add(output, torch.tensor([1, 2, -100]), torch.zeros(3, dtype=torch.bool))
    assert seen == [(2, 2)]
    total, count = metrics.sums(torch.device("cpu"), contributes=True)
    assert (float(total), float(count)) == (3.0, 2.0)
    assert metrics.sums(torch.device("cpu"), contributes=False) == (0.0, 0.0)


def test_a_validation_of_ones_own_gives_the_same_names_every_time() -> None:
    given = ReportedMetrics()
    given.add({"a": torch.ones(2)}, 2, torch.ones(2, dtype=torch.bool))
    with pytest.raises(WanmaError, match="metrics b, but a for"):
        given.add({"b": torch.ones(2)}, 2, torch.ones(2, dtype=torch.bool))
