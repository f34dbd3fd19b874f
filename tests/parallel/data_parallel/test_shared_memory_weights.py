"""Weights that ranks of one machine have in common: nothing is gathered, nobody sees half of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from support import late
from support.compare import same_bits
from support.ranks import Outcome, run_job, run_ranks
from support.shared import shared_world
from support.text import DECODER, text_job
from wanma.collectives.shared_memory.backend import allocated_bytes
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.model_spec import wrap_module
from wanma.parallel.data_parallel import sharded as sharding
from wanma.parallel.data_parallel.sharded import Sharded
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import ParallelModel, parallelize
from wanma.torch_internals.versions import SHARDED_INTEGER_PARAMETERS, installed_torch_version

MODEL = {**DECODER, "tie_embeddings": True}
UNEVEN = {**MODEL, "feed_forward": 51}
"""Rows that two ranks cannot share alike."""


def job(folder: Path, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} horses and {number * number} hooves. " for number in range(2000)))
    keys = {"steps": 4, "global_batch": 6, "validate_every_steps": 2, "validation_samples": 8}
    keys |= {"weight_average": 0.5, **train}
    data, saved = {"validation_fraction": 0.2}, {"in_memory_every_steps": "off"}
    made = text_job(folder, model, text=text, sequence_length=32, data=data, checkpoint=saved, **keys)
    return {**made, "parallel": {"collectives": "shared_memory"}}


@pytest.mark.parametrize("model", [MODEL, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=2, shard="parameters", micro_batch=2),
        Plan(dp_shard=2, shard="optimizer", micro_batch=2),
        Plan(dp_shard=2, dp_replicate=2, shard="gradients", micro_batch=1),
        Plan(dp_shard=2, tp=2, shard="parameters", micro_batch=3),
        Plan(dp_shard=2, pp=2, shard="parameters", micro_batch=1, recompute="full"),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu-fp32-uneven",
    "2 ranks (dp_shard 2), optimizer sharded, fp32, cpu-bf16-even",
    "4 ranks (dp_replicate 2 × dp_shard 2), gradients sharded, fp32, cpu-fp32-even",
)
def test_all_numbers_are_those_of_gathered_weights(
    plan: Plan, precision: Any, model: dict[str, Any], tmp_path: Path
) -> None:
    model = {**model, "feed_forward": 54} if plan.tp > 1 and model is UNEVEN else model  # 27 of each
    text, plan = job(tmp_path, model, precision=precision), replace(plan, precision=precision)
    gathered = run_job(tmp_path / "gathered", text, plan, patch="support.late:nothing_is_common")
    common = run_job(tmp_path / "common", text, plan)
    same_bits(gathered, common)
    assert gathered.validation_losses == common.validation_losses != []


PLAN = Plan(dp_shard=2, shard="parameters", micro_batch=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("when", [late.with_its_update, late.with_an_evaluation])
@pytest.mark.daily("with_its_update-bf16", "with_an_evaluation-fp32")
def test_whoever_is_late_is_waited_for(when: Any, precision: Any, tmp_path: Path) -> None:
    text, plan = job(tmp_path, MODEL, precision=precision), replace(PLAN, precision=precision)
    in_time = run_job(tmp_path / "in-time", text, plan)
    waited = run_job(tmp_path / "waited", text, plan, patch=f"support.late:{when.__name__}")
    same_bits(in_time, waited)
    assert in_time.validation_losses == waited.validation_losses


def test_an_update_that_nobody_waits_for_changes_the_numbers(tmp_path: Path) -> None:
    """The comparison above notices: the other rank computes with weights that are not updated yet."""
    text = job(tmp_path, MODEL)
    in_time = run_job(tmp_path / "in-time", text, PLAN)
    # On a busy machine the other rank may be just as late.
    assert any(differs(in_time, text, tmp_path / f"alone-{attempt}") for attempt in range(3))


def differs(in_time: Outcome, text: dict[str, Any], folder: Path) -> bool:
    """Return True if a run in which nobody waits has other numbers, or none."""
    try:
        alone = run_job(folder, text, PLAN, patch="support.late:with_its_update_and_nobody_waits")
    except AssertionError as error:
        return "nan" in str(error)
    return (alone.losses, alone.validation_losses) != (in_time.losses, in_time.validation_losses)


class Own(nn.Module):
    """Rows that two ranks cannot share alike, one that only one of them has, and numbers that are none."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8, max_norm=max_norm)
        self.product = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.randn(1))
        order = torch.arange(300, 305).flip(0)
        if SHARDED_INTEGER_PARAMETERS.affects(installed_torch_version()):
            self.register_buffer("order", order)
        else:
            self.order = nn.Parameter(order, requires_grad=False)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.product(self.embedding(numbers)) * self.scale
        return found[..., self.order - 300]


def test_integer_parameters_are_refused_where_torch_cannot_shard_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "installed_torch_version", lambda: (2, 11))
    model = nn.Module()
    model.order = nn.Parameter(torch.arange(3), requires_grad=False)
    with pytest.raises(JobError, match=r"parameter order .*int64, .* 2.11 "):
        sharding._require_shardable(model, set(), PLAN)
    sharding._require_shardable(model, {model.order}, PLAN)


