"""A hub on this machine: the routes of huggingface_hub that fetching and pushing use, over files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

TOKEN = "hf_of_this_test"
LFS = (".safetensors", ".png")


class Repository:
    """Commits by their hash, branches by their name, both of files by their path."""

    def __init__(self, private: bool = False, gated: bool = False):
        self.private, self.gated = private, gated
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.messages: list[str] = []
        self.commit("main", {}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        parts = [message, str(len(self.commits)), *(f"{p} {hashlib.sha1(d).hexdigest()}" for p, d in files.items())]
        sha = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        self.messages.append(message)
        return sha

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


class Hub(ThreadingHTTPServer):
    """`repositories` by name; `requests`, as `METHOD /path`, in their order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.broken = 0
        """A status that every request is answered with."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        url = urlparse(self.path)
        path = unquote(url.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.query = parse_qs(url.query)
        self.server.requests.append(f"{method} {path}")
        if self.server.broken:
            self._json({"error": "down"}, self.server.broken)
            return
        for verbs, pattern, name in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method in verbs:
                getattr(self, name)(**found.groupdict())
                return
        self._json({"error": f"no route {method} {path}"}, 404)

    def _json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._bytes(json.dumps(answer).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _bytes(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, repo: str) -> Repository | None:
        """The repository, where whoever asks may see it; else the answer is sent."""
        found = self.server.repositories.get(repo)
        if found is not None and found.gated:
            self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            return None
        if found is None or (found.private and not self.known):
            self._json({"error": "Repository not found"}, 404 if self.known else 401,
                       {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        return found

    def _commit_of(self, found: Repository, revision: str) -> str | None:
        sha = found.at(revision)
        if sha is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404,
                       {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        return sha

    def _allowed(self) -> bool:
        if not self.known:
            self._json({"error": "Invalid credentials"}, 401, {"X-Error-Message": "Invalid credentials"})
        return self.known

    def info(self, repo: str, revision: str | None = None) -> None:
        if (found := self._repository(repo)) and (sha := self._commit_of(found, revision or "main")):
            self._json({"id": repo, "modelId": repo, "sha": sha, "private": found.private, "tags": [], "downloads": 0,
                        "likes": 0, "siblings": [{"rfilename": p} for p in found.commits[sha]]})

    def tree(self, repo: str, revision: str) -> None:
        if (found := self._repository(repo)) and (sha := self._commit_of(found, revision)):
            self._json([{"type": "file", "oid": _oid(d), "size": len(d), "path": p} | (
                {"lfs": {"oid": hashlib.sha256(d).hexdigest(), "size": len(d), "pointerSize": 134}}
                if p.endswith(LFS) else {}) for p, d in found.commits[sha].items()])

    def resolve(self, repo: str, revision: str, file: str) -> None:
        if (found := self._repository(repo)) and (sha := self._commit_of(found, revision)):
            data = found.commits[sha].get(file)
            if data is None:
                self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            tag = hashlib.sha256(data).hexdigest() if file.endswith(LFS) else _oid(data)
            self._bytes(data, headers={"ETag": f'"{tag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"})

    def create(self) -> None:
        if not self._allowed():
            return
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.server.url}/{repo}", "name": repo, "id": repo}
        if repo in self.server.repositories:
            self._json({"error": "You already created this model repo", **answer}, 409)
            return
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.repositories[repo] = Repository(private=bool(private))
        self._json(answer)

    def branch(self, repo: str, name: str) -> None:
        if self._allowed() and (found := self._repository(repo)):
            if name in found.branches:
                self._json({"error": "Reference already exists"}, 409)
                return
            found.branches[name] = found.branches["main"]
            self._json({})

    def yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        if self._allowed():
            self._json({"files": [{"path": f["path"], "shouldIgnore": False,
                                   "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular"}
                                  for f in json.loads(self.body)["files"]]})

    def batch(self, repo: str) -> None:
        if self._allowed():
            self._json({"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{self.server.url}/lfs/{o['oid']}"}}}
                for o in json.loads(self.body)["objects"]]})

    def put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.objects[oid] = self.body
        self._json({})

    def commit(self, repo: str, revision: str) -> None:
        if not self._allowed():
            return
        found = self.server.repositories[repo]
        files, message = dict(found.commits[found.branches[revision]]), ""
        for line in self.body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "header":
                message = value["summary"]
            elif part["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif part["key"] == "deletedFile":
                del files[value["path"]]
        sha = found.commit(revision, files, message)
        self._json({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})


def _oid(data: bytes) -> str:
    """As git names a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = (
    ("GET", rf"/api/models/{REPO}", "info"),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>.+)", "info"),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", "tree"),
    (("GET", "HEAD"), rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
    (("POST",), "/api/repos/create", "create"),
    (("POST",), "/api/validate-yaml", "yaml"),
    (("POST",), rf"/api/models/{REPO}/branch/(?P<name>.+)", "branch"),
    (("POST",), rf"/api/models/{REPO}/preupload/(?P<revision>.+)", "preupload"),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", "batch"),
    (("PUT",), r"/lfs/(?P<oid>[0-9a-f]+)", "put"),
    (("POST",), rf"/api/models/{REPO}/commit/(?P<revision>.+)", "commit"),
)
