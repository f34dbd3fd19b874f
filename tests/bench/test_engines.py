"""Benchmarks on engines, whose processes do not descend from the benchmark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from support.slurm import SlurmCluster, slurm_cluster
from support.ssh import SshSite, ssh_hosts
from wanma.bench.measurements.measurement import Utilization
from wanma.bench.results.directory import list_result_directories
from wanma.bench.results.result import BenchmarkResult

# Fixtures wait for the cluster, or the hosts, of another file.
pytestmark = pytest.mark.timeout(300, func_only=True)

JOB = """
[model]
preset = "gpt-1m"
[data]
text = ["stdlib"]
sequence_length = 64
[train]
steps = {steps}
global_batch = 8
[checkpoint]
every_steps = 100000
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SshSite]:
    with ssh_hosts(tmp_path, 2) as made:
        yield made


def start(
    folder: Path, environment: Mapping[str, str], *words: str, steps: int = 40
) -> subprocess.Popen[str]:
    (folder / "gpt.toml").write_text(JOB.format(steps=steps))
    return subprocess.Popen(
        [sys.executable, "-m", "wanma", "bench", "train", "gpt.toml", "--foreign-limit", "100", *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def measured(
    folder: Path, environment: Mapping[str, str], *words: str, steps: int = 40
) -> tuple[BenchmarkResult, str]:
    with start(folder, environment, *words, steps=steps) as process:
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    (directory,) = list_result_directories(folder / "bench-results")
    return directory.read(), output


def check_unwatched(result: BenchmarkResult) -> None:
    """Neither the foreign load on the hosts of an engine nor the use of this machine is told."""
    for measurement in result.measurements:
        assert measurement.machine.foreign_cpu is None
        assert measurement.utilization == Utilization()


@pytest.mark.full
def test_a_job_is_measured_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    result, output = measured(
        tmp_path,
        cluster.environment,
        *(
            "--engine",
            "slurm",
            "--over",
            "cluster.nodes=1,2",
            "parallel.dp_replicate=2",
            "--rounds",
            "1",
            "--steps",
            "400",
        ),
        steps=400,
    )
    assert [len(one.steps) for one in result.measurements] == [400, 400]
    check_unwatched(result)
    hosts = [one.unwatched_hosts for one in result.measurements]
    assert sorted(map(len, hosts)) == [1, 2]
    assert "not watched on: n1" in output
    assert "Breakdown of a step" in output
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")


@pytest.mark.full
def test_a_target_ends_the_run_in_slurm_and_a_killed_benchmark_leaves_none(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    words = ("--engine", "slurm", "--steps", "100000")
    result, _ = measured(
        tmp_path, cluster.environment, *words, "--rounds", "1", "--until", "loss<=4.5", steps=100_000
    )
    (measurement,) = result.measurements
    assert measurement.counts, measurement.error
    assert "time_to_target_seconds" in measurement.figures
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")

    def has_steps() -> bool:
        return any((tmp_path / "killed").glob("*/runs/*/bench-*/metrics.jsonl"))

    for number in (signal.SIGTERM, signal.SIGKILL):
        with start(tmp_path, cluster.environment, *words, "--results", "killed", steps=100_000) as process:
            cluster.wait_for(has_steps, "a first step")
            process.send_signal(number)
            process.communicate(timeout=100)
        if number == signal.SIGTERM:
            cluster.wait_for(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")
            for path in (tmp_path / "killed").glob("*/runs/*/bench-*/metrics.jsonl"):
                path.unlink()
    # Slurm goes on with the run of a benchmark that could not end it; the next benchmark ends it first.
    assert cluster.run("squeue", "--noheader").count("\n") == 1
    left = cluster.run("squeue", "--noheader", "--format=%i").strip()
    with start(tmp_path, cluster.environment, *words, "--results", "killed", steps=100_000) as process:
        cluster.wait_for(
            lambda: cluster.job(left)["JobState"] == "CANCELLED", "the end of the run that was left"
        )
        cluster.wait_for(has_steps, "a first step")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader"), "an empty queue")


@pytest.mark.full
def test_a_job_is_measured_on_hosts_of_ssh_and_leaves_nothing_there(site: SshSite, tmp_path: Path) -> None:
    section = site.section()
    settings = [f"cluster.ssh.{key}={json.dumps(value)}" for key, value in section.items() if key != "python"]
    result, output = measured(
        site.project,
        {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        *("--engine", "ssh", "--nodes", "2", "parallel.dp_replicate=2", "--rounds", "2"),
        *(*settings, f"cluster.ssh.python={section['python']}"),
    )
    assert [len(one.steps) for one in result.measurements] == [40, 40]
    check_unwatched(result)
    hosts = {one.unwatched_hosts for one in result.measurements}
    assert hosts == {("gpu1", "gpu2")}, hosts
    assert "not watched on: gpu1, gpu2." in output
    site.wait_until_idle()
    for host in site.hosts:
        assert list((host.home / ".wanma" / "runs").iterdir()) == []
        # One snapshot of the code: results are no part of it, although they grow.
        assert len([path for path in (host.home / ".wanma" / "code").iterdir() if path.is_dir()]) == 1


def test_faults_and_environments_of_contenders_are_refused_where_they_have_no_effect(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    job = '[job.model]\npreset = "gpt-1m"\n[job.data]\ntext = ["stdlib"]\n[job.cluster]\nengine = "ssh"\n'
    cases = {
        "fault = {after_step = 2, rank = 0}": "ranks are killed on this machine alone",
        'environment = {A = "b"}': "do not reach hosts of ssh: A",
    }
    for line, message in cases.items():
        suite.write_text(f'{job}[[contenders]]\nname = "one"\n{line}\n')
        done = subprocess.run(
            [sys.executable, "-m", "wanma", "bench", "train", str(suite), "--results", str(tmp_path / "r")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert message in done.stderr


def test_an_engine_is_refused_for_commands(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text('[[contenders]]\nname = "script"\ncommand = ["true"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "wanma", "bench", "train", str(suite), "--engine", "slurm"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--engine and --nodes are for jobs" in done.stderr
    assert "script" in done.stderr
