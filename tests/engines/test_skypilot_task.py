"""SkyPilot's task: its fields, its script run for real, and SkyPilot's own check of it."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from wanma.engines.engine import Submission
from wanma.engines.skypilot_task import accelerator_name, render_skypilot_task
from wanma.hardware.catalogue.lookup import CATALOGUE
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.errors import JobError
from wanma.job.sections.cluster import ClusterSection

SKY_PYTHON = Path(__file__).parents[2] / ".venv-skypilot" / "bin" / "python"
JOB = '[model]\npreset = "gpt-1m"\n[data]\ntext = ["a $HOME `b` \'c\'"]\n[checkpoint]\nupload = "s3://bucket/run"\n'
LOAD = """
import sys, json, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
names = [ref.name for ref in task.managed_secret_refs]
print(json.dumps([task.num_nodes, resources.accelerators, resources.cpus, names]))
"""


def task_text(folder: Path, cluster: str, nodes: int, min_nodes: int | None = None) -> str:
    (node,) = read_cluster(cluster).nodes
    submission = Submission(
        name="gpt",
        run_directory=folder / "run",
        folder=folder,
        command=("train", "job.toml"),
        nodes=nodes,
        min_nodes=min_nodes or nodes,
        ranks_per_node=8,
        gpus_per_node=len(node.devices),
        cores_per_node=node.cores,
        settings=ClusterSection(),
        secret="s3cr3t",
        job_text=JOB,
    )
    return render_skypilot_task(submission, node)


def test_the_script_writes_the_job_and_joins_the_nodes(tmp_path: Path) -> None:
    text = task_text(tmp_path, "2x8 H100 SXM, 8x400G", 2)
    assert "s3cr3t" not in text
    task: dict[str, Any] = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "H100:8"})
    assert task["secrets"] == {"WANMA_SECRET": None}
    (tmp_path / "wanma").write_text(
        '#!/usr/bin/env python3\nimport json, sys\njson.dump(sys.argv[1:], open("words", "w"))\n'
    )
    (tmp_path / "wanma").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    }
    subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, check=True)
    words = json.loads((tmp_path / "words").read_text())
    assert words[:4] == ["train", ".wanma-job.toml", "--run-dir", "runs/gpt"]
    assert words[4:] == ["cluster.nodes=2", "cluster.node_rank=1", "cluster.rendezvous=10.0.0.4:29500"]
    assert tomllib.loads((tmp_path / ".wanma-job.toml").read_text()) == tomllib.loads(JOB)


def test_a_node_without_accelerators_and_a_range_of_nodes(tmp_path: Path) -> None:
    task = yaml.safe_load(task_text(tmp_path, "1x8 cores EPYC 9654", 1))
    assert task["resources"]["cpus"] == "8+"
    assert "secrets" not in task
    with pytest.raises(JobError, match=r"cluster\.nodes = '2\.\.4'"):
        task_text(tmp_path, "4x8 H100 SXM, 8x400G", 4, 2)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.skipif(not SKY_PYTHON.exists(), reason="without SkyPilot: make skypilot")
def test_skypilot_takes_it_and_knows_the_devices(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def load() -> list[Any]:
        words = [SKY_PYTHON, "-c", LOAD, file]
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        found: list[Any] = json.loads(ran.stdout.splitlines()[-1])
        return found

    file.write_text(task_text(tmp_path, "2x8 A100 SXM 80 GB, 8x200G", 2))
    assert load() == [2, {"A100-80GB": 8}, None, ["WANMA_SECRET"]]
    file.write_text(task_text(tmp_path, "1x8 cores EPYC 9654", 1))
    assert load() == [1, None, "8+", []]


def test_names_of_devices() -> None:
    names = {kind.name: accelerator_name(kind.name) for kind in CATALOGUE if kind.kind == "cuda"}
    assert names["A100 SXM 40 GB"] == "A100"
    assert names["V100 SXM2 32 GB"] == "V100-32GB"
    assert names["H200 SXM"] == "H200"
    assert names["RTX 4090"] == "RTX4090"
