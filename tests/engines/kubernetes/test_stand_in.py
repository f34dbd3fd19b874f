"""The stand-in cluster of these tests behaves as Kubernetes, JobSet and Kueue say that they do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

client = pytest.importorskip("kubernetes.client")

from kubernetes import config  # noqa: E402
from kubernetes.stream import stream  # noqa: E402

from support.kubernetes.cluster import IMAGE, KubernetesCluster, node  # noqa: E402
from support.kubernetes.schemas import check  # noqa: E402

pytestmark = pytest.mark.root
SLEEP = ["python", "-c", "import time; time.sleep(600)"]
DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
FATAL = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    """Two nodes with two GPUs each. What its controllers have written is valid."""
    with KubernetesCluster(tmp_path, [node("a", gpus=2), node("b", gpus=2)]) as made:
        config.load_kube_config(str(made.kubeconfig))
        yield made
        for (plural, _, _), found in list(made.store.objects.items()):
            if plural != "events":  # the client's models check those
                check(plural, found)


def pod_spec(command: list[str], gpus: int = 0, **more: Any) -> dict[str, Any]:
    resources = {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}} if gpus else {}
    container = {"name": "main", "image": IMAGE, "command": command, **resources}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        **more,
    }


def indexed_job(name: str, pod: dict[str, Any], **more: Any) -> dict[str, Any]:
    spec = {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "template": {"spec": pod},
        **more,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def job_set(
    name: str, pod: dict[str, Any], labels: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    template = {"spec": indexed_job(name, pod, backoffLimit=0)["spec"]}
    spec = {"replicatedJobs": [{"name": "node", "template": template}], **more}
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def create(found: dict[str, Any]) -> Any:
    """Create an object as it is: the client's own models would refuse some before the server does."""
    group, _, version = found["apiVersion"].rpartition("/")
    plural = found["kind"].lower() + "s"
    api = client.CustomObjectsApi()
    return api.create_namespaced_custom_object(group, version, "default", plural, found)


def running(job: str) -> set[str]:
    """Return the names of the running pods of a Job."""
    pods = client.CoreV1Api().list_namespaced_pod("default", label_selector=f"job-name={job}").items
    return {
        pod.metadata.name
        for pod in pods
        if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp
    }


def conditions(kind: str, name: str) -> dict[str, tuple[str, str, str]]:
    """Return status, reason and message of each condition of a custom resource."""
    group, version = ("kueue.x-k8s.io", "v1beta2") if kind == "workloads" else ("jobset.x-k8s.io", "v1alpha2")
    found = client.CustomObjectsApi().list_namespaced_custom_object(group, version, "default", kind)["items"]
    (one,) = [one for one in found if name in one["metadata"]["name"]]
    listed = one["status"].get("conditions", [])
    return {entry["type"]: (entry["status"], entry["reason"], entry["message"]) for entry in listed}


def events(name: str) -> dict[str, str]:
    selector = f"involvedObject.name={name}"
    found = client.CoreV1Api().list_namespaced_event("default", field_selector=selector).items
    return {one.reason: one.message for one in found}


def test_official_client_creates_and_reads_a_pod(cluster: KubernetesCluster) -> None:
    core = client.CoreV1Api()
    command = ["python", "-c", "print('one'); print('two'); raise SystemExit(3)"]
    core.create_namespaced_pod("default", {"metadata": {"name": "p"}, "spec": pod_spec(command)})
    cluster.wait_for(lambda: core.read_namespaced_pod("p", "default").status.phase == "Failed", "end")
    pod = core.read_namespaced_pod("p", "default")
    assert pod.status.container_statuses[0].state.terminated.exit_code == 3
    assert core.read_namespaced_pod_log("p", "default") == "one\ntwo\n"
    assert core.read_namespaced_pod_log("p", "default", tail_lines=1) == "two\n"
    core.delete_namespaced_pod("p", "default")
    assert not core.list_namespaced_pod("default").items


