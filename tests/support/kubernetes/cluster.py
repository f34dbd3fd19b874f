"""A whole cluster for a test.

with KubernetesCluster(tmp_path, [node("a", gpus=2)]) as cluster:
    ...  # `cluster.kubeconfig` is what KUBECONFIG names
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.admission import admit, report_quotas
from support.kubernetes.jobs import Jobs
from support.kubernetes.jobsets import JobSets, complete
from support.kubernetes.kubelet import Kubelets
from support.kubernetes.kueue import Kueue, suspend
from support.kubernetes.resources import EXTENSIONS, Object, now, set_condition
from support.kubernetes.scheduler import Scheduler, tolerates
from support.kubernetes.server import ApiServer, evict
from support.kubernetes.store import Store

IMAGE = "wanma:test"
"""Image that can be pulled: this machine, with the interpreter of the test in its PATH."""
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "chroot", "openssl")


def node(
    name: str,
    gpus: int = 0,
    cpu: str = "8",
    memory: str = "32Gi",
    labels: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
) -> Object:
    """Return a Node as a machine with `gpus` GPUs of the GPU Operator reports itself."""
    resources = {"cpu": cpu, "memory": memory, "pods": "110"} | (
        {"nvidia.com/gpu": str(gpus)} if gpus else {}
    )
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {"taints": taints} if taints else {},
        "status": {"capacity": resources, "allocatable": resources},
    }


class KubernetesCluster:
    """A running cluster: API server, controllers, scheduler and the kubelets of its nodes.

    Args:
        folder: claims, pods and the kubeconfig lie here.
        nodes: as `node` makes them.
        extensions: API groups of custom resources that are installed.
        images: names that can be pulled.
        backoff_seconds: delay of the first retry of anything (10 s and more in a real cluster).
        eviction_seconds: time after which pods of an unreachable node are evicted (300 s in a real one).
    """

    def __init__(
        self, folder: Path, nodes: list[Object], *, extensions: tuple[str, ...] = EXTENSIONS,
        images: tuple[str, ...] = (IMAGE,), backoff_seconds: float = 0.3, eviction_seconds: float = 0.5,
    ) -> None:  # fmt: skip
        if os.getuid() != 0:
            pytest.skip("network namespaces need root")
        for program in PROGRAMS:
            if shutil.which(program) is None:
                pytest.skip(f"pods need the command `{program}`")
        if subprocess.run(
            ["unshare", "--mount", "--net", "true"], capture_output=True, check=False
        ).returncode:
            pytest.skip("pods need CAP_SYS_ADMIN")
        self.folder, self.extensions, self.eviction_seconds = folder, extensions, eviction_seconds
        self.kubeconfig = folder / "kubeconfig"
        self.store, self.denied = Store(), set[tuple[str, str]]()
        self.store.admission.append(complete)
        self.store.admission += [suspend] if "kueue.x-k8s.io" in extensions else []
        self.store.admission.append(lambda plural, found: admit(self.store, plural, found))
        self.kubelets = Kubelets(self.store, folder, set(images), backoff_seconds)
        self.scheduler = Scheduler(self.store)
        self.errors: list[str] = []
        """Failures of the stand-in itself."""
        self._token, self._port = secrets.token_hex(16), 0
        self._server: ApiServer | None = None
        self._certificate = folder / "certificate.pem"
        name = ["-subj", "/CN=stand-in", "-addext", "subjectAltName=IP:127.0.0.1"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        files = ["-keyout", self._certificate, "-out", folder / "certificate.crt"]
        subprocess.run(["openssl", "req", "-x509", *key, *name, *files], check=True, capture_output=True)
        with self._certificate.open("ab") as file:
            file.write((folder / "certificate.crt").read_bytes())
        self._is_over = threading.Event()
        self._steps: list[Callable[[], None]] = [
            self.store.collect_garbage,
            self._keep_namespaces,
            JobSets(self.store).sync,
            Kueue(self.store).sync,
            Jobs(self.store, backoff_seconds).sync,
            self._evict_from_tainted,
            self._bind_claims,
            lambda: report_quotas(self.store),
            self.scheduler.sync,
        ]
        for name in ("default", "kube-system"):
            self.add("namespaces", {"metadata": {"name": name}, "status": {"phase": "Active"}})
        for one in nodes:
            self.add_node(one)
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)

    def __enter__(self) -> KubernetesCluster:
        self._keep_namespaces()
        self.start()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()
        self.stop()
        assert not self.errors, self.errors[0]

    def start(self) -> None:
        """Start the API server, on the same port as before."""
        address = ("127.0.0.1", self._port)
        self._server = ApiServer(
            address, self.store, self.kubelets, self._token, self.denied, self.extensions, self._certificate
        )
        self._port = self._server.server_address[1]
        self._write_kubeconfig()

    def stop(self) -> None:
        """Take the API server away. Pods run on; controllers wait; nothing is forgotten."""
        if self._server is not None:
            server, self._server = self._server, None
            server.close()

    def lose_answers(self, count: int = 1) -> None:
        """Do what the next requests to create something want, and close their connections unanswered."""
        assert self._server is not None
        self._server.lost_answers += [None] * count

    def add(self, plural: str, found: Object, namespace: str = "") -> Object:
        """Put an object into the cluster, as its administrator does."""
        status = found.get("status")
        made = self.store.create(plural, found, namespace)
        if status is not None:
            with self.store.edit(made) as made:
                made["status"] = status
        return made

    def add_node(self, found: Object) -> None:
        """Add a node, as an autoscaler does."""
        made = self.add("nodes", found)
        self.store.condition(made, "Ready", "True", "KubeletReady", "kubelet is posting ready status")
        self.kubelets.lost.discard(found["metadata"]["name"])

    def lose_node(self, name: str, *, is_removed: bool = True) -> None:
        """End everything on a node at once.

        `is_removed`: the cloud's controller removes the Node, and its pods are collected as garbage; else it
        stays, unreachable, and its pods stay in deletion (as where nobody knows whether they run).
        https://kubernetes.io/docs/concepts/architecture/nodes/
        """
        with self.store.changed:
            self.kubelets.lose(name)
            found = self.store.get("nodes", "", name)
            words = "Kubelet stopped posting node status."
            self.store.condition(found, "Ready", "Unknown", "NodeStatusUnknown", words)
            for effect in ("NoSchedule", "NoExecute"):
                self.taint(name, "node.kubernetes.io/unreachable", effect=effect)
            if is_removed:
                self.store.delete(found)

    def taint(self, name: str, key: str = "maintenance", value: str = "", effect: str = "NoSchedule") -> None:
        """Taint a node; with the effect NoExecute its pods are evicted."""
        with self.store.edit(self.store.get("nodes", "", name)) as after:
            added = {"key": key, "effect": effect, **({"value": value} if value else {})}
            after["spec"].setdefault("taints", []).append({**added, "timeAdded": now()})

    def evict(self, pod: str, namespace: str = "default") -> None:
        """Evict a pod as the Eviction API does."""
        evict(self.store, self.store.get("pods", namespace, pod))

    def deny(self, verb: str, resource: str) -> None:
        """Refuse a verb ('*': all) on a resource ('pods', 'pods/log') with 403."""
        self.denied.add((verb, resource))

    def set_quota(self, hard: dict[str, str], namespace: str = "default", name: str = "quota") -> None:
        """Set the ResourceQuota of a namespace."""
        found = self.store.find("resourcequotas", namespace, name)
        if found is None:
            self.add("resourcequotas", {"metadata": {"name": name}, "spec": {"hard": hard}}, namespace)
            return
        with self.store.edit(found) as after:
            after["spec"]["hard"] = hard

    def set_queue(
        self, quota: dict[str, str], name: str = "team", namespace: str = "default", preemption: str = "Never"
    ) -> None:
        """Set up a LocalQueue, its ClusterQueue and their only flavor with a quota, or change the quota."""
        resources = [{"name": key, "nominalQuota": value} for key, value in quota.items()]
        flavors = [{"name": "default-flavor", "resources": resources}]
        groups = [{"coveredResources": list(quota), "flavors": flavors}]
        if (found := self.store.find("clusterqueues", "", name)) is not None:
            with self.store.edit(found) as after:
                after["spec"]["resourceGroups"] = groups
            return
        if self.store.find("resourceflavors", "", "default-flavor") is None:
            self.add("resourceflavors", {"metadata": {"name": "default-flavor"}, "spec": {}})
        spec = {
            "namespaceSelector": {},
            "resourceGroups": groups,
            "preemption": {"withinClusterQueue": preemption},
        }
        self.add("clusterqueues", {"metadata": {"name": name}, "spec": spec})
        self.add("localqueues", {"metadata": {"name": name}, "spec": {"clusterQueue": name}}, namespace)

    def claim_folder(self, claim: str, namespace: str = "default") -> Path:
        """Return the folder that a PersistentVolumeClaim's volume is on this machine."""
        return self.folder / "claims" / namespace / claim

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait until `condition` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert not self.errors, self.errors[0]
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.describe()}"
            time.sleep(0.05)

    def describe(self) -> str:
        """Return what a failed test wants to know: statuses of all workloads, and events."""
        lines = []
        for plural in ("jobsets", "workloads", "jobs", "pods"):
            for one in self.store.list(plural):
                lines.append(f"{plural} {one['metadata']['name']}: {json.dumps(one.get('status'))}")
        for one in self.store.list("events"):
            about = one["involvedObject"]
            lines.append(f"{about['kind']} {about['name']}: {one['reason']}: {one['message']}")
        return "\n".join(lines)

    def _run(self) -> None:
        version = -1
        while not self._is_over.is_set():
            with self.store.changed:
                if version == self.store.version:
                    self.store.changed.wait(0.05)
                version = self.store.version
                try:
                    for step in self._steps if self._server is not None else []:
                        step()
                    if self._server is not None:
                        self.kubelets.sync()
                except Exception:
                    self.errors.append(traceback.format_exc())
                    break
        self.kubelets.close()  # in this thread: its end ends its children

    def _keep_namespaces(self) -> None:
        for space in self.store.list("namespaces"):
            name = space["metadata"]["name"]
            if "deletionTimestamp" not in space["metadata"]:
                with self.store.edit(space) as after:
                    after.setdefault("status", {"phase": "Active"})
                if self.store.find("serviceaccounts", name, "default") is None:
                    self.add("serviceaccounts", {"metadata": {"name": "default"}}, name)

    def _bind_claims(self) -> None:
        for claim in self.store.list("persistentvolumeclaims"):
            if claim.get("status", {}).get("phase") != "Bound":
                folder = self.claim_folder(claim["metadata"]["name"], claim["metadata"]["namespace"])
                folder.mkdir(parents=True, exist_ok=True)
                with self.store.edit(claim) as after:
                    after["status"] = {
                        "phase": "Bound",
                        "accessModes": claim["spec"].get("accessModes", []),
                        "capacity": claim["spec"].get("resources", {}).get("requests", {}),
                    }

    def _evict_from_tainted(self) -> None:
        """Taint eviction and garbage collection of pods: the conditions of a disruption.

        https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
        """
        nodes = {one["metadata"]["name"]: one for one in self.store.list("nodes")}
        for pod in self.store.list("pods"):
            name, metadata = pod["spec"].get("nodeName"), pod["metadata"]
            if not name or (name in nodes and "deletionTimestamp" in metadata):
                continue
            if name not in nodes:
                words = ("DeletionByPodGC", "PodGC: node no longer exists")
            elif any(
                one["effect"] == "NoExecute" and not tolerates(pod, one)
                for one in nodes[name]["spec"].get("taints", [])
            ):
                words = ("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            else:
                continue
            is_over = pod["status"]["phase"] in ("Succeeded", "Failed")
            with self.store.edit(pod) as after:
                if not is_over:
                    set_condition(after["status"], "DisruptionTarget", "True", *words)
                    after["status"]["phase"] = "Failed" if name not in nodes else after["status"]["phase"]
            if not is_over or name not in nodes:
                grace = 0 if name not in nodes else None
                self.store.delete(pod, grace=grace)

    def _write_kubeconfig(self) -> None:
        """https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/ ."""
        server = {
            "server": f"https://127.0.0.1:{self._port}",
            "certificate-authority": str(self._certificate),
        }
        context = {"cluster": "stand-in", "user": "wanma-test", "namespace": "default"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "stand-in", "cluster": server}],
            "users": [{"name": "wanma-test", "user": {"token": self._token}}],
            "contexts": [{"name": "stand-in", "context": context}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.kubeconfig.chmod(0o600)
