"""Small valid heads in every layout that is read, and one random fault at a time for a copy of them.

A fault is described by words such as "config.json rope_theta: replace 0.5"; the file's name comes first.
"""

from __future__ import annotations

import json
import os
import random as pyrandom
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from format_layouts import (
    DFLASH_CONFIG,
    DSPARK_CONFIG,
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    LLAMA,
    MEDUSA_CONFIG,
    MEDUSA_V1_CONFIG,
    NESTED_EAGLE,
    SPECFORGE_CONFIG,
    SPECFORGE_DSPARK_CONFIG,
    SPECULATORS_CONFIG,
    SPECULATORS_DFLASH_CONFIG,
    SPECULATORS_EAGLE_CONFIG,
    YUHUILI_CONFIG,
    D,
    Tensors,
    U,
    dflash_tensors,
    dspark_tensors,
    eagle3_tensors,
    eagle_tensors,
    language_model,
    later_layer,
    medusa_tensors,
    our_head,
    peagle_tensors,
    random,
    reduced,
    speculators_eagle,
    stream_norms,
    vllm_medusa,
    write,
)
from safetensors.torch import load_file, save_file

from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.families.peagle.head import PEagleConfig
from headstart.heads.formats import ExportConfig, export_head, save_head
from headstart.heads.formats.sidecar import SIDECAR, seal

WEIGHTS = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Base:
    """A valid directory.

    Attributes:
        readable: Headstart reads it; otherwise only `--check` knows it.
    """

    directory: Path
    readable: bool = True

    @property
    def sealed(self) -> bool:
        return (self.directory / SIDECAR).exists()


def make_bases(root: Path) -> list[Base]:
    """One directory per family and layout; ours with and without the side file."""
    ours = {
        "medusa": MedusaConfig(depth=2),
        "medusa-shared": MedusaConfig(depth=2, lm_head="shared"),
        "medusa-lowrank": MedusaConfig(depth=2, lm_head="lowrank", rank=4),
        "eagle": EagleConfig(),
        "eagle-bias": EagleConfig(fc_bias=True),
        "eagle3": Eagle3Config(draft_vocab_size=U),
        "eagle3-narrow": Eagle3Config(draft_vocab_size=U, hidden_size=16),
        "eagle3-deep": Eagle3Config(draft_vocab_size=U, layers=2, qk_norm=True, fc_norm="stream", norm_output=True),
        "dflash": DFlashConfig(layers=1, depth=3, mask_token_id=90),
        "dflash-reduced": DFlashConfig(depth=3, mask_token_id=9, layers=2, draft_vocab_size=U, sample_from_anchor=True),
        "dspark": DSparkConfig(layers=1, depth=3, mask_token_id=90, markov_rank=6, draft_vocab_size=U),
        "dspark-gated": DSparkConfig(layers=1, depth=3, mask_token_id=90, markov_rank=6, markov_head="gated"),
        "peagle": PEagleConfig(draft_vocab_size=U, mask_token_id=5),
        "peagle-narrow": PEagleConfig(draft_vocab_size=U, hidden_size=16, layers=2, mask_token_id=5),
    }
    for name, config in ours.items():
        save_head(our_head(config), root / name, {})
    save_head(our_head(EagleConfig()), root / "eagle-shards", {}, max_shard_bytes=30_000)
    provenance = {"target": {"name": "someone/target"}}
    for name, config, engine in (
        ("sglang", ours["eagle"], "sglang"),
        ("tgi-1", ours["medusa"], "tgi"),
        ("tgi-2", ours["medusa-shared"], "tgi"),
        ("vllm-shared", ours["medusa-shared"], "vllm"),
        ("peagle-exported", ours["peagle"], "vllm"),
    ):
        export_head(our_head(config), root / name, ExportConfig([engine], "float32"), provenance)
    sealed = [Base(root / name) for name in (*ours, "eagle-shards", "sglang", "tgi-1", "tgi-2", "vllm-shared",
                                           "peagle-exported")]
    return [*sealed, *_without_sidecar(root, BARE), *_foreign(root)]


#: directories that are also tried without their side file
BARE = ("medusa", "eagle", "eagle3", "eagle3-deep", "sglang", "tgi-1", "peagle-narrow", "peagle-exported", "dflash",
        "dspark")  # fmt: skip


def _without_sidecar(root: Path, names: tuple[str, ...]) -> list[Base]:
    found = []
    for name in names:
        copy = root / f"{name}-bare"
        copy.mkdir()
        for path in (root / name).iterdir():
            if path.name != SIDECAR:
                (copy / path.name).write_bytes(path.read_bytes())
        found.append(Base(copy))
    return found


