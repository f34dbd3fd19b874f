"""Refusal of objects that their schema, its CEL rules or the rules in words do not allow."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate

from support.kubernetes.resources import RESOURCES, Object, RefusalError, Resource, quantity

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def check(plural: str, found: Object, before: Object | None = None) -> None:
    """Refuse an object as the API server does; `before` is what an update replaces."""
    resource = RESOURCES[plural]
    name = found["metadata"].get("name", "")
    if found.get("kind") != resource.kind or found.get("apiVersion") != resource.group_version:
        words = f"{found.get('apiVersion')}, Kind={found.get('kind')}"
        raise RefusalError(400, "BadRequest", f"the object provided is unrecognized: {words}")
    causes: list[str] = []
    schema = _custom_schema(resource)
    try:
        if schema is None:
            kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)
        else:
            jsonschema.Draft202012Validator(schema).validate(found)
            causes += _rule_failures(schema, found, before, "")
    except jsonschema.ValidationError as error:
        path = ".".join(str(part) for part in error.path)
        unknown = re.search(r"\('(\S+)' was unexpected|\('(\S+)',.* were unexpected", error.message)
        if unknown:  # https://kubernetes.io/docs/reference/using-api/api-concepts/#field-validation
            where = f"{path}.{unknown[1] or unknown[2]}".lstrip(".")
            words = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            words += f': strict decoding error: unknown field "{where}"'
            raise RefusalError(400, "BadRequest", words) from None
        causes.append(f"{path}: Invalid value: {error.message[:300]}")
    causes += _naming(plural, found)
    if not causes and plural != "trainjobs":  # whose pod templates are patches
        causes += [words for spec, path in _pod_specs(found, "") for words in _pod_spec(spec, path)]
        causes += _job(found, before) if plural == "jobs" else []
    old = before["spec"] if before and plural == "jobsets" else {"suspend": True}
    if not old.get("suspend") and old["replicatedJobs"] != found["spec"]["replicatedJobs"]:
        # kubernetes-sigs/jobset pkg/webhooks/jobset_webhook.go
        words = 'admission webhook "vjobset.kb.io" denied the request: spec.replicatedJobs: Invalid value'
        raise RefusalError(403, "Forbidden", f"{words}: field is immutable")
    if causes:
        listed = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
        kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
        details = {"name": name, "group": resource.group, "kind": resource.kind}
        details["causes"] = [{"reason": "FieldValueInvalid", "message": words} for words in causes]
        raise RefusalError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)


def apply_defaults(plural: str, found: Object) -> None:
    """Fill in the defaults of a custom resource definition, and those of built-in kinds that matter here."""
    schema = _custom_schema(RESOURCES[plural])
    if schema is not None:
        _defaults(schema, found)
    else:
        _canonize(found)
    if plural == "jobs":
        spec = found["spec"]
        spec.setdefault("backoffLimit", 6)
        spec.setdefault("completionMode", "NonIndexed")
        spec.setdefault("suspend", False)
        spec.setdefault("parallelism", 1)
        if spec["completionMode"] == "NonIndexed" and spec["parallelism"] == 1:
            spec.setdefault("completions", 1)
        only_failed = "podFailurePolicy" in spec
        spec.setdefault("podReplacementPolicy", "Failed" if only_failed else "TerminatingOrFailed")
    if plural == "secrets":  # what is written as text is read as base64 only
        texts = found.pop("stringData", {}).items()
        found.setdefault("data", {}).update({key: b64encode(text.encode()).decode() for key, text in texts})
    for spec in [found["spec"]] if plural == "pods" else []:
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("serviceAccountName", "default")
        spec.setdefault("schedulerName", "default-scheduler")
        for container in spec["containers"]:  # limits of extended resources are their requests
            resources = container.setdefault("resources", {})
            limits = resources.get("limits", {})
            if limits:
                resources["requests"] = {**limits, **resources.get("requests", {})}


def _canonize(value: Any) -> None:
    """Turn quantities of built-in kinds into strings, as the API server returns them."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if key in ("limits", "requests", "hard", "capacity", "allocatable") and isinstance(one, dict):
            value[key] = {name: str(number) for name, number in one.items()}
        elif isinstance(one, dict | list):
            _canonize(one)