def test_exec_carries_bytes_both_ways_and_the_exit_code(cluster: KubernetesCluster) -> None:
    core = client.CoreV1Api()
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    core.create_namespaced_persistent_volume_claim("default", {"metadata": {"name": "runs"}, "spec": claim})
    spec = pod_spec(SLEEP, volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "runs"}}])
    spec["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": "/wanma"}]
    core.create_namespaced_pod("default", {"metadata": {"name": "p"}, "spec": spec})
    cluster.wait_for(lambda: core.read_namespaced_pod("p", "default").status.phase == "Running", "start")
    program = (
        "import sys; count = int.from_bytes(sys.stdin.buffer.read(8), 'big'); "
        "data = sys.stdin.buffer.read(count); open('/wanma/data', 'wb').write(data); "
        "sys.stdout.buffer.write(data[::-1]); sys.stderr.write('end'); sys.exit(5)"
    )
    opened = stream(
        core.connect_get_namespaced_pod_exec, "p", "default", command=["python", "-c", program],
        stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False, binary=True,
    )  # fmt: skip
    data = os.urandom(1_000_000)
    opened.write_stdin(len(data).to_bytes(8, "big"))
    opened.write_stdin(data)
    opened.run_forever(timeout=30)
    assert opened.read_stdout() == data[::-1]
    assert opened.read_stderr() == b"end"
    assert opened.returncode == 5
    assert (cluster.claim_folder("runs") / "data").read_bytes() == data


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"surprise": 1}, 400, 'unknown field "spec.surprise"'),
        ({"completions": "two"}, 422, "spec.completions"),
        ({"template": {"spec": pod_spec(["x"]) | {"restartPolicy": "Always"}}}, 422, "restartPolicy"),
        ({"template": {"spec": pod_spec(["x"]) | {"hostname": "UPPER"}}}, 422, "hostname"),
    ],
)
def test_manifest_that_is_wrong_is_refused(
    cluster: KubernetesCluster, change: dict[str, Any], code: int, words: str
) -> None:
    with pytest.raises(client.ApiException) as refused:
        create(indexed_job("j", pod_spec(["x"]), **change))
    assert refused.value.status == code
    assert words in json.loads(refused.value.body)["message"]
    assert not cluster.store.list("jobs")


def test_rule_of_a_custom_resource_refuses_with_its_message(cluster: KubernetesCluster) -> None:
    found = job_set("s", pod_spec(["x"]), startupPolicy={"startupPolicyOrder": "InOrder"})
    found["spec"]["replicatedJobs"][0]["dependsOn"] = [{"name": "other", "status": "Ready"}]
    with pytest.raises(client.ApiException) as refused:
        create(found)
    assert refused.value.status == 422
    assert "StartupPolicy and DependsOn APIs are mutually exclusive" in refused.value.body


def test_refusals_have_the_codes_of_the_real_server(cluster: KubernetesCluster) -> None:
    core = client.CoreV1Api()
    core.create_namespaced_config_map("default", {"metadata": {"name": "c"}, "data": {"a": "1"}})
    core.patch_namespaced_config_map("c", "default", {"data": {"a": "2"}})
    cluster.deny("list", "secrets")
    calls = {
        409: lambda: core.create_namespaced_config_map("default", {"metadata": {"name": "c"}}),
        404: lambda: core.create_namespaced_config_map("nowhere", {"metadata": {"name": "c"}}),
        403: lambda: core.list_namespaced_secret("default"),
    }
    for code, call in calls.items():
        with pytest.raises(client.ApiException) as refused:
            call()
        assert refused.value.status == code
    assert core.read_namespaced_config_map("c", "default").data == {"a": "2"}


def test_group_that_is_not_installed_is_not_found(tmp_path: Path) -> None:
    with KubernetesCluster(tmp_path, [], extensions=()) as made:
        config.load_kube_config(str(made.kubeconfig))
        with pytest.raises(client.ApiException) as refused:
            create(job_set("s", pod_spec(["x"])))
        assert refused.value.status == 404


def test_job_orphans_its_pods_unless_it_is_deleted_with_a_policy(cluster: KubernetesCluster) -> None:
    batch = client.BatchV1Api()
    for name, policy in {"orphaning": {}, "cascading": {"propagation_policy": "Background"}}.items():
        create(indexed_job(name, pod_spec(SLEEP)))
        cluster.wait_for(lambda name=name: len(running(name)) == 2, "start")
        batch.delete_namespaced_job(name, "default", **policy)
    cluster.wait_for(lambda: not running("cascading"), "deletion of the pods")
    assert len(running("orphaning")) == 2


