"""The API server: REST paths, logs and exec over HTTP. Watches and updates by PUT are not served.

https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
import urllib.parse
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.kubernetes.execution import serve_exec
from support.kubernetes.kubelet import Kubelets
from support.kubernetes.resources import (
    EXTENSIONS,
    RESOURCES,
    Object,
    RefusalError,
    Resource,
    qualified,
    refuse_unknown,
)
from support.kubernetes.store import Store, patched

USER = "wanma-test"
_RETURNED = ("pods", "services", "serviceaccounts", "persistentvolumeclaims", "resourcequotas")
"""Kinds whose deletion is answered by the object, though it is gone."""
_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
_VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-stand-in"}
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+)(?=/(?!status)))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


class ApiServer(ThreadingHTTPServer):
    """Server over a store. Each connection has a thread; `close` ends them all."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], store: Store, kubelets: Kubelets, token: str,
        denied: set[tuple[str, str]], extensions: tuple[str, ...], certificate: Path,
    ) -> None:  # fmt: skip
        super().__init__(address, _Handler)
        self.store, self.kubelets, self.token, self.denied = store, kubelets, token, denied
        self.extensions = extensions
        self.open: set[socket.socket] = set()
        self.is_closed = False
        self.lost_answers: list[None] = []
        """An element for each creation to come whose answer the client will not see."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not self.is_closed:
            super().handle_error(request, client_address)

    def is_allowed(self, verb: str, resource: str) -> bool:
        return not {(verb, resource), ("*", resource), (verb, "*")} & self.denied

    def close(self) -> None:
        self.is_closed = True
        self.shutdown()
        self.server_close()
        for one in list(self.open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, verb: str) -> None:
        url = urllib.parse.urlparse(self.path)
        self.query = {key: values[-1] for key, values in urllib.parse.parse_qs(url.query).items()}
        self.queries = urllib.parse.parse_qs(url.query)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.headers.get("Authorization") != f"Bearer {self.server.token}":
                raise RefusalError(401, "Unauthorized", "Unauthorized")
            try:
                sent = json.loads(body) if body else {}
            except ValueError as error:
                raise RefusalError(400, "BadRequest", f"couldn't parse the body: {error}") from None
            if url.path.rstrip("/") == "/version":
                self._send(200, _VERSION)
            else:
                self._resource(verb, url.path, sent)
        except RefusalError as refusal:
            self._send(refusal.code, refusal.status())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            self.connection.close()

    do_GET = partialmethod(_answer, "get")  # noqa: N815
    do_POST = partialmethod(_answer, "create")  # noqa: N815
    do_PATCH = partialmethod(_answer, "patch")  # noqa: N815
    do_DELETE = partialmethod(_answer, "delete")  # noqa: N815

    def _send(self, code: int, answer: Object) -> None:
        if code == 201 and self.server.lost_answers:
            self.server.lost_answers.pop()
            raise ConnectionResetError
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _served(self) -> list[Resource]:
        missing = set(EXTENSIONS) - set(self.server.extensions)
        return [one for one in RESOURCES.values() if one.group not in missing]

    def _resource(self, verb: str, path: str, sent: Object) -> None:
        match = _PATH.fullmatch(path)
        found = RESOURCES.get(match["plural"]) if match else None
        version = f"{match['group']}/{match['version']}" if match and match["group"] else "v1"
        if match is None or found not in self._served() or found is None or found.group_version != version:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        namespace, name, sub = match["namespace"] or "", match["name"] or "", match["sub"] or ""
        plural = found.plural
        verb = "list" if verb == "get" and not name else verb
        refuse_unknown(self.query, "watch", "dryRun", "resourceVersion")
        self._authorize("create" if sub == "exec" else verb, plural, namespace, name, sub)
        store = self.server.store
        if sub in ("log", "exec"):
            getattr(self, f"_{sub}")(store.get(plural, namespace, name), sent)
        elif verb == "list":
            self._list(plural, namespace)
        elif verb == "get":
            self._send(200, store.get(plural, namespace, name))
        elif verb == "create":
            self._send(201, store.create(plural, sent, namespace))
        elif verb == "patch":
            self._patch(plural, namespace, name, sent)
        else:
            self._delete(plural, namespace, name, sent)

    def _authorize(self, verb: str, plural: str, namespace: str, name: str, sub: str) -> None:
        """Refuse what the test denies: https://kubernetes.io/docs/reference/access-authn-authz/rbac/ ."""
        resource = f"{plural}/{sub}" if sub else plural
        if self.server.is_allowed(verb, resource):
            return
        group = RESOURCES[plural].group
        what = f'"{name}" is forbidden' if name else "is forbidden"
        words = f'{qualified(RESOURCES[plural])} {what}: User "{USER}" cannot {verb} resource "{resource}" in'
        words += f' API group "{group}"' + (
            f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
        )
        raise RefusalError(403, "Forbidden", words, {"name": name, "group": group, "kind": plural})

    def _list(self, plural: str, namespace: str) -> None:
        resource, store = RESOURCES[plural], self.server.store
        with store.changed:
            selectors = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
            items = store.list(plural, namespace, *selectors)
            meta = {"resourceVersion": str(store.version)}
        kind = {"kind": f"{resource.kind}List", "apiVersion": resource.group_version}
        self._send(200, {**kind, "metadata": meta, "items": items})

    def _patch(self, plural: str, namespace: str, name: str, sent: Any) -> None:
        kind = self.headers.get("Content-Type", "").split(";")[0]
        if kind == "application/strategic-merge-patch+json" and RESOURCES[plural].group in EXTENSIONS:
            words = "the body of the request was in an unknown format - accepted media types include: "
            words += "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
            raise RefusalError(415, "UnsupportedMediaType", words)
        store = self.server.store
        with store.changed:
            after = store.replace(plural, patched(store.get(plural, namespace, name), sent, kind))
        self._send(200, after)

    def _delete(self, plural: str, namespace: str, name: str, sent: Object) -> None:
        store = self.server.store
        policy = sent.get("propagationPolicy") or self.query.get("propagationPolicy", "")
        seconds = sent.get("gracePeriodSeconds", self.query.get("gracePeriodSeconds"))
        with store.changed:
            grace = None if seconds is None else int(seconds)
            last = store.delete(store.get(plural, namespace, name), policy, grace)
            is_left = store.find(plural, namespace, name) is not None
        is_returned = is_left or plural in _RETURNED
        self._send(200, last if is_returned else _SUCCESS)

    def _log(self, pod: Object, sent: Object) -> None:
        refuse_unknown(self.query, "follow", "previous", "timestamps", "sinceSeconds", "sinceTime")
        lines = self.server.kubelets.instance(pod, self.query.get("container", "")).lines
        text = b"".join(lines[-int(self.query.get("tailLines", len(lines))) or len(lines) :])
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _exec(self, pod: Object, sent: Object) -> None:
        command = self.queries.get("command", [])
        if not command:
            raise RefusalError(400, "BadRequest", "you must specify at least 1 command for the container")
        if self.headers.get("Upgrade", "").lower() != "websocket":
            raise RefusalError(400, "BadRequest", "Upgrade request required")
        found = self.server.kubelets.instance(pod, self.query.get("container", ""))
        if found.poll() is not None or not found.is_started:
            words = f'unable to upgrade connection: container not found ("{found.name}")'
            raise RefusalError(500, "InternalError", words)
        serve_exec(self, found.execute(command))


def evict(store: Store, pod: Object) -> None:
    """Evict a pod as the Eviction API does."""
    store.condition(pod, "DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
    store.delete(pod)
