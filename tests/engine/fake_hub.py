"""The part of the Hugging Face hub's HTTP API that huggingface_hub needs to create, upload and download models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_right"


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory; without the right token everything is 401."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.commits: dict[str, list[tuple[str, str, dict[str, bytes]]]] = {}  # repository -> id, message, files
        self.blobs: dict[str, bytes] = {}  # what came through LFS, by SHA-256
        self.requests: list[tuple[str, str]] = []

    def commit(self, repo: str, message: str, changes: dict[str, bytes]) -> str:
        files = {**(self.commits[repo][-1][2] if self.commits.get(repo) else {}), **changes}
        commit = hashlib.sha1(f"{repo} {message} {len(self.commits[repo])}".encode()).hexdigest()
        self.commits[repo].append((commit, message, files))
        return commit

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for commit, _, files in reversed(self.commits.get(repo, [])):
            if revision in ("main", commit):
                return commit, files
        return None


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_POST = do_PUT = do_GET

    def _route(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, path))
        if path.startswith("/lfs/"):  # signed addresses carry no token
            self.server.blobs[path.removeprefix("/lfs/")] = self.body
            return self._reply(200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._reply(401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials"})
        for method, pattern, action in (
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/main", self._preupload),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/main", self._commit),
            ("GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            ("GET|HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
        ):
            match = re.fullmatch(pattern, path)
            if match and re.fullmatch(method, self.command):
                return action(*match.groups())
        return self._reply(404, {"error": f"no {self.command} {path}"})

    def _reply(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _create(self) -> None:
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.server.url}/{repo}"
        if repo in self.server.commits:
            return self._reply(409, {"error": "You already created this model repo", "url": url})
        self.server.private[repo] = wanted.get("private") or wanted.get("visibility") == "private"
        self.server.commits[repo] = []
        return self._reply(200, {"url": url, "name": repo, "id": "1"})

    def _preupload(self, repo: str) -> None:
        files = json.loads(self.body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
            | {"shouldIgnore": False}
            for f in files
        ]
        self._reply(200, {"files": modes})

    def _lfs(self, repo: str) -> None:
        objects = [
            {"oid": o["oid"], "size": o["size"]}
            | {"actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}", "header": {}}}}
            for o in json.loads(self.body)["objects"]
        ]
        kind = {"Content-Type": "application/vnd.git-lfs+json"}
        self._reply(200, {"transfer": "basic", "objects": objects}, kind)

    def _commit(self, repo: str) -> None:
        message, files = "", {}
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = data = self.server.blobs[value["oid"]]
                assert hashlib.sha256(data).hexdigest() == value["oid"] and len(data) == value["size"]
        commit = self.server.commit(repo, message, files)
        url = f"{self.server.url}/{repo}/commit/{commit}"
        self._reply(200, {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _info(self, repo: str, revision: str) -> None:
        if (found := self.server.at(repo, revision)) is None:
            return self._missing("RevisionNotFound" if repo in self.server.commits else "RepoNotFound")
        siblings = [{"rfilename": name} for name in found[1]]
        return self._reply(200, {"id": repo, "modelId": repo, "sha": found[0], "siblings": siblings, "tags": []})

    def _tree(self, repo: str, revision: str) -> None:
        if (found := self.server.at(repo, revision)) is None:
            return self._missing("RevisionNotFound")
        assert parse_qs(urlsplit(self.path).query)["recursive"]
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in found[1].items()
        ]
        return self._reply(200, files)

    def _file(self, repo: str, revision: str, name: str) -> None:
        found = self.server.at(repo, revision)
        if found is None or name not in found[1]:
            return self._missing("EntryNotFound" if found else "RevisionNotFound")
        data = found[1][name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": found[0]}
        return self._reply(200, data, headers)

    def _missing(self, code: str) -> None:
        self._reply(404, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})
