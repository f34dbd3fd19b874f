"""The objects of the cluster, their versions and what has happened to them."""

from __future__ import annotations

import copy
import itertools
import secrets
import string
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.kubernetes.resources import (
    RESOURCES,
    Object,
    RefusalError,
    forbidden,
    matches,
    not_found,
    now,
    qualified,
    set_condition,
)
from support.kubernetes.schemas import apply_defaults, check

Key = tuple[str, str, str]
"""Plural, namespace ('' for cluster-wide kinds) and name."""


class Store:
    """Objects by key. An object once stored is not changed: `edit` puts another in its place.

    Attributes:
        changed: condition that is notified of each change; its lock guards everything here.
        admission: called with plural and object before it is created; completes or refuses it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[Key, Object] = {}
        self.version = 1
        self.admission: list[Callable[[str, Object], None]] = []
        self._counter = itertools.count(1)

    def get(self, plural: str, namespace: str, name: str) -> Object:
        found = self.find(plural, namespace, name)
        if found is None:
            raise not_found(plural, name)
        return found

    def fresh(self, found: Object) -> Object:
        """Return the newest state of an object."""
        return self.objects[self.key(found)]

    @staticmethod
    def key(found: Object) -> Key:
        metadata = found["metadata"]
        plural = next(one.plural for one in RESOURCES.values() if one.kind == found["kind"])
        return plural, metadata.get("namespace", ""), metadata["name"]

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        return self.objects.get((plural, namespace if RESOURCES[plural].is_namespaced else "", name))

    def list(self, plural: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Object]:
        with self.changed:
            return [
                found
                for (kind, space, _), found in sorted(self.objects.items())
                if kind == plural
                and namespace in ("", space)
                and matches(labels, found)
                and matches(fields, found, is_field=True)
            ]

    def owned(self, plural: str, owner: Object) -> list[Object]:
        """Return the objects whose controller is `owner`."""
        uid = owner["metadata"]["uid"]
        return [
            one
            for one in self.list(plural, owner["metadata"].get("namespace", ""))
            if any(ref["uid"] == uid for ref in one["metadata"].get("ownerReferences", []))
        ]

    def create(self, plural: str, found: Object, namespace: str = "") -> Object:
        """Check and keep an object; what a controller creates goes the same way as what a client does."""
        resource, found = RESOURCES[plural], copy.deepcopy(found)
        found.setdefault("apiVersion", resource.group_version)
        found.setdefault("kind", resource.kind)
        metadata = found.setdefault("metadata", {})
        with self.changed:
            if resource.is_namespaced:
                metadata.setdefault("namespace", namespace)
                self._check_namespace(plural, metadata, namespace)
            check(plural, found)
            apply_defaults(plural, found)
            if (key := self.key(found)) in self.objects:
                words = f'{qualified(resource)} "{metadata["name"]}" already exists'
                details = {"name": metadata["name"], "group": resource.group, "kind": plural}
                raise RefusalError(409, "AlreadyExists", words, details)
            metadata["uid"] = str(uuid.uuid4())
            metadata["creationTimestamp"] = now()
            if plural not in ("secrets", "configmaps", "events"):
                metadata["generation"] = 1
            if plural in ("pods", "jobs", "jobsets", "workloads"):
                found["status"] = {"phase": "Pending"} if plural == "pods" else {}
            for step in self.admission:
                step(plural, found)
            self._put(key, found)
            return found

    def _check_namespace(self, plural: str, metadata: Object, namespace: str) -> None:
        if namespace and metadata["namespace"] != namespace:
            words = "the namespace of the provided object does not match the namespace sent on the request"
            raise RefusalError(400, "BadRequest", words)
        space = self.get("namespaces", "", metadata["namespace"])
        if space["status"]["phase"] == "Terminating":
            why = f"unable to create new content in namespace {metadata['namespace']} because it is being"
            raise forbidden(plural, metadata.get("name", ""), why + " terminated")

    def replace(self, plural: str, after: Object) -> Object:
        """Put an object in the place of the one before, or refuse it."""
        with self.changed:
            before = self.get(plural, after["metadata"].get("namespace", ""), after["metadata"]["name"])
            check(plural, after, before)
            if plural == "pods" and after["spec"] != before["spec"]:
                words = "spec: Forbidden: pod updates may not change fields other than its image"
                raise RefusalError(422, "Invalid", f'Pod "{after["metadata"]["name"]}" is invalid: {words}')
            if after != before:
                self._put(self.key(after), after)
            return self.objects.get(self.key(after), after)

    @contextmanager
    def edit(self, found: Object) -> Iterator[Object]:
        """Give a copy of the newest state of an object, which replaces it after the block."""
        with self.changed:
            before = self.objects.get(key := self.key(found))
            after = copy.deepcopy(before if before is not None else found)
            yield after
            if before is not None and after != before:
                self._put(key, after)

    def condition(self, found: Object, kind: str, value: str, reason: str, message: str) -> bool:
        """Set a condition of an object; returns True if it is another than before."""
        with self.edit(found) as after:
            return set_condition(after["status"], kind, value, reason, message)

    def _put(self, key: Key, found: Object) -> None:
        before, metadata = self.objects.get(key), found["metadata"]
        if before is not None and before.get("spec") != found.get("spec"):
            metadata["generation"] = metadata.get("generation", 1) + 1
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        is_gone = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if is_gone and not metadata.get("deletionGracePeriodSeconds"):
            self.objects.pop(key, None)
        else:
            self.objects[key] = found
        self.changed.notify_all()

    def delete(self, found: Object, policy: str = "", grace: int | None = None) -> Object:
        """Delete an object, or mark it, where finalizers or its grace keep it.

        https://kubernetes.io/docs/concepts/architecture/garbage-collection/ ; without a policy a Job of
        batch/v1 orphans its pods: kubernetes/kubernetes pkg/registry/batch/job/strategy.go .
        """
        with self.changed:
            plural = self.key(found)[0]
            policy = policy or ("Orphan" if plural == "jobs" else "Background")
            if policy == "Orphan":
                self._orphan(found)
            with self.edit(found) as after:
                metadata = after["metadata"]
                metadata.setdefault("deletionTimestamp", now())
                if policy == "Foreground":
                    finalizers = metadata.setdefault("finalizers", [])
                    finalizers += [] if "foregroundDeletion" in finalizers else ["foregroundDeletion"]
                if plural == "pods":
                    seconds = after["spec"]["terminationGracePeriodSeconds"] if grace is None else grace
                    is_over = after["status"]["phase"] in ("Succeeded", "Failed")
                    if is_over or "nodeName" not in after["spec"]:
                        seconds = 0
                    before = metadata.get("deletionGracePeriodSeconds", seconds)
                    metadata["deletionGracePeriodSeconds"] = min(before, seconds)
                if plural == "namespaces":
                    after["status"]["phase"] = "Terminating"
                    metadata["finalizers"] = ["kubernetes"]
            return after

    def _orphan(self, owner: Object) -> None:
        for plural in RESOURCES:
            for one in self.owned(plural, owner):
                with self.edit(one) as after:
                    references = after["metadata"]["ownerReferences"]
                    after["metadata"]["ownerReferences"] = [
                        ref for ref in references if ref["uid"] != owner["metadata"]["uid"]
                    ]

    def event(self, about: Object, kind: str, reason: str, message: str, source: str) -> None:
        """Record an event, or count one more of the same.

        https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
        """
        metadata, stamp = about["metadata"], now()
        namespace = metadata.get("namespace", "default")
        involved = {"apiVersion": about["apiVersion"], "kind": about["kind"], "name": metadata["name"]}
        involved |= {"namespace": namespace, "uid": metadata["uid"]}
        what = {"involvedObject": involved, "type": kind, "reason": reason, "message": message}
        with self.changed:
            for one in self.list("events", namespace, fields=f"involvedObject.uid={metadata['uid']}"):
                if what.items() <= one.items():
                    if one["lastTimestamp"] != stamp:
                        with self.edit(one) as after:
                            after |= {"count": after["count"] + 1, "lastTimestamp": stamp}
                    return
            if self.find("namespaces", "", namespace) is None:
                return
            name = f"{metadata['name']}.{next(self._counter):016x}"
            own = {"name": name, "namespace": namespace, "creationTimestamp": stamp, "uid": str(uuid.uuid4())}
            made = {"apiVersion": "v1", "kind": "Event", "metadata": own, **what, "count": 1}
            made |= {"source": {"component": source}, "reportingComponent": source}
            made |= {"firstTimestamp": stamp, "lastTimestamp": stamp}
            self._put(("events", namespace, name), made)

    def collect_garbage(self) -> None:
        """Delete what has no owner left, finish deletions in the foreground and empty namespaces."""
        uids = {one["metadata"]["uid"] for one in self.objects.values()}
        leaving = {
            one["metadata"]["uid"]
            for one in self.objects.values()
            if "foregroundDeletion" in one["metadata"].get("finalizers", [])
        }
        for (plural, namespace, name), one in list(self.objects.items()):
            metadata = one["metadata"]
            owners = {ref["uid"] for ref in metadata.get("ownerReferences", [])}
            space = self.objects.get(("namespaces", "", namespace), one)
            is_orphan = bool(owners and (not owners & uids or owners & leaving))
            is_orphan |= bool(namespace) and "deletionTimestamp" in space["metadata"]
            if is_orphan and "deletionTimestamp" not in metadata:
                self.delete(one, "Background" if owners - leaving else "Foreground")
            is_empty = plural == "namespaces" and not any(key[1] == name for key in self.objects)
            is_last = metadata["uid"] in leaving and not any(
                ref["uid"] == metadata["uid"]
                for other in self.objects.values()
                for ref in other["metadata"].get("ownerReferences", [])
            )
            if "deletionTimestamp" in metadata and (is_empty or is_last):
                with self.edit(one) as after:
                    drop = "kubernetes" if is_empty else "foregroundDeletion"
                    after["metadata"]["finalizers"] = [
                        word for word in after["metadata"]["finalizers"] if word != drop
                    ]


def suffix() -> str:
    """Return five letters and digits, as the API server appends them to `generateName`."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz" + string.digits[2:]) for _ in range(5))


def patched(before: Object, patch: Any, kind: str) -> Object:
    """Return an object with a merge patch (RFC 7386) or a strategic one; JSON patches are refused.

    https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
    """
    after = copy.deepcopy(before)
    is_strategic = kind == "application/strategic-merge-patch+json"
    if kind != "application/merge-patch+json" and not is_strategic:
        raise RefusalError(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}"
        )
    merged: Object = _merged(after, patch, is_strategic)
    return merged


def _merged(before: Any, patch: Any, is_strategic: bool) -> Any:
    if not isinstance(patch, dict):
        return patch
    after = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif is_strategic and key == "ownerReferences":  # a strategic patch merges it by uid
            merged = {one["uid"]: one for one in (*after.get(key, []), *value)}
            after[key] = list(merged.values())
        elif is_strategic and isinstance(value, list):
            raise NotImplementedError(f"the stand-in does not merge lists such as {key}")
        else:
            after[key] = _merged(after.get(key), value, is_strategic)
    return after
