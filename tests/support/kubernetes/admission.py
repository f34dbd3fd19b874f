"""Admission: accounts, priorities, limit ranges and quotas, by which a valid object may still be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.kubernetes.resources import Object, forbidden, quantity

if TYPE_CHECKING:
    from support.kubernetes.store import Store


def admit(store: Store, plural: str, found: Object) -> None:
    """Complete an object that is about to be created, or refuse it."""
    namespace, name = found["metadata"].get("namespace", ""), found["metadata"]["name"]
    if plural == "pods":
        spec = found["spec"]
        account = spec["serviceAccountName"]
        if store.find("serviceaccounts", namespace, account) is None:
            why = f"error looking up service account {namespace}/{account}: serviceaccount "
            why += f'"{account}" not found'
            raise forbidden(plural, name, why)
        if wanted := spec.get("priorityClassName"):
            priority = store.find("priorityclasses", "", wanted)
            if priority is None:
                raise forbidden(plural, name, f"no PriorityClass with name {wanted} was found")
            spec["priority"] = priority["value"]
        _pod_security(store.get("namespaces", "", namespace), found)
        _limit_ranges(store, namespace, found)
    _quotas(store, plural, namespace, found)


def _pod_security(namespace: Object, pod: Object) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/ , the profile `restricted`."""
    if namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
        return
    causes = []
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
        own = container.get("securityContext", {})
        rights, name = {**pod["spec"].get("securityContext", {}), **own}, container["name"]
        rules = {
            "allowPrivilegeEscalation": (rights.get("allowPrivilegeEscalation"), [False]),
            "capabilities.drop": (own.get("capabilities", {}).get("drop"), [["ALL"]]),
            "runAsNonRoot": (rights.get("runAsNonRoot"), [True]),
            "seccompProfile.type": (
                rights.get("seccompProfile", {}).get("type"),
                ["RuntimeDefault", "Localhost"],
            ),
        }
        for key, (value, allowed) in rules.items():
            if value not in allowed:
                causes.append(f'container "{name}" must set securityContext.{key} to {allowed[0]}')
    if causes:
        why = f'violates PodSecurity "restricted:latest": {", ".join(causes)}'
        raise forbidden("pods", pod["metadata"]["name"], why)


def pod_requests(pod: Object, key: str = "requests") -> dict[str, float]:
    """Return the resources that a pod asks for: its containers together, or its largest init container."""
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        values = (
            resources.get(key, {})
            if key == "limits"
            else {**resources.get("limits", {}), **resources.get(key, {})}
        )
        for name, text in values.items():
            total[name] = total.get(name, 0.0) + quantity(text)
    for container in pod["spec"].get("initContainers", []):
        for name, text in container.get("resources", {}).get(key, {}).items():
            total[name] = max(total.get(name, 0.0), quantity(text))
    return total


def _limit_ranges(store: Store, namespace: str, pod: Object) -> None:
    """https://kubernetes.io/docs/concepts/policy/limit-range/ ."""
    for limits in store.list("limitranges", namespace):
        for item in (one for one in limits["spec"]["limits"] if one["type"] == "Container"):
            for container in pod["spec"]["containers"]:
                resources = container.setdefault("resources", {})
                for key, default in (("limits", "default"), ("requests", "defaultRequest")):
                    resources[key] = {**item.get(default, {}), **resources.get(key, {})}
                for name, most in item.get("max", {}).items():
                    has = resources["limits"].get(name, resources["requests"].get(name))
                    if has is not None and quantity(has) > quantity(most):
                        why = f"maximum {name} usage per Container is {most}, but limit is {has}"
                        raise forbidden("pods", pod["metadata"]["name"], why)
                for name, least in item.get("min", {}).items():
                    has = resources["requests"].get(name)
                    if has is not None and quantity(has) < quantity(least):
                        why = f"minimum {name} usage per Container is {least}, but request is {has}"
                        raise forbidden("pods", pod["metadata"]["name"], why)


def _quotas(store: Store, plural: str, namespace: str, found: Object) -> None:
    """https://kubernetes.io/docs/concepts/policy/resource-quotas/ ."""
    for quota in store.list("resourcequotas", namespace):
        hard = quota["spec"].get("hard", {})
        asked = _usage(plural, found)
        used = quota_usage(store, quota)
        if plural == "pods":
            missing = [
                name for name in hard if name.split(".")[-1] in ("cpu", "memory") and name not in asked
            ]
            if missing:
                why = f"failed quota: {quota['metadata']['name']}: must specify {','.join(missing)}"
                raise forbidden(plural, found["metadata"]["name"], why)
        over = [name for name in hard if name in asked and used[name] + asked[name] > quantity(hard[name])]
        if over:
            why = f"exceeded quota: {quota['metadata']['name']}"
            for word, values in (("requested", asked), ("used", used), ("limited", hard)):
                why += f", {word}: " + ",".join(f"{name}={_text(values[name])}" for name in over)
            raise forbidden(plural, found["metadata"]["name"], why)


def quota_usage(store: Store, quota: Object) -> dict[str, float]:
    """Return what of a quota is in use."""
    used = dict.fromkeys(quota["spec"].get("hard", {}), 0.0)
    for plural in ("pods", "jobs", "persistentvolumeclaims", "services", "secrets", "configmaps"):
        for one in store.list(plural, quota["metadata"]["namespace"]):
            if plural == "pods" and one["status"]["phase"] in ("Succeeded", "Failed"):
                continue
            for name, value in _usage(plural, one).items():
                if name in used:
                    used[name] += value
    return used


def report_quotas(store: Store) -> None:
    for quota in store.list("resourcequotas"):
        with store.edit(quota) as after:
            used = {name: _text(value) for name, value in quota_usage(store, quota).items()}
            after["status"] = {"hard": quota["spec"].get("hard", {}), "used": used}


def _usage(plural: str, found: Object) -> dict[str, float]:
    group = {"jobs": "count/jobs.batch"}.get(plural, f"count/{plural}")
    usage = {plural: 1.0, group: 1.0}
    if plural == "pods":
        for key in ("requests", "limits"):
            for name, value in pod_requests(found, key).items():
                usage[f"{key}.{name}"] = value
                usage |= {name: value} if key == "requests" and "/" not in name else {}
    return usage


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
