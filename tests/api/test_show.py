"""What a dry run shows of a plan."""

from __future__ import annotations

import re

from rich.console import Console

from wanma.api.planning import Prepared
from wanma.api.show import describe
from wanma.hardware.cluster_text import parse_cluster
from wanma.job.cluster import Cluster, Node
from wanma.job.sections import Job
from wanma.models.dimensions import DecoderDimensions
from wanma.models.workload import decoder_workload
from wanma.planner.choose import complete, layout

LAPTOP = Cluster((Node("laptop", 8, 16 << 30, ()),))
DECODER = DecoderDimensions(layers=6, hidden=64, heads=4, kv_heads=4, feed_forward=128, vocabulary=512)


def shown(parallel: dict[str, object], on: Cluster = LAPTOP) -> str:
    job = Job.model_validate({"model": {"preset": "gpt-1m"}, "parallel": parallel})
    workload = decoder_workload(DECODER, 32)
    planned = complete(job, layout(job, on), on, workload, DECODER)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(describe(job, Prepared(on, planned, workload, None)))
    return capture.get()


def test_a_pipeline_is_shown_with_its_schedule_and_the_blocks_before_which_it_is_cut() -> None:
    text = " ".join(shown({"pp": 2, "schedule": "zbv", "stage_cuts": [2, 4, 5]}).split())
    assert "pipeline zbv, 4 stages, cut before blocks 2, 4, 5" in text
    assert "pipeline 1f1b, 2 stages, cut before block 3" in " ".join(shown({"pp": 2}).split())


def test_a_pipelines_ranks_are_told_with_their_memory() -> None:
    text = " ".join(shown({"pp": 2, "stage_cuts": [1]}).split())
    sizes = re.search(r"pipeline ranks in their order: (\S+ MiB), (\S+ MiB)", text)
    assert sizes is not None
    fullest = re.search(r"in all (\S+ MiB)", text)
    assert fullest is not None
    assert fullest[1] in sizes.groups()
    assert sizes[1] != sizes[2]
    assert "pipeline ranks" not in shown({})


def test_a_device_that_torch_has_no_name_for_is_told_by_its_own() -> None:
    assert "fp32 on TPU v4" in shown({}, parse_cluster("1 TPU v4"))
    assert "fp32 on cuda" in shown({}, parse_cluster("1 H100"))


def test_a_plan_without_a_pipeline_says_nothing_of_one() -> None:
    assert "pipeline" not in shown({}).split("Plan", 1)[1].split("Memory", 1)[0]
