"""Publishing: the card says what the report says, the upload follows the Hub's protocol, failures name their remedy."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from format_layouts import DIMS, U, our_head, same_state
from huggingface_hub import HfApi

from headstart.heads.eagle import EagleConfig
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.errors import ConfigError, FormatError, StorageError
from headstart.heads.formats import ExportConfig, export_head, load_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.hub import fetch_head, push_export

PROVENANCE = {
    "target": {"name": "someone/tiny-llama", "revision": "abc123"},
    "recipe": {"train": {"lr": 0.001}},
    "git_revision": "deadbeef",
}
ROW = {
    "prompts": 12,
    "tau": 1.834,
    "per_position_acceptance": [0.51, 0.32],
    "baseline_tokens_per_s": 20.0,
    "tokens_per_s": 30.0,
    "speedup": 1.5,
}
REPORT = {
    **ROW,
    "tasks": {"letters": {**ROW, "prompts": 5, "tau": 2.001}},
    "greedy_identity": {"dtype": "float32", "sequences": 12, "identical": 12},
    "tree": {"label": "chain2"},
    "temperature": 0.0,
    "dtype": "float32",
    "batch_size": 1,
    "device": "a processor",
}


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub that an upload and a download use; `server.files` is the repository."""

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
        if self.headers.get("Authorization") != "Bearer secret" and not self.path.startswith("/storage/"):
            return self.answer(401, {"error": "who are you"})
        if hub.failures and self.path.endswith("/commit/main"):
            return self.answer(hub.failures.pop(), {"error": "later"})
        host = f"http://127.0.0.1:{self.server.server_address[1]}"
        if self.path == "/api/repos/create":
            hub.created = json.loads(body)
            return self.answer(200, {"url": f"{host}/me/head", "name": "me/head"})
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
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.blobs[value["oid"]]
            commit = {"commitUrl": f"{host}/me/head/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}
            return self.answer(200, {"success": True, **commit})
        if self.path == "/api/models/someone/tiny-llama":
            return self.answer(200, {"id": "someone/tiny-llama", "siblings": [], "cardData": {"license": "apache-2.0"}})
        return self.answer(404, {"error": f"nothing at {self.path}"})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.blobs, server.messages, server.requests, server.failures = {}, {}, [], [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def api_of(hub: Any, token: str = "secret") -> HfApi:
    return HfApi(endpoint=f"http://127.0.0.1:{hub.server_address[1]}", token=token)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path / "export", ExportConfig(), PROVENANCE)
    return tmp_path / "export"


TO = ExportConfig(push_to_hub="me/head", private=True)


def test_push_uploads_the_head_and_its_card(hub: Any, exported: Path, tmp_path: Path) -> None:
    url = push_export(exported, TO, REPORT, api_of(hub))
    assert url.endswith("/me/head")
    assert hub.created["name"] == "head" and hub.created["organization"] == "me"
    assert set(hub.files) == {"config.json", "headstart.json", "model.safetensors", "README.md"}
    assert hub.messages == ["eagle3 head for someone/tiny-llama"]
    assert b"license: apache-2.0" in hub.files["README.md"]
    for name, content in hub.files.items():  # what arrived is a head
        (tmp_path / "arrived").mkdir(exist_ok=True)
        (tmp_path / "arrived" / name).write_bytes(content)
    assert same_state(load_head(tmp_path / "arrived", DIMS), load_head(exported, DIMS))


def test_a_failed_commit_is_tried_again_without_sending_the_weights_twice(hub: Any, exported: Path) -> None:
    hub.failures = [502, 502]
    waits: list[float] = []
    push_export(exported, TO, None, api_of(hub), waits.append)
    assert hub.messages and waits
    assert sum(command == "PUT" for command, _ in hub.requests) == 1


def test_a_hub_that_stays_down_says_how_to_continue(hub: Any, exported: Path) -> None:
    hub.failures = [503] * 100
    with pytest.raises(StorageError, match="run the same command again"):
        push_export(exported, TO, None, api_of(hub), lambda _: None)


def test_an_unreachable_hub_says_how_to_continue(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    api = HfApi(endpoint="http://127.0.0.1:9", token="secret")
    with pytest.raises(StorageError, match="out of reach"):
        push_export(exported, TO, None, api, lambda _: None)


def test_a_token_that_may_not_write(hub: Any, exported: Path) -> None:
    with pytest.raises(ConfigError, match="write access"):
        push_export(exported, TO, None, api_of(hub, "stranger"), lambda _: None)


def test_no_token(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"hf auth login.*complete in"):
        push_export(exported, TO, None, HfApi(token=None))


@pytest.mark.parametrize("name", ["head", "me/head/more", "me/he ad", "../x", ""])
def test_bad_repository_names(exported: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"push_to_hub: found .*user/name"):
        push_export(exported, ExportConfig(push_to_hub=name), None, HfApi(token="secret"))


def test_only_exports_are_pushed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="headstart export"):
        push_export(tmp_path, TO, None, HfApi(token="secret"))


def test_the_card_holds_the_measured_numbers_and_launch_commands(exported: Path) -> None:
    side = json.loads((exported / "headstart.json").read_text())
    card = render_card("me/head", side, REPORT, ["headstart", "vllm", "sglang"], "apache-2.0")
    front = card.split("---")[1]
    assert '- "someone/tiny-llama"' in front and "license: apache-2.0" in front and "- eagle3" in front
    assert "| all | 12 | 1.834 | 0.510 0.320 | 20.00 | 30.00 | 1.50 |" in card
    assert "| letters | 5 | 2.001 |" in card
    assert "vllm serve someone/tiny-llama --speculative-config" in card and '"method": "eagle3"' in card
    assert "--speculative-algorithm EAGLE3" in card and "text-generation-launcher" not in card
    assert "12 of 12 sequences" in card and "chain2" in card and '"lr": 0.001' in card and "deadbeef" in card
    assert "2503.01840" in card and "licence applies" in card


def test_a_card_without_measurements_or_hub_name_claims_nothing(tmp_path: Path) -> None:
    export_head(our_head(EagleConfig()), tmp_path, ExportConfig(), {"target": {"name": "/models/local"}})
    card = render_card("me/head", json.loads((tmp_path / "headstart.json").read_text()), None, ["vllm"])
    assert "Not measured" in card and "base_model" not in card and "license: other" in card


def test_fetching_a_head_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"someone/nothing@v1.*local directory"):
        fetch_head("someone/nothing@v1", cache_dir=tmp_path)
