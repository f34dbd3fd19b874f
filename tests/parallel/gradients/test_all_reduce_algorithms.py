"""Training whose gradients are summed by wanma's own algorithms: every layout follows one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.compare import same_bits, same_curve
from support.ranks import Outcome, run_job
from support.text import text_job
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.parallel import AllReduceAlgorithm

DECODER = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2}
EXPERTS = {**DECODER, "experts": 4, "experts_per_token": 1, "expert_feed_forward": 8, "balance": "none"}
MESSAGES: tuple[AllReduceAlgorithm, ...] = ("ring", "tree", "halving_doubling")
LAYOUTS = {
    "3 replicas": Plan(dp_replicate=3),
    "4 replicas of several micro-batches": Plan(dp_replicate=4, micro_batch=1),
    "experts on 2 replicas": Plan(dp_replicate=2),
    "uneven shares": Plan(dp_replicate=3, batch_shares=(3, 2, 1)),
    "tensor × replicas": Plan(tp=2, sequence_parallel=True, dp_replicate=2),
    "context × replicas": Plan(cp=2, dp_replicate=2),
    "pipeline × replicas": Plan(pp=2, dp_replicate=2, micro_batch=1, stage_cuts=(1,)),
    "recomputing in full": Plan(dp_replicate=2, recompute="full"),
}


def job(folder: Path, name: str = "", **parallel: Any) -> dict[str, Any]:
    train = {"steps": 2, "global_batch": 12, "validation_samples": 2, "precision": "fp64"}
    return {**text_job(folder, EXPERTS if "experts" in name else DECODER, **train), "parallel": parallel}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per model."""

    @cache
    def run(kind: str) -> Outcome:
        folder = tmp_path_factory.mktemp(kind)
        return run_job(folder / "run", job(folder, kind), Plan(micro_batch=12, precision="fp64"))

    return lambda name: run("experts" if "experts" in name else "plain")


@pytest.mark.parametrize("algorithm", MESSAGES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.daily(
    "3 replicas-ring",
    "4 replicas of several micro-batches-tree",
    "uneven shares-tree",
    "tensor × replicas-halving_doubling",
    "context × replicas-ring",
    "pipeline × replicas-tree",
)
def test_every_layout_follows_one_process_and_repeats_bit_for_bit(
    name: str, algorithm: AllReduceAlgorithm, tmp_path: Path, one_process: Any
) -> None:
    layout = LAYOUTS[name]
    micro_batch = layout.micro_batch if "several" in name or layout.pp > 1 else 12
    plan = replace(
        layout, precision="fp64", micro_batch=micro_batch, all_reduce=algorithm, bucket_bytes=1 << 11
    )
    given = job(tmp_path, name, collectives="gloo" if algorithm == "ring" else "auto")
    found = run_job(tmp_path / "run", given, plan)
    one = one_process(name)
    same_curve(one, found, 1e-10)
    # Whenever its sums begin: the schedule alone orders what is added.
    same_bits(found, run_job(tmp_path / "again", given, replace(plan, overlap=False)))


def test_nodes_with_unequal_numbers_of_ranks_sum_by_nodes(tmp_path: Path, one_process: Any) -> None:
    plan = Plan(
        dp_replicate=3, micro_batch=12, precision="fp64", all_reduce="hierarchical", bucket_bytes=1 << 11
    )
    workers = {rank: {"local_world_sizes": (2, 1)} for rank in range(3)}
    found = run_job(tmp_path / "run", job(tmp_path), plan, workers=workers)
    one = one_process("")
    same_curve(one, found, 1e-10)


def test_replicas_of_a_site_sum_by_the_plans_algorithm_too(tmp_path: Path) -> None:
    plan = Plan(
        dp_replicate=4,
        micro_batch=3,
        precision="fp64",
        synchronization=Synchronization("local_sgd", sites=2, every=2),
    )
    own = run_job(tmp_path / "own", job(tmp_path), plan)
    ring = run_job(tmp_path / "ring", job(tmp_path), replace(plan, all_reduce="ring"))
    same_curve(own, ring, 1e-12)