@cache
def _custom_schema(resource: Resource) -> Any:
    path = Path(__file__).parent / "schemas" / f"{resource.group}_{resource.plural}.json.gz"
    if not path.exists():
        return None
    versions = json.loads(gzip.decompress(path.read_bytes()))["spec"]["versions"]
    schema = next(one for one in versions if one["name"] == resource.version)["schema"]["openAPIV3Schema"]
    _strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> None:
    """Turn a structural schema into one of JSON Schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    inner = [*schema.get("properties", {}).values(), schema.get("items")]
    inner.append(schema.get("additionalProperties"))
    for one in inner:
        if isinstance(one, dict):
            _strict(one)


def _defaults(schema: Any, value: Any) -> None:
    for key, inner in schema.get("properties", {}).items() if isinstance(value, dict) else ():
        if key not in value and "default" in inner:
            value[key] = json.loads(json.dumps(inner["default"]))
        if key in value:
            _defaults(inner, value[key])
    for one in value if isinstance(value, list) else ():
        _defaults(schema.get("items", {}), one)


def _rule_failures(schema: Any, value: Any, before: Any, path: str) -> Iterator[str]:
    """Yield what the CEL rules of a schema refuse.

    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
    """
    for rule in schema.get("x-kubernetes-validations", []):
        is_transition = "oldSelf" in rule["rule"]
        if is_transition and before is None:
            continue
        names = {"self": celpy.json_to_cel(value)}
        if is_transition:
            names["oldSelf"] = celpy.json_to_cel(before)
        if not _program(rule["rule"]).evaluate(names):
            yield f"{path or '<nil>'}: Invalid value: {rule.get('message', 'failed rule: ' + rule['rule'])}"
    if isinstance(value, dict):
        more = schema.get("additionalProperties")
        for key, one in value.items():
            inner = schema.get("properties", {}).get(key) or (more if isinstance(more, dict) else None)
            if inner:
                old = before.get(key) if isinstance(before, dict) else None
                yield from _rule_failures(inner, one, old, f"{path}.{key}".lstrip("."))
    for number, one in enumerate(value) if isinstance(value, list) else ():
        old = None
        if keys := schema.get("x-kubernetes-list-map-keys"):  # others have no old value of an element
            same = (old for old in before or [] if all(old.get(key) == one.get(key) for key in keys))
            old = next(same, None)
        yield from _rule_failures(schema.get("items", {}), one, old, f"{path}[{number}]")


@cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _naming(plural: str, found: Object) -> Iterator[str]:
    """https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ ."""
    metadata = found["metadata"]
    name = metadata.get("name", "")
    if not name:
        yield "metadata.name: Required value: name or generateName is required"
    elif plural in ("services", "namespaces") and not _LABEL.fullmatch(name):
        yield f'metadata.name: Invalid value: "{name}": must be a lower case RFC 1123 label'
    elif (not _SUBDOMAIN.fullmatch(name) and plural not in ("roles", "rolebindings")) or len(name) > 253:
        yield f'metadata.name: Invalid value: "{name}": must be a lower case RFC 1123 subdomain'
    templates = [metadata] + [one.get("metadata", {}) for one in _templates(found)]
    for some in templates:
        for key, value in some.get("labels", {}).items():
            if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
                yield f'metadata.labels: Invalid value: "{key}={value}": must be 63 characters or less'
        for key, value in some.get("annotations", {}).items():
            if not _KEY.fullmatch(key) or not isinstance(value, str):
                yield f'metadata.annotations: Invalid value: "{key}"'


def _templates(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key == "template" and isinstance(one, dict):
                yield one
            yield from _templates(one)
    for one in value if isinstance(value, list) else ():
        yield from _templates(one)


def _pod_specs(found: Object, path: str) -> Iterator[tuple[Object, str]]:
    if found["kind"] == "Pod":
        yield found["spec"], "spec"
    for template in _templates(found):
        if "containers" in template.get("spec", {}):
            yield template["spec"], "spec.template.spec"


def _pod_spec(spec: Object, path: str) -> Iterator[str]:
    """Rules in words of pods: kubernetes/kubernetes pkg/apis/core/validation/validation.go ."""
    volumes = {one["name"] for one in spec.get("volumes", [])}
    both = [*spec.get("initContainers", []), *spec["containers"]]
    names = [one["name"] for one in both]
    for name in {one for one in names if names.count(one) > 1}:
        yield f'{path}.containers.name: Duplicate value: "{name}"'
    for one in both:
        where = f"{path}.containers[{one['name']}]"
        if not _LABEL.fullmatch(one["name"]):
            yield f'{where}.name: Invalid value: "{one["name"]}": must be a lower case RFC 1123 label'
        if not one.get("image"):
            yield f"{where}.image: Required value"
        for mount in one.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f'{where}.volumeMounts.name: Not found: "{mount["name"]}"'
        limits, requests = (one.get("resources", {}).get(key, {}) for key in ("limits", "requests"))
        for key, value in {**limits, **requests}.items():
            try:
                number = quantity(value)
            except ValueError:
                yield f'{where}.resources: Invalid value: "{value}": quantities must match the expression'
                continue
            if key in limits and quantity(requests.get(key, 0)) > quantity(limits[key]):
                yield f"{where}.resources.requests: must be at most {key} limit of {limits[key]}"
            if "/" in key and (
                number != int(number) or limits.get(key) != requests.get(key, limits.get(key))
            ):
                yield f"{where}.resources.limits[{key}]: must be an integer, and the request the limit"
    for volume in spec.get("volumes", []):
        if len(volume) != 2:
            yield f"{path}.volumes[{volume['name']}]: must specify exactly one volume type"
    for key in ("hostname", "subdomain"):
        if key in spec and not _LABEL.fullmatch(spec[key]):
            yield f'{path}.{key}: Invalid value: "{spec[key]}": must be a lower case RFC 1123 label'


def _job(found: Object, before: Object | None) -> Iterator[str]:
    """Rules in words of Jobs: kubernetes/kubernetes pkg/apis/batch/validation/validation.go ."""
    spec, name = found["spec"], found["metadata"]["name"]
    policy = spec["template"]["spec"].get("restartPolicy", "Always")
    if policy not in ("Never", "OnFailure"):
        yield f'spec.template.spec.restartPolicy: Unsupported value: "{policy}"'
    if "podFailurePolicy" in spec and policy != "Never":
        yield 'spec.template.spec.restartPolicy: only "Never" is supported when podFailurePolicy is specified'
    if spec.get("completionMode") == "Indexed":
        if "completions" not in spec:
            yield "spec.completions: Required value: when completion mode is Indexed"
        elif len(f"{name}-{spec['completions'] - 1}") > 63:
            yield f'metadata.name: Invalid value: "{name}": pods would have an invalid DNS label'
    if len(name) > 63:
        yield f'metadata.name: Invalid value: "{name}": must be no more than 63 characters'
    for key in ("completionMode", "podFailurePolicy", "backoffLimitPerIndex", "selector", "template"):
        if before is None or before["spec"].get(key) == spec.get(key):
            continue
        if key == "template" and before["spec"].get("suspend") and not before.get("status", {}).get("active"):
            continue  # scheduling directives may change: KEP-2926
        yield f"spec.{key}: Invalid value: field is immutable"
