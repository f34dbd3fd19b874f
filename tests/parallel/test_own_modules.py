"""Modules of one's own without a line of layout: every block is a unit, and the numbers are one process's."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, exact_job, seeded
from support.ranks import Outcome, run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext


class Translator(nn.Module):
    """An encoder and a decoder of torch's own; the two read the input from both ends."""

    def __init__(self, features: int = 8, hidden: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, hidden)
        self.transformer = nn.Transformer(hidden, 2, 3, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x.unsqueeze(-1))
        decoded = self.transformer(hidden, hidden.flip(1))
        logits: Tensor = self.head(decoded.mean(1))
        return logits


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.second = nn.Conv1d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.norm(self.first(x)).relu()).relu()
        return hidden


class UNet(nn.Module):
    """Down and up again, with what was on the way down beside it (Ronneberger et al. 2015)."""

    def __init__(self, classes: int = 4, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(1, width), Double(width, 2 * width), Double(2 * width, 4 * width)])
        self.up = nn.ModuleList([Double(6 * width, 2 * width), Double(3 * width, width)])
        self.head = nn.Conv1d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = x.unsqueeze(1), []
        for level in self.down:
            hidden = level(hidden if not kept else nn.functional.avg_pool1d(hidden, 2))
            kept.append(hidden)
        for level, beside in zip(self.up, (kept[1], kept[0]), strict=True):
            hidden = level(torch.cat([nn.functional.interpolate(hidden, scale_factor=2.0), beside], 1))
        logits: Tensor = self.head(hidden).mean(-1)
        return logits


class Shared(nn.Module):
    """Two blocks have a matrix in common, and another shares its own with the head."""

    def __init__(self, features: int = 8, classes: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(features), nn.Linear(features, features)) for _ in range(4)
        )
        self.head = nn.Linear(features, classes)
        blocks: Any = self.blocks
        blocks[2][1].weight = blocks[0][1].weight
        self.head.weight = blocks[3][1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        logits: Tensor = self.head(x)
        return logits


class Tempered(nn.Module):
    """Its parameters are single numbers too, in a block and beside them; two modules share one."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaling(features) for _ in range(3))
        self.head = nn.Linear(features, classes)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        blocks: Any = self.blocks
        blocks[2].scale = blocks[0].scale

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x) * self.temperature.exp()
        return logits


class Scaling(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x).tanh() * self.scale
        return output


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "translator": (Translator, 5),
    "unet": (UNet, 5),
    "shared": (Shared, 1),
    "tempered": (Tempered, 3),
}
PLANS = {
    "2 ranks ZeRO 3, recomputing": Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
    "2 ranks ZeRO 2, selective": Plan(dp_shard=2, shard="gradients", micro_batch=2, recompute="selective"),
    "2 replicas, offloading": Plan(
        dp_replicate=2, micro_batch=2, offload_parameters="disk", offload_activations="disk"
    ),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per model."""

    @cache
    def run(name: str) -> Outcome:
        folder = tmp_path_factory.mktemp("one")
        return one_process(folder / "run", exact_job(folder), 7, objects=objects_of(name))

    return run


def objects_of(name: str) -> dict[str, Any]:
    return {"model": seeded(MODELS[name][0]), "data": Numbers(classes=4)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.daily(
    "translator-2 ranks ZeRO 3, recomputing",
    "unet-2 ranks ZeRO 2, selective",
    "shared-2 ranks ZeRO 3, recomputing",
    "shared-2 replicas, offloading",
    "tempered-2 ranks ZeRO 3, recomputing",
    "tempered-2 replicas, offloading",
)
def test_every_plan_follows_one_process(name: str, plan: str, tmp_path: Path, reference: Any) -> None:
    other = spread_over(tmp_path / "run", exact_job(tmp_path), PLANS[plan], objects=objects_of(name))
    same_numbers(reference(name), other)


@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_a_unit_of_communication_but_for_those_that_share(name: str) -> None:
    kind, expected = MODELS[name]
    assert run_ranks(count_units, 1, (kind,), is_reused=True) == [expected + 1]  # and the rest of the model


@pytest.mark.parametrize("trained", [True, False])
def test_sparse_gradients_are_refused_by_name(trained: bool) -> None:
    table = nn.EmbeddingBag(10, 2, sparse=True).requires_grad_(trained)
    expected = r"Sequential: 0 makes sparse gradients.*\n.*sparse=False"
    builds_if(not trained, nn.Sequential(table, nn.Linear(2, 2)), expected)


@pytest.mark.parametrize("trained", [True, False])
def test_weights_in_16_bits_are_not_trained(trained: bool) -> None:
    low = nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(trained)
    expected = r"Sequential: 1\.weight is bfloat16, but trained weights must be fp32"
    builds_if(not trained, nn.Sequential(nn.Linear(2, 2), low), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_statistics_of_ones_own_samples_are_for_one_rank(ranks: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True))
    builds_if(
        ranks == 1, model, r"the running statistics of 1 cover only the samples of one rank, so 2", ranks
    )


def builds_if(right: bool, model: nn.Module, otherwise: str, ranks: int = 1) -> None:
    with nullcontext() if right else pytest.raises(AssertionError, match=otherwise):
        run_ranks(build, ranks, (model, Plan(dp_replicate=ranks)), is_reused=True)


def build(worker: WorkerContext, model: nn.Module, plan: Plan) -> None:
    from wanma.models.model_spec import wrap_module
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.parallel.parallelize import parallelize

    with open_mesh(worker, plan, 60) as grid:
        parallelize(wrap_module(model), plan, grid, 1)


def count_units(worker: WorkerContext, kind: type[nn.Module]) -> int:
    from torch.distributed.fsdp import FSDPModule

    from wanma.models.model_spec import wrap_module
    from wanma.parallel.memory.disk_pool import DiskPool
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.parallel.parallelize import parallelize

    plan = Plan(offload_parameters="disk")
    with open_mesh(worker, plan, 60) as grid, DiskPool(worker.run_directory) as scratch:
        module = parallelize(wrap_module(kind()), plan, grid, 1, scratch).module
        return sum(isinstance(part, FSDPModule) for part in module.modules())
