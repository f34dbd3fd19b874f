"""Manifests against the schemas of Kubernetes, JobSet, Kueue and Kubeflow, and what they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes.schemas import check
from wanma.engines.engine import Submission
from wanma.engines.kubernetes.manifests import (
    make_placement,
    read_rbac,
    render_files_pod,
    render_manifests,
    render_secret,
    to_yaml,
)
from wanma.job.errors import JobError
from wanma.job.sections.cluster import ClusterSection

PLURALS = {
    "Service": "services",
    "Job": "jobs",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "PodGroup": "podgroups",
    "Secret": "secrets",
    "Pod": "pods",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
}
FULL = {
    "namespace": "ml",
    "image_pull_secrets": ["registry"],
    "queue": "team",
    "priority_class": "high",
    "gpu_product": "NVIDIA-H100-80GB-HBM3",
    "node_selector": {"zone": "a"},
    "tolerations": ["nvidia.com/gpu:NoSchedule", "team=ml:NoExecute", "spot"],
    "host_paths": ["/var/cache/wanma", "/data"],
    "memory": "200Gi",
    "shared_memory": "16Gi",
    "run_as_user": 1000,
    "service_account": "trainer",
    "secret_environment": {"WANDB_API_KEY": "wandb/key"},
}

STORE: dict[str, Any] = {
    "volume": None,
    "store": "s3://bucket/runs",
    "secret_environment": {"AWS_SECRET": "s3/key"},
}

GANG = {**FULL, "scheduler": "volcano"}


def submission(code: str = "", **settings: Any) -> Submission:
    run = Path("/home/me/project/runs/GPT_1")
    section = {"nodes": 2, "kubernetes": {"image": "wanma:1", "volume": "runs", **settings}}
    return Submission(
        name="GPT_1",
        run_directory=run,
        folder=Path("/home/me/project"),
        command=("train", f"{run}/engine/job.toml", "--run-dir", str(run)),
        nodes=2,
        min_nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        cores_per_node=64,
        settings=ClusterSection.model_validate(section),
        secret="nobody-sees-it",
        job_text="[model]",
        preferred_hosts=tuple(map(str, range(100))),
        code=run / "code" / f"{'a' * 64}.tar" if code else None,
    )


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    spec = manifests[-1]["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return dict(spec["template"]["spec"])


@pytest.mark.parametrize("kind", ["jobset", "job", "trainjob"])
@pytest.mark.parametrize("settings", [{}, FULL, STORE, GANG], ids=["least", "full", "store", "gang"])
@pytest.mark.parametrize("code", ["", "code"])
def test_manifests_satisfy_the_schemas(kind: str, settings: dict[str, Any], code: str) -> None:
    given = submission(code, **settings)
    if kind == "trainjob" and settings in (STORE, GANG):
        with pytest.raises(JobError, match=r"cluster\.kubernetes\.(store|scheduler)"):
            render_manifests(given, kind)
        return
    manifests = render_manifests(given, kind)
    assert list(yaml.safe_load_all(to_yaml(manifests))) == manifests
    placement = make_placement(given.run_directory, given.settings.kubernetes)
    files = render_files_pod("files", given.settings.kubernetes, placement)
    for manifest in [*manifests, render_secret(given), files]:
        check(PLURALS[manifest["kind"]], manifest)
    assert given.secret not in to_yaml(manifests)


def test_the_rights_are_a_role_and_its_binding() -> None:
    for manifest in yaml.safe_load_all(read_rbac()):
        check(PLURALS[manifest["kind"]], manifest)


def test_an_eviction_is_no_failure_and_a_failed_run_is_not_repeated() -> None:
    job = render_manifests(submission(), "job")[-1]["spec"]
    rules = {rule["action"]: rule for rule in reversed(job["podFailurePolicy"]["rules"])}
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules["FailJob"]["onExitCodes"]["values"] == [1, 2, 130]
    assert job["completions"] == job["parallelism"] == 2


def test_a_pod_has_its_code_its_volume_its_shared_memory_and_no_token() -> None:
    pod = pod_of(render_manifests(submission("code", **FULL), "jobset"))
    (starter,), (container,) = pod["initContainers"], pod["containers"]
    assert starter["command"][4].startswith("/wanma/runs/GPT_1/code/")
    assert container["command"][-3:] == [
        "/wanma/runs/GPT_1/engine/job.toml",
        "--run-dir",
        "/wanma/runs/GPT_1",
    ]
    assert container["workingDir"].endswith("a" * 64)
    assert container["resources"]["limits"] == {"memory": "200Gi", "nvidia.com/gpu": "8"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert [one["hostPath"]["path"] for one in pod["volumes"][-3:-1]] == FULL["host_paths"]
    assert [one["mountPath"] for one in container["volumeMounts"][-3:-1]] == FULL["host_paths"]
    (preferred,) = pod["affinity"]["nodeAffinity"].values()
    terms = [one for term in preferred for one in term["preference"]["matchFields"]]
    assert [one["values"] for one in terms] == [[str(number)] for number in range(64)]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"]
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == FULL["gpu_product"]
    assert "priorityClassName" not in pod  # Kueue has its own


@pytest.mark.parametrize("code", ["", "code"])
def test_a_pod_without_a_volume_fetches_its_files_with_the_secrets_of_the_run(code: str) -> None:
    pod = pod_of(render_manifests(submission(code, **STORE), "job"))
    (starter,), (container,) = pod["initContainers"], pod["containers"]
    assert not any("persistentVolumeClaim" in volume for volume in pod["volumes"])
    for part in (starter, container):
        assert any(word.startswith("s3://bucket/runs/wanma-gpt-1-") for word in part["command"])
        references = [entry for entry in part["env"] if entry["name"] == "AWS_SECRET"]
        assert references[0]["valueFrom"]["secretKeyRef"] == {"name": "s3", "key": "key"}


def test_a_queue_suspends_the_run_and_joining_pods_belong_to_it() -> None:
    first = render_manifests(submission(queue="team"), "jobset")[-1]
    assert first["spec"]["suspend"]
    assert first["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    name = first["metadata"]["name"]
    joining = render_manifests(submission(), "jobset", joining=f"{name}-2")[-1]
    assert joining["metadata"]["labels"]["wanma.dev/run"] == name
    assert pod_of([joining])["containers"] == pod_of([first])["containers"]


def test_pods_of_a_gang_name_it_and_kueue_has_no_part_in_it() -> None:
    _, gang, job = render_manifests(submission(**GANG), "job")
    assert gang["spec"] == {"minMember": 2, "queue": "team", "priorityClassName": "high"}
    name = gang["metadata"]["name"]
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": name}
    assert template["spec"]["schedulerName"] == "volcano"
    assert "suspend" not in job["spec"]
    joining = render_manifests(submission(**GANG), "jobset", joining=f"{name}-2")[0]
    assert (joining["metadata"]["name"], joining["spec"]["minMember"]) == (f"{name}-2", 1)


def test_a_run_directory_on_the_volume_is_used_as_it_is() -> None:
    settings = submission(mount_path="/home/me").settings.kubernetes
    assert make_placement(Path("/home/me/runs/gpt"), settings).folder == "/home/me/runs/gpt"
    assert not make_placement(Path("/home/meadow/gpt"), settings).is_shared


@pytest.mark.parametrize("missing", ["image", "volume"])
def test_a_pod_without_image_or_volume_is_refused(missing: str) -> None:
    with pytest.raises(JobError) as refused:
        render_manifests(submission(**{missing: None}), "job")
    assert f"cluster.kubernetes.{missing}" in refused.value.message
    assert refused.value.hint
