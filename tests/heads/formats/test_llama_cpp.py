"""An EAGLE-3 head as GGUF for llama.cpp: what stands in the file, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.errors import FormatError
from headstart.heads.families import build_head
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head
from headstart.heads.formats.gguf_file import NAMES, llama3_divisors, neighbours
from headstart.heads.formats.launch import launch_commands
from headstart.heads.formats.sidecar import notes

V, D, U = 97, 32, 40
DIMS = HeadDims(
    hidden_size=D, vocab_size=V, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def exported(place: Path, dims: HeadDims = DIMS, dtype: str = "float32", **config: Any) -> Any:
    torch.manual_seed(0)
    head = build_head(Eagle3Config(draft_vocab_size=U, **config), dims)
    head.bind(TargetEnds(torch.randn(V, D), torch.randn(V, D)))
    return head, export_head(head, place, ExportConfig(["llama_cpp"], dtype), {"target": {"name": "user/target"}})


def tensors_of(path: Path) -> dict[str, Any]:
    """Tensors of a GGUF file in row-major form, as numpy arrays."""
    return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}


def field(path: Path, name: str) -> Any:
    return GGUFReader(path).fields[name].contents()


def test_the_file_says_what_the_head_reads_and_how_it_rotates(tmp_path: Path) -> None:
    head, reports = exported(tmp_path)
    assert reports["llama_cpp"].loads("llama_cpp") and load_head(tmp_path).config == head.config
    path = tmp_path / "eagle3.gguf"
    wanted = {
        "general.architecture": "eagle3", "tokenizer.ggml.model": "no_vocab", "eagle3.vocab_size": V,
        "eagle3.embedding_length": D, "eagle3.block_count": 1, "eagle3.feed_forward_length": 48,
        "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2, "eagle3.attention.key_length": 8,
        "eagle3.rope.dimension_count": 8, "eagle3.target_layers": list(head.spec.layer_ids),
        "eagle3.target_hidden_size": D, "eagle3.norm_before_residual": False, "eagle3.norm_before_fc": False,
    }  # fmt: skip
    assert {name: field(path, name) for name in wanted} == wanted
    assert field(path, "eagle3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert field(path, "eagle3.rope.freq_base") == 10000.0


def test_every_weight_is_there_and_draft_ids_are_the_targets(tmp_path: Path) -> None:
    exported(tmp_path)
    raw, held = open_checkpoint(tmp_path), tensors_of(tmp_path / "eagle3.gguf")
    assert set(held) == {NAMES[name] for name in raw.tensors if name in NAMES} | {"d2t"}
    assert set(raw.tensors) - set(NAMES) == {"d2t", "t2d"}
    assert held["d2t"].tolist() == [int(offset) + i for i, offset in enumerate(raw.read("d2t"))]
    for name in ("fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight", "midlayer.hidden_norm.weight"):
        assert (held[NAMES[name]] == raw.read(name).numpy()).all()


def test_bfloat16_weights_keep_their_bits_and_norms_are_float32(tmp_path: Path) -> None:
    exported(tmp_path, dtype="bfloat16")
    raw, held = open_checkpoint(tmp_path), tensors_of(tmp_path / "eagle3.gguf")
    fc = torch.from_numpy(held["fc.weight"].copy()).view(torch.bfloat16)
    assert torch.equal(fc, raw.read("fc.weight"))
    assert held["output_norm.weight"].dtype.name == "float32"


def turned_halves(x: Tensor, angles: Tensor) -> Tensor:
    """transformers' rope of one head: dimension i turns with i + half."""
    half = angles.shape[0]
    left, right = x[:half], x[half : 2 * half]
    turned = [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()]
    return torch.cat([*turned, x[2 * half :]])


