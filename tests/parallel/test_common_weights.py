"""Weights that ranks of one machine have in common: nothing is gathered, nobody sees half of an update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support import late
from support.compare import same_bits
from support.ranks import Outcome, run_job, run_ranks
from support.shared import shared_world
from wanma.job.plan import Plan
from wanma.job.worker import Worker
from wanma.parallel.shard import Sharded

MODEL = {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4, "tie_embeddings": True}
UNEVEN = {**MODEL, "feed_forward": 51}
"""Rows that two ranks cannot share alike."""


def job(folder: Path, model: dict[str, Any], **train: Any) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} horses and {number * number} hooves. " for number in range(2000)))
    return {
        "model": model,
        "data": {
            "text": [str(text)],
            "sequence_length": 32,
            "validation_fraction": 0.2,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 4,
            "global_batch": 6,
            "learning_rate": 1e-2,
            "validate_every_steps": 2,
            "validation_samples": 8,
            "weight_average": 0.5,
            **train,
        },
        "parallel": {"collectives": "shared"},
        "checkpoint": {"snapshots": "off"},
    }


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
def test_all_numbers_are_those_of_gathered_weights(
    plan: Plan, precision: Any, model: dict[str, Any], tmp_path: Path
) -> None:
    model = {**model, "feed_forward": 54} if plan.tp > 1 and model is UNEVEN else model  # 27 of each
    text, plan = job(tmp_path, model, precision=precision), replace(plan, precision=precision)
    gathered = run_job(tmp_path / "gathered", text, plan, patch="support.late:nothing_is_common")
    common = run_job(tmp_path / "common", text, plan)
    same_bits(gathered, common)
    assert validations(gathered) == validations(common)


def validations(run: Outcome) -> list[float]:
    import json

    lines = (run.directory / "events.jsonl").read_text().splitlines()
    found = [event["loss"] for event in map(json.loads, lines) if event["kind"] == "validation"]
    assert found
    return found


PLAN = Plan(dp_shard=2, shard="parameters", micro_batch=3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("when", [late.with_its_update, late.with_an_evaluation])
def test_whoever_is_late_is_waited_for(when: Any, precision: Any, tmp_path: Path) -> None:
    text, plan = job(tmp_path, MODEL, precision=precision), replace(PLAN, precision=precision)
    in_time = run_job(tmp_path / "in-time", text, plan)
    waited = run_job(tmp_path / "waited", text, plan, patch=f"support.late:{when.__name__}")
    same_bits(in_time, waited)
    assert validations(in_time) == validations(waited)
    # Were it not, this comparison would notice: numbers are others, or none.
    patch = f"support.late:{when.__name__}_and_nobody_waits"
    try:
        alone = run_job(tmp_path / "alone", text, plan, patch=patch)
        is_noticed = (alone.losses, validations(alone)) != (in_time.losses, validations(in_time))
    except AssertionError as error:
        is_noticed = "nan" in str(error)
    assert is_noticed


def held(worker: Worker, text: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What a rank of the model has in memory that all share, and what of its shards lies there."""
    from wanma.collectives.shared.backend import allocated_bytes
    from wanma.data.open import open_data
    from wanma.job.sections import Job
    from wanma.models.build import model_spec
    from wanma.parallel.mesh import process_grid
    from wanma.parallel.parallelize import parallelize

    parsed = Job.model_validate(text)
    with process_grid(worker, plan, 60, "shared") as grid:
        data = open_data(parsed.data, parsed.train)
        spec = model_spec(
            parsed.model,
            vocabulary=data.vocabulary,
            sequence_length=parsed.data.sequence_length,
            image_shape=data.image_shape,
            classes=data.classes,
        )
        parallel = parallelize(spec, plan, grid, 1)
        parallel.initialize()
        (sharded,) = parallel.data_parallel
        assert isinstance(sharded, Sharded)
        assert sharded.weights is not None
        parts = {tensor._part.data_ptr() for tensor in sharded.weights.tensors}
        shards = [one.to_local() for one in parallel.module.parameters() if isinstance(one, DTensor)]
        return {
            "elements": sum(shard.numel() for shard in shards),
            "in place": all(shard.data_ptr() in parts for shard in shards),
            "common": allocated_bytes(),
        }


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_a_model_lies_there_once(precision: Any, width: int, tmp_path: Path) -> None:
    plan = replace(PLAN, precision=precision)
    for rank in run_ranks(held, 2, (job(tmp_path, MODEL, precision=precision), plan)):
        assert rank["in place"] == (precision == "fp32")
        # A rank's part of it, and less than a page for each tensor.
        rest = rank["common"] - rank["elements"] * width
        assert 0 <= rest < 4096 * 32


def in_common(worker: Worker) -> list[Any]:
    with shared_world(worker) as (group, _):
        parts = [(5, torch.float32), (70_000, torch.bfloat16), (1, torch.float64), (0, torch.int64)]
        found = []
        for one in group.allocate_common(parts):
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
        assert run_ranks(in_common, ranks, ()) == [[[everybodys] * 3, 0]] * ranks


def too_much(worker: Worker) -> list[bool]:
    with shared_world(worker) as (group, _):
        found = group.allocate_common([(1 << 50, torch.float32), (10, torch.float32)])
        return [one is not None for one in found]


def test_where_there_is_no_room_all_ranks_know() -> None:
    assert run_ranks(too_much, 2, ()) == [[False, True]] * 2
