"""A checkpoint of any layout is that of any other: every tensor bit for bit, and the curve goes on.

Each layout trains once and keeps checkpoints. Then processes of one layout take up another's, in memory
that held no number, and save it again: in a ring, of those layouts that split in every way by default, of
all with `--full`. With `--exhaustive` every layout takes up all the others', one after the other.
"""

from __future__ import annotations

import argparse
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.compare import EXACT_TRAIN, same_tensors
from support.ranks import Outcome, run_job, run_ranks
from support.text import text_job
from wanma.checkpoint.format.local_shards import local_tensor
from wanma.checkpoint.load.reader import read_training_state
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.data.opening import open_dataset
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.parallelize import parallelize
from wanma.training.checkpointing.run_identity import Identity
from wanma.training.loop.train_request import TrainRequest
from wanma.training.loop.train_worker import build_model_spec
from wanma.training.run.numerics import configure_numerics
from wanma.training.run.trainer import Trainer

HALF, STEPS = 1, 2

DENSE = {
    "family": "decoder",
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 26,  # 13 rows per tensor rank, which no number of shards divides
    "tie_embeddings": True,
}
EXPERTS = {
    **DENSE,
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "expert_feed_forward": 10,
    "dense_layers": 1,
    "balance": "bias",
    "balance_rate": 0.01,
}
MODELS = {"dense": DENSE, "experts": EXPERTS}

LAYOUTS = {
    "one process": Plan(micro_batch=4),
    "2 replicas of ZeRO 2": Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2),
    "tensor × pipeline": Plan(tp=2, pp=2, micro_batch=2),
    "ZBV": Plan(pp=2, schedule="zbv", virtual_stages=2, micro_batch=2),
    "ring × ZeRO 3": Plan(cp=2, dp_shard=2, shard="parameters", micro_batch=2),
    "experts × ZeRO 3 of 4": Plan(dp_shard=4, ep=2, shard="parameters", micro_batch=2),
    "interleaved": Plan(pp=2, schedule="interleaved_1f1b", virtual_stages=2, micro_batch=2),
    "ZeRO 1 of 2": Plan(dp_shard=2, shard="optimizer", micro_batch=2),
    "sequence × ZeRO 3": Plan(tp=2, sequence_parallel=True, dp_shard=2, shard="parameters", micro_batch=2),
    "2 replicas": Plan(dp_replicate=2, micro_batch=2),
    "experts × tensor": Plan(dp_replicate=2, tp=2, ep=2, micro_batch=2),
    "ZeRO 3 of 4": Plan(dp_shard=4, shard="parameters", micro_batch=2),
}
"""In the order of the ring."""
DAILY = tuple(LAYOUTS)[:6]
"""Layouts that together split in every way."""


CHANGES = [
    ("tensor × pipeline", "ZeRO 3 of 4"),
    ("ring × ZeRO 3", "tensor × pipeline"),
    ("experts × ZeRO 3 of 4", "ZBV"),
]
"""Layouts of the two halves of a run."""


def layouts_of(model: str) -> dict[str, Plan]:
    """In fp64, of those that the model can have."""
    fit = {name: plan for name, plan in LAYOUTS.items() if model == "experts" or plan.ep == 1}
    return {name: replace(plan, precision="fp64") for name, plan in fit.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshard")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    """Each layout's own run, made once, with checkpoints half way and at the end."""

    @cache
    def run(model: str, layout: str) -> Outcome:
        return run_job(folder / f"{model}-{layout}", job(folder, model), layouts_of(model)[layout])

    return run


EVERY = [
    pytest.param(
        model,
        layout,
        marks=pytest.mark.exhaustive if model == "dense" else () if layout in DAILY else pytest.mark.full,
    )
    for model in MODELS
    for layout in layouts_of(model)
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), EVERY)
def test_every_layout_saves_the_tensors_of_one_process(model: str, layout: str, trained: Any) -> None:
    one, saved = trained(model, "one process").tensors(HALF), trained(model, layout).tensors(HALF)
    assert {key.partition(".")[0] for key in saved} == {"model", "optimizer", "average"}
    assert {key: tensor.shape for key, tensor in saved.items()} == {k: t.shape for k, t in one.items()}
    same_tensors(one, saved, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "target"), EVERY)
