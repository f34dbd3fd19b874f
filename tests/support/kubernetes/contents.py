"""Contents of a container: environment, volumes and its user."""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path

from support.kubernetes.resources import Object, refuse_unknown
from support.kubernetes.store import Store

_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Search path of the image."""


class NotYetError(Exception):
    """Reason and message with which a container waits."""


def environment(store: Store, pod: Object, container: Object) -> dict[str, str]:
    """https://kubernetes.io/docs/tasks/inject-data-application/ ."""
    made = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": hostname(pod)}
    for one in container.get("env", []):
        made[one["name"]] = expand(one.get("value", ""), made)
        source = one.get("valueFrom", {})
        refuse_unknown(source, *source.keys() - {"secretKeyRef", "fieldRef"})
        if "secretKeyRef" in source:
            made[one["name"]] = _secret(store, pod, source["secretKeyRef"])
        if "fieldRef" in source:
            made[one["name"]] = _field(pod, source["fieldRef"]["fieldPath"])
    return made


def volume_folder(pod: Object, volume: Object, own: Path, claims: Path, disk: Path) -> Path:
    """Return the folder that holds a volume: https://kubernetes.io/docs/concepts/storage/volumes/ .

    Args:
        own: folder of the pod's own volumes.
        claims: folder of the claims of all namespaces.
        disk: folder of the node's own disk.
    """
    folder = own / volume["name"]
    if "persistentVolumeClaim" in volume:
        folder = claims / pod["metadata"]["namespace"] / volume["persistentVolumeClaim"]["claimName"]
    if "hostPath" in volume:
        assert volume["hostPath"]["type"] == "DirectoryOrCreate"
        folder = disk / volume["hostPath"]["path"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    refuse_unknown(volume, *volume.keys() - {"name", "persistentVolumeClaim", "emptyDir"})
    folder.mkdir(parents=True, exist_ok=True)
    if "emptyDir" in volume:
        folder.chmod(0o777)
    if group := pod["spec"].get("securityContext", {}).get("fsGroup"):
        os.chown(folder, -1, group)
        folder.chmod(0o2775)
    return folder


def user_options(security: Object) -> list[str]:
    """Return the options of `setpriv` that a security context means; none for root.

    https://kubernetes.io/docs/tasks/configure-pod-container/security-context/
    """
    uid = security.get("runAsUser")
    if security.get("runAsNonRoot") and not uid:
        words = "container has runAsNonRoot and image will run as root"
        raise NotYetError("CreateContainerConfigError", words)
    if not uid:
        return []
    groups = [*security.get("supplementalGroups", []), security.get("fsGroup")]
    listed = ",".join(str(group) for group in groups if group is not None)
    chosen = f"--groups={listed}" if listed else "--clear-groups"
    return [f"--reuid={uid}", f"--regid={security.get('runAsGroup', 0)}", chosen]


def _secret(store: Store, pod: Object, reference: Object) -> str:
    name, key = reference["name"], reference["key"]
    found = store.find("secrets", pod["metadata"]["namespace"], name)
    if found is None:
        raise NotYetError("CreateContainerConfigError", f'secret "{name}" not found')
    if key not in found["data"]:
        raise NotYetError("CreateContainerConfigError", f"couldn't find key {key} in Secret {name}")
    return base64.b64decode(found["data"][key]).decode()


def hostname(pod: Object) -> str:
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"][:63]
    return name


def expand(text: str, environment: dict[str, str]) -> str:
    """Replace `$(NAME)` by the value of a known variable."""
    return re.sub(r"\$\(([A-Za-z_][\w.-]*)\)", lambda match: environment.get(match[1], match[0]), text)


def _field(pod: Object, path: str) -> str:
    """https://kubernetes.io/docs/concepts/workloads/pods/downward-api/ ; the node, and labels."""
    if path == "spec.nodeName":
        return str(pod["spec"]["nodeName"])
    match = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
    assert match is not None, path
    return str(pod["metadata"].get("labels", {}).get(match[1], ""))
