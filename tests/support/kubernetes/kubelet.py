"""The kubelets of all nodes: pods run as processes, in a network namespace each.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.kubernetes.containers import Container, Mount, start
from support.kubernetes.resources import Object, RefusalError, now, set_condition
from support.kubernetes.store import Store
from support.networks import ip

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_FIELDS = {
    "name",
    "image",
    "imagePullPolicy",
    "command",
    "args",
    "workingDir",
    "env",
    "envFrom",
    "volumeMounts",
}
_FIELDS |= {"resources", "securityContext", "ports", "terminationMessagePath", "terminationMessagePolicy"}


class NotYetError(Exception):
    """Reason for which a container waits: (reason, message)."""


@dataclass
class _Run:
    """A pod on its node.

    Attributes:
        containers: all instances of each container, oldest first.
        waiting: of containers that cannot start, reason and message.
        retry: time at which a container may start again.
    """

    network: str
    address: str
    folder: Path
    containers: dict[str, list[Container]] = field(default_factory=dict)
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)
    retry: dict[str, float] = field(default_factory=dict)
    kill_at: float = float("inf")
    is_stopped: bool = False

    def last(self, name: str) -> Container | None:
        return (self.containers.get(name) or [None])[-1]  # type: ignore[list-item]

    def all(self) -> list[Container]:
        return [one for some in self.containers.values() for one in some]


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
        self._numbers = iter(range(2, 65000))
        self.bridge, self.subnet = "", ""
        for number in range(100):
            self.bridge, self.subnet = f"wk8s{number}", f"10.{130 + number}"
            _remove_abandoned(self.bridge)
            owner = os.getpid().to_bytes(4, "big").hex(":")  # by which a bridge that was left is known
            command = ["ip", "link", "add", self.bridge, "address", f"02:00:{owner}", "type", "bridge"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                break
        ip("addr", "add", f"{self.subnet}.0.1/16", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def close(self) -> None:
        try:
            for run in self._runs.values():
                self._tear_down(run)
        finally:
            _remove(self.bridge)

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
            self._run_container(pod, run, one, is_init=True)
            last = run.last(one["name"])
            if last is None or last.poll() != 0:
                break
        else:
            for one in spec["containers"]:
                self._run_container(pod, run, one, is_init=False)
        self._report(pod, run)

    def _set_up(self, pod: Object) -> _Run:
        for key in ("containers", "initContainers"):
            for one in pod["spec"].get(key, []):
                if unknown := one.keys() - _FIELDS:  # rather than to do without
                    raise NotImplementedError(f"the stand-in does not know of containers: {unknown}")
        number = next(self._numbers)
        network, address = f"{self.bridge}-{number}", f"{self.subnet}.{number // 256}.{number % 256}"
        ip("netns", "add", network)
        cable = f"{self.bridge}.{number}"
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", network)
        ip("link", "set", cable, "master", self.bridge, "up")
        ip("-n", network, "addr", "add", f"{address}/16", "dev", "eth0")
        ip("-n", network, "link", "set", "lo", "up")
        ip("-n", network, "link", "set", "eth0", "up")
        folder = self.folder / "pods" / pod["metadata"]["uid"]
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {hostname(pod)}\n")
        return _Run(network, address, folder)

    def _tear_down(self, run: _Run) -> None:
        for one in run.all():
            if one.code is None:
                one.signal(signal.SIGKILL)
                one.process.wait()
                one.poll()
        if not run.is_stopped:
            ip("netns", "del", run.network)
            run.is_stopped = True
            shutil.rmtree(run.folder / "volumes", ignore_errors=True)

    def _stop(self, run: _Run | None, pod: Object) -> None:
        """https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination ."""
        running = [one for one in run.all() if one.poll() is None] if run else []
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

    def _run_container(self, pod: Object, run: _Run, container: Object, is_init: bool) -> None:
        name, policy = container["name"], pod["spec"]["restartPolicy"]
        last = run.last(name)
        if last is not None:
            code = last.poll()
            if code is None or policy == "Never" or (code == 0 and (is_init or policy == "OnFailure")):
                return
            count = len(run.containers[name])
            delay = self.backoff_seconds * 2 ** (count - 1)
            if time.monotonic() < run.retry.setdefault(f"{name} {count}", time.monotonic() + delay):
                words = f"back-off {count}0s restarting failed container={name} pod={pod['metadata']['name']}"
                run.waiting[name] = ("CrashLoopBackOff", words)
                self._event(pod, "Warning", "BackOff", f"Back-off restarting failed container {name}")
                return
        try:
            self._start(pod, run, container)
            run.waiting.pop(name, None)
        except NotYetError as error:
            run.waiting[name] = (error.args[0], error.args[1])

    def _start(self, pod: Object, run: _Run, container: Object) -> None:
        name, image = container["name"], container["image"]
        count = len(run.containers.get(name, []))
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
        uid = security.get("runAsUser")
        if security.get("runAsNonRoot") and not uid:
            words = "container has runAsNonRoot and image will run as root"
            self._event(pod, "Warning", "Failed", f"Error: {words}")
            raise NotYetError("CreateContainerConfigError", words)
        environment = self._environment(pod, run, container)
        mounts = [Mount(run.folder / file, f"/etc/{file}") for file in ("hosts", "resolv.conf")]
        for mount in sorted(container.get("volumeMounts", []), key=lambda one: str(one["mountPath"])):
            volume = next(one for one in pod["spec"]["volumes"] if one["name"] == mount["name"])
            source = self._volume(pod, run, volume)
            if "subPath" in mount:
                source = source / mount["subPath"]
                source.mkdir(parents=True, exist_ok=True)
            mounts.append(Mount(source, mount["mountPath"], mount.get("readOnly", False)))
        command = [*container.get("command", ["sh"]), *container.get("args", [])]
        groups = [
            *security.get("supplementalGroups", []),
            *([security["fsGroup"]] if "fsGroup" in security else []),
        ]
        user = [f"--reuid={uid}", f"--regid={security.get('runAsGroup', 0)}"]
        user.append(f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups")
        made = start(
            name,
            run.folder / f"{name}-{count}",
            [_expand(word, environment) for word in command],
            mounts,
            environment,
            network=run.network,
            hostname=hostname(pod),
            directory=container.get("workingDir", "/"),
            user=user if uid else [],
            is_read_only=security.get("readOnlyRootFilesystem", False),
        )
        run.containers.setdefault(name, []).append(made)
        self._event(pod, "Normal", "Pulled", f'Container image "{image}" already present on machine')
        self._event(pod, "Normal", "Created", f"Created container: {name}")
        self._event(pod, "Normal", "Started", f"Started container {name}")

    def _environment(self, pod: Object, run: _Run, container: Object) -> dict[str, str]:
        """https://kubernetes.io/docs/tasks/inject-data-application/ ."""
        path = f"{Path(sys.executable).parent}:{_SYSTEM_PATH}"  # of the image
        made = {"PATH": path, "HOME": "/root", "HOSTNAME": hostname(pod)}
        for one in container.get("envFrom", []):
            for plural, key in (("secrets", "secretRef"), ("configmaps", "configMapRef")):
                if key in one:
                    values = self._values(pod, plural, one[key])
                    made |= {one.get("prefix", "") + name: text.decode() for name, text in values.items()}
        for one in container.get("env", []):
            made[one["name"]] = _expand(one.get("value", ""), made)
            source = one.get("valueFrom", {})
            for plural, key in (("secrets", "secretKeyRef"), ("configmaps", "configMapKeyRef")):
                if key in source:
                    values = self._values(pod, plural, source[key])
                    if source[key]["key"] not in values:
                        words = f"couldn't find key {source[key]['key']} in {source[key]['name']}"
                        raise NotYetError("CreateContainerConfigError", words)
                    made[one["name"]] = values[source[key]["key"]].decode()
            if "fieldRef" in source:
                made[one["name"]] = _pod_field(pod, run.address, source["fieldRef"]["fieldPath"])
        return made

    def _values(self, pod: Object, plural: str, reference: Object) -> dict[str, bytes]:
        name = reference.get("name") or reference.get("secretName")
        found = self.store.find(plural, pod["metadata"]["namespace"], str(name))
        if found is None:
            words = f'{plural[:-1]} "{name}" not found'
            if not reference.get("optional"):
                self._event(pod, "Warning", "Failed", f"Error: {words}")
                raise NotYetError("CreateContainerConfigError", words)
            return {}
        encode = base64.b64decode if plural == "secrets" else str.encode
        return {key: encode(text) for key, text in found.get("data", {}).items()}

    def _volume(self, pod: Object, run: _Run, volume: Object) -> Path:
        """Return the folder that holds a volume; https://kubernetes.io/docs/concepts/storage/volumes/ ."""
        folder = run.folder / "volumes" / volume["name"]
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            folder = self.folder / "claims" / pod["metadata"]["namespace"] / claim
        elif not {"emptyDir", "secret", "configMap"} & volume.keys():
            raise NotImplementedError(f"the stand-in has no such volumes: {volume}")
        folder.mkdir(parents=True, exist_ok=True)
        for plural, key in (("secrets", "secret"), ("configmaps", "configMap")):
            if key in volume:
                try:
                    values = self._values(pod, plural, volume[key])
                except NotYetError as error:
                    words = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error.args[1]}'
                    self._event(pod, "Warning", "FailedMount", words)
                    raise NotYetError("ContainerCreating", "") from None
                paths = {one["key"]: one["path"] for one in volume[key].get("items", [])}
                for name, text in values.items():
                    if not paths or name in paths:
                        (folder / paths.get(name, name)).write_bytes(text)
        if "emptyDir" in volume:
            folder.chmod(0o777)
        if group := pod["spec"].get("securityContext", {}).get("fsGroup"):
            os.chown(folder, -1, group)
            folder.chmod(0o2775)
        return folder

    def _report(self, pod: Object, run: _Run) -> None:
        """Write the status of a pod."""
        with self.store.edit(pod) as after:
            status, spec = after["status"], pod["spec"]
            status |= {"podIP": run.address, "podIPs": [{"ip": run.address}]}
            status |= {"hostIP": f"{self.subnet}.0.1", "hostIPs": [{"ip": f"{self.subnet}.0.1"}]}
            inits = spec.get("initContainers", [])
            done = [run.last(one["name"]) for one in inits]
            is_initialized = all(one is not None and one.code == 0 for one in done)
            for key, containers in (("initC", inits), ("c", spec["containers"])):
                statuses = [self._status(run, one, is_initialized or key != "c") for one in containers]
                status |= {f"{key}ontainerStatuses": statuses} if statuses else {}
            lasts = [run.last(one["name"]) for one in spec["containers"]]
            policy = spec["restartPolicy"]
            codes = [None if one is None else one.code for one in lasts]
            is_init_failed = policy == "Never" and any(one is not None and one.code for one in done)
            if is_init_failed:
                phase = "Failed"
            elif None in codes or policy == "Always" or (policy == "OnFailure" and any(codes)):
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
        name, some = container["name"], run.containers.get(container["name"], [])
        last = some[-1] if some else None
        first = "ContainerCreating" if is_initialized else "PodInitializing"
        reason, message = run.waiting.get(name, (first, ""))
        if last is None or (name in run.waiting and last.code is not None):
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        else:
            state = last.state()
        before = last if "waiting" in state else some[-2] if len(some) > 1 else None
        is_running = "running" in state
        is_init_done = "terminated" in state and state["terminated"]["exitCode"] == 0
        return {
            "name": name,
            "state": state,
            "lastState": before.state() if before is not None and before.code is not None else {},
            "ready": is_running or is_init_done,
            "started": is_running,
            "restartCount": max(0, len(some) - 1),
            "image": container["image"],
            "imageID": f"sha256:{container['image']}" if some else "",
            **({"containerID": f"containerd://{last.process.pid:064x}"} if last else {}),
        }

    def _publish_names(self, pods: dict[str, Object]) -> None:
        """Write the names that headless Services give pods into the `/etc/hosts` of every pod.

        https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
        """
        names: dict[str, list[str]] = {}
        for service in self.store.list("services"):
            spec, namespace = service["spec"], service["metadata"]["namespace"]
            name, selector = service["metadata"]["name"], service["spec"].get("selector", {})
            for uid, pod in pods.items():
                run = self._runs.get(uid)
                labels = pod["metadata"].get("labels", {})
                is_chosen = pod["metadata"]["namespace"] == namespace and selector.items() <= labels.items()
                if (
                    not selector
                    or run is None
                    or run.is_stopped
                    or not is_chosen
                    or spec.get("clusterIP") != "None"
                ):
                    continue
                ready = [
                    one["status"] for one in pod["status"].get("conditions", []) if one["type"] == "Ready"
                ]
                if ready != ["True"] and not spec.get("publishNotReadyAddresses"):
                    continue
                hosts = [name]
                if "hostname" in pod["spec"] and pod["spec"].get("subdomain") == name:
                    hosts.append(f"{pod['spec']['hostname']}.{name}")
                for host in hosts:
                    endings = (f".{namespace}.svc.cluster.local", f".{namespace}.svc", f".{namespace}", "")
                    line = " ".join([run.address, *(host + ending for ending in endings)])
                    names.setdefault(namespace, []).append(line)
        for uid, pod in pods.items():
            run = self._runs.get(uid)
            if run is None or run.is_stopped:
                continue
            lines = ["127.0.0.1 localhost", f"{run.address} {hostname(pod)}"]
            text = "\n".join([*lines, *names.get(pod["metadata"]["namespace"], [])]) + "\n"
            path = run.folder / "hosts"
            if path.read_text() != text:
                with path.open("r+b") as file:  # the file itself is mounted: it is not replaced
                    file.write(text.encode())
                    file.truncate()

    def _event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        self.store.event(pod, kind, reason, message, "kubelet")

    def instance(self, pod: Object, container: str, is_previous: bool = False) -> Container:
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
        some = run.containers.get(container, []) if run else []
        if is_previous and len(some) > 1:
            return some[-2]
        if not some or is_previous:
            state = "ContainerCreating" if node else "Pending"
            words = f'container "{container}" in pod "{name}" is waiting to start: {state}'
            raise RefusalError(400, "BadRequest", words)
        return some[-1]


def _remove(bridge: str) -> None:
    for path in Path("/run/netns").glob(f"{bridge}-*"):
        ip("netns", "del", path.name)
    ip("link", "del", bridge)


def _remove_abandoned(bridge: str) -> None:
    """Remove the network of a test that was killed."""
    with contextlib.suppress(OSError):
        address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
        if not Path(f"/proc/{int(address[6:].replace(':', ''), 16)}").exists():
            _remove(bridge)


def hostname(pod: Object) -> str:
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"][:63]
    return name


def _expand(text: str, environment: dict[str, str]) -> str:
    """Replace `$(NAME)` by the value of a known variable."""
    return re.sub(r"\$\(([A-Za-z_][\w.-]*)\)", lambda match: environment.get(match[1], match[0]), text)


def _pod_field(pod: Object, address: str, path: str) -> str:
    """https://kubernetes.io/docs/concepts/workloads/pods/downward-api/ ."""
    if path == "status.podIP":
        return address
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    found: Any = pod
    for key in path.split("."):
        found = found.get(key, "")
    return str(found)
