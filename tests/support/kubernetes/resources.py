"""The resources that the API server knows, and its refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """One kind of object and where it is found."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_TABLE = """
v1: pods/Pod services/Service secrets/Secret configmaps/ConfigMap serviceaccounts/ServiceAccount events/Event
v1: persistentvolumeclaims/PersistentVolumeClaim resourcequotas/ResourceQuota limitranges/LimitRange
v1: namespaces/Namespace* nodes/Node*
batch/v1: jobs/Job
rbac.authorization.k8s.io/v1: roles/Role rolebindings/RoleBinding
scheduling.k8s.io/v1: priorityclasses/PriorityClass*
jobset.x-k8s.io/v1alpha2: jobsets/JobSet
kueue.x-k8s.io/v1beta2: workloads/Workload localqueues/LocalQueue clusterqueues/ClusterQueue*
kueue.x-k8s.io/v1beta2: resourceflavors/ResourceFlavor*
scheduling.volcano.sh/v1beta1: podgroups/PodGroup
trainer.kubeflow.org/v1alpha1: trainjobs/TrainJob
"""


def _read(table: str) -> Iterator[Resource]:
    for line in table.strip().split("\n"):
        group_version, _, words = line.partition(": ")
        group, _, version = group_version.rpartition("/")
        for plural, kind in (word.split("/") for word in words.split()):
            yield Resource(group, version, plural, kind.rstrip("*"), not kind.endswith("*"))


RESOURCES = {resource.plural: resource for resource in _read(_TABLE)}
"""By plural, which is unique here."""
EXTENSIONS = ("jobset.x-k8s.io", "kueue.x-k8s.io", "scheduling.volcano.sh", "trainer.kubeflow.org")
"""Groups of custom resource definitions; a cluster may lack each."""


@dataclass
class RefusalError(Exception):
    """Answer other than success, as a `Status` object.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/
    """

    code: int
    reason: str
    message: str
    details: Object = field(default_factory=dict)

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def refuse_unknown(found: Object, *keys: str) -> None:
    """Fail the test that uses fields which the stand-in would silently do without."""
    if used := found.keys() & set(keys):
        raise NotImplementedError(f"the stand-in does not honour {sorted(used)}")


def qualified(resource: Resource) -> str:
    """Return the resource as messages name it: `jobs.batch`, `pods`."""
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural


def not_found(plural: str, name: str) -> RefusalError:
    resource = RESOURCES[plural]
    details = {"name": name, "group": resource.group, "kind": plural}
    return RefusalError(404, "NotFound", f'{qualified(resource)} "{name}" not found', details)


def forbidden(plural: str, name: str, why: str) -> RefusalError:
    resource = RESOURCES[plural]
    words = f'{qualified(resource)} "{name}" is forbidden: {why}'
    return RefusalError(403, "Forbidden", words, {"name": name, "kind": plural})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(stamp: str) -> float:
    """Return the seconds since a time stamp."""
    return datetime.now(UTC).timestamp() - datetime.fromisoformat(stamp).timestamp()


def quantity(text: Any) -> float:
    """Return the number that a quantity ('500m', '1Gi') states.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
    """
    match = re.fullmatch(r"([-+0-9.eE]+?)(m|[kMGTPE]i?|Ki)?", str(text))
    if match is None:
        raise ValueError(text)
    unit = match[2] or ""
    power = "kMGTPE".find(unit[:1].replace("K", "k")) + 1 if unit and unit != "m" else 0
    return float(match[1]) * (1e-3 if unit == "m" else (1024 if unit.endswith("i") else 1000) ** power)


def set_condition(status: Object, kind: str, value: str, reason: str = "", message: str = "") -> bool:
    """Set a condition of a status; returns True if it is another than before."""
    conditions = status.setdefault("conditions", [])
    before = next((one for one in conditions if one["type"] == kind), None)
    after = {"type": kind, "status": value, "reason": reason, "message": message}
    if before is not None and {key: before.get(key, "") for key in after} == after:
        return False
    stamp = before["lastTransitionTime"] if before and before["status"] == value else now()
    kept = {key: value for key, value in after.items() if value}
    conditions[:] = [one for one in conditions if one["type"] != kind]
    conditions.append({**kept, "lastTransitionTime": stamp})
    return True


def has_condition(found: Object, kind: str) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def matches(selector: str, found: Object, is_field: bool = False) -> bool:
    """Return True if a label or field selector, as a request states it, selects an object.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#api
    """
    labels = found["metadata"].get("labels", {})
    for part in re.split(r",(?![^(]*\))", selector) if selector else []:
        if group := re.fullmatch(r"\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*", part):
            is_in = labels.get(group[1]) in [word.strip() for word in group[3].split(",")]
            if is_in != (group[2] == "in"):
                return False
            continue
        key, sign, value = re.fullmatch(r"\s*(!?[^=!\s]+)\s*(==|=|!=)?\s*(.*?)\s*", part).groups()  # type: ignore[union-attr]
        if sign is None:
            is_selected = key.lstrip("!") in labels
            if is_selected == key.startswith("!"):
                return False
            continue
        has = _field(found, key) if is_field else labels.get(key)
        if (has == value) == (sign == "!="):
            return False
    return True


def _field(found: Any, path: str) -> str:
    for key in path.split("."):
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return "" if found == {} else found if isinstance(found, str) else json.dumps(found)
