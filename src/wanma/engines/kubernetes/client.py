"""Access to the API server by the official client: objects as plain dictionaries, failures in plain words.

Each question has a deadline, within which an API server that is away is asked again. The client is imported
when it is used.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.engines.kubernetes.manifests import TOKEN_ANNOTATION, Manifest
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError, missing_extra_error

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
RETRY_SECONDS = 0.5
CHANGE_SECONDS = 60.0
"""Deadline of a change, in seconds: an API server that restarts is waited for."""
CORE = ("Pod", "Service", "Secret", "Event", "PersistentVolumeClaim", "ResourceQuota", "Node", "LimitRange")
GROUPS = {
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "Workload": ("kueue.x-k8s.io", "v1beta2", "workloads"),
    "LocalQueue": ("kueue.x-k8s.io", "v1beta2", "localqueues"),
}
"""API group, version and plural of each kind outside the core."""
CORE_NAMES = {
    "PersistentVolumeClaim": "persistent_volume_claim",
    "ResourceQuota": "resource_quota",
    "LimitRange": "limit_range",
}


class KubernetesError(WanmaError):
    """Failure of a question to the API server.

    Args:
        message: the cause.
        hint: the way out.
        status: HTTP status; 0: there was no answer.
        exit_code: exit code of the process.
    """

    def __init__(self, message: str, hint: str = "", status: int = 0, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message, hint, exit_code)
        self.status = status


class KubernetesClient:
    """Client of one context and namespace.

    Args:
        context: context of the kubeconfig; None: the current one, or within a pod that of its ServiceAccount.
        namespace: namespace; None: that of the context.

    Raises:
        WanmaError: the package is not installed, or there is no configuration.
    """

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        try:
            from kubernetes import client, config
        except ImportError:
            raise missing_extra_error("kubernetes", "kubernetes", "the engine 'kubernetes'") from None
        try:
            if context is None and _is_in_pod():
                config.load_incluster_config(settings := client.Configuration())
                api, default = client.ApiClient(settings), _POD_NAMESPACE.read_text().strip()
            else:
                api = config.new_client_from_config(context=context)
                contexts, current = config.list_kube_config_contexts()
                named = {entry["name"]: entry for entry in contexts}
                default = named.get(context, current)["context"].get("namespace", "default")
        except (config.ConfigException, OSError) as error:
            raise KubernetesError(
                f"no Kubernetes cluster is configured here: {error}",
                "set KUBECONFIG, or get a kubeconfig from your cluster's administrator; cluster.kubernetes.context "
                "chooses one of its contexts",
                exit_code=EXIT_USAGE,
            ) from error
        api.configuration.retries = False  # this class asks again, and says so
        self.namespace = namespace or default
        self.core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._version = client.VersionApi(api)

    def check(self) -> None:
        """Ask for the version of the server. Raises `KubernetesError`."""
        self._ask(
            "version", lambda: self._version.get_code(_preload_content=False, _request_timeout=_TIMEOUT)
        )

    def list(
        self, kind: str, labels: str = "", fields: str = "", *, everywhere: bool = False
    ) -> list[Manifest]:
        """Return the objects of a kind in the namespace, or in all.

        Args:
            kind: kind, such as "Pod".
            labels: label selector; empty: all.
            fields: field selector; empty: all.
            everywhere: of all namespaces.

        Raises:
            KubernetesError: the server refuses, or does not answer.
        """
        options = {"label_selector": labels, "field_selector": fields}
        given = {name: value for name, value in options.items() if value}
        answer = self._call("list", kind, everywhere=everywhere, **given)
        return list(answer.get("items") or [])

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None: there is none. Raises `KubernetesError`."""
        try:
            return self._call("get", kind, name)
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    def has_kind(self, kind: str) -> bool:
        """Return True if the cluster knows a kind outside the core. Raises `KubernetesError`."""
        try:
            self._call("list", kind, limit=1)
        except KubernetesError as error:
            if error.status == 404:
                return False
            raise
        return True

    def create(self, manifest: Manifest, token: str) -> Manifest:
        """Create an object, once, also if the answer of a first attempt was lost.

        Args:
            manifest: the object.
            token: random text of the submission, by which an object of its own is known.

        Raises:
            KubernetesError: the server refuses it, or one of that name exists.
        """
        metadata = manifest["metadata"]
        annotations = {**metadata.get("annotations", {}), TOKEN_ANNOTATION: token}
        body = {**manifest, "metadata": {**metadata, "annotations": annotations}}
        try:
            return self._call("create", manifest["kind"], body=body, seconds=CHANGE_SECONDS)
        except KubernetesError as error:
            if error.status == 409:
                found = self.get(manifest["kind"], metadata["name"])
                if (
                    found is not None
                    and found["metadata"].get("annotations", {}).get(TOKEN_ANNOTATION) == token
                ):
                    return found
            raise

    def patch(self, kind: str, name: str, body: Mapping[str, Any]) -> None:
        """Change an object by a merge patch. Raises `KubernetesError`."""
        self._call("patch", kind, name, body=dict(body), seconds=CHANGE_SECONDS)

    def delete(self, kind: str, name: str, *, grace_seconds: int | None = None) -> None:
        """Delete an object after those that it owns; one that is gone is no error. Raises `KubernetesError`."""
        options: dict[str, Any] = {"propagation_policy": "Foreground"}
        if grace_seconds is not None:
            options["grace_period_seconds"] = grace_seconds
        try:
            self._call("delete", kind, name, seconds=CHANGE_SECONDS, **options)
        except KubernetesError as error:
            if error.status != 404:
                raise

    def await_absence(self, kind: str, labels: str) -> None:
        """Wait until no object with these labels is left, as after their deletion. Raises `KubernetesError`."""
        deadline = time.monotonic() + CHANGE_SECONDS
        while left := self.list(kind, labels):
            if time.monotonic() > deadline:
                name = left[0]["metadata"]["name"]
                raise KubernetesError(
                    f"{kind} {name} is still being deleted after {CHANGE_SECONDS:.0f} s",
                    f"see `kubectl describe {kind.lower()} {name}`, and try again",
                    exit_code=EXIT_USAGE,
                )
            time.sleep(RETRY_SECONDS)

    def log_tail(self, pod: str, lines: int) -> str:
        """Return the last lines of a pod's output; empty if it has none. Raises `KubernetesError`."""

        def read() -> Any:
            return self.core.read_namespaced_pod_log(
                pod, self.namespace, tail_lines=lines, _preload_content=False, _request_timeout=_TIMEOUT
            )

        try:
            return self._ask(f"the log of {pod}", read).decode(errors="replace")
        except KubernetesError as error:
            if error.status in (400, 404):  # its container has not started
                return ""
            raise

    def _call(
        self,
        verb: str,
        kind: str,
        name: str = "",
        *,
        everywhere: bool = False,
        seconds: float = QUERY_SECONDS,
        **options: Any,
    ) -> Manifest:
        scope = self._scope(kind, everywhere=everywhere)
        arguments: list[Any] = [name] if name else []
        arguments += [self.namespace] if scope == "namespaced" else []
        if kind in CORE:
            verb = "read" if verb == "get" else verb
            suffix = CORE_NAMES.get(kind, kind.lower())
            parts = [verb, suffix, "for_all_namespaces"] if scope == "everywhere" else [verb, suffix]
            if scope == "namespaced":
                parts.insert(1, "namespaced")
            method = getattr(self.core, "_".join(parts))
            if "body" in options:
                arguments.append(options.pop("body"))
        else:
            group, version, plural = GROUPS[kind]
            arguments = [group, version, self.namespace, plural, *([name] if name else [])]
            if "body" in options:
                arguments.append(options.pop("body"))
            method = getattr(self._custom, f"{verb}_namespaced_custom_object")

        def ask() -> Any:
            return method(*arguments, _preload_content=False, _request_timeout=_TIMEOUT, **options)

        what = f"{verb} {kind}{f' {name}' if name else ''} in namespace {self.namespace}"
        return dict(json.loads(self._ask(what, ask, seconds)))

    @staticmethod
    def _scope(kind: str, *, everywhere: bool) -> str:
        if kind == "Node":
            return "cluster"
        return "everywhere" if everywhere else "namespaced"

    def _ask(self, what: str, question: Callable[[], Any], seconds: float = QUERY_SECONDS) -> bytes:
        """Ask until there is an answer, or the deadline passes; return its body."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        deadline = time.monotonic() + seconds
        while True:
            try:
                return bytes(question().data)
            except ApiException as error:
                if error.status not in (0, 429, 500, 502, 503, 504) or time.monotonic() > deadline:
                    raise explain_refusal(
                        what, error.status or 0, error.body or error.reason or ""
                    ) from error
            except (HTTPError, OSError) as error:
                if time.monotonic() > deadline:
                    raise KubernetesError(
                        f"the Kubernetes API server gave no answer within {seconds:.0f} s ({what}): {error}",
                        "it may be restarting: try again later; runs that it has started go on",
                    ) from error
            time.sleep(RETRY_SECONDS)


_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _is_in_pod() -> bool:
    """Return True in a pod with a ServiceAccount's token and without a kubeconfig, as of a CI job."""
    has_file = "KUBECONFIG" in os.environ or Path("~/.kube/config").expanduser().exists()
    return _POD_NAMESPACE.exists() and not has_file


