"""Parts of a model that each pipeline stage keeps, under the full model's names."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from support.compare import one_process, same_numbers, spread_over
from support.own_loop import session_job
from support.ranks import run_ranks
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.pipeline.stage_partition import extract_stage, pipeline_parallel_spec
from wanma.torch_internals.versions import SPLIT_BACKWARD_OF_REUSED_PARAMETERS, installed_torch_version
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import train

DIMENSIONS = DecoderConfig(layers=4, hidden=8, heads=2, kv_heads=2, feed_forward=16, vocabulary=32)


def decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(DIMENSIONS)


def sequence(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def stages(model: nn.Module, layout: ParallelSpec, plan: Plan) -> list[nn.Module]:
    return [extract_stage(model, layout, plan, stage) for stage in range(plan.stage_count)]


def test_stages_hold_every_parameter_once_under_its_own_name() -> None:
    model = decoder()
    whole = [name for name, _ in model.named_parameters()]
    parts = stages(
        model, model.parallel_spec, Plan(pp=2, virtual_stages=2, schedule="zbv", stage_cuts=(0, 2, 4))
    )
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert sorted(itertools.chain(*names)) == sorted(whole)
    assert names[0] == ["embedding.weight"]
    assert {name.split(".")[1] for name in names[1]} == {"0", "1"}
    assert names[3] == ["norm.weight", "head.weight"]
    assert [name for name, _ in model.named_parameters()] == whole, "the model itself is left alone"


def test_stages_one_after_the_other_compute_what_the_whole_computes() -> None:
    torch.manual_seed(0)
    model = Decoder(DIMENSIONS).double()
    tokens = torch.arange(12).view(2, 6)
    given = tokens
    for part in stages(model, model.parallel_spec, Plan(pp=3, stage_cuts=(1, 3))):
        given = part(given)
    assert torch.equal(given, model(tokens))


def test_a_sequence_is_cut_between_its_children_with_their_numbers_kept() -> None:
    torch.manual_seed(0)
    model = sequence(4, 8, 8, 2)
    parts = stages(model, pipeline_parallel_spec(model, None, Plan(pp=2)), Plan(pp=2, stage_cuts=(2,)))
    assert [name for name, _ in parts[0].named_children()] == ["0", "1"]
    assert [name for name, _ in parts[1].named_children()] == ["2", "3", "4"]
    x = torch.randn(3, 4)
    assert torch.equal(parts[1](parts[0](x)), model(x))


def test_a_sequence_that_nobody_measured_is_cut_by_its_parameters() -> None:
    model = sequence(4, 4, 4, 400, 4)
    parts = stages(model, ParallelSpec(blocks=""), Plan(pp=2))
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert sizes == [5 * 4 * 2 + 5 * 400, 401 * 4]


REFUSED: dict[str, tuple[nn.Module, ParallelSpec | None, str]] = {
    "blocks that nobody declared": (nn.ModuleList([nn.Linear(2, 2)]), None, "does not declare its blocks"),
    "a layout without blocks": (sequence(2, 2, 2), ParallelSpec(blocks=None), "does not declare its blocks"),
    "statistics over samples": (
        nn.Sequential(nn.Linear(2, 2), GroupedBatchNorm(2, group_size=4)),
        None,
        "batch normalization",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    model, layout, says = REFUSED[name]
    with pytest.raises(JobError, match=says):
        pipeline_parallel_spec(model, layout, Plan(pp=2))


def test_children_that_share_a_parameter_are_refused() -> None:
    first = nn.Linear(2, 2)
    with pytest.raises(JobError, match=r"0\.weight and 2\.weight are one"):
        pipeline_parallel_spec(nn.Sequential(first, nn.Tanh(), first), None, Plan(pp=2))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(pp=8), "4 blocks cannot be split into 8 stages"),
        (Plan(pp=2, stage_cuts=(1, 2)), "2 stages need 1 cuts, not 2"),
        (Plan(pp=3, stage_cuts=(2, 2)), "stage 1 of 3 would be empty"),
    ],
)
def test_cuts_that_do_not_fit_the_model_are_refused(plan: Plan, says: str) -> None:
    model = decoder()
    with pytest.raises(JobError, match=says):
        extract_stage(model, model.parallel_spec, plan, 0)


# ------------------------------------------------------------------ a user's sequence, trained


def data(rows: int = 24) -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(rows, 3, 6)  # a linear layer of such puts out a view, at which stages are cut too
    return TensorDataset(inputs, (inputs.sum(2) > 0).long())


def user_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 2)
    )


APART = Plan(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2)
"""Under it the gradients of inputs and of weights are computed apart."""
JOB = session_job(
    model={"factory": "unused:unused"}, train={"steps": 3, "deterministic": True, "validation_samples": 5}
)


def skip_if_refused() -> None:
    """Skip with a torch whose split backward is refused for modules of users; another test has that."""
    if SPLIT_BACKWARD_OF_REUSED_PARAMETERS.affects(version := installed_torch_version()):
        pytest.skip(f"{SPLIT_BACKWARD_OF_REUSED_PARAMETERS.describe(version)}: refused by name")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, micro_batch=2),
        Plan(pp=2, dp_shard=2, shard="optimizer", micro_batch=1),
        APART,
    ],
    ids=lambda plan: f"{plan.schedule} on {plan}",
)
def test_a_users_sequence_in_a_pipeline_follows_one_process(plan: Plan, tmp_path: Path) -> None:
    if plan is APART:
        skip_if_refused()
    objects = {"model": user_model(), "data": data()}
    one = one_process(tmp_path / "one", JOB, micro_batch=7, objects=copy.deepcopy(objects))
    other = spread_over(tmp_path / "other", JOB, plan, objects=objects)
    same_numbers(one, other)


class Doubling(nn.Module):
    """Changes its input, which torch forbids for the input of a stage."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_modules_that_stand_twice_or_write_to_their_input_follow_one_process(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(1)
        twice, twelve = nn.Tanh(), nn.Linear(12, 12)
        return nn.Sequential(
            Doubling(),
            nn.Linear(6, 12),
            twice,
            twelve,
            Doubling(),
            nn.Linear(12, 12),
            twice,
            nn.Linear(12, 2),
        )

    one = one_process(tmp_path / "one", JOB, micro_batch=7, objects={"model": model(), "data": data()})
    plan = Plan(pp=2, micro_batch=2, stage_cuts=(4,))
    same_numbers(one, spread_over(tmp_path / "two", JOB, plan, objects={"model": model(), "data": data()}))


