"""Heads for targets of many architectures: what a draft layer takes over of them is saved, read back and served."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from format_layouts import our_head, same_state

from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import build_head
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.files import read_json, write_json
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, save_head
from headstart.heads.formats.launch import launch_commands
from headstart.heads.formats.sidecar import SIDECAR, seal
from headstart.heads.targets.target import Target

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [4.0] * 4}
YARN = {"kind": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}


def rope(theta: float = 10000.0, kind: str = "default", **fields: object) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **fields}


#: target → (settings of its config, the rope of its draft layer)
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": ({}, rope()),
    "Gemma": ({"head_dim": 8}, rope()),
    "Gemma4Text": ({"head_dim": 8}, rope(1000000.0)),
    "GPTNeoX": ({}, rope(partial_rotary_factor=0.25)),
    "GptOss": (
        {"head_dim": 8}, rope(150000.0, **YARN, factor=32.0, truncate=False, original_max_position_embeddings=4096),
    ),
    "Ministral3": (
        {"head_dim": 8},
        rope(1e6, **YARN, factor=16.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16384),
    ),
    "Nemotron": ({}, rope(partial_rotary_factor=0.5)),
    "Phi": ({}, rope(partial_rotary_factor=0.5)),
    "Phi3": (
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        {**LONGROPE, "original_max_position_embeddings": 64},
    ),
    "Qwen2VLText": ({"rope_parameters": rope(1000000.0, mrope_section=[1, 1, 2])}, rope(1000000.0)),
    "Starcoder2": ({}, rope()),
}  # fmt: skip
FAMILIES = {"eagle": EagleConfig(), "eagle3": Eagle3Config(draft_vocab_size=40), "medusa": MedusaConfig(lm_head="own")}
#: engines that take the portable directory
ENGINES = {"eagle": ["vllm"], "eagle3": ["vllm", "sglang", "tensorrt_llm"], "medusa": ["vllm"]}


def dims_of(name: str, **changes: object) -> HeadDims:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **TARGETS.get(name, ({}, {}))[0], **changes})
    return HeadDims.from_hf_config(config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_head_for_any_target_is_read_back_and_served(tmp_path: Path, name: str, family: str) -> None:
    dims = dims_of(name)
    assert dims.rope_parameters == TARGETS[name][1] and dims.hidden_act == "silu"
    head = our_head(FAMILIES[family], dims)
    save_head(head, tmp_path, {})
    for known in (dims, None):
        loaded = load_head(tmp_path, known)
        assert loaded.dims == dims and loaded.config == head.config and same_state(head, loaded)
    report = check_directory(tmp_path, dims)
    assert report.served == ENGINES[family] and report.loads("headstart")
    # an engine's view: without what only we read
    (tmp_path / SIDECAR).unlink()
    if family != "medusa":
        assert load_head(tmp_path, dims).dims.rope_parameters == dims.rope_parameters


def test_longrope_says_the_length_that_it_is_served_with(tmp_path: Path) -> None:
    dims = dims_of("Phi3")
    assert dims.positions == 64 and dims_of("Llama").positions == 128
    save_head(our_head(FAMILIES["eagle3"], dims), tmp_path, {})
    side = read_json(tmp_path / SIDECAR)
    flags = {"vllm": "--max-model-len 64", "sglang": "--context-length 64", "tensorrt_llm": "--max_seq_len 64"}
    for engine in ENGINES["eagle3"]:
        assert flags[engine] in launch_commands("head", side, ENGINES["eagle3"])[engine]
        notes = check_directory(tmp_path, dims).engines[engine].notes
        assert any("LongRoPE: launch the engine with a context of at most 64 tokens" in note for note in notes)


def test_what_engines_make_of_a_dynamic_rope_is_said(tmp_path: Path) -> None:
    dims = dims_of("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    save_head(our_head(FAMILIES["eagle3"], dims), tmp_path, {})
    report = check_directory(tmp_path, dims)
    assert report.loads("vllm") and any("3^(d/(d-2)) times as large" in n for n in report.engines["vllm"].notes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rope_type": "default", "rope_theta": 1e4, "swirl": 0.5}, "rope field swirl = 0.5 is not known"),
        ({"rope_type": "spiral", "rope_theta": 1e4}, "rope type 'spiral'; known: default"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "rope type yarn needs factor"),
    ],
)
def test_a_rope_that_no_draft_layer_has_is_refused_when_the_head_is_built(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    dims = replace(dims_of("Llama"), rope_parameters=given)
    for family in ("eagle", "eagle3"):
        with pytest.raises(ConfigError, match=f"the target .llama.: {named}.*head.type=medusa"):
            build_head(FAMILIES[family], dims)
    # a head that turns nothing is not concerned
    save_head(our_head(FAMILIES["medusa"], dims), tmp_path, {})
    assert load_head(tmp_path, dims).dims.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_another_activation_is_the_recipes_choice_and_engines_say_so(tmp_path: Path, family: str) -> None:
    head = our_head(replace(FAMILIES[family], hidden_act="gelu_pytorch_tanh"), dims_of("Gemma"))
    save_head(head, tmp_path, {})
    assert read_json(tmp_path / "config.json")["hidden_act"] == "gelu_pytorch_tanh"
    loaded = load_head(tmp_path)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    mlp = loaded.layer.mlp
    expected = mlp.down_proj(torch.nn.functional.gelu(mlp.gate_proj(x), approximate="tanh") * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), expected)
    report = check_directory(tmp_path)
    assert report.served == [] and "hidden_act is 'gelu_pytorch_tanh'" in report.engines["vllm"].reasons[0]
    with pytest.raises(ConfigError, match="head.hidden_act: found 'sillu', expected one of .*silu"):
        build_head(replace(FAMILIES[family], hidden_act="sillu"), dims_of("Gemma"))


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_heads_of_older_versions_keep_the_activation_they_were_trained_with(tmp_path: Path, family: str) -> None:
    """Their headstart.json has the target's activation among its sizes, and none in the head's settings."""
    save_head(our_head(FAMILIES[family], replace(dims_of("Gemma"), hidden_act="gelu")), tmp_path, {})
    side = read_json(tmp_path / SIDECAR)
    del side["config"]["hidden_act"]
    write_json(tmp_path / SIDECAR, seal(side))
    assert load_head(tmp_path, dims_of("Gemma")).hidden_act == "gelu"
    # a foreign directory says it in its config
    (tmp_path / SIDECAR).unlink()
    assert load_head(tmp_path, dims_of("Gemma")).hidden_act == "gelu"


def test_an_edited_activation_is_noticed(tmp_path: Path) -> None:
    save_head(our_head(FAMILIES["eagle"], dims_of("Gemma")), tmp_path, {})
    config, side = read_json(tmp_path / "config.json"), read_json(tmp_path / SIDECAR)
    write_json(tmp_path / "config.json", {**config, "hidden_act": "gelu"})
    digest = hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest()
    write_json(tmp_path / SIDECAR, seal({**side, "sha256": {**side["sha256"], "config.json": digest}}))
    with pytest.raises(FormatError, match="hidden_act is 'silu' and config.json with the tensors says 'gelu'"):
        load_head(tmp_path)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", ["Gemma", "Phi", "Starcoder2", "Nemotron", "GPTNeoX"])
def test_a_head_trained_on_a_target_of_another_activation_is_served(tmp_path: Path, name: str, family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **TARGETS[name][0]})
    target = Target.from_model(transformers.AutoModelForCausalLM.from_config(config))
    head = build_head(FAMILIES[family], target.dims)
    head.initialise(target.ends, torch.arange(40) if family == "eagle3" else None)
    tokens_T = torch.randint(40, (24,), generator=torch.Generator().manual_seed(1))
    batch = target.extract(FeatureBatch.pack([(tokens_T, torch.zeros_like(tokens_T))], head.depth), head.spec)
    optimizer, losses = torch.optim.Adam(head.parameters(), lr=1e-2), []
    for _ in range(8):
        loss = head.loss(batch, target.teacher)
        total = (loss.sum_T / loss.count_T.clamp(min=1)).sum()
        losses.append(float(total))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert losses[-1] < losses[0]  # little: a random target is nearly indifferent, and its entropy is a floor
    engines = {"eagle": ["portable", "sglang"], "eagle3": ["portable", "vllm", "sglang", "tensorrt_llm"]}[family]
    origin = {"target": {"name": name}}
    reports = export_head(head, tmp_path, ExportConfig(engines=engines), origin)
    assert [key for key, report in reports.items() if report.loads("vllm" if key == "portable" else key)] == engines
    assert read_json(tmp_path / "config.json")["hidden_act"] == "silu"
