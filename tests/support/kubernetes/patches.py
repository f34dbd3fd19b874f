"""Patches: merge (RFC 7386) and strategic merge; JSON patches (RFC 6902) are refused.

https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import copy
from typing import Any

from support.kubernetes.resources import Object, RefusalError

_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ownerReferences": "uid",
}
"""Key by which a strategic patch merges a list; other lists are replaced."""


def patched(before: Object, patch: Any, kind: str) -> Object:
    """Return an object with a patch applied."""
    after = copy.deepcopy(before)
    is_strategic = kind == "application/strategic-merge-patch+json"
    if kind not in ("application/merge-patch+json", "application/apply-patch+yaml") and not is_strategic:
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
        elif is_strategic and isinstance(value, list) and key == "finalizers":
            after[key] = list(dict.fromkeys([*after.get(key, []), *value]))
        elif is_strategic and isinstance(value, list) and _KEYS.get(key):
            after[key] = _merged_list(after.get(key, []), value, _KEYS[key])
        else:
            after[key] = _merged(after.get(key), value, is_strategic)
    return after


def _merged_list(before: list[Object], patch: list[Object], name: str) -> list[Object]:
    after = {one[name]: one for one in before}
    for one in patch:
        if one.get("$patch") == "delete":
            after.pop(one[name], None)
        else:
            after[one[name]] = _merged(after.get(one[name], {}), one, True)
    return list(after.values())