@contextmanager
def spread(worker: WorkerContext, model: nn.Module, plan: Plan) -> Iterator[ParallelModel]:
    with open_mesh(worker, plan, 60, "shared_memory") as grid:
        parallel = parallelize(wrap_module(model, 1), plan, grid, 1)
        (sharded,) = parallel.data_parallel
        assert isinstance(sharded, Sharded)
        assert sharded.shared_memory_weights is not None
        assert len(sharded.shared_memory_weights.parameters) == len(list(model.parameters()))
        yield parallel


def held(worker: WorkerContext, precision: Any) -> dict[str, Any]:
    """Model memory of a rank that all ranks share, and whether its shards lie there."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    with spread(worker, model, replace(PLAN, precision=precision)) as parallel:
        (sharded,) = parallel.data_parallel
        assert isinstance(sharded, Sharded)
        assert sharded.shared_memory_weights is not None
        parts = {tensor._own_part.data_ptr() for tensor in sharded.shared_memory_weights.parameters}
        shards = [one.to_local() for one in parallel.module.parameters() if isinstance(one, DTensor)]
        return {
            "elements": sum(shard.numel() for shard in shards),
            "in place": all(shard.data_ptr() in parts for shard in shards),
            "common": allocated_bytes(),
        }


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_model_lies_there_once(precision: Any, width: int) -> None:
    for rank in run_ranks(held, 2, (precision,), is_reused=True):
        assert rank["in place"] == (precision == "fp32")
        # A rank's part of it, and less than a page for each tensor.
        assert 0 <= rank["common"] - rank["elements"] * width < 4096 * 4


def replaced(worker: WorkerContext, precision: Any) -> list[bool]:
    numbers = torch.arange(11)
    expected = Own()(numbers)
    close = partial(torch.allclose, rtol=1e-6 if precision == "fp32" else 0.05, atol=0.05)
    found = []
    with spread(worker, Own(), replace(PLAN, precision=precision)) as parallel, torch.no_grad():
        model = parallel.module.to("cpu")
        found.append(close(model(numbers).float(), expected))
        parallel.reshard()
        parallel.wait_until_weights_unused()
        twice = {name: value * 2 if name == "scale" else value for name, value in model.state_dict().items()}
        model.load_state_dict(twice, assign=True)
        found.append(close(model(numbers).float(), expected * 2))
        parallel.reshard()
        parallel.wait_until_weights_unused()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.to_local().mul_(0)
        found.append(float(model(numbers).abs().max()) == 0)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_any_module_computes_with_its_own_numbers_whoever_replaces_them(precision: Any) -> None:
    assert run_ranks(replaced, 2, (precision,), is_reused=True) == [[True] * 3] * 2


def changed_in_forward(worker: WorkerContext) -> str:
    with spread(worker, Own(max_norm=0.1), PLAN) as parallel, torch.no_grad():
        parallel.module(torch.arange(11))
        parallel.reshard()
        try:
            parallel.wait_until_weights_unused()
        except WanmaError as error:
            return error.message
    return ""


def test_weights_that_change_as_they_compute_are_refused_by_name() -> None:
    for message in run_ranks(changed_in_forward, 2, (), is_reused=True):
        assert message.startswith("embedding.weight was modified in a forward pass")


def changed_between_steps(worker: WorkerContext, precision: Any) -> list[float]:
    """As of a loop that evaluates by itself, and then changes weights."""
    found = []
    with spread(worker, Own(), replace(PLAN, precision=precision)) as parallel:
        for change in (2.0, 3.0):
            with torch.no_grad():
                parallel.module(torch.arange(11))
                parallel.reshard()
                parallel.wait_until_weights_unused()
                if worker.rank == 1:
                    time.sleep(0.1)
                for parameter in parallel.module.parameters():
                    if parameter.is_floating_point():
                        parameter.to_local().fill_(change)
            parallel.begin_micro_batch(is_last=True)
            found.append(float(parallel.module(torch.arange(11)).detach().float().mean()))
            parallel.reshard()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_changed_by_hand_are_those_of_the_next_step(precision: Any) -> None:
    # Of eight products and a bias, times the scale.
    expected = [(8 * 4 + 2) * 2.0, (8 * 9 + 3) * 3.0]
    found = run_ranks(changed_between_steps, 2, (precision,), is_reused=True)
    assert found == [pytest.approx(expected, rel=0.02)] * 2


def in_common(worker: WorkerContext) -> list[Any]:
    with shared_world(worker) as (group, _):
        parts = [(5, torch.float32), (70_000, torch.bfloat16), (1, torch.float64), (0, torch.int64)]
        found = []
        for one in group.allocate_shared(parts):
            assert one is not None
            found.append(one)
            one[1].fill_(worker.rank + 1)
        assert [(part.numel(), part.dtype) for _, part in found] == parts
        dist.barrier()
        numbers = [whole.view(worker.world_size, -1)[:, -1].tolist() for whole, part in found if part.numel()]
        dist.barrier()
        return [numbers, found[-1][0].numel()]


def test_what_one_rank_writes_all_read() -> None:
    for ranks in (2, 3):
        everybodys = list(range(1, ranks + 1))
        assert run_ranks(in_common, ranks, (), is_reused=True) == [[[everybodys] * 3, 0]] * ranks


def too_much(worker: WorkerContext) -> list[bool]:
    with shared_world(worker) as (group, _):
        found = group.allocate_shared([(1 << 50, torch.float32), (10, torch.float32)])
        return [one is not None for one in found]


def test_where_there_is_no_room_all_ranks_know() -> None:
    assert run_ranks(too_much, 2, (), is_reused=True) == [[False, True]] * 2
