"""Contents of a container: environment, volumes and its user."""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from typing import Any

from support.kubernetes.resources import Object
from support.kubernetes.store import Store

_PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Search path of the image."""


class NotYetError(Exception):
    """Reason and message with which a container waits."""


def environment(store: Store, pod: Object, address: str, container: Object) -> dict[str, str]:
    """https://kubernetes.io/docs/tasks/inject-data-application/ ."""
    made = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": hostname(pod)}
    for one in container.get("envFrom", []):
        for plural, key in (("secrets", "secretRef"), ("configmaps", "configMapRef")):
            if key in one:
                values = _values(store, pod, plural, one[key], one[key]["name"])
                made |= {one.get("prefix", "") + name: text.decode() for name, text in values.items()}
    for one in container.get("env", []):
        made[one["name"]] = expand(one.get("value", ""), made)
        source = one.get("valueFrom", {})
        for plural, key in (("secrets", "secretKeyRef"), ("configmaps", "configMapKeyRef")):
            if key in source:
                name, wanted = source[key]["name"], source[key]["key"]
                values = _values(store, pod, plural, source[key], name)
                if wanted not in values:
                    words = f"couldn't find key {wanted} in {plural[:-1]} {name}"
                    raise NotYetError("CreateContainerConfigError", words)
                made[one["name"]] = values[wanted].decode()
        if "fieldRef" in source:
            made[one["name"]] = _pod_field(pod, address, source["fieldRef"]["fieldPath"])
    return made


def volume_folder(store: Store, pod: Object, volume: Object, own: Path, claims: Path) -> Path:
    """Return the folder that holds a volume: https://kubernetes.io/docs/concepts/storage/volumes/ .

    Args:
        own: folder of the pod's own volumes.
        claims: folder of the claims of all namespaces.
    """
    folder = own / volume["name"]
    if "persistentVolumeClaim" in volume:
        folder = claims / pod["metadata"]["namespace"] / volume["persistentVolumeClaim"]["claimName"]
    elif not {"emptyDir", "secret", "configMap"} & volume.keys():
        raise NotImplementedError(f"the stand-in has no such volumes: {volume}")
    folder.mkdir(parents=True, exist_ok=True)
    for plural, key, name in (("secrets", "secret", "secretName"), ("configmaps", "configMap", "name")):
        if key in volume:
            try:
                values = _values(store, pod, plural, volume[key], volume[key][name])
            except NotYetError as error:
                words = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error.args[1]}'
                raise NotYetError("FailedMount", words) from None
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


def _values(store: Store, pod: Object, plural: str, reference: Object, name: str) -> dict[str, bytes]:
    found = store.find(plural, pod["metadata"]["namespace"], name)
    if found is None:
        if not reference.get("optional"):
            raise NotYetError("CreateContainerConfigError", f'{plural[:-1]} "{name}" not found')
        return {}
    encode = base64.b64decode if plural == "secrets" else str.encode
    return {key: encode(text) for key, text in found.get("data", {}).items()}


def hostname(pod: Object) -> str:
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"][:63]
    return name


def expand(text: str, environment: dict[str, str]) -> str:
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
