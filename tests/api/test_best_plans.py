"""`wanma.plan`: the best plans from Python, for jobs and modules, on machines that need not be here."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wanma
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.planner.preparation import job_cluster

LINE = "8 H100"
JOB: dict[str, Any] = {
    "model": {"preset": "gpt-10m"},
    "train": {"global_batch": 16, "precision": "bf16"},
    "parallel": {"schedule": "1f1b", "recompute": "none", "cp": 1},
}
"""Little is left open, so that a search is a matter of milliseconds."""


@pytest.fixture(scope="module")
def best() -> list[tuple[Any, Any]]:
    return wanma.plan(JOB, LINE)


def test_fifty_billion_parameters_on_1024_data_ranks_have_a_plan_with_a_price(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "youtube-50b.toml"
    cluster = tmp_path / "cluster.toml"
    seconds = []
    for nodes in (128, 1):
        cluster.write_text(
            f'[[nodes]]\ncount = {nodes}\ndevice = "H100 SXM"\ndevices = 8\nnetwork = "8x400G"\n'
            "price_per_hour = 24\n"
        )
        plan, forecast = wanma.plan(example, cluster)[0]
        assert plan.dp_replicate * plan.dp_shard == plan.world_size == 8 * nodes
        assert plan.embedding == "auto"
        assert forecast.run is not None
        assert forecast.run.price == pytest.approx(24 * nodes * forecast.run.seconds / 3600)
        seconds.append(forecast.run.seconds)
    assert seconds[0] < seconds[1]


def test_plans_come_with_their_forecasts_the_fastest_first(best: list[tuple[Any, Any]]) -> None:
    times = [forecast.step.seconds for _, forecast in best]
    assert len(best) > 3
    assert times == sorted(times)
    layouts = {(plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.shard) for plan, _ in best}
    assert len(layouts) == len(best)


def test_every_way_of_saying_job_and_cluster_gives_the_same(
    best: list[tuple[Any, Any]], tmp_path: Path
) -> None:
    file, hall = tmp_path / "job.toml", tmp_path / "cluster.toml"
    file.write_text(
        '[model]\npreset = "gpt-10m"\n[train]\nglobal_batch = 16\nprecision = "bf16"\n'
        '[parallel]\nschedule = "1f1b"\nrecompute = "none"\ncp = 1\n'
    )
    hall.write_text('[[nodes]]\ndevice = "H100 SXM"\n')
    assert wanma.plan(to_job(JOB), parse_shorthand(LINE)) == best
    assert wanma.plan(file, hall) == best
    assert wanma.plan(str(file), str(hall)) == best


def test_what_the_job_says_is_kept_and_overrides_count() -> None:
    plans = wanma.plan(JOB, LINE, overrides=["parallel.tp=2", "train.global_batch=32"], keep=3)
    assert len(plans) == 3
    assert all(plan.tp == 2 for plan, _ in plans)
    assert all(
        plan.gradient_accumulation_steps(32) * plan.micro_batch * plan.data_parallel_size >= 32
        for plan, _ in plans
    )


def test_plans_and_the_function_itself_pickle(best: list[tuple[Any, Any]]) -> None:
    assert pickle.loads(pickle.dumps(best)) == best
    assert pickle.loads(pickle.dumps(wanma.plan)) is wanma.plan


def test_a_module_is_planned_for_by_an_example_of_its_inputs() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
        inputs = torch.empty(1, 4096)
    overrides = ["train.global_batch=64"]
    plans = wanma.plan(module, LINE, example=(inputs,), overrides=overrides)
    plan, forecast = plans[0]
    assert (plan.tp, plan.pp, plan.cp) == (1, 1, 1)
    parameters = 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert forecast.optimizer_bytes * plan.shard_group_size == pytest.approx(8 * parameters, rel=0.02)
    assert forecast.step is not None
    with pytest.raises(JobError, match="needs example inputs"):
        wanma.plan(module, LINE)


def test_without_rates_there_is_one_plan_by_rule() -> None:
    laptop = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))
    ((plan, forecast),) = wanma.plan({"model": {"preset": "gpt-1m"}}, laptop)
    assert plan.world_size == 1
    assert forecast.step is None
    assert forecast.memory_bytes > 0


def test_without_a_cluster_it_plans_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_cluster, "discover_node", lambda: parse_shorthand("2 H100"))
    plans = wanma.plan(JOB)
    assert plans
    assert {plan.world_size for plan, _ in plans} <= {1, 2}


def test_plans_that_wanma_does_not_run_say_so() -> None:
    plans = wanma.plan(JOB, "4 TPU v4")
    assert all(
        forecast.reasons[-1] == "a forecast only: wanma does not support TPU v4" for _, forecast in plans
    )


@pytest.mark.parametrize(
    ("job", "cluster", "more", "told"),
    [
        (JOB, "8 H101", {}, r"'H101' is not in the device catalogue\. Did you mean 'H100"),
        (JOB, "0x8 H100", {}, "nodes must be 1 to"),
        ({"model": {"preset": "gpt-10n"}}, LINE, {}, r"Did you mean 'gpt-10m'\?"),
        (42, LINE, {}, "a job cannot be made from int"),
        ({"model": {"factory": "os:getcwd"}}, LINE, {}, r"wanma\.plan\(module, cluster, example="),
        (JOB, LINE, {"keep": 0}, "keep=0: must be at least 1"),
        (JOB, LINE, {"overrides": ["train.steps=0"]}, r"overrides of wanma\.plan: train\.steps = 0: must be"),
        (JOB, LINE, {"example": ()}, "example= applies to a module, not to a job"),
        (
            JOB,
            LINE,
            {"overrides": ["parallel.tp=3"]},
            r"parallel\.tp = 3 does not divide model\.feed_forward",
        ),
    ],
)
def test_what_is_wrong_is_one_error(job: Any, cluster: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as refusal:
        wanma.plan(job, cluster, **more)
    assert re.search(told, str(refusal.value)), str(refusal.value)


def test_planning_a_job_imports_no_torch() -> None:
    program = f"import sys, wanma\nwanma.plan({JOB!r}, {LINE!r})\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
