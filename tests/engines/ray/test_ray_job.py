"""RayJob of KubeRay and command of `ray job submit` for a submission."""

from __future__ import annotations

import gzip
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from wanma.engines.engine import Submission
from wanma.engines.ray.ray_job import render_ray_job
from wanma.job.sections.cluster import ClusterSection

SCHEMA = Path(__file__).parents[4] / "shared" / "kubernetes" / "ray.io_rayjobs.yaml.gz"


def submission(**ray: Any) -> Submission:
    return Submission(
        name="My run",
        run_directory=Path("/shared/runs/a"),
        folder=Path("/shared"),
        command=("train", "/shared/runs/a/engine/job.toml", "--run-dir", "/shared/runs/a"),
        nodes=4,
        min_nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        cores_per_node=64,
        settings=ClusterSection.model_validate({"engine": "ray", "ray": ray}),
        secret="key",
        job_text='[model]\npreset = "gpt-1m"\n',
    )


def ray_job() -> tuple[dict[str, Any], dict[str, Any]]:
    text = render_ray_job(submission(image="wanma-ray:1", volume="runs"))
    assert "key" not in text.split()
    config_map, job = yaml.safe_load_all(text)
    return config_map, job


def test_the_cluster_has_a_pod_for_each_node_and_its_entrypoint_reads_the_job() -> None:
    config_map, job = ray_job()
    assert config_map["data"]["job.toml"] == submission().job_text
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (workers["replicas"], workers["minReplicas"]) == (4, 2)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": 64, "nvidia.com/gpu": 8}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"job": "/etc/wanma", "shm": "/dev/shm", "shared": "/shared"}
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["cd", "/shared", "&&"]
    assert words[words.index("train") + 1 :] == [
        "/etc/wanma/job.toml", "--run-dir", "/shared/runs/a", "cluster.ray.address=auto"
    ]  # fmt: skip


def test_without_an_image_only_the_command_is_given() -> None:
    text = render_ray_job(submission())
    assert all(line.startswith("#") for line in text.splitlines())
    assert "ray job submit" in text


@pytest.mark.skipif(not SCHEMA.exists(), reason="the schema is in ../shared")
def test_the_ray_job_is_one_of_kuberay() -> None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 25,000 lines
    resource = yaml.load(gzip.decompress(SCHEMA.read_bytes()), loader)
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in resource["spec"]["versions"]
        if version["name"] == "v1"
    ]
    jsonschema.Draft202012Validator(_strict(schema)).validate(ray_job()[1])


def _strict(schema: Any) -> Any:
    """Return an OpenAPI schema as JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("properties") and "type" in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made
