"""The API server: REST paths, watches, logs and exec over HTTP.

https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
import time
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
    matches,
    not_found,
    qualified,
)
from support.kubernetes.store import Store, patched

USER = "wanma-test"
_RETURNED = ("pods", "services", "serviceaccounts", "persistentvolumeclaims", "resourcequotas")
"""Kinds whose deletion is answered by the object, though it is gone."""
_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
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
            if (discovered := self._discovery(url.path)) is not None:
                self._send(200, discovered)
            else:
                self._resource(verb, url.path, sent)
        except RefusalError as refusal:
            self._send(refusal.code, refusal.status())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            self.connection.close()

    do_GET = partialmethod(_answer, "get")  # noqa: N815
    do_POST = partialmethod(_answer, "create")  # noqa: N815
    do_PUT = partialmethod(_answer, "update")  # noqa: N815
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

    def _discovery(self, path: str) -> Object | None:
        path = path.rstrip("/")
        if path == "/version":
            words = ("buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion", "platform")
            version = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-stand-in"}
            return dict.fromkeys(words, "") | version
        groups = {one.group_version: one for one in self._served()}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            listed = []
            for group_version, one in groups.items():
                both = {"groupVersion": group_version, "version": one.version}
                listed.append({"name": one.group, "versions": [both], "preferredVersion": both})
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [one for one in listed if one["name"]],
            }
        group_version = path.removeprefix("/apis/").removeprefix("/api/")
        if group_version not in groups:
            return None
        verbs = ["create", "delete", "get", "list", "watch", "patch", "update"]
        resources = [
            {"name": one.plural, "singularName": one.kind.lower(), "namespaced": one.is_namespaced}
            | {"kind": one.kind, "verbs": verbs}
            for one in self._served()
            if one.group_version == group_version
        ]
        kind = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
        return kind | {"resources": resources}

    def _resource(self, verb: str, path: str, sent: Object) -> None:
        match = _PATH.fullmatch(path)
        found = RESOURCES.get(match["plural"]) if match else None
        version = f"{match['group']}/{match['version']}" if match and match["group"] else "v1"
        if match is None or found not in self._served() or found is None or found.group_version != version:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        namespace, name, sub = match["namespace"] or "", match["name"] or "", match["sub"] or ""
        plural = found.plural
        if verb == "get" and not name:
            verb = "watch" if self.query.get("watch") in ("true", "1") else "list"
        if verb == "delete" and not name:
            verb = "deletecollection"
        self._authorize("create" if sub == "exec" else verb, plural, namespace, name, sub)
        store = self.server.store
        if sub in ("log", "exec", "eviction"):
            getattr(self, f"_{sub}")(store.get(plural, namespace, name), sent)
        elif verb == "list":
            self._list(plural, namespace)
        elif verb == "watch":
            self._watch(plural, namespace)
        elif verb == "get":
            self._send(200, store.get(plural, namespace, name))
        elif verb == "create":
            self._create(plural, namespace, sent)
        elif verb == "update":
            if sent.get("metadata", {}).get("name") != name:
                raise RefusalError(400, "BadRequest", "the name of the object does not match the URL")
            sent["metadata"].setdefault("namespace", namespace) if namespace else None
            self._send(200, store.replace(plural, sent, sub, "dryRun" in self.query))
        elif verb == "patch":
            self._patch(plural, namespace, name, sub, sent)
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

    def _create(self, plural: str, namespace: str, sent: Object) -> None:
        if plural == "selfsubjectaccessreviews":
            asked = sent["spec"].get("resourceAttributes", {})
            resource = asked.get("resource", "") + (
                f"/{asked['subresource']}" if asked.get("subresource") else ""
            )
            sent["status"] = {"allowed": self.server.is_allowed(asked.get("verb", ""), resource)}
            self._send(201, sent)
            return
        made = self.server.store.create(plural, sent, namespace, dry_run="dryRun" in self.query)
        self._send(201, made)

    def _patch(self, plural: str, namespace: str, name: str, sub: str, sent: Any) -> None:
        kind = self.headers.get("Content-Type", "").split(";")[0]
        is_custom = RESOURCES[plural].group in EXTENSIONS
        if kind == "application/strategic-merge-patch+json" and is_custom:
            words = "the body of the request was in an unknown format - accepted media types include: "
            words += "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
            raise RefusalError(415, "UnsupportedMediaType", words)
        store = self.server.store
        with store.changed:
            before = store.find(plural, namespace, name)
            if before is None and kind == "application/apply-patch+yaml":
                self._create(plural, namespace, sent)
                return
            if before is None:
                raise not_found(plural, name)
            after = patched(before, sent, kind)
            after = store.replace(plural, after, sub, "dryRun" in self.query)
        self._send(200, after)

    def _delete(self, plural: str, namespace: str, name: str, sent: Object) -> None:
        store = self.server.store
        policy = sent.get("propagationPolicy") or self.query.get("propagationPolicy", "")
        seconds = sent.get("gracePeriodSeconds", self.query.get("gracePeriodSeconds"))
        with store.changed:
            if not name:
                selectors = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
                found = store.list(plural, namespace, *selectors)
            else:
                found = [store.get(plural, namespace, name)]
            for one in found:
                wanted = sent.get("preconditions", {}).get("uid", one["metadata"]["uid"])
                if wanted != one["metadata"]["uid"]:
                    words = f"Precondition failed: UID in precondition: {wanted}"
                    raise RefusalError(409, "Conflict", words)
                grace = None if seconds is None else int(seconds)
                last = store.delete(one, policy, grace)
            is_left = store.find(plural, namespace, name) is not None
        is_returned = name and (is_left or plural in _RETURNED)
        self._send(200, last if is_returned else _SUCCESS)

    def _eviction(self, pod: Object, sent: Object) -> None:
        """https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/ ."""
        evict(self.server.store, pod)
        self._send(201, _SUCCESS)

    def _start_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def _watch(self, plural: str, namespace: str) -> None:
        """https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes ."""
        store, wanted = self.server.store, self.query.get("resourceVersion", "")
        labels, fields = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        self._start_stream("application/json")

        def is_selected(found: Object | None) -> bool:
            if found is None or namespace not in ("", found["metadata"].get("namespace", "")):
                return False
            return matches(labels, found) and matches(fields, found, is_field=True)

        def send(kind: str, found: Object) -> None:
            self._chunk(json.dumps({"type": kind, "object": found}).encode() + b"\n")

        with store.changed:
            position, start = len(store.history), []
            if wanted in ("", "0"):
                start = store.list(plural, namespace, labels, fields)
            elif int(wanted) < store.oldest:
                words = f"too old resource version: {wanted} ({store.oldest})"
                send("ERROR", RefusalError(410, "Expired", words).status())
                self._chunk(b"")
                return
            else:
                position = sum(1 for entry in store.history if entry[0] <= int(wanted))
        for found in start:
            send("ADDED", found)
        deadline = time.monotonic() + float(self.query.get("timeoutSeconds", 1800))
        while time.monotonic() < deadline and not self.server.is_closed:
            with store.changed:
                if position == len(store.history):
                    store.changed.wait(0.2)
                entries, position = store.history[position:], len(store.history)
            for _, kind, what, found, before in entries:
                if what != plural:
                    continue
                was, is_now = is_selected(before), is_selected(found)
                if kind == "DELETED" and (was or is_now):
                    send("DELETED", found)
                elif is_now:
                    send("MODIFIED" if was else "ADDED", found)
                elif was:
                    send("DELETED", found)
        self._chunk(b"")

    def _log(self, pod: Object, sent: Object) -> None:
        is_previous = self.query.get("previous") in ("true", "1")
        found = self.server.kubelets.instance(pod, self.query.get("container", ""), is_previous)
        self._start_stream("text/plain")
        for text in found.read(self.query, lambda: self.server.is_closed):
            self._chunk(text)
        self._chunk(b"")

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
