"""Hostile and damaged checkpoints: each is refused with a message, before memory is spent, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DIMS,
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    U,
    eagle3_tensors,
    eagle_tensors,
    our_head,
    write,
)

from headstart.heads.checkpoints.raw import read_header
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.formats import check_directory, load_head, save_head
from headstart.heads.formats.sidecar import seal


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "header longer than the file": (safetensors_bytes({"a": F32}, b"12345678", 1 << 40), "claims"),
    "not JSON": (safetensors_bytes(b"{nope", b""), "not valid JSON"),
    "a list": (safetensors_bytes([1], b""), "expected an object"),
    "deeply nested": (safetensors_bytes(b"[" * 100000 + b"]" * 100000), "not valid JSON"),
    "truncated data": (safetensors_bytes({"a": F32}, b"1234"), "header gives it bytes"),
    "something appended": (safetensors_bytes({"a": F32}, b"12345678extra"), "appended"),
    "huge shape": (safetensors_bytes({"a": {**F32, "shape": [1 << 40, 1 << 20]}}, b"12345678"), "needs"),
    "negative shape": (safetensors_bytes({"a": {**F32, "shape": [-2]}}, b"12345678"), "expected up to 4 sizes"),
    "boolean shape": (safetensors_bytes({"a": {**F32, "shape": [True]}}, b"1234"), "expected up to 4 sizes"),
    "too many dimensions": (safetensors_bytes({"a": {**F32, "shape": [1] * 9}}, b"1234"), "expected up to 4 sizes"),
    "overlap": (safetensors_bytes({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"123456789012"), "overlaps"),
    "the same key twice": (safetensors_bytes(b'{"a":{},"a":{}}'), "appears twice"),
    "unknown dtype": (safetensors_bytes({"a": {**F32, "dtype": "F8_E4M3"}}, b"12345678"), "unquantised"),
    "odd entry": (safetensors_bytes({"a": {"dtype": "F32"}}, b""), "malformed"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_safetensors_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        read_header(tmp_path / "model.safetensors")


BAD_CONFIGS: dict[str, tuple[bytes, str]] = {
    "missing brace": (b'{"a": 1', "not valid JSON"),
    "a number": (b"3", "expected an object"),
    "not UTF-8": (b"\xff\xfe{}", "not valid JSON"),
    "nested": (b'{"a":' * 60000 + b"1" + b"}" * 60000, "nested too deeply"),
    "nested less": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested too deeply"),
    "a lone surrogate": (b'{"hidden_act": "\\ud800"}', "surrogates not allowed"),
    "long integer": (b'{"hidden_size": ' + b"9" * 20000 + b"}", "JSON|hidden_size"),
    "twice": (b'{"hidden_size": 32, "hidden_size": 64}', "appears twice"),
}


@pytest.mark.parametrize(("content", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_bad_config_files(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path, EAGLE_CONFIG, eagle_tensors())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        load_head(tmp_path)


HOSTILE_VALUES: list[tuple[str, Any]] = [
    ("hidden_size", 1 << 60),
    ("hidden_size", -1),
    ("hidden_size", 0),
    ("hidden_size", True),
    ("hidden_size", 32.0),
    ("hidden_size", "32"),
    ("hidden_size", None),
    ("hidden_size", [32]),
    ("intermediate_size", 1 << 50),
    ("num_attention_heads", 0),
    ("num_attention_heads", 5),
    ("num_key_value_heads", 3),
    ("head_dim", 1 << 30),
    ("vocab_size", 1 << 40),
    ("draft_vocab_size", 1 << 40),
    ("draft_vocab_size", 0),
    ("num_hidden_layers", 10**9),
    ("max_position_embeddings", -5),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", float("inf")),
    ("rms_norm_eps", "small"),
    ("hidden_act", "__import__('os')"),
    ("hidden_act", 5),
    ("rope_theta", float("nan")),
    ("rope_theta", -1.0),
    ("rope_theta", 1e400),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 5000}),
    ("rope_scaling", {"rope_type": ["yarn"], "factor": 2.0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": "two"}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("eos_token_id", [1, {"a": 2}]),
    ("eos_token_id", [1] * 100_000),
    ("eagle_config", "yes"),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": {"a": 1}}),
    ("eagle_aux_hidden_state_layer_ids", [2, 4, 10**30]),
    ("eagle_aux_hidden_state_layer_ids", ["2", "4", "5"]),
    ("norm_before_residual", "no"),
    ("model_type", ["llama"]),
    ("auto_map", {"AutoModel": "evil.Model"}),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE_VALUES, ids=lambda v: str(v)[:30])
def test_hostile_config_values(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, {**EAGLE3_CONFIG, key: value}, eagle3_tensors())
    check_directory(tmp_path, DIMS)
    if key == "auto_map":  # remote code is never looked at
        load_head(tmp_path, DIMS)
        return
    with pytest.raises(FormatError, match=None if key in ("head_dim", "rope_scaling") else key):
        load_head(tmp_path, DIMS)


def test_hostile_head_counts_do_not_build_modules(tmp_path: Path) -> None:
    save_head(our_head(MedusaConfig(depth=2)), tmp_path, {})
    side = json.loads((tmp_path / "headstart.json").read_text())
    side["config"]["depth"] = 10**9
    (tmp_path / "headstart.json").write_text(json.dumps(seal(side)))
    with pytest.raises(FormatError, match=r"config.depth is 1000000000, expected 1 … 64"):
        load_head(tmp_path)


def test_interpolations_in_a_sidecar_are_not_resolved(tmp_path: Path) -> None:
    save_head(our_head(MedusaConfig(depth=2)), tmp_path, {})
    side = json.loads((tmp_path / "headstart.json").read_text())
    side["config"]["loss"] = "${oc.env:HOME}"
    (tmp_path / "headstart.json").write_text(json.dumps(seal(side)))
    with pytest.raises(FormatError, match="not a plain object"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\x00b", 5, "x.bin"]
)
def test_index_files_cannot_leave_the_directory(tmp_path: Path, name: Any) -> None:
    write(tmp_path / "head", EAGLE_CONFIG, eagle_tensors())
    shutil.copy(tmp_path / "head/model.safetensors", tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(eagle_tensors(), name)}
    (tmp_path / "head/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="index.json"):
        load_head(tmp_path / "head")


def test_an_index_that_disagrees_with_its_shards(tmp_path: Path) -> None:
    write(tmp_path, EAGLE_CONFIG, eagle_tensors())
    index = {"weight_map": dict.fromkeys([*eagle_tensors(), "ghost.weight"], "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="disagrees.*ghost.weight"):
        load_head(tmp_path)


class Bomb:
    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.write_text, (self.place, "executed"))


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "medusa_lm_head.pt", "another_lm_head.pt"])
@pytest.mark.parametrize("plain_pickle", [True, False])
def test_pickles_are_never_executed(tmp_path: Path, weights: str, plain_pickle: bool) -> None:
    head = write(tmp_path / "head", EAGLE_CONFIG, {}, "pytorch_model.bin")
    (head / "pytorch_model.bin").unlink()
    content = {"fc.weight": Bomb(tmp_path / "executed")}
    if plain_pickle:
        (head / weights).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, head / weights)
    with pytest.raises(FormatError, match="more than tensors|cannot be read"):
        load_head(head)
    assert not (tmp_path / "executed").exists()


def test_of_two_pickles_neither_is_read(tmp_path: Path) -> None:
    head = write(tmp_path, EAGLE_CONFIG, {"fc.weight": torch.ones(2)}, "one_lm_head.pt")
    (head / "two_lm_head.pt").write_bytes((head / "one_lm_head.pt").read_bytes())
    with pytest.raises(FormatError, match=r"2 files named \*_lm_head.pt; keep the one that is meant"):
        load_head(head)


def test_pickles_hold_tensors_only(tmp_path: Path) -> None:
    head = write(tmp_path, EAGLE_CONFIG, {"fc.weight": torch.ones(2), "step": 5}, "pytorch_model.bin")  # type: ignore[dict-item]
    with pytest.raises(FormatError, match="flat dictionary of tensors"):
        load_head(head)


def test_a_pickled_tensor_cannot_claim_more_than_the_file_holds(tmp_path: Path) -> None:
    huge = torch.ones(1).expand(1 << 20, 1 << 10)
    head = write(tmp_path, EAGLE_CONFIG, {"fc.weight": huge}, "pytorch_model.bin")
    with pytest.raises(FormatError, match="more than the file"):
        load_head(head)


def test_compressed_archives_are_not_unpacked(tmp_path: Path) -> None:
    """torch writes archives uncompressed; a small one that unpacks to much is a bomb."""
    head = write(tmp_path, EAGLE_CONFIG, {"fc.weight": torch.zeros(1 << 20)}, "pytorch_model.bin")
    with zipfile.ZipFile(head / "pytorch_model.bin") as plain:
        entries = {entry.filename: plain.read(entry) for entry in plain.infolist()}
    with zipfile.ZipFile(head / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    with pytest.raises(FormatError, match="unpacks to .* compressed weight files are refused"):
        load_head(head)


@pytest.mark.parametrize("layout", ["one file", "shards"])
def test_a_flipped_bit_in_a_pickled_file_is_seen(tmp_path: Path, layout: str) -> None:
    """The archive carries checksums, which torch does not compare when it maps the file."""
    tensors = eagle_tensors()
    weights = "pytorch_model.bin" if layout == "one file" else "pytorch_model-00001-of-00001.bin"
    head = write(tmp_path, EAGLE_CONFIG, tensors, weights)
    if layout == "shards":
        (head / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, weights)}))
    assert torch.equal(load_head(head, DIMS).state_dict()["fc.weight"], tensors["fc.weight"])
    whole = (head / weights).read_bytes()
    place = whole.index(tensors["fc.weight"].numpy().tobytes())
    (head / weights).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(FormatError, match=rf"{weights}: .*data/0 does not have the checksum"):
        load_head(head, DIMS)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "headstart.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "loop", "nowhere"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path, EAGLE_CONFIG, eagle_tensors(), name if "model" in name else "model.safetensors")
    (tmp_path / name).unlink(missing_ok=True)
    put_special(tmp_path / name, kind)
    for read in (load_head, check_directory):
        with pytest.raises(FormatError, match=rf"{name}: (cannot be read|no such file)"):
            read(tmp_path, DIMS)


def put_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name, "nowhere": "not-there"}[kind])


def test_entries_of_an_archive_that_leave_the_directory_are_never_written(tmp_path: Path) -> None:
    head = write(tmp_path / "a/head", EAGLE_CONFIG, eagle_tensors(), "pytorch_model.bin")
    with zipfile.ZipFile(head / "pytorch_model.bin", "a") as archive:
        for name in ("../../escaped", "/tmp/escaped-by-headstart-test", "pytorch_model/data/../../../escaped"):
            archive.writestr(name, b"out")
    before = sorted(path for path in tmp_path.rglob("*"))
    try:
        load_head(head)
    except FormatError as error:
        assert "pytorch_model.bin" in str(error)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert not Path("/tmp/escaped-by-headstart-test").exists()


def test_a_sidecar_that_asks_for_much_memory_is_refused_before_it_is_spent(tmp_path: Path) -> None:
    """Whoever can write the file can seal it: its sizes are bounded and compared with the tensors all the same."""
    save_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path, {})
    original = json.loads((tmp_path / "headstart.json").read_text())
    hostile = [
        ("dims", "max_position_embeddings", 1 << 40),
        ("dims", "head_dim", 1 << 20),
        ("dims", "intermediate_size", 1 << 19),
        ("config", "intermediate_size", 1 << 45),
        ("config", "draft_vocab_size", 1 << 45),
        ("config", "hidden_size", 1 << 45),
        ("config", "feature_layers", [1] * 100_000),
    ]
    for node, key, value in hostile:
        side = json.loads(json.dumps(original))
        side[node][key] = value
        (tmp_path / "headstart.json").write_text(json.dumps(seal(side)))
        with pytest.raises(FormatError):
            load_head(tmp_path)


def test_non_finite_weights_are_named(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    tensors["layers.0.mlp.up_proj.weight"][3, 3] = float("inf")
    with pytest.raises(FormatError, match="up_proj.weight holds NaN or infinite"):
        load_head(write(tmp_path, EAGLE_CONFIG, tensors))


def test_shapes_are_compared_before_memory_is_spent(tmp_path: Path) -> None:
    """A config that asks for a 100 GB head beside a small file fails at once."""
    config = {**EAGLE_CONFIG, "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "head_dim": 8}
    with pytest.raises(FormatError, match="config.json: the config belongs to another head|expected floating point"):
        load_head(write(tmp_path, config, eagle_tensors()))
