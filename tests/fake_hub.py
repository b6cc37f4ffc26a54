"""A server on this machine with the few requests of the Hub by which huggingface_hub uploads and fetches a model."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/(?P<what>\w+)(?:/(?P<revision>[^/]+))?)?")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class FakeHub(ThreadingHTTPServer):
    """`repositories`: name -> branch or commit -> path -> content. `requests`: method and path, in their order.
    `token`: the token that opens them; None: they are public."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.requests: list[str] = []
        self.token: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, branch: str, files: dict[str, bytes]) -> str:
        """Add files to a branch; return the commit."""
        branches = self.repositories.setdefault(name, {})
        branches[branch] = {**branches.get(branch, {}), **files}
        commit = hashlib.sha1(repr(sorted(branches[branch].items())).encode()).hexdigest()
        branches[commit] = branches[branch]
        return commit


@contextmanager
def fake_hub(monkeypatch, cache) -> Iterator[FakeHub]:
    """Run a server; huggingface_hub takes it for the Hub, and `cache` for its cache."""
    from huggingface_hub import constants

    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    values = {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_TOKEN_PATH": str(cache / "token"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self._body()
        path = self._path()
        if self._is_refused():
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields['organization']}/{fields['name']}"
            self.server.repositories.setdefault(name, {"main": {}})
            return self._json({"url": f"{self.server.url}/{name}"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        match = _API.fullmatch(path)
        if match["what"] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        if match["what"] == "branch":
            self.server.add(match["name"], match["revision"], {})
            return self._json({})
        rows = [json.loads(line) for line in body.splitlines()]
        files = [row["value"] for row in rows if row["key"] == "file"]
        contents = {file["path"]: base64.b64decode(file["content"]) for file in files}
        commit = self.server.add(match["name"], match["revision"], contents)
        self._json({"commitUrl": f"{self.server.url}/{match['name']}/commit/{commit}", "commitOid": commit})

    def do_GET(self) -> None:
        path = self._path()
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None:
            return self._json({"error": "Not found"}, 404)
        branches = self.server.repositories.get(match["name"])
        if branches is None or self._is_refused():
            return self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        files = branches.get(unquote(match["revision"] or "main"))
        if files is None:
            return self._json({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        commit = next(name for name in reversed(branches) if branches[name] is files and len(name) == 40)
        if match.re is _FILE:
            content = files[unquote(match["path"])]
            etag = hashlib.sha1(content).hexdigest()
            return self._send(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        if match["what"] == "tree":
            rows = [(path, content) for path, content in files.items()]
            return self._json(
                [{"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for p, c in rows]
            )
        self._json({"id": match["name"], "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    do_HEAD = do_GET

    def _is_refused(self) -> bool:
        return self.server.token is not None and self.headers["Authorization"] != f"Bearer {self.server.token}"

    def _path(self) -> str:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        return path

    def _body(self) -> bytes:
        if length := self.headers["Content-Length"]:
            return self.rfile.read(int(length))
        chunks = []
        while size := int(self.rfile.readline(), 16):  # a request in chunks
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _json(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
