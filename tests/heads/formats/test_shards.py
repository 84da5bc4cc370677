"""Weights in several files: bounded, indexed, read back bit for bit, and only where an engine reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_layouts import DIMS, U, our_head, same_state
from safetensors.torch import load_file, save_file

from headstart.heads.base import HeadConfig
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, save_head
from headstart.heads.formats.shards import shard_bytes

LIMIT = 30_000
CONFIGS: dict[str, HeadConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=U),
    "eagle": EagleConfig(),
    "medusa": MedusaConfig(depth=3, lm_head="own"),
    "medusa-shared": MedusaConfig(depth=12, lm_head="shared"),
}


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_shards_are_bounded_indexed_and_read_back(tmp_path: Path, config: HeadConfig) -> None:
    head = our_head(config)
    save_head(head, tmp_path, {}, max_shard_bytes=LIMIT)
    files = weight_files(tmp_path)
    assert len(files) > 1 and not (tmp_path / "model.safetensors").exists()
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert all(file.stat().st_size <= LIMIT for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == found
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors)
    assert same_state(load_head(tmp_path, DIMS), head)


@pytest.mark.parametrize(
    ("config", "engines"),
    [("eagle3", ["portable"]), ("eagle", ["vllm", "sglang"]), ("medusa", ["vllm"]), ("medusa-shared", ["vllm"])],
)
def test_engines_that_read_shards_are_named(tmp_path: Path, config: str, engines: list[str]) -> None:
    export_head(our_head(CONFIGS[config]), tmp_path, ExportConfig(engines, "float32", max_shard_size="30KB"), {})
    loads = {"eagle3": ("vllm", "sglang", "tensorrt_llm"), "eagle": ("vllm",)}.get(config, ("vllm",))
    report = check_directory(tmp_path, DIMS)
    for engine in ("headstart", *loads):
        assert report.loads(engine), report.render()
        assert any("files: all of them are read" in note for note in report.engines[engine].notes)
    assert not any("all of them" in note for note in report.engines["tgi"].notes)
    if config == "eagle":
        assert check_directory(tmp_path / "sglang", DIMS).loads("sglang")


@pytest.mark.parametrize("engine", ["tgi", "tensorrt_llm"])
def test_engines_that_open_one_file_get_no_shards(tmp_path: Path, engine: str) -> None:
    with pytest.raises(FormatError, match=r"max_shard_size.*no second file"):
        export_head(
            our_head(CONFIGS["medusa"]),
            tmp_path,
            ExportConfig([engine], max_shard_size="20KB"),
            {"target": {"name": "someone/target"}},
        )
    export_head(
        our_head(CONFIGS["medusa"]),
        tmp_path,
        ExportConfig([engine], max_shard_size="5GB"),
        {"target": {"name": "someone/target"}},
    )
    assert [file.name for file in weight_files(tmp_path)] == ["medusa_lm_head.safetensors"]


def test_a_tensor_larger_than_a_file_may_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"fc\.weight.*alone takes 8512 bytes.*not split"):
        save_head(our_head(CONFIGS["eagle"]), tmp_path, {}, max_shard_bytes=8400)
    assert not weight_files(tmp_path)


def test_a_small_head_stays_in_one_file(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle"]), tmp_path, {}, max_shard_bytes=10**6)
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_saving_with_another_size_leaves_no_old_files(tmp_path: Path) -> None:
    head = our_head(CONFIGS["eagle"])
    for limit, count in ((LIMIT, 2), (20_000, 3), (None, 1), (LIMIT, 2)):
        save_head(head, tmp_path, {}, max_shard_bytes=limit)
        assert len(weight_files(tmp_path)) == count
        assert (tmp_path / "model.safetensors.index.json").exists() == (count > 1)
        assert same_state(load_head(tmp_path, DIMS), head)


def test_shards_of_somebody_else_are_never_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "model-00001-of-00009.safetensors"
    save_file({"x": torch.ones(1)}, theirs)
    for limit in (LIMIT, None):
        with pytest.raises(FormatError, match="already holds model-00001-of-00009"):
            save_head(our_head(CONFIGS["eagle"]), tmp_path, {}, max_shard_bytes=limit)
    assert theirs.exists()


def test_a_damaged_or_missing_shard_is_recognised(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle"]), tmp_path, {}, max_shard_bytes=LIMIT)
    shard = weight_files(tmp_path)[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(FormatError, match=f"{shard.name}: was changed or damaged"):
        load_head(tmp_path, DIMS)
    shard.unlink()
    with pytest.raises(FormatError, match="no such file"):
        load_head(tmp_path, DIMS)


def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle"]), tmp_path, {}, max_shard_bytes=LIMIT)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name: f"../{file}" for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match="only plain file names"):
        load_head(tmp_path, DIMS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("14MB", 14_000_000), ("5 GB", 5 * 10**9), ("512MiB", 512 << 20), ("1.5kb", 1500), ("900", 900), (None, None)],
)
def test_sizes(given: str | None, expected: int | None) -> None:
    assert shard_bytes(given) == expected


@pytest.mark.parametrize("given", ["", "big", "0", "-5MB", "5TB", "MB", "0.1"])
def test_sizes_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        shard_bytes(given)
