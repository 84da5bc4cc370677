"""A local server that speaks the part of the Hub's protocol that uploads and downloads of heads use."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest


def listing(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """What the Hub says of a repository's files."""
    return [
        {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for file, content in files.items()
    ]


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub that an upload and a download use; `server.files` is the repository me/head."""

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the repository that the path names."""
        hub: Any = self.server
        return hub.target_files if "me/head-target/" in self.path else hub.files

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, value: Any = None, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        content = body if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_any(self) -> None:
        hub: Any = self.server
        body = self.body()
        hub.requests.append((self.command, self.path))
        if self.command in ("GET", "HEAD") and self.read():
            return None
        if self.headers.get("Authorization") != "Bearer secret" and not self.path.startswith("/storage/"):
            return self.answer(401, {"error": "who are you"})
        if hub.failures and self.path.endswith("/commit/main"):
            return self.answer(hub.failures.pop(), {"error": "later"})
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        if self.path == "/api/repos/create":
            hub.created = json.loads(body)
            name = f"me/{hub.created['name']}"
            return self.answer(200, {"url": f"{host}/{name}", "name": name})
        if self.path.startswith(("/api/models/me/head/tree/main", "/api/models/me/head-target/tree/main")):
            return self.answer(200, listing(self.files))
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if "safetensors" in f["path"] else "regular"} for f in files
            ]
            return self.answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = []
            for entry in json.loads(body)["objects"]:
                known = entry["oid"] in hub.blobs  # no action is offered for what is there already
                action = {"actions": {"upload": {"href": f"{host}/storage/{entry['oid']}"}}}
                objects.append(entry if known else {**entry, **action})
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if self.path.startswith("/storage/") and self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == self.path.rsplit("/", 1)[1]
            hub.blobs[self.path.rsplit("/", 1)[1]] = body
            return self.answer(200, {})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = hub.blobs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del self.files[value["path"]]
            commit = {"commitUrl": f"{host}/me/head/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
            return self.answer(200, {"success": True, **commit})
        if self.path == "/api/models/someone/tiny-llama":
            return self.answer(200, {"id": "someone/tiny-llama", "siblings": [], "cardData": {"license": "apache-2.0"}})
        return self.answer(404, {"error": f"nothing at {self.path}"})

    def read(self) -> bool:
        """Serve a published repository, `hub.published`: revision → files. Returns whether the path was one of its."""
        hub: Any = self.server
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        prefix = "/api/models/me/published"
        commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in hub.published}
        found = {commit: hub.published[name] for name, commit in commits.items()}
        if path == "/":
            self.answer(200, {})
        elif path.startswith((f"{prefix}/revision/", f"{prefix}/tree/", "/me/published/resolve/")):
            kind, _, rest = path.removeprefix(prefix).removeprefix("/me/published").lstrip("/").partition("/")
            name, _, file = rest.partition("/")
            commit = commits.get(name, name)
            if commit not in found:
                headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {name}"}
                self.answer(404, {"error": "no such revision"}, headers)
            elif kind == "revision":
                siblings = [{"rfilename": file} for file in found[commit]]
                self.answer(200, {"id": "me/published", "sha": commit, "siblings": siblings})
            elif kind == "tree":
                self.answer(200, listing(found[commit]))
            elif file in found[commit]:
                content = found[commit][file]
                etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
                self.answer(200, None, {**etag, "Content-Length": str(len(content))}, content)
            else:
                self.answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        else:
            return False
        return True

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running Hub, which huggingface_hub takes for the real one.

    Attributes of what is yielded: `files` (the repository me/head, which was pushed), `target_files` (me/head-target),
    `blobs`, `messages` (of commits),
    `requests` ((method, path)), `failures` (statuses with which the next commits fail), `published` (revision → files
    of the repository me/published), `address`.
    """
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.blobs, server.messages, server.requests, server.failures = {}, {}, [], [], []
    server.published, server.target_files = {}, {}
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
