"""Open layouts (`parallel = "auto"`) on a number of ranks that another launcher has started."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.sections.job import Job
from wanma.planner.job_planner import build_layout
from wanma.planner.preparation import job_planning
from wanma.planner.preparation.job_planning import complete_run_plan, initial_layout

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))


def job(**parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"preset": "gpt-1m"},
            "data": {"text": "stdlib", "sequence_length": 128},
            "train": {"global_batch": 16},
            "parallel": {"auto": True, **parallel},
        }
    )


def test_without_a_search_they_shard_one_replica() -> None:
    assert build_layout(job(), LAPTOP).world_size == 1
    assert (build_layout(job(), LAPTOP, 4).dp_shard, build_layout(job(), LAPTOP, 4).threads_per_rank) == (
        4,
        2,
    )
    assert build_layout(job(tp=2), LAPTOP, 4).world_size == 4


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"dp_shard": 8}, {"pp": 8}])
def test_sizes_that_do_not_make_them_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(JobError, match=r"4 ranks .* in \[parallel\] make "):
        build_layout(job(**sizes), LAPTOP, 4)


def test_a_search_considers_only_plans_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = parse_shorthand("8x H100 SXM")
    monkeypatch.setattr(job_planning, "run_cluster", lambda _job: cluster)
    asked = job()
    assert initial_layout(asked).plan.world_size == 8
    layout = initial_layout(asked, world_size=4)
    planned = complete_run_plan(asked, layout, job_planning.job_workload(asked))
    assert (layout.plan.world_size, planned.plan.world_size) == (4, 4)
    assert {candidate.plan.world_size for candidate in planned.search_result.candidates} == {4}
