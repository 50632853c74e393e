"""A stand-in for a Kubernetes API server, for kubectl: it tells its kinds, and validates, keeps and merges objects."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
KINDS = {
    "v1": {
        "ConfigMap": "configmaps",
        "PersistentVolumeClaim": "persistentvolumeclaims",
        "Pod": "pods",
        "Secret": "secrets",
        "Service": "services",
    },
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"},
    "ray.io/v1": {"RayService": "rayservices"},
}


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        result[key] = merged(result.get(key), value)
        if value is None:
            del result[key]
    return result


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of a protobuf message's fields, of those that have a length."""

    def varint() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while data:
        number, wire = divmod(varint(), 8)
        size = varint()
        if wire == 2:
            yield number, data[:size]
            data = data[size:]


def _decoded(body: bytes) -> Object:
    """A Secret or a ConfigMap as kubectl sends what it has made itself: protobuf, by their .proto files."""
    unknown = dict(_fields(body.removeprefix(b"k8s\0")))  # runtime.Unknown
    version, kind = (value.decode() for _, value in sorted(_fields(unknown[1])))
    made: Object = {"apiVersion": version, "kind": kind, "data": {}}
    for number, value in _fields(unknown[2]):
        if number == 1:
            made["metadata"] = {"name": dict(_fields(value))[1].decode()}
        elif number == 2:
            key, content = (part for _, part in sorted(_fields(value)))
            made["data"][key.decode()] = base64.b64encode(content).decode() if kind == "Secret" else content.decode()
        elif number == 3 and kind == "Secret":
            made["type"] = value.decode()
    return made


class ApiServer(ThreadingHTTPServer):
    """`validate` lists what is wrong with an object; one with problems is refused, as one with unknown fields is by a
    server that is asked to be strict, which kubectl does."""

    daemon_threads = True

    def __init__(self, validate: Callable[[Object], list[str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.validate = validate
        self.objects: dict[str, Object] = {}  # by path
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {o["metadata"]["name"]: o for o in self.objects.values() if o["kind"] == kind}

    def put(self, version: str, kind: str, name: str, **rest: Any) -> None:
        metadata = {"name": name, "namespace": "default"} | rest.pop("metadata", {})
        path = f"{_root(version)}/namespaces/default/{KINDS[version][kind]}/{name}"
        self.objects[path] = {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _root(version: str) -> str:
    return f"/api/{version}" if version == "v1" else f"/apis/{version}"


def _discovery(path: str) -> Object | None:
    versions = {version: version.partition("/") for version in KINDS if version != "v1"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for version, (group, _, number) in versions.items():
            entry = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        roots = [_root(version)[1:] for version in KINDS]
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    for version, kinds in KINDS.items():
        if path == _root(version):
            verbs = ["create", "get", "list", "patch", "watch"]
            resources = [
                {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
                for kind, plural in kinds.items()
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if path == f"/openapi/v3{_root(version)}":  # by this kubectl sees that the server validates
            group, _, number = version.rpartition("/")
            paths = {}
            for kind, plural in kinds.items():
                operation = {
                    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                    "responses": {},
                    "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                }
                paths[f"{_root(version)}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": operation}
            return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}
    return None


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        path, query = split.path, parse_qs(split.query)
        self.server.asked.append(f"{self.command} {path}")
        objects = self.server.objects
        if (found := _discovery(path)) is not None:
            self._answer(200, found)
        elif path in objects:
            self._answer(200, objects[path])
        elif path.rpartition("/")[2] in {plural for kinds in KINDS.values() for plural in kinds.values()}:
            found = [o for key, o in objects.items() if key.rpartition("/")[0] == path and self._selected(o, query)]
            if "watch" in query:
                self._answer(200, *({"type": "ADDED", "object": o} for o in found))
            else:
                self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": found})
        else:
            self._refuse(404, "NotFound", f"{path} not found")

    @staticmethod
    def _selected(found: Object, query: dict[str, list[str]]) -> bool:
        labels = found["metadata"].get("labels", {})
        wanted = [term.partition("=") for term in ",".join(query.get("labelSelector", [])).split(",") if term]
        name = ",".join(query.get("fieldSelector", [])).removeprefix("metadata.name=")
        return all(labels.get(k) == v for k, _, v in wanted) and name in ("", found["metadata"]["name"])

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        if path.endswith("/portforward"):
            self._refuse(403, "Forbidden", "this far and no further")
            return
        body = self._body()
        body["metadata"]["namespace"] = "default"
        self._keep(f"{path}/{body['metadata']['name']}", body, 201)

    def do_PATCH(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        if path in self.server.objects:
            self._keep(path, merged(self.server.objects[path], self._body()), 200)
        else:
            self._refuse(404, "NotFound", f"{path} not found")

    def _keep(self, path: str, found: Object, status: int) -> None:
        bare = {key: value for key, value in found.items() if key != "metadata"} | {
            "metadata": {key: value for key, value in found["metadata"].items() if key != "creationTimestamp"}
        }
        if problems := self.server.validate(bare):
            self._refuse(400, "BadRequest", "; ".join(problems))
            return
        self.server.objects[path] = found
        self._answer(status, found)

    def _body(self) -> Object:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        made: Object = _decoded(body) if body.startswith(b"k8s\0") else json.loads(body)
        return made

    def _refuse(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        self._answer(code, status | {"code": code, "reason": reason, "message": message})

    def _answer(self, code: int, *documents: Object) -> None:
        body = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
