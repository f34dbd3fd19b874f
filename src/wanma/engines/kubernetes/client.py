"""Access to the API server by the official client: objects as plain dictionaries, failures in plain words.

Each question has a deadline, within which an API server that is away is asked again. The client is imported
when it is used.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.engines.kubernetes.manifests import TOKEN_ANNOTATION, Manifest
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError, missing_extra_error

CONNECT_SECONDS, READ_SECONDS = 5.0, 30.0
RETRY_SECONDS = 0.5
CHANGE_SECONDS = 60.0
"""Deadline of a change, in seconds: an API server that restarts is waited for."""
KINDS: dict[str, str | tuple[str, str, str]] = {
    "Pod": "pod",
    "Service": "service",
    "Secret": "secret",
    "Event": "event",
    "Node": "node",
    "PersistentVolumeClaim": "persistent_volume_claim",
    "ResourceQuota": "resource_quota",
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "Workload": ("kueue.x-k8s.io", "v1beta2", "workloads"),
    "PodGroup": ("scheduling.volcano.sh", "v1beta1", "podgroups"),
    "LocalQueue": ("kueue.x-k8s.io", "v1beta2", "localqueues"),
}
"""Name of each core kind in the client's methods; of others API group, version and plural."""


class KubernetesError(WanmaError):
    """Failure of a question to the API server, with its HTTP status; 0: there was no answer."""

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
            from kubernetes import client
        except ImportError:
            raise missing_extra_error("kubernetes", "kubernetes", "the engine 'kubernetes'") from None
        api, default = _load_configuration(context)
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
        """Return the objects of a kind, in the namespace or in all. Raises `KubernetesError`."""
        options: dict[str, Any] = {"label_selector": labels} if labels else {}
        options |= {"field_selector": fields} if fields else {}
        return list(self._call("list", kind, everywhere=everywhere, **options).get("items") or [])

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None: there is none. Raises `KubernetesError`."""
        return self._find("get", kind, name)

    def has_kind(self, kind: str) -> bool:
        """Return True if the cluster knows a kind outside the core. Raises `KubernetesError`."""
        return self._find("list", kind, limit=1) is not None

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
            return self._call("create", manifest["kind"], "", body, seconds=CHANGE_SECONDS)
        except KubernetesError as error:
            if error.status == 409:
                found = self.get(manifest["kind"], metadata["name"])
                if found and found["metadata"].get("annotations", {}).get(TOKEN_ANNOTATION) == token:
                    return found
            raise

    def patch(self, kind: str, name: str, body: Manifest) -> None:
        """Change an object by a merge patch. Raises `KubernetesError`."""
        self._call("patch", kind, name, dict(body), seconds=CHANGE_SECONDS)

    def delete(self, kind: str, name: str, *, grace_seconds: int | None = None) -> None:
        """Delete an object and those that it owns; one that is gone is no error. Raises `KubernetesError`."""
        options: dict[str, Any] = {"propagation_policy": "Foreground"}
        if grace_seconds is not None:
            options["grace_period_seconds"] = grace_seconds
        self._find("delete", kind, name, seconds=CHANGE_SECONDS, **options)

    def await_absence(self, kind: str, labels: str) -> None:
        """Wait until no object with these labels is left, after a deletion. Raises `KubernetesError`."""
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

    def _find(self, verb: str, kind: str, name: str = "", **options: Any) -> Manifest | None:
        """Return the answer of `_call`; None: there is no such object or kind."""
        try:
            return self._call(verb, kind, name, **options)
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    def _call(
        self,
        verb: str,
        kind: str,
        name: str = "",
        body: Manifest | None = None,
        *,
        everywhere: bool = False,
        seconds: float = QUERY_SECONDS,
        **options: Any,
    ) -> Manifest:
        """Call the client's method for a verb and kind; return the answer."""
        place = KINDS[kind]
        arguments: list[Any] = [name] if name else []
        if isinstance(place, tuple):
            method = getattr(self._custom, "_".join([verb, "namespaced", "custom", "object"]))
            arguments = [*place[:2], self.namespace, place[2], *arguments]
        else:
            words: list[str] = ["read" if verb == "get" else verb, place]
            if everywhere:
                words.append("for_all_namespaces")
            elif kind != "Node":
                words.insert(1, "namespaced")
                arguments.append(self.namespace)
            method = getattr(self.core, "_".join(words))
        arguments += [body] if body is not None else []

        def ask() -> Any:
            return method(*arguments, _preload_content=False, _request_timeout=_TIMEOUT, **options)

        what = f"{verb} {kind}{f' {name}' if name else ''}, namespace {self.namespace}"
        return dict(json.loads(self._ask(what, ask, seconds)))

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


def _load_configuration(context: str | None) -> tuple[Any, str]:
    """Return a client of the kubeconfig, or of a pod's ServiceAccount, and its namespace."""
    from kubernetes import client
    from kubernetes import config as untyped

    config: Any = untyped
    file = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    settings = client.Configuration()
    settings.retries = False  # `KubernetesClient` asks again, and says so
    try:
        if _POD_NAMESPACE.exists() and not Path(file).exists():
            config.load_incluster_config(settings)
            return client.ApiClient(settings), _POD_NAMESPACE.read_text().strip()
        contexts, current = config.list_kube_config_contexts(file)
        named = {entry["name"]: entry for entry in contexts}
        chosen = named.get(context, current)["context"]
        config.load_kube_config(file, context, settings)
        return client.ApiClient(settings), chosen.get("namespace", "default")
    except (config.ConfigException, OSError) as error:
        raise KubernetesError(
            f"no Kubernetes cluster is configured here: {str(error).rstrip('.')}",
            "set KUBECONFIG to a kubeconfig; cluster.kubernetes.context chooses one of its contexts",
            exit_code=EXIT_USAGE,
        ) from error


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
        "",
        "you have no permission",
        "ask for the rights that `wanma render JOB --engine kubernetes --rbac` lists",
    ),
    (
        401,
        "",
        "the API server does not know you",
        "renew your credentials, as by your cluster's login command",
    ),
    (
        404,
        "namespaces",
        "the namespace does not exist",
        "set cluster.kubernetes.namespace; `kubectl get namespaces` lists them",
    ),
    (409, "", "an object of that name exists", "`wanma cancel` its run, or choose another observe.name"),
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
