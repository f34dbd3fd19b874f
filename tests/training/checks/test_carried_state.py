"""State that a forward leaves behind: right where a step is one pass, refused where the layout would show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import wanma
from support.compare import same_numbers
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job
from support.ranks import Outcome, run_job, run_ranks
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext, current_worker_context

STEPS, SAMPLES = 2, 8


class Counting(Plain):
    """Halves its output at each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class CountingInPython(Plain):
    """The same by an attribute."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class KeepingTheMean(Plain):
    """A running mean of the samples, which no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.1)
        return super().forward(x)


class Following(Plain):
    """A moving average of its weights, moved at each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return super().forward(x)


class Remembering(Plain):
    """Keeps its last activations and a norm of its weights: all passes leave the same, or nothing read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.norm = self.first.weight.detach().norm()
        self.last_input = x
        self.kept = [x]
        return super().forward(x) / (1 + self.norm)


class Drawing(Plain):
    """Draws by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(np.random.randn()))


def job(plan: Plan) -> dict[str, Any]:
    train = {"steps": STEPS, "global_batch": SAMPLES, "validation_samples": 2}
    parallel = {"micro_batch": plan.micro_batch, "dp_replicate": plan.dp_replicate}
    return session_job(model={"factory": "any:thing"}, train=train, parallel=parallel)


def train(folder: Path, plan: Plan, kind: type[nn.Module]) -> Outcome:
    return run_job(folder, job(plan), plan, objects={"model": seeded(kind), "data": Numbers()})


ALONE = Plan(micro_batch=SAMPLES, precision="fp64")
IN_PARTS = Plan(micro_batch=2, precision="fp64")
ON_TWO = Plan(dp_replicate=2, micro_batch=4, precision="fp64")
CARRYING = [Counting, CountingInPython, KeepingTheMean, Following]


@pytest.mark.parametrize("kind", CARRYING)
def test_what_a_pass_carries_on_is_refused_in_several_micro_batches(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="depends on earlier forward passes") as refusal:
        train(tmp_path, IN_PARTS, kind)
    assert f"parallel.micro_batch = {SAMPLES}" in str(refusal.value)
    assert not (tmp_path / "metrics.jsonl").read_text()


class CountingLayer(nn.Linear):
    """Divides by the number of its passes, which is an attribute."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_stages_pass_carries_on_is_refused_in_a_pipeline(rows: int, tmp_path: Path) -> None:
    plan = Plan(pp=2, micro_batch=rows, precision="fp64")
    layers = nn.Sequential(nn.Linear(8, 8), CountingLayer(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(AssertionError, match="the output of the model depends"):
        run_job(tmp_path, job(plan), plan, objects={"model": layers, "data": Numbers()})


class CentringLayer(nn.Linear):
    """Takes the micro-batch's mean away."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class LayerOfOneRow(nn.Linear):
    """Takes one sample at a time."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one sample at a time")
        return super().forward(x)


def in_a_pipeline(folder: Path, kind: type[nn.Linear]) -> Outcome:
    plan = Plan(pp=2, micro_batch=1, precision="fp64")
    layers = nn.Sequential(kind(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    return run_job(folder, job(plan), plan, objects={"model": layers, "data": Numbers()}, seconds=60)


def test_samples_that_see_each_other_are_refused_where_a_pipeline_has_one_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="share its micro-batch"):
        in_a_pipeline(tmp_path, CentringLayer)


def test_a_pipeline_of_a_model_that_takes_one_sample_trains(tmp_path: Path) -> None:
    assert len(in_a_pipeline(tmp_path, LayerOfOneRow).losses) == STEPS


def test_draws_of_numpy_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"numpy\.random (?s:.)*numbers of torch"):
        train(tmp_path, ON_TWO, Drawing)


@pytest.mark.parametrize("kind", [KeepingTheMean])
def test_running_statistics_of_a_ranks_samples_are_refused(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="mean depends on earlier forward passes"):
        train(tmp_path, ON_TWO, kind)


@pytest.mark.parametrize("kind", [Counting, Following, Remembering])
def test_one_pass_per_step_and_rank_is_that_of_a_plain_loop(kind: type[nn.Module], tmp_path: Path) -> None:
    same_numbers(train(tmp_path / "1", ALONE, kind), train(tmp_path / "2", ON_TWO, kind), 1e-10)


def test_what_every_pass_leaves_alike_is_no_reason(tmp_path: Path) -> None:
    same_numbers(
        train(tmp_path / "1", ALONE, Remembering), train(tmp_path / "2", IN_PARTS, Remembering), 1e-10
    )


class Centring(Plain):
    """Takes the micro-batch's mean away within the model."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@dataclass
class Logits:
    values: Tensor


class CentringInADataclass(Plain):
    """Returns an object of its own."""

    def forward(self, x: Tensor) -> Any:
        return Logits(super().forward(x - x.mean(0)))


class Spectral(Plain):
    """Divides a weight by its largest singular value, which one step of power iteration per pass follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(self.first)


class WithAPartOfOneRank(Plain):
    """Rank 1 ends with a part that rank 0 has no samples for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.blocks[0](x))
        return y + self.blocks[1](x).mean() if dist.get_rank() == 1 else y


def own_loop(folder: Path, plan: Plan, kind: type[nn.Module], uneven: Any = None) -> None:
    sections = job(plan)
    if uneven is not None:
        sections["train"]["global_batch"], sections["parallel"] = uneven["global_batch"], uneven["parallel"]
    with wanma.session(sections, run_directory=folder) as session:
        model = session.prepare(seeded(kind))
        for batch in session.batches(Numbers()):
            output = model(*batch.inputs)
            logits = output.values if isinstance(output, Logits) else output
            session.step(F.cross_entropy(logits, batch.targets, reduction="none"))


def own_loop_in_rank(
    worker: WorkerContext, folder: Path, plan: Plan, kind: type[nn.Module], uneven: Any = None
) -> None:
    RunDirectory(folder).create()
    token = current_worker_context.set(worker)
    try:
        own_loop(folder, plan, kind, uneven)
    finally:
        current_worker_context.reset(token)


@pytest.mark.parametrize("kind", [Counting, KeepingTheMean, Centring, CentringInADataclass, Spectral])
def test_an_own_loop_is_refused_at_its_first_forward(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(JobError, match="would train another model"):
        own_loop(tmp_path, IN_PARTS, kind)


def test_an_own_loop_with_one_row_is_refused_at_its_first_forward(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="would train another model"):
        own_loop(tmp_path, Plan(micro_batch=1, precision="fp64"), Centring)


def test_a_rank_with_one_row_takes_part_in_the_check(tmp_path: Path) -> None:
    uneven = {"global_batch": 5, "parallel": {"dp_shard": 2, "shard": "parameters", "micro_batch": 2}}
    run_ranks(own_loop_in_rank, 2, (tmp_path, ON_TWO, Remembering, uneven), seconds=60)


def test_an_own_loop_of_several_ranks_is_refused_together(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="share its micro-batch"):
        run_ranks(own_loop_in_rank, 2, (tmp_path, ON_TWO, Centring))


def test_ranks_that_use_unlike_parts_are_refused_and_do_not_wait(tmp_path: Path) -> None:
    parallel = {"dp_shard": 2, "shard": "parameters", "micro_batch": 2, "collectives": "gloo"}
    given = {"global_batch": 8, "parallel": parallel}
    expected = "rank 0 has finished its gathers while rank 1 gathers blocks.1"
    with pytest.raises(AssertionError, match=expected):
        run_ranks(own_loop_in_rank, 2, (tmp_path, ON_TWO, WithAPartOfOneRank, given), seconds=20)
