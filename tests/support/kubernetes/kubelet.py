"""The kubelets of all nodes: pods run as processes, in a network namespace each.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.kubernetes.containers import Container, Mount, start
from support.kubernetes.contents import (
    NotYetError,
    environment,
    expand,
    hostname,
    user_options,
    volume_folder,
)
from support.kubernetes.pod_network import PodNetwork, service_names
from support.kubernetes.resources import Object, RefusalError, now, refuse_unknown, set_condition
from support.kubernetes.store import Store

_FIELDS = {"name", "image", "imagePullPolicy", "command", "args", "workingDir", "env", "ports"}
_FIELDS |= {"volumeMounts", "resources", "securityContext", "terminationMessagePath"}
_FIELDS |= {"terminationMessagePolicy"}
"""Fields of containers that are honoured, or make no difference here."""


@dataclass
class _Run:
    """A pod on its node.

    Attributes:
        containers: containers that have started, by name.
        waiting: of containers that cannot start, reason and message.
        retry: time at which the image of a container is pulled again.
    """

    network: str
    address: str
    folder: Path
    containers: dict[str, Container] = field(default_factory=dict)
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)
    retry: dict[str, float] = field(default_factory=dict)
    kill_at: float = float("inf")
    is_stopped: bool = False


class Kubelets:
    """Kubelets of all nodes; `sync` brings every pod a step further.

    Attributes:
        images: names that can be pulled.
        lost: nodes whose kubelet is away.
    """

    def __init__(self, store: Store, folder: Path, images: set[str], backoff_seconds: float) -> None:
        self.store, self.folder, self.images, self.backoff_seconds = store, folder, images, backoff_seconds
        self.lost: set[str] = set()
        self._runs: dict[str, _Run] = {}
        self.network = PodNetwork()

    def close(self) -> None:
        try:
            for run in self._runs.values():
                self._tear_down(run)
        finally:
            self.network.close()

    def sync(self) -> None:
        pods = {one["metadata"]["uid"]: one for one in self.store.list("pods")}
        for uid, run in list(self._runs.items()):
            if uid not in pods:
                self._tear_down(run)
                del self._runs[uid]
        for uid, pod in pods.items():
            if pod["spec"].get("nodeName") and pod["spec"]["nodeName"] not in self.lost:
                self._advance(uid, pod)
        self._publish_names(pods)

    def lose(self, node: str) -> None:
        """End everything on a node, as a loss of power does."""
        self.lost.add(node)
        for pod in self.store.list("pods", fields=f"spec.nodeName={node}"):
            if run := self._runs.get(pod["metadata"]["uid"]):
                self._tear_down(run)

    def _advance(self, uid: str, pod: Object) -> None:
        run = self._runs.get(uid)
        is_over = pod["status"]["phase"] in ("Succeeded", "Failed")
        if "deletionTimestamp" in pod["metadata"]:
            self._stop(run, pod)
            return
        if is_over:
            return
        if run is None:
            run = self._runs[uid] = self._set_up(pod)
            with self.store.edit(pod) as after:
                after["status"]["startTime"] = now()
        spec = pod["spec"]
        for one in spec.get("initContainers", []):
            self._run_container(pod, run, one)
            last = run.containers.get(one["name"])
            if last is None or last.poll() != 0:
                break
        else:
            for one in spec["containers"]:
                self._run_container(pod, run, one)
        self._report(pod, run)

    def _set_up(self, pod: Object) -> _Run:
        assert pod["spec"]["restartPolicy"] == "Never", "the stand-in starts no container anew"
        for key in ("containers", "initContainers"):
            for one in pod["spec"].get(key, []):
                refuse_unknown(one, *one.keys() - _FIELDS)
        network, address = self.network.add()
        folder = self.folder / "pods" / pod["metadata"]["uid"]
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {hostname(pod)}\n")
        return _Run(network, address, folder)

    def _tear_down(self, run: _Run) -> None:
        for one in run.containers.values():
            if one.code is None:
                one.signal(signal.SIGKILL)
                one.process.wait()
                one.poll()
        if not run.is_stopped:
            self.network.remove(run.network)
            run.is_stopped = True
            shutil.rmtree(run.folder / "volumes", ignore_errors=True)

    def _stop(self, run: _Run | None, pod: Object) -> None:
        """https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination ."""
        running = [one for one in run.containers.values() if one.poll() is None] if run else []
        if run and running:
            grace = pod["metadata"]["deletionGracePeriodSeconds"]
            run.kill_at = min(run.kill_at, time.monotonic() + grace)
            for one in running:
                if not one.has_term:
                    one.has_term = True
                    one.signal(signal.SIGTERM)
                if time.monotonic() >= run.kill_at:
                    one.signal(signal.SIGKILL)
            return
        if run:
            self._report(pod, run)
            self._tear_down(run)
        with self.store.edit(pod) as after:
            if after["status"]["phase"] not in ("Succeeded", "Failed"):
                after["status"]["phase"] = "Failed"
            after["metadata"]["deletionGracePeriodSeconds"] = 0

    def _run_container(self, pod: Object, run: _Run, container: Object) -> None:
        if (name := container["name"]) in run.containers:
            run.containers[name].poll()
            return
        try:
            self._start(pod, run, container)
            run.waiting.pop(name, None)
        except NotYetError as error:
            reason, words = error.args
            if reason == "CreateContainerConfigError":
                self._event(pod, "Warning", "Failed", f"Error: {words}")
            run.waiting[name] = (reason, words)

    def _start(self, pod: Object, run: _Run, container: Object) -> None:
        name, image = container["name"], container["image"]
        if image not in self.images:
            failed = f'failed to pull and unpack image "{image}": not found'
            if run.waiting.get(name, ("",))[0] != "ErrImagePull" and name not in run.retry:
                run.retry[name] = time.monotonic() + self.backoff_seconds
                words = f'Failed to pull image "{image}": rpc error: code = NotFound desc = {failed}'
                self._event(pod, "Normal", "Pulling", f'Pulling image "{image}"')
                self._event(pod, "Warning", "Failed", words)
                self._event(pod, "Warning", "Failed", "Error: ErrImagePull")
            if time.monotonic() < run.retry[name]:
                raise NotYetError("ErrImagePull", f"rpc error: code = NotFound desc = {failed}")
            self._event(pod, "Normal", "BackOff", f'Back-off pulling image "{image}"')
            self._event(pod, "Warning", "Failed", "Error: ImagePullBackOff")
            raise NotYetError("ImagePullBackOff", f'Back-off pulling image "{image}"')
        security = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
        variables = environment(self.store, pod, container)
        mounts = [Mount(run.folder / file, f"/etc/{file}") for file in ("hosts", "resolv.conf")]
        for mount in sorted(container.get("volumeMounts", []), key=lambda one: str(one["mountPath"])):
            volume = next(one for one in pod["spec"]["volumes"] if one["name"] == mount["name"])
            disk = self.folder / "disks" / pod["spec"]["nodeName"]
            source = volume_folder(pod, volume, run.folder / "volumes", self.folder / "claims", disk)
            if "subPath" in mount:
                source = source / mount["subPath"]
                source.mkdir(parents=True, exist_ok=True)
            mounts.append(Mount(source, mount["mountPath"], mount.get("readOnly", False)))
        command = [*container.get("command", ["sh"]), *container.get("args", [])]
        run.containers[name] = start(
            name,
            run.folder / name,
            [expand(word, variables) for word in command],
            mounts,
            variables,
            network=run.network,
            hostname=hostname(pod),
            directory=container.get("workingDir", "/"),
            user=user_options(security),
            is_read_only=security.get("readOnlyRootFilesystem", False),
        )
        self._event(pod, "Normal", "Pulled", f'Container image "{image}" already present on machine')
        self._event(pod, "Normal", "Created", f"Created container: {name}")
        self._event(pod, "Normal", "Started", f"Started container {name}")

    def _report(self, pod: Object, run: _Run) -> None:
        """Write the status of a pod."""
        with self.store.edit(pod) as after:
            status, spec = after["status"], pod["spec"]
            status |= {"podIP": run.address, "podIPs": [{"ip": run.address}]}
            status |= {"hostIP": self.network.gateway, "hostIPs": [{"ip": self.network.gateway}]}
            inits = spec.get("initContainers", [])
            done = [run.containers.get(one["name"]) for one in inits]
            is_initialized = all(one is not None and one.code == 0 for one in done)
            for key, containers in (("initC", inits), ("c", spec["containers"])):
                statuses = [self._status(run, one, is_initialized or key != "c") for one in containers]
                status |= {f"{key}ontainerStatuses": statuses} if statuses else {}
            lasts = [run.containers.get(one["name"]) for one in spec["containers"]]
            codes = [None if one is None else one.code for one in lasts]
            if any(one is not None and one.code for one in done):
                phase = "Failed"
            elif None in codes:
                phase = "Running" if any(one is not None and one.is_started for one in lasts) else "Pending"
            else:
                phase = "Failed" if any(codes) else "Succeeded"
            if "deletionTimestamp" in pod["metadata"] and phase in ("Running", "Pending"):
                phase = "Failed"
            status["phase"] = phase
            is_ready = phase == "Running" and all(
                one is not None and one.code is None and one.is_started for one in lasts
            )
            why = "" if is_ready else "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
            set_condition(status, "PodReadyToStartContainers", "True" if phase == "Running" else "False")
            set_condition(status, "Initialized", str(is_initialized))
            for kind in ("Ready", "ContainersReady"):
                set_condition(status, kind, str(is_ready), why)
        if phase in ("Succeeded", "Failed"):
            self._tear_down(run)

    def _status(self, run: _Run, container: Object, is_initialized: bool) -> Object:
        name, last = container["name"], run.containers.get(container["name"])
        first = "ContainerCreating" if is_initialized else "PodInitializing"
        reason, message = run.waiting.get(name, (first, ""))
        if last is None:
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        else:
            state = last.state()
        is_running = "running" in state
        is_init_done = "terminated" in state and state["terminated"]["exitCode"] == 0
        return {
            "name": name,
            "state": state,
            "lastState": {},
            "ready": is_running or is_init_done,
            "started": is_running,
            "restartCount": 0,
            "image": container["image"],
            "imageID": f"sha256:{container['image']}" if last else "",
            **({"containerID": f"containerd://{last.process.pid:064x}"} if last else {}),
        }

    def _publish_names(self, pods: dict[str, Object]) -> None:
        """Write the names of other pods into the `/etc/hosts` of every pod."""
        services = self.store.list("services")
        running = [(pods[uid], run) for uid, run in self._runs.items() if uid in pods and not run.is_stopped]
        for pod, run in running:
            namespace = pod["metadata"]["namespace"]
            mine = [one for one in services if one["metadata"]["namespace"] == namespace]
            others = [(one, its.address) for one, its in running if one["metadata"]["namespace"] == namespace]
            lines = ["127.0.0.1 localhost", f"{run.address} {hostname(pod)}", *service_names(mine, others)]
            text, path = "\n".join(lines) + "\n", run.folder / "hosts"
            if path.read_text() != text:
                with path.open("r+b") as file:  # the file itself is mounted: it is not replaced
                    file.write(text.encode())
                    file.truncate()

    def _event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        self.store.event(pod, kind, reason, message, "kubelet")

    def instance(self, pod: Object, container: str) -> Container:
        """Return the container that a request for logs or exec means, or refuse it."""
        name, run = pod["metadata"]["name"], self._runs.get(pod["metadata"]["uid"])
        known = [one["name"] for key in ("containers", "initContainers") for one in pod["spec"].get(key, [])]
        if not container and len(pod["spec"]["containers"]) > 1:
            words = f"a container name must be specified for pod {name}, choose one of: [{' '.join(known)}]"
            raise RefusalError(400, "BadRequest", words)
        container = container or known[0]
        if container not in known:
            raise RefusalError(400, "BadRequest", f"container {container} is not valid for pod {name}")
        node = pod["spec"].get("nodeName", "")
        if node in self.lost:
            words = f'Get "https://{node}:10250/containerLogs": dial tcp: connect: no route to host'
            raise RefusalError(500, "InternalError", words)
        if run is None or container not in run.containers:
            state = "ContainerCreating" if node else "Pending"
            words = f'container "{container}" in pod "{name}" is waiting to start: {state}'
            raise RefusalError(400, "BadRequest", words)
        return run.containers[container]
