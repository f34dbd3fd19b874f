"""Cluster for which a job is planned: the detected one, that of `cluster.file`, or an imagined one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from wanma.api.plan_report.command import plan_job
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.preparation import job_cluster
from wanma.planner.preparation.job_cluster import check_node_kind, job_on_hypothetical_cluster, run_cluster
from wanma.planner.rules.unused_keys import unused_key_notes


def job(**sections: dict[str, Any]) -> Job:
    return to_job({"model": {"preset": "gpt-1m"}, **sections})


def pretend(monkeypatch: pytest.MonkeyPatch, said: str) -> Cluster:
    """This machine is one node of what `said` describes, by its driver's names."""
    (node,) = parse_shorthand(said).nodes
    devices = tuple(replace(device, name=f"NVIDIA {device.name}") for device in node.devices)
    found = Cluster((replace(node, name="this", count=1, devices=devices),))
    monkeypatch.setattr(job_cluster, "discover_node", lambda: found)
    return found


def test_without_a_file_a_job_runs_on_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pretend(monkeypatch, "8 B200")
    assert run_cluster(job()) == found


def test_a_file_describes_the_machines_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, "8 B200")
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\ndevice = "B200"\ncount = 2\nnetwork = "4x100G"\n')
    described = run_cluster(job(cluster={"file": str(file), "nodes": 2, "rendezvous": "host:1"}))
    assert described == parse_shorthand("2x8 B200, 4x100G")


@pytest.mark.parametrize(
    ("file", "nodes", "told"),
    [
        ("2x8 B200", 1, r"2 nodes, and cluster\.nodes = 1"),
        ("2x8 H100", 2, r"describes 2 nodes of 8 × H100 SXM, .*this node .* is none of them"),
        ("2x4 B200", 2, "is none of them"),
        ("2x2 Grace, 25G", 2, "is none of them"),
    ],
)
def test_a_run_is_refused_where_the_file_describes_other_machines(
    file: str, nodes: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "8 B200")
    with pytest.raises(JobError, match=told):
        run_cluster(job(cluster={"file": file, "nodes": nodes}))


def test_a_device_s_name_imagines_as_many_as_the_job_has_ranks() -> None:
    wide = job(parallel={"dp_shard": 24, "tp": 2})
    sized, cluster = job_on_hypothetical_cluster(wide, device="h100 sxm")
    assert cluster == parse_shorthand("6x8 H100")
    assert (sized.cluster.nodes, sized.cluster.device) == (6, "cuda")
    assert job_on_hypothetical_cluster(job(), device="H100")[1].device_count == 1
    assert job_on_hypothetical_cluster(wide, device="2x4 B200")[1] == parse_shorthand("2x4 B200")


def test_a_layout_runs_on_as_much_of_an_imagined_cluster_as_it_needs() -> None:
    some = job(parallel={"dp_shard": 16})
    assert job_on_hypothetical_cluster(some, cluster="64x8 H100")[0].cluster.nodes == 2
    one_machine = job_on_hypothetical_cluster(job(parallel={"dp_shard": 8}), cluster="64x8 H100")[0]
    assert unused_key_notes(one_machine, Plan(dp_shard=8)) == []
    everything = job(parallel={"auto": True})
    assert job_on_hypothetical_cluster(everything, cluster="64x8 H100 + 32x8 A100")[0].cluster.nodes == 96
    on_cpus = job_on_hypothetical_cluster(everything, cluster="4x2 EPYC 9654, 25G")[0].cluster
    assert (on_cpus.nodes, on_cpus.device) == (4, "cpu")


def test_only_one_of_device_and_cluster_is_taken() -> None:
    with pytest.raises(JobError, match="--device"):
        job_on_hypothetical_cluster(job(), device="H100", cluster="8x8 H100")


def test_a_plan_says_for_which_machines_it_is() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    wide = job(parallel={"dp_shard": 8}, cluster={"file": "2x4 TPU v4"})
    console.print(plan_job(wide)[1])
    text = console.export_text()
    assert "2 nodes of 4 × TPU v4, 1 × 100G" in text
    assert "does not support TPU v4" in text
    assert "8 (dp_shard 8)" in text


MIXED = "1x8 H100 + 2x8 A100, 4x100G"
UNLIKE = Plan(dp_shard=24, shard="optimizer", batch_shares=(2,) * 8 + (1,) * 16, device="cuda")


def test_a_machine_of_a_mixed_cluster_is_the_one_that_its_work_is_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = parse_shorthand(MIXED)
    pretend(monkeypatch, "8 A100")

    def as_number(rank: int | None, plan: Plan = UNLIKE, **parallel: Any) -> None:
        section = {"nodes": 3, "rendezvous": "host:1", "node_rank": rank}
        check_node_kind(job(cluster=section, parallel=parallel), plan, cluster)

    as_number(1)
    as_number(2)
    with pytest.raises(JobError, match=r"node_rank = 0 is .*H100.* and .*A100"):
        as_number(0)
    with pytest.raises(JobError, match=r"cluster\.node_rank") as refusal:
        as_number(None)
    assert "from 0 to 2" in refusal.value.hint
    as_number(None, replace(UNLIKE, batch_shares=()))
    as_number(None, dp_shard=24, batch_shares=list(UNLIKE.batch_shares))
    with pytest.raises(JobError, match="of this node is not set"):
        as_number(None, Plan(pp=3, dp_shard=8, shard="optimizer", stage_cuts=(9, 13)), auto=True)