def turned_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """llama.cpp's rope of one head, pair by pair: dimension 2i turns with 2i + 1."""
    out = x.clone()
    for i, angle in enumerate(angles):
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i], out[2 * i + 1] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize("rotated", [8, 4])
def test_reordered_rows_give_the_same_attention_under_the_other_rope(rotated: int) -> None:
    noise = torch.Generator().manual_seed(1)
    q, k = (torch.randn(16, 5, generator=noise, dtype=torch.float64) for _ in range(2))
    x, y = torch.randn(5, generator=noise, dtype=torch.float64), torch.randn(5, generator=noise, dtype=torch.float64)
    at_x, at_y = (torch.arange(1, rotated // 2 + 1, dtype=torch.float64) * step for step in (0.7, 0.3))
    for head in range(2):
        rows = slice(8 * head, 8 * head + 8)
        ours = turned_halves((q @ x)[rows], at_x) @ turned_halves((k @ y)[rows], at_y)
        q_there, k_there = neighbours(q, 2, rotated), neighbours(k, 2, rotated)
        theirs = turned_neighbours((q_there @ x)[rows], at_x) @ turned_neighbours((k_there @ y)[rows], at_y)
        assert torch.allclose(ours, theirs, atol=1e-12)
        assert not torch.allclose(ours, turned_neighbours((q @ x)[rows], at_x) @ turned_neighbours((k @ y)[rows], at_y))


def test_llama3_divides_its_frequencies_as_transformers_does(tmp_path: Path) -> None:
    config = SimpleNamespace(rope_parameters=LLAMA3, head_dim=64, hidden_size=128, num_attention_heads=2)
    config.standardize_rope_params = lambda: None
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    assert torch.allclose(plain / llama3_divisors(LLAMA3, 64), inverse, rtol=1e-5)
    exported(tmp_path, replace(DIMS, rope_parameters=LLAMA3))
    held = tensors_of(tmp_path / "eagle3.gguf")["rope_freqs.weight"]
    assert held.tolist() == pytest.approx(llama3_divisors(LLAMA3, 8).tolist())


def test_a_directory_without_the_file_is_refused(tmp_path: Path) -> None:
    head, _ = exported(tmp_path / "made")
    export_head(head, tmp_path / "portable", ExportConfig(["portable"], "float32"), {})
    shutil.copytree(tmp_path / "made", tmp_path / "lost")
    (tmp_path / "lost/eagle3.gguf").unlink()
    for name in ("portable", "lost"):
        handling = check_directory(tmp_path / name, DIMS).engines["llama_cpp"]
        assert handling.refused == ["reads GGUF, and there is no eagle3.gguf: export.engines=[llama_cpp] writes one"]
    held = json.loads((tmp_path / "lost/config.json").read_text())
    for norm in ("fc_norm", "norm_output"):
        (tmp_path / "lost/headstart.json").unlink(missing_ok=True)
        (tmp_path / "lost/config.json").write_text(json.dumps({**held, norm: True}))
        (said,) = check_directory(tmp_path / "lost", DIMS).engines["llama_cpp"].refused
        assert said.endswith("train with head.fc_norm=concat head.norm_output=false")


def test_a_target_whose_hidden_states_it_does_not_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not give a head the hidden states of gemma3_text targets"):
        exported(tmp_path, replace(DIMS, model_type="gemma3_text"))


def test_the_launch_command_converts_the_target_and_names_the_file(tmp_path: Path) -> None:
    exported(tmp_path)
    side = {**notes(tmp_path), "config": {**notes(tmp_path)["config"], "depth": 3}}
    lines = launch_commands("dir/my head", side, ["llama_cpp"])["llama_cpp"].splitlines()
    assert lines == [
        "# the target as GGUF: python convert_hf_to_gguf.py --remote user/target --outfile target.gguf",
        "llama-server -m target.gguf -md 'dir/my head/eagle3.gguf' --spec-type draft-eagle3 --spec-draft-n-max 3",
    ]
    local = {**side, "target": {"name": "/models/target"}}
    lines = launch_commands("head", local, ["llama_cpp"])["llama_cpp"].splitlines()
    assert lines[0] == "# the target as GGUF: python convert_hf_to_gguf.py TARGET --outfile TARGET.gguf"  # a directory


def test_what_its_graph_lacks_is_refused(tmp_path: Path) -> None:
    exported(tmp_path)
    (tmp_path / "headstart.json").unlink()
    held = json.loads((tmp_path / "config.json").read_text())
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    for change, words in (
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "three are needed"),
        ({"fc_norm": True}, "not one for each"),
        ({"norm_output": True}, "the un-normed state goes into the next step"),
        (
            {"rope_parameters": dynamic, "rope_scaling": {k: v for k, v in dynamic.items() if k != "rope_theta"}},
            "rope_type is 'dynamic'",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**held, **change}))
        handling = check_directory(tmp_path, DIMS).engines["llama_cpp"]
        assert any(words in reason for reason in (*handling.refused, *handling.wrong)), handling


def test_a_rope_of_some_dimensions_and_its_scaling_are_written(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 16.0, "beta_slow": 2.0, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    exported(tmp_path, replace(DIMS, rope_parameters=yarn))
    written = {
        "dimension_count": DIMS.head_dim // 2, "scaling.type": "yarn", "scaling.factor": 8.0,
        "scaling.original_context_length": 64, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0,
    }  # fmt: skip
    assert {name: field(tmp_path / "eagle3.gguf", f"eagle3.rope.{name}") for name in written} == written
