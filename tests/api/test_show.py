"""Text of a dry run about a plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.forecast.forecast import Forecast
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.preparation.job_planning import PreparedJob
from wanma.planner.presentation.dry_run_summary import render_dry_run
from wanma.planner.presentation.formatting import in_memory_checkpoint_text

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))
DECODER = DecoderConfig(layers=6, hidden=64, heads=4, kv_heads=4, feed_forward=128, vocabulary=512)


def shown(parallel: dict[str, object], on: Cluster = LAPTOP) -> str:
    job = Job.model_validate({"model": {"preset": "gpt-1m"}, "parallel": parallel})
    workload = compute_decoder_workload(DECODER, 32)
    planned = complete_plan(job, build_layout(job, on), on, workload, DECODER)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render_dry_run(job, PreparedJob(on, planned, workload, None)))
    return capture.get()


def test_a_pipeline_is_shown_with_its_schedule_and_the_blocks_before_which_it_is_cut() -> None:
    text = " ".join(shown({"pp": 2, "schedule": "zbv", "stage_cuts": [2, 4, 5]}).split())
    assert "pipeline zbv, 4 stages, split before blocks 2, 4, 5" in text
    assert "pipeline 1f1b, 2 stages, split before block 3" in " ".join(shown({"pp": 2}).split())


def test_a_pipelines_ranks_are_told_with_their_memory() -> None:
    text = " ".join(shown({"pp": 2, "stage_cuts": [1]}).split())
    sizes = re.search(r"memory by pipeline rank: (\S+ MiB), (\S+ MiB)", text)
    fullest = re.search(r"total (\S+ MiB)", text)
    assert fullest[1] in sizes.groups()
    assert sizes[1] != sizes[2]
    assert "by pipeline rank" not in shown({})


def test_unequal_shares_are_shown_with_the_nodes_that_they_belong_to() -> None:
    nodes = Cluster(tuple(replace(LAPTOP.nodes[0], name=name) for name in ("slow", "fast")))
    lines = shown({"dp_replicate": 2, "batch_shares": [1, 3]}, nodes).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("Placement"))
    assert [line.rstrip() for line in lines[head + 1 : head + 3]] == [
        "1 data rank on slow: 25.00% of the batch each",
        "1 data rank on fast: 75.00% of the batch each",
    ]
    assert "Placement" not in shown({"dp_replicate": 2}, nodes)


def test_copies_for_recovery_are_told_where_they_take_much_of_a_machines_memory() -> None:
    found = Forecast(1, 1, 1, 1, 1, snapshots_bytes=1 << 30)
    plan, two = Plan(dp_replicate=8), parse_shorthand("2x8 H100, 8x400G")
    small = replace(LAPTOP.nodes[0], memory_bytes=64 << 30)
    assert in_memory_checkpoint_text(found, plan, Cluster((small,))) == "8.0 GiB of 64.0 GiB per node"
    assert (
        in_memory_checkpoint_text(found, plan, Cluster((replace(small, count=4),))) == ""
    )  # two ranks on each
    tight = replace(two, nodes=(replace(two.nodes[0], memory_bytes=100 << 30),))
    assert (
        in_memory_checkpoint_text(found, plan, tight) == "8.0 GiB of 100 GiB per node"
    )  # all of them on one
    assert in_memory_checkpoint_text(found, plan, two) == ""
    (gpus,) = parse_shorthand("1x2 H100").nodes
    tiny = Cluster((replace(gpus, memory_bytes=32 << 20),))
    lines = " ".join(shown({"dp_shard": 2}, tiny).split())
    row = re.search(r"in-memory checkpoints (\S+) MiB (\S+) MiB of 32.0 MiB per node", lines)
    assert float(row[2]) == pytest.approx(2 * float(row[1]), abs=0.15)
    assert "in-memory checkpoints" not in shown({"dp_shard": 2})


def test_a_device_that_torch_has_no_name_for_is_told_by_its_own() -> None:
    assert "fp32 on TPU v4" in shown({}, parse_shorthand("1 TPU v4"))
    assert "fp32 on cuda" in shown({}, parse_shorthand("1 H100"))


def test_a_plan_without_a_pipeline_says_nothing_of_one() -> None:
    assert "pipeline" not in shown({}).split("Plan", 1)[1].split("Memory", 1)[0]
