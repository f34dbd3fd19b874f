"""Re-planning of a run whose number of nodes changes: the planner's rule, on the detected hardware."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from wanma.api.run.job_run import _launch_fingerprint
from wanma.api.run.replanning import JobReplanner
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.recovery.replan import ReplanRequest
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.node_range import is_elastic, require_fixed_nodes
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.forecast.problem import PlanningInputs
from wanma.planner.job_planner import plan_for_job
from wanma.planner.preparation.job_planning import job_dimensions, job_workload

CPUS = Cluster((NodeGroup("box", 2, 8 << 30, ()),))


def job(nodes: str, parallel: dict[str, Any] | str, model: dict[str, Any], **train: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"family": "decoder", **model},
            "data": {"text": ["stdlib"], "sequence_length": 128},
            "train": {"global_batch": 24, "steps": 10_000, **train},
            "parallel": parallel,
            "cluster": {"nodes": nodes, "rendezvous": "a:1"},
        }
    )


def test_a_node_that_finds_the_coordinator_elsewhere_has_the_same_job() -> None:
    def agreed(layers: int, place: str) -> str:
        made = job("1..2", {"dp_replicate": 2}, {"layers": layers})
        section = made.cluster.model_copy(update={"rendezvous": place})
        return _launch_fingerprint(made.model_copy(update={"cluster": section}), Plan(dp_replicate=2))

    assert agreed(1, "a:1") == agreed(1, "b:2") != agreed(2, "a:1")


def payload(of: Job, plan: Plan, _peak: float | None) -> bytes:
    return pickle.dumps((of.cluster.nodes, plan))


def plans(of: Job, cluster: Cluster) -> JobReplanner:
    workload = job_workload(of)
    assert workload is not None
    planned = plan_for_job(PlanningInputs(of, cluster, workload, job_dimensions(of)))
    return JobReplanner(of, cluster, planned.plan, workload, payload)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processors that nobody has measured."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


SMALL = {"layers": 4, "hidden": 64, "heads": 4}


@pytest.mark.usefixtures("unknown")
def test_fewer_machines_keep_what_the_job_says_and_change_its_data_axes() -> None:
    made = plans(job("2..4", {"pp": 2, "dp_replicate": 4}, SMALL), CPUS)
    assert (made.plan.world_size, made.plan.pp) == (8, 2)
    decision = made.replan(ReplanRequest(3, made.plan, 4, 100))
    assert (decision.nodes, decision.plan.pp, decision.plan.dp_replicate) == (3, 2, 3)
    assert "8 ranks, and there is room for 6" in decision.reason
    first = made.replan(ReplanRequest(3))
    assert first.plan == decision.plan, "a first start with fewer is decided alike"


@pytest.mark.usefixtures("unknown")
def test_machines_that_the_fixed_sizes_have_no_use_for_stand_by() -> None:
    made = plans(job("2..4", {"pp": 2, "dp_replicate": 2}, SMALL), CPUS)
    decision = made.replan(ReplanRequest(3, made.plan, 4, 100))
    assert (decision.nodes, decision.plan.pp, decision.plan.dp_replicate) == (2, 2, 1)


@pytest.mark.usefixtures("unknown")
def test_sizes_that_cannot_be_had_on_what_is_left_are_named() -> None:
    made = plans(job("1..4", {"pp": 4}, SMALL), CPUS)
    decision = made.replan(ReplanRequest(3, made.plan, 4, 100))
    assert decision.plan is None
    assert "3 ranks on 3 nodes are not a multiple" in decision.reason
    assert "1 node: " in decision.reason


@pytest.mark.usefixtures("unknown")
def test_it_grows_where_what_is_left_gains_twice_what_it_costs() -> None:
    made = plans(job("2..3", {"dp_replicate": 3}, SMALL), CPUS)
    two = made.replan(ReplanRequest(2)).plan
    assert two is not None
    pays = made.replan(ReplanRequest(3, two, 2, 9_000, 0.5, 2.0))
    assert pays.plan == made.plan
    assert pays.nodes == 3
    assert "0.50 s per step now" in pays.reason
    assert "at best" in pays.reason
    too_late = made.replan(ReplanRequest(3, two, 2, 9_990, 0.5, 2.0))
    assert (too_late.plan, too_late.nodes) == (two, 2)
    assert "keep the plan: " in too_late.reason
    assert made.replan(ReplanRequest(3, two, 2, 9_000)).nodes == 2, (
        "one takes the place of another that was lost"
    )


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("most", "parallel"),
    [
        (2, {"dp_shard": 2, "shard": "parameters"}),
        (2, {"dp_shard": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2, "shard": "optimizer"}),
    ],
)
def test_a_run_that_had_shrunk_to_one_rank_grows_back_to_the_layout_of_its_job(
    most: int, parallel: dict[str, Any]
) -> None:
    made = plans(job(f"1..{most}", parallel, SMALL), CPUS)
    alone = made.replan(ReplanRequest(1, made.plan, most, 100)).plan
    assert (alone.world_size, alone.shard) == (1, "none")
    back = made.replan(ReplanRequest(most, alone, 1, 100, 0.5, 2.0))
    assert (back.plan, back.nodes) == (made.plan, most)
    assert "steps save" in back.reason


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("replicas", "shards", "left", "layout"),
    [(2, 2, 2, (1, 2)), (2, 2, 3, (1, 3)), (4, 2, 4, (2, 2)), (4, 3, 4, (1, 4)), (4, 2, 6, (2, 3))],
)
def test_replicas_go_and_shards_stay(replicas: int, shards: int, left: int, layout: tuple[int, int]) -> None:
    most = replicas * shards
    made = plans(job(f"1..{most}", {"dp_replicate": replicas, "dp_shard": shards}, SMALL), CPUS)
    fewer = made.replan(ReplanRequest(left, made.plan, most, 100)).plan
    assert (fewer.dp_replicate, fewer.dp_shard) == layout
    assert fewer.shard == "parameters"


@pytest.mark.usefixtures("unknown")
def test_some_of_the_machines_of_a_sharded_run_shard_as_well() -> None:
    made = plans(job("1..3", {"dp_shard": 3, "shard": "parameters"}, SMALL), CPUS)
    alone = made.replan(ReplanRequest(1, made.plan, 3, 100)).plan
    two = made.replan(ReplanRequest(2, alone, 1, 100, 0.5, 2.0)).plan
    assert (two.dp_replicate, two.dp_shard, two.shard) == (1, 2, "parameters")


@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"dp_shard": 2, "shard": "parameters"}])
def test_a_sharded_run_on_known_devices_goes_on_on_one_and_grows_back(parallel: dict[str, Any]) -> None:
    """One device shards nothing, whatever the job says; two do as it says, though replicas were quicker."""
    large = {"layers": 16, "hidden": 2048, "heads": 16, "feed_forward": 8192}
    made = plans(job("1..2", parallel, large, global_batch=128), parse_shorthand("2x1 H100, 1x400G"))
    assert (made.plan.dp_shard, made.plan.shard) == (2, "parameters")
    alone = made.replan(ReplanRequest(1, made.plan, 2, 100)).plan
    assert (alone.world_size, alone.shard) == (1, "none")
    back = made.replan(ReplanRequest(2, alone, 1, 100, 4.0, 2.0))
    assert (back.plan, back.nodes) == (made.plan, 2)


def test_on_devices_whose_rates_are_known_the_best_plan_is_taken() -> None:
    large = {"layers": 16, "hidden": 2048, "heads": 16, "feed_forward": 8192}
    of = job("1..2", {"auto": True}, large, global_batch=128)
    two = parse_shorthand("2x8 H100, 8x400G")
    made = plans(of, two)
    decision = made.replan(ReplanRequest(1, made.plan, 2, 100))
    assert decision.plan.world_size == 8
    assert decision.forecast["step"]["seconds"] > 0
    back = made.replan(ReplanRequest(2, decision.plan, 1, 100, 0.5, 2.0))
    assert back.plan.world_size == 16


@pytest.mark.usefixtures("unknown")
def test_what_a_machine_starts_follows_from_the_plan() -> None:
    made = plans(job("1..2", {"dp_replicate": 4}, SMALL), CPUS)
    launch = LaunchConfig(Path("run"), "a:b", b"", ranks_per_node=2, nodes=2, replanner=made, min_nodes=1)
    plan = made.replan(ReplanRequest(1)).plan
    assert plan is not None
    mine = pickle.loads(pickle.dumps(made)).make_launch_config(launch, plan, 1)
    assert pickle.loads(mine.payload) == (1, plan)
    assert (mine.ranks_per_node, mine.threads_per_rank, mine.nodes) == (2, 1, 2)
    assert mine.worker_environment["OMP_NUM_THREADS"] == "1"


def test_who_fixes_the_plan_itself_refuses_such_a_job() -> None:
    of = job("2..3", {"dp_replicate": 3}, SMALL)
    assert is_elastic(of)
    assert not is_elastic(job("3..3", {"dp_replicate": 3}, SMALL))
    with pytest.raises(JobError, match=r"cluster\.nodes = '2\.\.3': a loop"):
        require_fixed_nodes(of, "a loop")
    with pytest.raises(JobError, match=r"wanma launch needs a fixed number"):
        parse_cluster_section(["cluster.nodes=2..3", "cluster.rendezvous=a:1"], "wanma launch", "")