def test_indexed_job_completes_with_names_that_resolve_between_pods(cluster: KubernetesCluster) -> None:
    core, batch = client.CoreV1Api(), client.BatchV1Api()
    service = {"clusterIP": "None", "selector": {"batch.kubernetes.io/job-name": "j"}}
    core.create_namespaced_service("default", {"metadata": {"name": "j"}, "spec": service})
    core.create_namespaced_secret("default", {"metadata": {"name": "s"}, "stringData": {"key": "value"}})
    program = (
        "import os, socket, time\n"
        "other = 'j-%d.j' % (1 - int(os.environ['JOB_COMPLETION_INDEX']))\n"
        "assert os.environ['KEY'] == 'value'\n"
        "server = socket.create_server(('', 9000))\n"
        "while True:\n"
        "    try:\n"
        "        socket.create_connection((other, 9000), 1)\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.05)\n"
        "server.accept()\n"
        "print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))\n"
    )
    spec = pod_spec(["python", "-c", program], gpus=2, subdomain="j")
    secret = {"secretKeyRef": {"name": "s", "key": "key"}}
    spec["containers"][0]["env"] = [{"name": "KEY", "valueFrom": secret}]
    create(indexed_job("j", spec))
    cluster.wait_for(lambda: batch.read_namespaced_job("j", "default").status.succeeded == 2, "completion")
    assert batch.read_namespaced_job("j", "default").status.completed_indexes == "0-1"
    pods = core.list_namespaced_pod("default").items
    assert {pod.spec.node_name for pod in pods} == {"a", "b"}
    for pod in pods:
        words = f"{pod.spec.hostname} {pod.status.pod_ip}\n"
        assert core.read_namespaced_pod_log(pod.metadata.name, "default") == words
    batch.delete_namespaced_job("j", "default", propagation_policy="Foreground")
    cluster.wait_for(lambda: not core.list_namespaced_pod("default").items, "deletion")


def test_disrupted_pods_are_made_anew_and_fatal_exits_fail_the_job(cluster: KubernetesCluster) -> None:
    batch = client.BatchV1Api()
    policy = {"rules": [DISRUPTED, FATAL]}
    create(indexed_job("j", pod_spec(SLEEP), backoffLimit=0, podFailurePolicy=policy))
    cluster.wait_for(lambda: len(running("j")) == 2, "start")
    first = running("j")
    cluster.evict(sorted(first)[0])
    cluster.wait_for(lambda: len(running("j")) == 2 and running("j") != first, "another pod")
    second = running("j")
    lost = cluster.store.get("pods", "default", sorted(second)[0])["spec"]["nodeName"]
    cluster.lose_node(lost)
    cluster.wait_for(lambda: len(running("j")) == 2 and running("j") != second, "pods on the other node")
    assert not batch.read_namespaced_job("j", "default").status.failed
    create(indexed_job("f", pod_spec(["python", "-c", "raise SystemExit(2)"]), podFailurePolicy=policy))
    cluster.wait_for(lambda: "PodFailurePolicy" in events("f"), "failure")


def test_job_set_waits_for_quota_and_yields_to_a_higher_priority(cluster: KubernetesCluster) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    create(job_set("one", pod_spec(SLEEP, gpus=1), labels))
    cluster.wait_for(lambda: "QuotaReserved" in conditions("workloads", "one"), "workload")
    words = "LocalQueue team doesn't exist"
    assert conditions("workloads", "one")["QuotaReserved"] == ("False", "Inadmissible", words)
    cluster.set_queue({"nvidia.com/gpu": "2"}, preemption="LowerPriority")
    cluster.wait_for(lambda: len(running("one-node-0")) == 2, "admission")
    create(job_set("two", pod_spec(SLEEP, gpus=1), labels))
    cluster.wait_for(lambda: "QuotaReserved" in conditions("workloads", "two"), "workload")
    words = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor"
    words += " default-flavor, 2 more needed"
    assert conditions("workloads", "two")["QuotaReserved"] == ("False", "Pending", words)
    cluster.add("priorityclasses", {"metadata": {"name": "high"}, "value": 100})
    program = ["python", "-c", "pass"]
    create(job_set("vip", pod_spec(program, gpus=1), labels | {"kueue.x-k8s.io/priority-class": "high"}))
    cluster.wait_for(lambda: "Completed" in conditions("jobsets", "vip"), "the higher priority")
    cluster.wait_for(lambda: len(running("one-node-0")) == 2, "the first again")
    status, reason, words = conditions("workloads", "one")["Preempted"]
    assert (status, reason) == ("False", "QuotaReserved")
    assert words.startswith("Previously: Preempted to accommodate")


def test_job_set_restarts_until_its_limit(cluster: KubernetesCluster) -> None:
    create(job_set("s", pod_spec(["python", "-c", "raise SystemExit(7)"]), failurePolicy={"maxRestarts": 1}))
    cluster.wait_for(lambda: "Failed" in conditions("jobsets", "s"), "failure")
    assert conditions("jobsets", "s")["Failed"][1] == "ReachedMaxRestarts"
    assert cluster.store.get("jobsets", "default", "s")["status"]["restarts"] == 1