_TIMEOUT = (CONNECT_SECONDS, READ_SECONDS)

REFUSALS: tuple[tuple[int, str, str, str], ...] = (
    (
        403,
        "exceeded quota",
        "the ResourceQuota of the namespace has no room",
        "use fewer nodes or wait for other runs; `kubectl describe quota` shows what is used",
    ),
    (
        403,
        "must specify",
        "the ResourceQuota of the namespace wants requests that the pods do not state",
        "set cluster.kubernetes.cpu and cluster.kubernetes.memory",
    ),
    (
        403,
        "usage per",
        "a LimitRange of the namespace forbids pods of this size",
        "set cluster.kubernetes.cpu and memory within it; `kubectl describe limitrange` shows it",
    ),
    (
        403,
        "violates PodSecurity",
        "the namespace admits only pods with fewer rights",
        "set cluster.kubernetes.run_as_user",
    ),
    (
        403,
        "being terminated",
        "the namespace is being deleted",
        "choose another: cluster.kubernetes.namespace",
    ),
    (
        403,
        "",
        "you have no permission",
        "ask for the rights that `wanma render JOB --engine kubernetes --rbac` lists",
    ),
    (
        401,
        "",
        "the API server does not know you",
        "renew your credentials, e.g. by your cluster's login command",
    ),
    (
        404,
        "namespaces",
        "the namespace does not exist",
        "set cluster.kubernetes.namespace; `kubectl get namespaces` lists them",
    ),
    (
        409,
        "",
        "an object of that name exists",
        "`wanma cancel RUN` removes it; another run needs another name",
    ),
    (422, "", "the API server refuses the object", ""),
)
"""HTTP status, text in its message, meaning and way out."""


def explain_refusal(what: str, status: int, body: str | bytes) -> KubernetesError:
    """Return the refusal of a request in plain words, with the server's own message."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        text = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        text = text.strip()[:300]
    for code, part, meaning, way_out in REFUSALS:
        if code == status and part in text:
            return KubernetesError(f"{meaning}: {text} ({what})", way_out, status, EXIT_USAGE)
    return KubernetesError(f"the API server answered {status}: {text} ({what})", "", status)