def test_another_layouts_checkpoint_is_taken_up_and_saved_again_bit_for_bit(
    model: str, target: str, tmp_path: Path, folder: Path, trained: Any, request: pytest.FixtureRequest
) -> None:
    plan = layouts_of(model)[target]
    if request.config.getoption("--exhaustive"):
        others = [name for name in layouts_of(model) if name != target]
    else:
        is_whole = request.config.getoption("--full") or target not in DAILY
        ring = [name for name in layouts_of(model) if is_whole or name in DAILY]
        others = [(ring * 2)[ring.index(target) + 1]]
    sources = {name: trained(model, name) for name in others}
    runs = {name: tmp_path / str(number) for number, name in enumerate(sources)}
    for name, run in runs.items():
        shutil.copytree(half_way(sources[name].directory), half_way(run))

    run_ranks(
        take_up_and_save, plan.world_size, (list(runs.values()), job(folder, model), plan), is_reused=True
    )

    for name, run in runs.items():
        assert read_training_state(half_way(run)) == read_training_state(half_way(sources[name].directory)), (
            name
        )
        assert len(read_manifest(half_way(run)).rank_state) == plan.world_size
        expected, got = sources[name].tensors(HALF), Outcome(run).tensors(HALF)
        assert expected.keys() == got.keys(), name
        assert [key for key in expected if not same_bits(expected[key], got[key])] == [], name


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), CHANGES)
@pytest.mark.daily("ring × ZeRO 3-tensor × pipeline")
def test_a_run_that_changes_its_layout_half_way_follows_one_that_does_not(
    first: str, then: str, tmp_path: Path, folder: Path, trained: Any
) -> None:
    whole = trained("experts", first)
    shutil.copytree(half_way(whole.directory), half_way(tmp_path))
    rest = run_job(tmp_path, job(folder, "experts"), layouts_of("experts")[then])
    assert [step["step"] for step in rest.steps] == list(range(HALF + 1, STEPS + 1))
    assert rest.losses == pytest.approx(whole.losses[HALF:], rel=1e-10)
    assert rest.norms == pytest.approx(whole.norms[HALF:], rel=1e-10)
    same_tensors(whole.tensors(STEPS), rest.tensors(STEPS), 1e-9)


def take_up_and_save(worker: WorkerContext, runs: list[Path], text: dict[str, Any], plan: Plan) -> None:
    """On one rank: build the model once, take up each run's checkpoint, and save it in its place."""
    job = Job.model_validate(text)
    configure_numerics(job, plan)
    with open_mesh(worker, plan, 60) as grid:
        data = open_dataset(job.data, job.train)
        parallel = parallelize(build_model_spec(TrainRequest(job, plan), data), plan, grid, job.train.seed)
        for run in runs:
            for _, tensor in (*parallel.named_parameters(), *parallel.named_buffers()):
                local_tensor(tensor.detach()).fill_(math.nan)
            with Trainer(
                job,
                plan,
                replace(worker, run_directory=run),
                grid,
                parallel,
                targets_per_sample=data.targets_per_sample,
                identity=Identity(data=data.fingerprint),
            ) as trainer:
                dist.barrier()
                if worker.rank == 0:
                    shutil.rmtree(half_way(run))
                trainer.save()
                trainer.finish("finished")


def half_way(run: Path) -> Path:
    return run / "checkpoints" / f"step-{HALF:08d}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def job(folder: Path, model: str) -> dict[str, Any]:
    train = {**EXACT_TRAIN, "steps": STEPS, "global_batch": 8, "weight_average": 0.9, "validation_samples": 1}
    return text_job(folder, MODELS[model], text=argparse.__file__, checkpoint={"every_steps": HALF}, **train)
