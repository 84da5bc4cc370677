"""The target's LoRA adapter: injected, switched off, saved for peft, merged, taken out."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from reference.tiny import SIZES
from torch import nn

from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.targets.adapter import (
    PREFIX,
    LoraSettings,
    adapter_off,
    add_adapter,
    has_adapter,
    linear_modules,
    merge_adapter,
    plain_weights,
    planned_parameters,
    remove_adapter,
    require_peft,
    save_adapter,
)
from headstart.heads.targets.target import Target

SETTINGS = LoraSettings(rank=4, alpha=8, dropout=0.0)
TOKENS = torch.arange(24).view(2, 12) * 7 % 97


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype).eval().requires_grad_(False)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def filled(model: nn.Module, settings: LoraSettings = SETTINGS) -> dict[str, nn.Parameter]:
    """An adapter that changes the model's answers."""
    parameters = add_adapter(model, settings, seed=5)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.3)
    return parameters


def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed():
    model = tiny_llama()
    plain = logits(model)
    parameters = add_adapter(model, SETTINGS, seed=5)
    assert torch.equal(logits(model), plain)
    assert len(parameters) == 2 * 7 * SIZES["num_hidden_layers"]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in parameters.values())
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
    again = add_adapter(model, SETTINGS, seed=6)  # it has one: it stays
    assert all(again[name] is p for name, p in parameters.items())
    torch.manual_seed(77)
    other = add_adapter(tiny_llama(), SETTINGS, seed=5)
    assert other.keys() == parameters.keys()
    assert all(torch.equal(other[name], p) for name, p in parameters.items())
    down = parameters["model.layers.0.mlp.down_proj.lora_A.weight"]
    assert down.shape == (4, 48) and 0.9 < down.abs().max() * 48**0.5 <= 1
    different = add_adapter(tiny_llama(), SETTINGS, seed=6)
    assert not torch.equal(different["model.layers.0.mlp.down_proj.lora_A.weight"], down)


def test_parameters_are_float32_whatever_the_target_is():
    parameters = add_adapter(tiny_llama(torch.bfloat16), SETTINGS, seed=5)
    assert {p.dtype for p in parameters.values()} == {torch.float32}


def test_switched_off_it_computes_what_the_plain_model_does():
    model = tiny_llama()
    plain = logits(model)
    parameters = filled(model)
    assert (logits(model) - plain).abs().max() > 0.01
    with adapter_off(model):
        assert torch.equal(logits(model), plain)
        assert all(p.requires_grad for p in parameters.values())
    assert (logits(model) - plain).abs().max() > 0.01


def test_taken_out_the_model_is_the_plain_one():
    model = tiny_llama()
    before, names = copy.deepcopy(model.state_dict()), [name for name, _ in model.named_modules()]
    modules = linear_modules(model)
    filled(model)
    assert linear_modules(model) == modules
    assert plain_weights(model).keys() == before.keys()
    remove_adapter(model)
    assert not has_adapter(model) and [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert linear_modules(model) == modules
    filled(model)  # it can be injected again


def test_the_fingerprint_stays_that_of_the_plain_target():
    plain = Target.from_model(tiny_llama()).fingerprint()
    model = tiny_llama()
    filled(model)
    with adapter_off(model):
        assert Target.from_model(model).fingerprint() == plain


@pytest.mark.parametrize("modules", [["all-linear"], ["q_proj", "mlp.down_proj"], ["model.layers.1.mlp.up_proj"]])
def test_peft_loads_what_is_saved(tmp_path, modules):
    from peft import PeftModel

    model = tiny_llama()
    settings = LoraSettings(rank=4, alpha=6, dropout=0.05, modules=modules)
    parameters = filled(model, settings)
    save_adapter(model, tmp_path, "some/base")
    loaded = PeftModel.from_pretrained(tiny_llama(), str(tmp_path)).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert (logits(model) - logits(tiny_llama())).abs().max() > 1e-4
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/base"
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6, 0.05)
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    if modules == ["all-linear"]:
        expected = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert config["target_modules"] == expected
    saved = loaded.state_dict()
    assert {f"{PREFIX}{name}".replace("_A.", "_A.default.").replace("_B.", "_B.default.") for name in parameters} == {
        name for name in saved if "lora_" in name
    }
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_names_of_the_files_are_those_that_peft_writes(tmp_path):
    from peft import PeftModel
    from safetensors.torch import load_file

    model = tiny_llama()
    filled(model)
    save_adapter(model, tmp_path / "ours", "base")
    PeftModel.from_pretrained(tiny_llama(), str(tmp_path / "ours")).save_pretrained(str(tmp_path / "theirs"))
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_it_computes_the_same(tmp_path, dtype):
    model = tiny_llama(dtype)
    adapter = {name: p.detach().double() for name, p in filled(model).items()}
    save_adapter(model, tmp_path, "base")
    merged, plain = tiny_llama(dtype), tiny_llama(dtype)
    merge_adapter(merged, tmp_path)
    assert not has_adapter(merged) and merged.state_dict().keys() == plain.state_dict().keys()
    for name, weight in plain.state_dict().items():
        stem = name.removesuffix(".weight")
        expected = weight
        if f"{stem}.lora_A.weight" in adapter:  # the exact sum, rounded once
            update = adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"] * 2
            expected = (weight.double() + update).float().to(dtype)
            assert not torch.equal(expected, weight)
        assert torch.equal(merged.state_dict()[name], expected), name
    if dtype == torch.float32:
        torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