def _foreign(root: Path) -> list[Base]:
    embedding = {"embed_tokens.weight": random(97, D, seed=90)}
    layers_0 = eagle3_tensors("layers.0.")
    files: dict[str, tuple[dict[str, Any], Tensors, str]] = {
        "eagle-authors": ({**LLAMA, "bias": True}, {**eagle_tensors(), **embedding}, "pytorch_model.bin"),
        "eagle-vllm": (EAGLE_CONFIG, eagle_tensors(), "model.safetensors"),
        "eagle-nested": (NESTED_EAGLE, eagle_tensors(), "model.safetensors"),
        "eagle-speculators": (SPECULATORS_EAGLE_CONFIG, speculators_eagle(eagle_tensors()), "model.safetensors"),
        "eagle3-authors": (YUHUILI_CONFIG, eagle3_tensors(), "pytorch_model.bin"),
        "eagle3-layers-0": (EAGLE3_CONFIG, {**layers_0, **embedding}, "model.safetensors"),
        "eagle3-specforge": (SPECFORGE_CONFIG, eagle3_tensors(), "model.safetensors"),
        "eagle3-speculators": (SPECULATORS_CONFIG, layers_0, "model.safetensors"),
        "eagle3-two-layers": (
            {**EAGLE3_CONFIG, "num_hidden_layers": 2, "use_aux_norm": True},
            {
                **layers_0, **later_layer(1, "input_layernorm", "hidden_norm"),
                **stream_norms("aux_norm_low", "aux_norm_mid", "aux_norm_high"),
            },
            "model.safetensors",
        ),
        "peagle-vllm": ({**EAGLE3_CONFIG, "ptd_token_id": 5}, peagle_tensors(), "model.safetensors"),
        "peagle-speculators": (
            {**SPECULATORS_CONFIG, "speculators_model_type": "peagle", "mask_token_id": 5}, peagle_tensors("layers.0."),
            "model.safetensors",
        ),
        "dflash-z-lab": (DFLASH_CONFIG, dflash_tensors(), "model.safetensors"),
        "dflash-speculators": (SPECULATORS_DFLASH_CONFIG, reduced(dflash_tensors()), "model.safetensors"),
        "dspark-deepspec": (DSPARK_CONFIG, dspark_tensors(), "model.safetensors"),
        "dspark-specforge": (SPECFORGE_DSPARK_CONFIG, dspark_tensors(), "model.safetensors"),
        "medusa-1": (MEDUSA_V1_CONFIG, medusa_tensors(), "medusa_lm_head.pt"),
        "medusa-tgi": (MEDUSA_V1_CONFIG, medusa_tensors(own=False), "medusa_lm_head.safetensors"),
        "medusa-vllm": (MEDUSA_CONFIG, vllm_medusa(medusa_tensors()), "model.safetensors"),
    }  # fmt: skip
    for name, content in files.items():
        write(root / name, *content)
    _shards_of_pickles(root / "eagle-bin-shards")
    checked = {
        "draft-model": ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, language_model()),
    }
    for name, other in checked.items():
        write(root / name, *other)
    return [*(Base(root / name) for name in (*files, "eagle-bin-shards")), *(Base(root / n, False) for n in checked)]


def _shards_of_pickles(directory: Path) -> None:
    tensors = eagle_tensors()
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[:4], "pytorch_model-00002-of-00002.bin": names[4:]}
    for file, part in parts.items():
        write(directory, EAGLE_CONFIG, {name: tensors[name] for name in part}, file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


# JSON: config.json, an index, headstart.json

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 33, 97, 2**40, -(2**70), 10**400, 0.5, 1e-30, 1e300, float("nan"), float("inf"),
    "", "x", "32", "gelu", "llama3", "\x1b[2J", "\ud800", "A" * 100_000, [], [1, 2], [2, 4, 5], [1, 3, 4], [[[]]],
    ["x"], list(range(50_000)), {}, {"a": 1}, {"rope_type": "yarn", "factor": 4.0},
]  # fmt: skip


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def change_json(path: Path, rng: pyrandom.Random) -> str:
    """One field, at any depth: removed, renamed, of another type or size, or said twice."""
    value = json.loads(path.read_text())
    node, trail = value, []
    while True:
        key = rng.choice(sorted(node))
        trail.append(key)
        if isinstance(node[key], dict) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        break
    action = rng.choice(["replace"] * 4 + ["delete", "rename", "nest", "wrap", "negate", "deep", "twice", "add"])
    old = node[key]
    if action == "replace":
        node[key] = rng.choice(JUNK)
    elif action == "delete":
        del node[key]
    elif action == "rename":
        node[key + rng.choice(["s", "_x", " "])] = node.pop(key)
    elif action == "nest":
        node[key] = {key: old}
    elif action == "wrap":
        node[key] = [old]
    elif action == "negate":
        node[key] = -old if isinstance(old, int | float) else [old, old]
    elif action == "deep":
        node[key] = nest(rng.choice([3, 60, 500, 900]))
    elif action == "add":
        key = rng.choice(["attention_bias", "sliding_window", "norm_output", "quantization_config", "num_x_heads"])
        node[key] = rng.choice(JUNK)
        trail[-1] = key
    if path.name == SIDECAR and rng.random() < 0.5 and "\ud800" not in json.dumps(value, ensure_ascii=False):
        value, action = seal(value), f"sealed {action}"
    text = json.dumps(value)
    if action.endswith("twice"):
        spelled = f"{json.dumps(key)}: "
        text = text.replace(spelled, f"{spelled}{json.dumps(rng.choice(JUNK))}, {spelled}", 1)
    path.write_text(text)
    return f"{path.name} {'.'.join(trail)}: {action} {json.dumps(node.get(key))[:60]}"


