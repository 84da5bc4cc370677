"""Checkpoints from elsewhere, in every public layout, become our heads: each tensor in its place, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DIMS,
    E1,
    E3,
    EAGLE3_CONFIG,
    EAGLE_CONFIG,
    LLAMA,
    LLAMA3,
    MEDUSA_CONFIG,
    MEDUSA_V1_CONFIG,
    NESTED_EAGLE,
    SPECFORGE_CONFIG,
    SPECULATORS_CONFIG,
    SPECULATORS_EAGLE_CONFIG,
    YUHUILI_CONFIG,
    D,
    M,
    Tensors,
    U,
    V,
    draft_ids,
    eagle3_tensors,
    eagle_tensors,
    later_layer,
    medusa_tensors,
    qk_norms,
    random,
    same_state,
    speculators_eagle,
    stream_norms,
    vllm_medusa,
    write,
)
from safetensors.torch import save_file

from headstart.heads.base import Head
from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import FormatError
from headstart.heads.formats import ExportConfig, check_embeddings, export_head, load_head


def embedded(tensors: Tensors) -> Tensors:
    return {**tensors, "embed_tokens.weight": random(V, D, seed=90)}


def expect_eagle3(head: Head, tensors: Tensors, prefix: str = "midlayer.") -> None:
    """Every parameter is the file's, by name."""
    state = head.state_dict()
    for name, tensor in tensors.items():
        if name not in ("d2t", "t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"):
            assert torch.equal(state.pop(name.replace(prefix, "midlayer.")), tensor), name
    assert torch.equal(state.pop("draft_ids_U"), draft_ids())
    assert not state
    assert head.config.type == "eagle3" and head.spec.layer_ids == (2, 4, 5)
    assert head.dims.rope_parameters == LLAMA3 and head.dims.rms_norm_eps == 1e-5


EAGLE3_LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "yuhuili-safetensors": (YUHUILI_CONFIG, "midlayer.", "model.safetensors"),
    "yuhuili-bin": (YUHUILI_CONFIG, "midlayer.", "pytorch_model.bin"),
    "specforge": (SPECFORGE_CONFIG, "midlayer.", "model.safetensors"),
    "vllm-layers.0": (EAGLE3_CONFIG, "layers.0.", "model.safetensors"),
    "speculators": (SPECULATORS_CONFIG, "layers.0.", "model.safetensors"),
}


@pytest.mark.parametrize(("config", "prefix", "weights"), EAGLE3_LAYOUTS.values(), ids=EAGLE3_LAYOUTS.keys())
def test_eagle3_layouts(tmp_path: Path, config: dict[str, Any], prefix: str, weights: str) -> None:
    tensors = embedded(eagle3_tensors(prefix))
    expect_eagle3(load_head(write(tmp_path, config, tensors, weights), DIMS), tensors, prefix)


def test_speculators_default_layers_and_verifier_copies(tmp_path: Path) -> None:
    config = {**SPECULATORS_CONFIG, "eagle_aux_hidden_state_layer_ids": None}
    tensors = eagle3_tensors("layers.0.")
    tensors |= {"verifier_norm.weight": random(D, seed=1), "verifier_lm_head.weight": random(U, D, seed=2)}
    expect_eagle3(load_head(write(tmp_path, config, tensors), DIMS), tensors, "layers.0.")


def test_speculators_leave_out_what_llama_defaults_say(tmp_path: Path) -> None:
    layer = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    config = {**SPECULATORS_CONFIG, "transformer_layer_config": layer}
    assert load_head(write(tmp_path, config, eagle3_tensors("layers.0.")), DIMS).dims.rms_norm_eps == 1e-6


