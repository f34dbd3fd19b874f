"""Settings that belong to each node alone: its network interface and its network position."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.api.launch.script_launch import Program, launch_script
from wanma.api.launch.script_launch import _launch_fingerprint as agreed_script
from wanma.api.run.job_run import _launch_fingerprint, train_job
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.job import Job


def job(**cluster: object) -> Job:
    return to_job({"model": {"preset": "gpt-1m"}, "cluster": {"device": "cpu", **cluster}})


def test_machines_agree_though_their_interfaces_and_places_differ(tmp_path: Path) -> None:
    common = {"nodes": 2, "rendezvous": "10.0.0.1:29500"}
    one = job(**common, network_interface="eth0", topology_address="r1", node_rank=0)
    other = job(**common, network_interface="ens3", topology_address="r2", node_rank=1)
    assert _launch_fingerprint(one, Plan()) == _launch_fingerprint(other, Plan())
    assert _launch_fingerprint(one, Plan()) != _launch_fingerprint(
        job(**common, hang_timeout_seconds=7.0), Plan()
    )
    addressed = [
        one.model_copy(update={"observe": one.observe.model_copy(update={"metrics_host": host})})
        for host in ("10.0.0.1", "10.0.0.2")
    ]
    assert len({_launch_fingerprint(node, Plan()) for node in addressed}) == 1
    script = tmp_path / "script.py"
    script.write_text("")
    sections = (one.cluster, other.cluster)
    program = Program(str(script))
    assert len({agreed_script(program, 2, section) for section in sections}) == 1
    assert agreed_script(program, 2, ClusterSection()) != agreed_script(program, 2, one.cluster)


def test_an_interface_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="this node has no interface 'ib7'") as refused:
        train_job(job(network_interface="ib7"), run_directory=tmp_path / "run")
    assert "choose from: " in refused.value.hint
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(WanmaError, match="no interface 'ib7'"):
        launch_script(
            Program(str(script)),
            1,
            run_directory=tmp_path / "run",
            overrides=["cluster.network_interface=ib7"],
        )
    assert not (tmp_path / "run").exists()
