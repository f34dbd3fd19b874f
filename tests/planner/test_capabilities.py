"""Forecasts that wanma runs and those it only makes; tests/parallel holds it to the runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import Approximation
from wanma.planner.rules.capabilities import (
    APPROXIMATIONS,
    allowed_approximations,
    check_supported,
    unsupported_reason,
)

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))
H100 = parse_shorthand("8 H100")
GPU = Plan(device="cuda", precision="bf16")


def job(model: dict[str, Any] | None = None, **sections: Any) -> Job:
    return Job.model_validate({"model": model or {"preset": "gpt-1m"}, **sections})


CLICKS: dict[str, Any] = {"family": "recommender", "kind": "dlrm"}
TABLES = Plan(embedding="row_wise")
LIMITS: dict[str, tuple[Job, Plan, Cluster, tuple[int, int], str]] = {
    "tables without an optimizer": (job(CLICKS), TABLES, LAPTOP, (2, 13), r"train\.embedding_optimizer"),
    "an optimizer of tables without tables": (
        job(CLICKS, train={"embedding_optimizer": "adam"}),
        Plan(),
        LAPTOP,
        (2, 13),
        r"parallel\.embedding",
    ),
    "tables of a decoder": (job(), TABLES, LAPTOP, (2, 13), r"parallel\.embedding"),
    "an optimizer of tables on servers without tables": (
        job(train={"embedding_optimizer": "adam"}, servers={"count": 1}),
        Plan(),
        LAPTOP,
        (2, 13),
        r"train\.embedding_optimizer",
    ),
    "tables on ranks beside servers": (
        job(
            CLICKS,
            train={"embedding_optimizer": "adam"},
            parallel={"embedding": "row_wise"},
            servers={"count": 1},
        ),
        TABLES,
        LAPTOP,
        (2, 13),
        r"parallel\.embedding",
    ),
    "compiled tables": (
        job(CLICKS, train={"embedding_optimizer": "adam"}),
        replace(TABLES, compile=True),
        LAPTOP,
        (2, 13),
        r"parallel\.compile",
    ),
    "dense tables on disk": (
        job(CLICKS),
        Plan(embedding_memory_bytes=1 << 20),
        LAPTOP,
        (2, 13),
        r"parallel\.embedding_memory_bytes",
    ),
    "tables on disk that servers update as dense ones": (
        job(CLICKS, servers={"count": 1}),
        Plan(embedding_memory_bytes=1 << 20),
        LAPTOP,
        (2, 13),
        r"train\.embedding_optimizer",
    ),
    "averaged tables": (
        job(CLICKS, train={"embedding_optimizer": "adam", "weight_average": 0.9}),
        TABLES,
        LAPTOP,
        (2, 13),
        r"train\.weight_average",
    ),
    "an accelerator that torch does not drive": (
        job(),
        GPU,
        parse_shorthand("4 TPU v4"),
        (2, 13),
        "wanma does not support TPU v4",
    ),
    "compressed gradients that nobody asked for": (
        job(),
        replace(GPU, compression="int8", approximate=("compression",)),
        H100,
        (2, 13),
        "compression drops or rounds parts of the gradients .* and the job does not allow it",
    ),
    "compressed gradients in fp64": (
        job(parallel={"allow": ["compression"]}),
        replace(GPU, compression="int8", precision="fp64", approximate=("compression",)),
        H100,
        (2, 13),
        "'int8' with train.precision = 'fp64': compressed gradients",
    ),
    "fp8 that nobody asked for": (
        job(),
        replace(GPU, fp8=True, approximate=("fp8",)),
        H100,
        (2, 13),
        "fp8 rounds .* and the job does not allow it",
    ),
    "fp8 on a GPU without it": (
        job(parallel={"allow": ["fp8"]}),
        replace(GPU, fp8=True, approximate=("fp8",)),
        parse_shorthand("8 A100"),
        (2, 13),
        r"A100 .* does not support fp8",
    ),
    "fp8 on CPUs": (
        job(train={"fp8": True}),
        Plan(fp8=True, precision="bf16", approximate=("fp8",)),
        LAPTOP,
        (2, 13),
        "CPUs do not support fp8",
    ),
    "fp8 around another precision than bf16": (
        job(train={"fp8": True}),
        replace(GPU, precision="fp16", fp8=True, approximate=("fp8",)),
        H100,
        (2, 13),
        "'fp16': with fp8, all other operators need bf16",
    ),
    "an optimizer of rows and columns that are split": (
        job(train={"optimizer": "adafactor"}),
        Plan(cp=2, shard="optimizer", tp=2),
        LAPTOP,
        (2, 13),
        r"'adafactor' needs complete rows and columns .* by parallel.cp = 2 and parallel.tp = 2",
    ),
    "split matrices compiled to run again": (
        job(),
        Plan(tp=2, compile=True, recompute="full"),
        LAPTOP,
        (2, 13),
        r"torch 2\.13 cannot compile blocks with full recompute and tensor parallelism",
    ),
    "an image model cut into stages": (
        job({"preset": "resnet-18"}),
        Plan(pp=2, tp=2),
        LAPTOP,
        (2, 13),
        "resnet-18 does not declare how to split it over pp and tp",
    ),
    "one's own module split": (
        job({"factory": "mine:model"}),
        Plan(tp=2),
        LAPTOP,
        (2, 13),
        "mine:model does not declare how to split it over tp",
    ),
    "one's own module, its backward taken apart by an older torch": (
        job({"factory": "mine:model"}),
        Plan(pp=2, schedule="zbv", virtual_stages=2),
        LAPTOP,
        (2, 11),
        r"schedule 'zbv', torch 2\.11 computes wrong gradients",
    ),
    "replicas on different devices": (
        job(),
        Plan(
            dp_replicate=2,
            tp=2,
            batch_shares=(2, 1),
            placement=(
                ReplicaPlacement(1, (StagePlacement(0, 4, 2),)),
                ReplicaPlacement(1, (StagePlacement(1, 4, 1),)),
            ),
        ),
        LAPTOP,
        (2, 13),
        "are not supported yet",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_a_forecast_only_says_why_and_is_refused_with_a_way_out(name: str) -> None:
    asked, plan, cluster, torch, reason = LIMITS[name]
    told = unsupported_reason(asked, plan, cluster, torch)
    assert told is not None
    with pytest.raises(JobError, match=f"cannot train this plan: .*{reason}") as refusal:
        check_supported(asked, plan, cluster, torch)
    assert told in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("asked", "plan", "cluster", "torch"),
    [
        (job(), GPU, H100, (2, 11)),
        (
            job(CLICKS, train={"embedding_optimizer": "adam"}),
            replace(GPU, embedding="row_wise", embedding_memory_bytes=1 << 20),
            H100,
            (2, 13),
        ),
        (job(parallel={"allow": ["fp8"]}), replace(GPU, fp8=True, approximate=("fp8",)), H100, (2, 13)),
        (job(train={"fp8": True}), replace(GPU, fp8=True, approximate=("fp8",)), H100, (2, 13)),
        (job(), Plan(tp=2, compile=True, recompute="full"), LAPTOP, (2, 11)),
        (job(), Plan(tp=2, compile=True, recompute="full"), LAPTOP, (2, 14)),
        (job(), Plan(tp=2, compile=True, recompute="selective"), LAPTOP, (2, 13)),
        (job(), Plan(compile=True, recompute="full"), LAPTOP, (2, 13)),
        (job({"preset": "resnet-18"}), Plan(dp_shard=2, shard="gradients"), LAPTOP, (2, 13)),
        (job({"factory": "m:f"}), Plan(pp=2, schedule="zbv", virtual_stages=2), LAPTOP, (2, 13)),
        (job(), Plan(pp=2, schedule="zbv", virtual_stages=2), LAPTOP, (2, 11)),
        (job(), Plan(), parse_shorthand("4 TPU v4"), (2, 13)),
    ],
    ids=lambda value: str(value) if isinstance(value, Plan) else None,
)
def test_what_runs_has_no_reason(asked: Job, plan: Plan, cluster: Cluster, torch: tuple[int, int]) -> None:
    assert unsupported_reason(asked, plan, cluster, torch) is None
    check_supported(asked, plan, cluster, torch)


def test_an_approximation_is_allowed_by_its_name_or_by_asking_for_it() -> None:
    assert allowed_approximations(job()) == frozenset()
    assert allowed_approximations(job(parallel={"allow": ["fp8"]})) == {"fp8"}
    assert allowed_approximations(job(train={"fp8": True})) == {"fp8"}


def test_every_approximation_that_a_job_can_name_is_published() -> None:
    assert tuple(APPROXIMATIONS) == get_args(Approximation)


@pytest.mark.parametrize("objective", [None, "in_batch_softmax"])
def test_in_batch_negatives_need_one_micro_batch(objective: str | None) -> None:
    model = {"family": "recommender", "kind": "two_tower", "recommender": {"objective": objective}}
    own = job(model, data={"interactions": {"target": "click"}}, train={"global_batch": 64})
    check_supported(own, Plan(dp_replicate=2, micro_batch=32), LAPTOP, (2, 13))
    with pytest.raises(JobError) as raised:
        check_supported(own, Plan(dp_replicate=2, micro_batch=16), LAPTOP, (2, 13))
    assert "parallel.micro_batch = 32" in raised.value.hint