def change_text(path: Path, rng: pyrandom.Random) -> str:
    """Damage below the level of JSON."""
    content = path.read_bytes()
    action = rng.choice(["cut", "flip", "empty", "bom", "huge integer", "deep"])
    place = rng.randrange(len(content))
    changed = {
        "cut": content[:place],
        "flip": content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :],
        "empty": b"",
        "bom": b"\xef\xbb\xbf" + content,
        "huge integer": content.replace(b"32", b"3" * 6000, 1),
        "deep": b"[" * 100_000,
    }[action]
    path.write_bytes(changed)
    return f"{path.name} text at {place}: {action}"


# safetensors: the header, and files that are valid but hold something else


def change_header(path: Path, rng: pyrandom.Random) -> str:
    """Entries of a header that no longer fit the data, or a length that lies."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    names = sorted(set(header) - {"__metadata__"})
    name = rng.choice(names)
    actions = ["delete", "rename", "dtype", "shape", "swap", "offset", "transpose", "length", "flip", "metadata"]
    action = rng.choice(actions)
    if action == "delete":
        del header[name]
    elif action == "rename":
        header[name + rng.choice(["x", ".weight", "2"])] = header.pop(name)
    elif action == "dtype":
        header[name]["dtype"] = rng.choice(["F16", "BF16", "I32", "I64", "F64", "U8", "F8_E5M2", 3, None])
    elif action == "shape":
        header[name]["shape"] = rng.choice([[], [0], [1], [-1], [2**62, 2**62], ["a"], [7, 7], None, [1.0], {}])
    elif action == "transpose":
        header[name]["shape"] = header[name]["shape"][::-1]
    elif action == "swap":
        other = rng.choice(names)
        header[name]["shape"], header[other]["shape"] = header[other]["shape"], header[name]["shape"]
    elif action == "offset":
        header[name]["data_offsets"] = [rng.choice([0, 4, -4, 2**63]), rng.choice([0, 8, 2**63])]
    elif action == "metadata":
        header["__metadata__"] = rng.choice([5, [], {"a": 5}, {"format": "tf"}, None])
    text = json.dumps(header).encode()
    said = len(text) if action != "length" else rng.choice([0, 1, len(text) - 1, len(text) + 8, 2**40, 2**64 - 1])
    if action == "flip":
        place = rng.randrange(len(text))
        text = text[:place] + bytes([text[place] ^ (1 << rng.randrange(8))]) + text[place + 1 :]
    path.write_bytes(struct.pack("<Q", said) + text + content[8 + length :])
    return f"{path.name} {name}: header {action}"


def _replace(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return {**tensors, name: change(tensors[name])}


def _poke(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone().float()
        changed.view(-1)[-1] = value
        return changed

    return change


TENSOR_CHANGES: dict[str, Callable[[Tensors, str, str], Tensors]] = {
    "removed": lambda t, a, b: {name: x for name, x in t.items() if name != a},
    "renamed": lambda t, a, b: {f"{name}.old" if name == a else name: x for name, x in t.items()},
    "prefixed": lambda t, a, b: {f"model.{name}": x for name, x in t.items()},
    "doubled": lambda t, a, b: {**t, f"model.{a}": t[a]},
    "transposed": lambda t, a, b: _replace(t, a, lambda x: x.mT.contiguous() if x.dim() > 1 else x[None]),
    "float16": lambda t, a, b: _replace(t, a, lambda x: x.half()),
    "float64": lambda t, a, b: _replace(t, a, lambda x: x.double()),
    "int32": lambda t, a, b: _replace(t, a, lambda x: x.to(torch.int32)),
    "bool": lambda t, a, b: _replace(t, a, lambda x: x.bool()),
    "nan": lambda t, a, b: _replace(t, a, _poke(float("nan"))),
    "inf": lambda t, a, b: _replace(t, a, _poke(float("-inf"))),
    "zero": lambda t, a, b: _replace(t, a, torch.zeros_like),
    "same rows": lambda t, a, b: _replace(t, a, lambda x: x[:1].expand_as(x).contiguous()),
    "short": lambda t, a, b: _replace(t, a, lambda x: x[:-1].contiguous()),
    "deeper": lambda t, a, b: _replace(t, a, lambda x: x[None]),
    "empty": lambda t, a, b: _replace(t, a, lambda x: x[:0].contiguous()),
    "exchanged": lambda t, a, b: {**t, a: t[b], b: t[a]},
    "added": lambda t, a, b: {**t, "layers.1.mlp.up_proj.weight": torch.ones(2, 2)},
    "poked": lambda t, a, b: _replace(t, a, _poke(3.0)),
}


def read_weights(path: Path) -> Tensors:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def change_tensors(path: Path, rng: pyrandom.Random) -> str:
    """A valid file with other tensors."""
    tensors = read_weights(path)
    name, other = rng.choice(sorted(tensors)), rng.choice(sorted(tensors))
    action = rng.choice(sorted(TENSOR_CHANGES))
    changed = TENSOR_CHANGES[action](dict(tensors), name, other)
    if path.suffix == ".safetensors":
        save_file({key: tensor.clone() for key, tensor in changed.items()}, path)
    else:
        torch.save(changed, path)
    return f"{path.name} {name}: tensor {action}" + (f" {other}" if action == "exchanged" else "")


# bytes and files


def change_bytes(path: Path, rng: pyrandom.Random) -> str:
    content = bytearray(path.read_bytes())
    action = rng.choice(["cut", "append", "zero length", "flip", "flip", "hole"])
    place = rng.randrange(len(content))
    if action == "cut":
        del content[place:]
    elif action == "append":
        content += bytes(rng.randrange(1, 64))
    elif action == "zero length":
        content[:8] = bytes(8)
    elif action == "hole":
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    else:
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(content))
    return f"{path.name} at {place}: bytes {action}"


def change_file(path: Path, rng: pyrandom.Random) -> str:
    """Something else in a file's place."""
    kinds = ["gone", "empty", "directory", "pipe", "loop", "nowhere", "device", "itself elsewhere", "sparse"]
    action = rng.choice(kinds)
    if action == "itself elsewhere":  # as caches hold files
        path.rename(path.with_name(f"{path.name}.blob"))
        path.symlink_to(f"{path.name}.blob")
        return f"{path.name}: file {action}"
    path.unlink()
    if action == "empty":
        path.touch()
    elif action == "directory":
        path.mkdir()
    elif action == "pipe":
        os.mkfifo(path)
    elif action == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 36)
    elif action != "gone":
        path.symlink_to({"loop": path.name, "nowhere": "not-there", "device": "/dev/zero"}[action])
    return f"{path.name}: file {action}"


def add_file(directory: Path, rng: pyrandom.Random) -> str:
    """A file that readers of another layout would look for."""
    name = rng.choice(["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "model.safetensors.index.json"])
    name = name if not (directory / name).exists() else "another.safetensors"
    if name.endswith(".json"):
        (directory / name).write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    else:
        contents = [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", struct.pack("<Q", 2) + b"{}"]
        (directory / name).write_bytes(rng.choice(contents))
    return f"{name}: file added"


def mutate(directory: Path, rng: pyrandom.Random) -> str:
    """Change one thing in a directory; returns what."""
    texts = sorted(directory.glob("*.json"))
    weights = sorted(path for path in directory.iterdir() if path.suffix in WEIGHTS)
    chance = rng.random()
    if chance < 0.42:
        return change_json(rng.choice(texts), rng)
    if chance < 0.48:
        return change_text(rng.choice(texts), rng)
    path = rng.choice(weights)
    if chance < 0.62 and path.suffix == ".safetensors":
        return change_header(path, rng)
    if chance < 0.78:
        return change_tensors(path, rng)
    if chance < 0.88:
        return change_bytes(path, rng)
    if chance < 0.97:
        return change_file(rng.choice([*texts, *weights]), rng)
    return add_file(directory, rng)