def test_eagle3_from_config_alone_when_it_names_its_layers(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    expect_eagle3(load_head(write(tmp_path, EAGLE3_CONFIG, tensors)), tensors)


def test_eagle3_without_layers_needs_the_target(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="which target layers it reads.*--target"):
        load_head(write(tmp_path, YUHUILI_CONFIG, eagle3_tensors()))


def test_eagle3_full_vocabulary(tmp_path: Path) -> None:
    tensors = eagle3_tensors(size=V)
    head = load_head(write(tmp_path, {**EAGLE3_CONFIG, "draft_vocab_size": V}, tensors), DIMS)
    assert head.draft_ids_U is None and torch.equal(head.lm_head.weight, tensors["lm_head.weight"])


#: what publishers add to an EAGLE-3 head → (config, tensors besides a plain head's, fields of our config)
EAGLE3_VARIANTS: dict[str, tuple[dict[str, Any], Tensors, dict[str, Any]]] = {
    "three layers, as vLLM names them": (
        {**SPECFORGE_CONFIG, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        {**later_layer(1, "input_layernorm"), **later_layer(2, "input_layernorm")},
        {"layers": 3},
    ),
    "two layers, as SGLang names them": (
        {**EAGLE3_CONFIG, "num_hidden_layers": 2}, later_layer(1, "hidden_norm"), {"layers": 2},
    ),
    "two layers, both names": (
        {**EAGLE3_CONFIG, "num_hidden_layers": 2}, later_layer(1, "input_layernorm", "hidden_norm"), {"layers": 2},
    ),
    "q/k norms": (
        {**EAGLE3_CONFIG, "model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]},
        qk_norms("layers.0."),
        {"qk_norm": True},
    ),
    "speculators, Qwen3 layers, norms": (
        {
            **SPECULATORS_CONFIG, "norm_before_fc": True, "norm_output": True,
            "transformer_layer_config": {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2},
        },
        {
            **qk_norms("layers.0.", "layers.1."), **later_layer(1, "input_layernorm"),
            "input_norm.weight": random(3 * D, seed=150),
        },
        {"layers": 2, "qk_norm": True, "fc_norm": "concat", "norm_output": True},
    ),
    "EAGLE-3.1": (
        {**EAGLE3_CONFIG, "fc_norm": True, "norm_output": True},
        stream_norms("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        {"fc_norm": "stream", "norm_output": True},
    ),
    "norms of the streams, as SGLang named them": (
        {**EAGLE3_CONFIG, "use_aux_norm": True},
        stream_norms("aux_norm_low", "aux_norm_mid", "aux_norm_high"),
        {"fc_norm": "stream"},
    ),
    "norm before fc, as TensorRT-LLM reads it": (
        {**EAGLE3_CONFIG, "eagle_config": {**EAGLE3_CONFIG["eagle_config"], "norm_before_fc": True}},
        {"input_norm.weight": random(3 * D, seed=151)},
        {"fc_norm": "concat"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "more", "fields"), EAGLE3_VARIANTS.values(), ids=EAGLE3_VARIANTS.keys())
def test_eagle3_variants(tmp_path: Path, config: dict[str, Any], more: Tensors, fields: dict[str, Any]) -> None:
    """Every tensor lands where it belongs, and the head drafts with it as it does after an export of ours."""
    tensors = {**eagle3_tensors("layers.0."), **more}
    head = load_head(write(tmp_path / "theirs", config, tensors), DIMS)
    defaults = {"layers": 1, "qk_norm": False, "fc_norm": "none", "norm_output": False}
    assert {name: getattr(head.config, name) for name in defaults} == {**defaults, **fields}
    state = head.state_dict()
    legacy = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
    for name, tensor in tensors.items():
        ours = name.replace("layers.0.", "midlayer.")
        for old, new in legacy.items():
            ours = ours.replace(old, new)
        if ours.startswith("layers."):
            ours = ours.replace("hidden_norm", "input_layernorm")
        if name not in ("d2t", "t2d"):
            assert torch.equal(state[ours], tensor), name
    assert len(state) == len({name.replace("hidden_norm", "input_layernorm") for name in more}) + 14
    export_head(head, tmp_path / "ours", ExportConfig(["vllm"], "float32"), {})
    assert same_state(load_head(tmp_path / "ours", DIMS), head)


def test_sharded_weights(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3_CONFIG))
    expect_eagle3(load_head(tmp_path, DIMS), tensors)


EAGLE_LAYOUTS = {
    "yuhuili": ({**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": True}, "pytorch_model.bin"),
    "vllm": (EAGLE_CONFIG, "model.safetensors"),
    "vllm-nested": (NESTED_EAGLE, "model.safetensors"),
    "sglang": ({**LLAMA, "architectures": ["LlamaForCausalLMEagle"]}, "model.safetensors"),
}


@pytest.mark.parametrize(("config", "weights"), EAGLE_LAYOUTS.values(), ids=EAGLE_LAYOUTS.keys())
def test_eagle1_layouts(tmp_path: Path, config: dict[str, Any], weights: str) -> None:
    tensors = eagle_tensors()
    on_disk = embedded({**tensors, "fc.bias": torch.zeros(D)})
    head = load_head(write(tmp_path, config, on_disk, weights), DIMS)
    state = head.state_dict()
    assert head.config.type == "eagle" and state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert head.dims == replace(DIMS, intermediate_size=64)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_eagle1_with_a_bias_on_fc(tmp_path: Path, weights: str) -> None:
    """The reference trains one by default; vLLM would drop it, SGLang reads it."""
    bias = random(D, seed=77)
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": True}
    head = load_head(write(tmp_path / "theirs", config, {**eagle_tensors(), "fc.bias": bias}, weights), DIMS)
    assert head.config.fc_bias and torch.equal(head.fc.bias, bias)
    head.bind(TargetEnds(random(V, D, seed=4), Teacher(random(V, D, seed=5))))
    embedding, feature = random(2, D, seed=6), random(2, D, seed=7)
    expected = torch.cat((embedding, feature), -1) @ eagle_tensors()["fc.weight"].T + bias
    torch.testing.assert_close(head.mix(embedding, feature), expected)
    report = export_head(head, tmp_path / "sglang", ExportConfig(["sglang"], "float32"), {})["sglang"]
    assert report.loads("sglang") and same_state(load_head(tmp_path / "sglang", DIMS), head)
    (tmp_path / "sglang/headstart.json").unlink()
    assert same_state(load_head(tmp_path / "sglang", DIMS), head)
    with pytest.raises(FormatError, match=r"vLLM 0.32 loads wrongly: fc.bias is not zero.*export.engines=\[sglang\]"):
        export_head(head, tmp_path / "portable", ExportConfig(), {})
    with torch.no_grad():
        head.fc.bias.zero_()  # still a parameter of the head
    export_head(head, tmp_path / "zero", ExportConfig(["sglang"], "float32"), {})
    assert same_state(load_head(tmp_path / "zero", DIMS), head)


def test_eagle1_speculators(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    head = write(tmp_path, SPECULATORS_EAGLE_CONFIG, speculators_eagle(tensors))
    state = load_head(head, DIMS).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


MEDUSA_LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "fasterdecoding-pt": (MEDUSA_V1_CONFIG, dict, "medusa_lm_head.pt"),
    "tgi-v1": (MEDUSA_V1_CONFIG, dict, "medusa_lm_head.safetensors"),
    "prefixed": (
        MEDUSA_V1_CONFIG,
        lambda t: {f"medusa_heads.{name}": tensor for name, tensor in t.items()},
        "medusa_lm_head.safetensors",
    ),
    # the published config of medusa-vicuna-7b-v1.3 says 2 heads; its file holds more
    "config-undercounts": ({**MEDUSA_V1_CONFIG, "medusa_num_heads": 2}, dict, "medusa_lm_head.pt"),
    "vllm": (MEDUSA_CONFIG, vllm_medusa, "model.safetensors"),
}


@pytest.mark.parametrize(("config", "rename", "weights"), MEDUSA_LAYOUTS.values(), ids=MEDUSA_LAYOUTS.keys())
def test_medusa_layouts(
    tmp_path: Path, config: dict[str, Any], rename: Callable[[Tensors], Tensors], weights: str
) -> None:
    tensors = medusa_tensors()
    head = load_head(write(tmp_path, config, rename(tensors), weights), DIMS)
    state, expected = head.state_dict(), vllm_medusa(tensors)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert (head.config.depth, head.config.num_layers, head.config.lm_head) == (3, 1, "own")


def test_medusa_of_several_blocks_and_no_target_given(tmp_path: Path) -> None:
    head = load_head(write(tmp_path, MEDUSA_V1_CONFIG, medusa_tensors(4, 2), "medusa_lm_head.safetensors"))
    assert (head.config.depth, head.config.num_layers) == (4, 2)
    assert (head.dims.hidden_size, head.dims.vocab_size) == (D, V)


def test_tgi_v2_shares_the_targets_lm_head(tmp_path: Path) -> None:
    tensors = medusa_tensors(own=False)
    head = load_head(write(tmp_path, MEDUSA_V1_CONFIG, tensors, "medusa_lm_head.safetensors"), DIMS)
    assert head.config.lm_head == "shared"
    head.bind(TargetEnds(random(V, D, seed=1), Teacher(random(V, D, seed=2))))
    hidden = random(2, D, seed=3)
    block = hidden + torch.nn.functional.silu(hidden @ tensors["1.0.linear.weight"].T + tensors["1.0.linear.bias"])
    torch.testing.assert_close(head.draft_logits(hidden)[:, 1], block @ random(V, D, seed=2).T)


def test_medusa_blocks_without_bias_get_zeros(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in vllm_medusa(medusa_tensors()).items() if not name.endswith("bias")}
    state = load_head(write(tmp_path, {**MEDUSA_CONFIG, "medusa_fc_bias": False}, tensors), DIMS).state_dict()
    assert not any(state[f"blocks.{i}.layers.0.bias"].any() for i in range(3))


# continue training, re-export


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3"])
def test_an_imported_head_trains_on_and_is_exported_again(tmp_path: Path, family: str) -> None:
    files = {
        "medusa": (MEDUSA_V1_CONFIG, medusa_tensors(), "medusa_lm_head.pt"),
        "eagle": (EAGLE_CONFIG, eagle_tensors(), "pytorch_model.bin"),
        "eagle3": (YUHUILI_CONFIG, eagle3_tensors(), "pytorch_model.bin"),
    }
    head = load_head(write(tmp_path / "theirs", *files[family]), DIMS)
    teacher = Teacher(random(V, D, seed=5))
    head.bind(TargetEnds(random(V, D, seed=4), teacher))
    tokens, turns = torch.arange(12) % V, torch.tensor([-1, -1] + [0] * 10)
    batch = FeatureBatch.pack([(tokens, turns)], head.depth)
    hidden = random(12, D, seed=6)
    argmax = teacher.logits(hidden[batch.anchors.row_A + 1]).argmax(-1)
    batch = replace(batch, hidden_RD=hidden, streams_RkD=random(12, 3, D, seed=7), teacher_argmax_A=argmax)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
    head.train().loss(batch, teacher).sum_T.sum().backward()
    optimizer.step()
    assert any(not torch.equal(before[name], tensor) for name, tensor in head.state_dict().items())
    export_head(head, tmp_path / "ours", ExportConfig(dtype="float32"), {})
    assert same_state(load_head(tmp_path / "ours", DIMS), head)


# refusals: nothing unknown is skipped


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


REFUSED: dict[str, tuple[tuple[dict[str, Any], Callable[[], Tensors]], dict[str, Any], Callable[..., Any], str]] = {
    "norm before residual": (E3, {"norm_before_residual": True}, dict, "norm_before_residual is true"),
    "norm output, nested": (E3, {"eagle_config": {"norm_output": True}}, dict, "norm_output is True"),
    "norm output as TensorRT-LLM alone reads it": (
        E3,
        {"eagle_config": {"return_hidden_post_norm": True}},
        dict,
        "return_hidden_post_norm.*at top level",
    ),
    "norm output that is no flag": (E3, {"norm_output": 1}, dict, "norm_output is 1, expected true or false"),
    "norm before fc": (E3, {"norm_before_fc": True}, dict, "lacks input_norm.weight"),
    "norm before fc, nested": (E3, {"eagle_config": {"norm_before_fc": True}}, dict, "lacks input_norm.weight"),
    "norm before fc, said twice": (
        E3,
        {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}},
        dict,
        "Write both alike",
    ),
    "fc norm": (E3, {"fc_norm": True}, dict, "lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
    "fc norm, nested": (E3, {"eagle_config": {"fc_norm": True}}, dict, "fc_norm is True"),
    "both norms before fc": (E3, {"fc_norm": True, "norm_before_fc": True}, dict, "are both set"),
    "fc norm without its setting": (
        E3,
        {},
        lambda t: {**t, **stream_norms("aux_norm_low")},
        "unknown aux_norm_low.weight",
    ),
    "attention bias": (E3, {"attention_bias": True}, dict, "attention_bias is True"),
    "quantised": (E3, {"quantization_config": {"quant_method": "fp8"}}, dict, "quantization_config"),
    "P-EAGLE": (E3, {"ptd_token_id": 5}, embedded, "lacks mask_hidden"),
    "no aux features": (E3, {"eagle_config": {"use_aux_hidden_state": False}}, dict, "use_aux_hidden_state is false"),
    "another family": (E3, {"model_type": "qwen2"}, dict, "model_type is 'qwen2'"),
    "Qwen3's without norms": (E3, {"model_type": "qwen3"}, dict, "lacks midlayer.self_attn.k_norm.weight"),
    "two layers": (E3, {"num_hidden_layers": 2}, dict, "lacks layers.1.input_layernorm.weight"),
    "a layer too many": (E3, {}, lambda t: {**t, **later_layer(1, "hidden_norm")}, "unknown layers.1.hidden_norm"),
    "too many layers": (E3, {"num_hidden_layers": 65}, dict, "num_hidden_layers is 65, expected an integer from 1 to"),
    "two layers, EAGLE-1": (E1, {"num_hidden_layers": 2}, dict, "an EAGLE-1 draft has one layer"),
    "two names of a norm": (
        E3,
        {"num_hidden_layers": 2},
        lambda t: {**t, **later_layer(1, "input_layernorm"), "layers.1.hidden_norm.weight": torch.ones(D)},
        "input_layernorm.weight and layers.1.hidden_norm.weight differ",
    ),
    "layers that read embeddings again": (
        (EAGLE3_CONFIG, lambda: eagle3_tensors("layers.0.")),
        {"num_hidden_layers": 2},
        lambda t: {**{name.replace("layers.0.", "layers.1."): x.clone() for name, x in t.items()}, **t},
        "layers.1.self_attn.q_proj.weight is .32, 64.*layer 1 reads embeddings again",
    ),
    "sliding layers": (
        E3,
        {"layer_types": ["sliding_attention"]},
        dict,
        "layer_types is .*expected full_attention for each of 1",
    ),
    "sliding window": (E1, {"sliding_window": 128}, dict, "sliding_window is 128"),
    "layers disagree": (
        E3,
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        dict,
        r"\[1, 3, 4\].*name different layers",
    ),
    "layers unsorted": (E3, {"eagle_aux_hidden_state_layer_ids": [4, 2, 5], "eagle_config": {}}, dict, "ascending"),
    "layer k = L": (E3, {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "eagle_config": {}}, dict, "below 8"),
    "layer 0": (E3, {"eagle_aux_hidden_state_layer_ids": [0, 4, 5], "eagle_config": {}}, dict, "ascending"),
    "another width": (E3, {"target_hidden_size": 48}, dict, "hidden_size is 48 and the target has 32"),
    "another vocabulary": (E3, {"vocab_size": 98}, dict, "vocab_size is 98 and the target has 97"),
    "vocabulary too large": (E3, {"draft_vocab_size": 98}, dict, "draft_vocab_size 98 exceeds vocab_size 97"),
    "d2t missing": (E3, {}, lambda t: without(t, "d2t", "t2d"), "d2t is missing"),
    "d2t holds ids": (E3, {}, lambda t: {**t, "d2t": draft_ids() + 30}, "must hold offsets"),
    "d2t in floats": (E3, {}, lambda t: {**t, "d2t": t["d2t"].float()}, "expected int64 offsets"),
    "t2d of others": (E3, {}, lambda t: {**t, "t2d": ~t["t2d"]}, "does not mark"),
    "lm_head missing": (E3, {}, lambda t: without(t, "lm_head.weight"), "lm_head.weight is missing.*wrong"),
    "a tensor missing": (E3, {}, lambda t: without(t, "midlayer.hidden_norm.weight"), "lacks midlayer.hidden_norm"),
    "a tensor too many": (E3, {}, lambda t: {**t, "input_norm.weight": torch.ones(96)}, "unknown input_norm.weight"),
    "q norm": (E3, {}, lambda t: {**t, "midlayer.self_attn.q_norm.weight": torch.ones(8)}, "unknown midlayer.*q_norm"),
    "mask_hidden": (E3, {}, lambda t: {**t, "mask_hidden": torch.ones(1, 1, 96)}, "mask_token_id is missing"),
    "wrong shape": (E3, {"intermediate_size": 65}, dict, r"gate_proj.*\[64, 32\], expected floating point \[65, 32\]"),
    "own embeddings missing": (E3, {"hidden_size": 16, "target_hidden_size": 32}, dict, "lacks embed_tokens.weight"),
    "EAGLE-1 lm_head": (E1, {}, lambda t: {**t, "lm_head.weight": torch.ones(V, D)}, "unknown lm_head.weight"),
    "input_layernorm": (
        E1,
        {},
        lambda t: {**t, "layers.0.input_layernorm.weight": torch.ones(D)},
        "unknown layers.0.input_layernorm.weight",
    ),
    "embeddings of others": (
        E1,
        {},
        lambda t: {**t, "embed_tokens.weight": torch.ones(50, D)},
        r"\[50, 32\], expected the target's \[97, 32\]",
    ),
    "both spellings": (E1, {}, lambda t: {**t, "model.fc.weight": t["fc.weight"].clone()}, "both with and without"),
    "rope spellings disagree": (E1, {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, dict, "disagree"),
    "unknown rope": (E1, {"rope_scaling": {"type": "magic"}}, dict, "magic"),
    "unknown rope field": (E1, {"rope_scaling": {**LLAMA["rope_scaling"], "twist": 2}}, dict, "twist"),
    "rope half said": (E1, {"rope_scaling": {"type": "linear"}}, dict, "linear needs factor"),
    "Medusa keys": (M, {}, lambda t: {**t, "blocks.0.norm.weight": torch.ones(D)}, "blocks.0.norm.weight"),
    "Medusa matrix missing": (M, {}, lambda t: without(t, "lm_heads.2.weight"), "lacks lm_heads.2.weight"),
    "Medusa head half there": (M, {}, lambda t: without(t, "blocks.1.layers.0.bias"), "lacks blocks.1.layers.0.bias"),
    "Medusa reduced": (M, {"truncated_vocab_size": 50}, dict, "truncated_vocab_size is 50"),
    "Medusa shape": (M, {"hidden_size": 33, "vocab_size": V}, dict, "hidden_size is 33 and the target has 32"),
}


@pytest.mark.parametrize(("base", "changes", "edit", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(tmp_path: Path, base: Any, changes: dict[str, Any], edit: Callable[..., Any], message: str) -> None:
    config, tensors = base
    with pytest.raises(FormatError, match=message):
        load_head(write(tmp_path, {**config, **changes}, edit(tensors())), DIMS)


def test_speculators_residual_defaults_to_the_variant_we_do_not_run(tmp_path: Path) -> None:
    config = {key: value for key, value in SPECULATORS_CONFIG.items() if key != "norm_before_residual"}
    with pytest.raises(FormatError, match="norm_before_residual is true"):
        load_head(write(tmp_path, config, eagle3_tensors("layers.0.")), DIMS)


def test_another_speculator_is_refused(tmp_path: Path) -> None:
    change = {"speculators_model_type": "mlp"}
    with pytest.raises(FormatError, match="speculators_model_type"):
        load_head(write(tmp_path, {**SPECULATORS_CONFIG, **change}, eagle3_tensors("layers.0.")), DIMS)


def test_a_model_that_is_no_head_lists_what_is_readable(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Readable: EAGLE-3, SpecForge, DSpark, EAGLE-1/2"):
        load_head(write(tmp_path, LLAMA, {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}), DIMS)


def test_embeddings_in_a_file_can_be_compared_with_the_targets(tmp_path: Path) -> None:
    embedding = random(V, D, seed=90)
    write(tmp_path, EAGLE_CONFIG, embedded(eagle_tensors()))
    check_embeddings(tmp_path, embedding)
    check_embeddings(tmp_path, embedding.to(torch.bfloat16))
    with pytest.raises(FormatError, match="differs from the target's embedding"):
        check_embeddings(tmp_path, embedding + 0.1)