class Borrowing(nn.Module):
    """Computes with another module's weight, which it holds where torch does not see it."""

    def __init__(self, lender: nn.Linear, hidden: bool) -> None:
        super().__init__()
        self.lenders = [] if hidden else [lender]
        self.scale = (lambda: lender.weight.mean()) if hidden else (lambda: self.lenders[0].weight.mean())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


@pytest.mark.parametrize("hidden", [False, True])
def test_parts_that_compute_with_anothers_parameters_are_refused(hidden: bool, tmp_path: Path) -> None:
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.Linear(6, 6), Borrowing(first, hidden), nn.Linear(6, 2))
    expected = (
        r"0\.weight: the forward pass uses an old reference"
        if hidden
        else r"a part of the model holds a reference to 0\.weight of another"
    )
    plan = Plan(pp=2, stage_cuts=(2,), micro_batch=2)
    with pytest.raises(AssertionError, match=expected):
        spread_over(tmp_path, JOB, plan, objects={"model": model, "data": data()})


def test_hooks_that_every_stage_would_run_are_refused() -> None:
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        model = sequence(2, 2, 2)
        getattr(model, register)(print)
        with pytest.raises(JobError, match="Sequential has a hook"):
            pipeline_parallel_spec(model, None, Plan(pp=2))


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def refusal_on_rank(worker: WorkerContext, folder: Path, plan: Plan) -> str:
    model = nn.Sequential(nn.Linear(6, 6), Pairs(), nn.Linear(6, 6), nn.Linear(6, 2))
    request = TrainRequest(Job.model_validate(JOB), plan, user_objects={"model": model, "data": data()})
    with pytest.raises(JobError) as refused:
        train(replace(worker, run_directory=folder), request)
    return str(refused.value)


def test_a_stage_that_puts_out_something_else_than_one_tensor_is_refused_alike_on_all_ranks(
    tmp_path: Path,
) -> None:
    """The user reads the error of whichever rank ends first."""
    plan = Plan(pp=2, stage_cuts=(2,), micro_batch=2, precision="fp64")
    first, second = run_ranks(refusal_on_rank, 2, (tmp_path, plan))
    assert "the output of stage 0 is a tuple" in first
    assert first == second


class Twice(nn.Module):
    """Uses one parameter twice, with another that is used in between or not."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6) if between else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.tanh(self.norm(self.inner(self.norm(x)))))


def twice(between: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    blocks = [Twice(between) for _ in range(4)]
    return {"model": nn.Sequential(*blocks, nn.Linear(6, 2)), "data": data()}


def test_a_parameter_used_twice_trains_where_backward_is_taken_apart_or_is_refused(tmp_path: Path) -> None:
    skip_if_refused()
    one = one_process(tmp_path / "one", JOB, micro_batch=7, objects=twice(between=False))
    same_numbers(one, spread_over(tmp_path / "apart", JOB, APART, objects=twice(between=False)))
    with pytest.raises(AssertionError, match=r"one stage uses twice\n.*'interleaved"):
        spread_over(tmp_path / "refused", JOB, APART, objects=twice(between=True))


def test_torch_that_takes_a_backward_apart_wrongly_is_refused_for_modules_nobody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sequence(2, 2, 2, 2, 2)
    monkeypatch.setattr("wanma.parallel.pipeline.stage_partition.installed_torch_version", lambda: (2, 11))
    with pytest.raises(JobError, match=r"torch 2\.11 computes wrong gradients"):
        pipeline_parallel_spec(model, None, APART)
    pipeline_parallel_spec(decoder(), decoder().parallel_spec, APART)
    monkeypatch.setattr("wanma.parallel.pipeline.stage_partition.installed_torch_version", lambda: (2, 13))
    assert pipeline_parallel_spec(model, None, APART).blocks == ""