def test_gang_starts_whole_or_not_at_all(cluster: KubernetesCluster) -> None:
    group = {"metadata": {"name": "gang"}, "spec": {"minMember": 2}}
    cluster.add("podgroups", group, "default")
    job = indexed_job("j", pod_spec(SLEEP, gpus=2, schedulerName="volcano"))
    job["spec"]["template"]["metadata"] = {"annotations": {"scheduling.k8s.io/group-name": "gang"}}
    cluster.taint("a")
    create(job)
    cluster.wait_for(
        lambda: "1 Schedulable, 1 Unschedulable" in events("gang").get("Unschedulable", ""), "gang"
    )
    assert not running("j")
    cluster.add_node(node("c", gpus=2))
    cluster.wait_for(lambda: len(running("j")) == 2, "both")


def test_events_say_why_a_pod_does_not_run(cluster: KubernetesCluster) -> None:
    core = client.CoreV1Api()
    cluster.set_quota({"requests.nvidia.com/gpu": "8"})
    cluster.taint("a")
    cluster.scheduler.autoscaler = "NotTriggerScaleUp"
    for name, spec in {
        "large": pod_spec(SLEEP, gpus=4),
        "image": pod_spec(SLEEP) | {"containers": [{"name": "main", "image": "unknown:1"}]},
    }.items():
        core.create_namespaced_pod("default", {"metadata": {"name": name}, "spec": spec})
    create(indexed_job("quota", pod_spec(SLEEP, gpus=6)))
    cluster.wait_for(lambda: "NotTriggerScaleUp" in events("large"), "autoscaler")
    words = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint"
    words += (
        " {maintenance: }. preemption: 0/2 nodes are available: 1 No preemption victims found for incoming"
    )
    words += " pod, 1 Preemption is not helpful for scheduling."
    assert events("large")["FailedScheduling"] == words
    cluster.wait_for(lambda: "BackOff" in events("image"), "image")
    cluster.wait_for(lambda: "FailedCreate" in events("quota"), "quota")
    assert "exceeded quota: quota, requested: requests.nvidia.com/gpu=6" in events("quota")["FailedCreate"]


def test_pods_and_state_outlive_the_api_server(cluster: KubernetesCluster) -> None:
    create(indexed_job("j", pod_spec(SLEEP)))
    cluster.wait_for(lambda: len(running("j")) == 2, "start")
    before = running("j")
    cluster.lose_answers()
    with pytest.raises(Exception, match=r"closed|aborted|reset|EOF"):
        create(indexed_job("lost", pod_spec(SLEEP)))
    cluster.wait_for(lambda: len(running("lost")) == 2, "the Job whose answer was lost")
    cluster.stop()
    with pytest.raises(Exception, match=r"refused|aborted|reset"):
        running("j")
    cluster.start()
    assert running("j") == before


def test_restricted_namespace_runs_only_pods_without_rights(cluster: KubernetesCluster) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.add("namespaces", {"metadata": {"name": "safe", "labels": labels}})
    cluster.wait_for(lambda: cluster.store.find("serviceaccounts", "safe", "default"), "account")
    core = client.CoreV1Api()
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    core.create_namespaced_persistent_volume_claim("safe", {"metadata": {"name": "runs"}, "spec": claim})
    spec = pod_spec(["sh", "-c", "touch /wanma/file && echo $(id -u) $(id -g) $(pwd)"])
    pod = {"metadata": {"name": "p"}, "spec": spec}
    with pytest.raises(client.ApiException) as refused:
        core.create_namespaced_pod("safe", pod)
    assert refused.value.status == 403
    assert "runAsNonRoot" in json.loads(refused.value.body)["message"]
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000}
    spec["securityContext"] = {**user, "seccompProfile": {"type": "RuntimeDefault"}}
    spec["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "runs"}}]
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    spec["containers"][0] |= {
        "securityContext": {**rights, "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "v", "mountPath": "/wanma"}],
        "workingDir": "/usr",
    }
    core.create_namespaced_pod("safe", pod)
    cluster.wait_for(lambda: core.read_namespaced_pod("p", "safe").status.phase == "Succeeded", "end")
    assert core.read_namespaced_pod_log("p", "safe") == "1000 1000 /usr\n"
    assert (cluster.claim_folder("runs", "safe") / "file").exists()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with KubernetesCluster(tmp_path, [node("a")]) as made:
        spec = pod_spec(["sleep", "600"])
        spec["containers"][0]["securityContext"] = {"runAsUser": 1000, "runAsNonRoot": True}
        made.add("pods", {"metadata": {"name": "p"}, "spec": spec}, "default")
        made.wait_for(lambda: made.store.get("pods", "default", "p")["status"]["phase"] == "Running", "start")
        bridge = made.kubelets.network.bridge
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert bridge not in links.replace("@", " ").replace(".", " ").split()
    assert not list(Path("/run/netns").glob(f"{bridge}-*"))
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            assert str(tmp_path) not in path.read_text()