def test_modules_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"joint.modules: found 'c_attn'.*q_proj.*all-linear"):
        add_adapter(tiny_llama(), LoraSettings(modules=["q_proj", "c_attn"]), 0)
    with pytest.raises(ConfigError, match="joint.modules: found 'lm_head'"):
        add_adapter(tiny_llama(), LoraSettings(modules=["lm_head"]), 0)
    with pytest.raises(ConfigError, match="joint.modules: found no name"):
        add_adapter(tiny_llama(), LoraSettings(modules=[]), 0)


def test_files_of_another_target_are_refused(tmp_path):
    model = tiny_llama()
    filled(model)
    save_adapter(model, tmp_path, "base")
    for changes in ({"intermediate_size": 40}, {"num_hidden_layers": 5}, {"num_hidden_layers": 7}):
        other = tiny_llama(**changes)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(TargetError, match="not an adapter of this target"):
            merge_adapter(other, tmp_path)
        assert not has_adapter(other)
        assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    with pytest.raises(TargetError, match=r"found no adapter_model.safetensors"):
        merge_adapter(tiny_llama(), tmp_path / "nowhere")


def test_tied_embeddings_stay_tied(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    filled(model)
    save_adapter(model, tmp_path, "base")
    merged = tiny_llama(tie_word_embeddings=True)
    merge_adapter(merged, tmp_path)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


def test_layers_that_hold_their_matrix_transposed(tmp_path):
    """GPT-2's layers are Conv1D: their weights are [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def gpt2() -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
        return GPT2LMHeadModel(config).eval().requires_grad_(False)

    model = gpt2()
    planned = planned_parameters(model, SETTINGS)
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        parameters = filled(model)
    assert {n: p.shape for n, p in parameters.items()} == {n: p.shape for n, p in planned.items()}
    assert len(parameters) == 2 * 4 * 2
    save_adapter(model, tmp_path, "base")
    merged = gpt2()
    merge_adapter(merged, tmp_path)
    assert (logits(model) - logits(gpt2())).abs().max() > 0.01
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


def test_planned_parameters_are_those_that_are_injected():
    model = tiny_llama()
    for modules in (["all-linear"], ["q_proj", "mlp.down_proj"]):
        settings = LoraSettings(rank=4, modules=modules)
        planned = planned_parameters(model, settings)
        added = add_adapter(tiny_llama(), settings, 0)
        assert {n: p.shape for n, p in planned.items()} == {n: p.shape for n, p in added.items()}
        assert not has_adapter(model)


def test_a_missing_peft_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="joint.enabled: found true, and peft cannot be imported.*pip install peft"):
        require_peft()
