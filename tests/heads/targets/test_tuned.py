"""A target with an adapter merged computes what peft computes with it; what is no fitting LoRA is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from reference.tiny import SIZES
from safetensors.torch import load_file, save_file

from headstart.data.store import check_fingerprint
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.files import sha256_file
from headstart.heads.targets.load import load_target, weightless_target
from headstart.heads.targets.target import TargetConfig
from headstart.heads.targets.tuned import (
    TUNED_KEY,
    merged_adapter_in,
    merged_for_now,
    read_adapter,
    save_tuned,
    tuned_bytes,
)
from headstart.identity import of_target

TOKENS = torch.arange(3, 23)[None]


def model_of(name: str = "Llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    ).eval()


def save_model(directory: Path, model: Any) -> Path:
    """A target's directory, with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models

    vocab = {chr(33 + index): index for index in range(SIZES["vocab_size"])}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="#")
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def save_lora(directory: Path, model: Any, scale: float = 0.3, seed: int = 1, **settings: Any) -> Any:
    """A random adapter that peft saves; returns peft's model with it."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings}
    tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=noise))
    tuned.peft_config["default"].base_model_name_or_path = "me/base"
    tuned.save_pretrained(directory, save_embedding_layers=False)
    return tuned.eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", model_of())


def config(base: Path, adapter: Path | None, **changes: Any) -> TargetConfig:
    return TargetConfig(
        **{"name": str(base), "adapter": None if adapter is None else str(adapter), "device": "cpu", **changes}
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS).logits.float()


LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all linear": {"target_modules": "all-linear"},
    "rank-stabilised": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "some layers": {"layers_to_transform": [1, 4]},
    "DoRA": {"use_dora": True},
    "output matrix": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("name", LORAS)
def test_a_tuned_target_computes_what_peft_computes(base: Path, tmp_path: Path, name: str) -> None:
    theirs = save_lora(tmp_path / "lora", model_of(), **LORAS[name])
    plain, tuned = load_target(config(base, None)), load_target(config(base, tmp_path / "lora"))
    assert (logits(tuned.model) - logits(theirs)).abs().max() < 1e-5
    assert (logits(tuned.model) - logits(plain.model)).abs().max() > 0.05
    hidden = tuned.forward_documents(TOKENS, ())[0]
    assert torch.allclose(tuned.teacher.logits(hidden[0]), logits(tuned.model)[0], atol=1e-5)
    assert not any(parameter.requires_grad for parameter in tuned.model.parameters())
    assert not any("lora" in key for key in tuned.model.state_dict())
    assert "lora (made for me/base) is merged into it" in tuned.notes[0]


def test_a_half_precision_target_is_the_rounded_sum(base: Path, tmp_path: Path) -> None:
    theirs = save_lora(tmp_path / "lora", model_of().bfloat16().float())
    tuned = load_target(config(base, tmp_path / "lora", dtype="bfloat16"))
    merged = theirs.merge_and_unload().state_dict()
    weights = tuned.model.state_dict()
    changed = [name for name in weights if "q_proj" in name or "down_proj" in name]
    assert len(changed) == 12
    for name in changed:
        assert weights[name].dtype == torch.bfloat16
        # float32 sums of peft and the float64 sum round alike but for ties
        equal = (weights[name] == merged[name].bfloat16()).float().mean()
        assert equal > 0.999


def test_the_fingerprint_says_what_the_target_is_made_of(base: Path, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora", model_of())
    save_lora(tmp_path / "other", model_of(), seed=2)
    plain, tuned = (
        load_target(config(base, None)).fingerprint(),
        load_target(config(base, tmp_path / "lora")).fingerprint(),
    )
    assert tuned["name"] == plain["name"] and tuned["revision"] == plain["revision"]
    assert tuned["weight_hash"] != plain["weight_hash"] == tuned["base_weight_hash"]
    assert tuned["adapter"] == str(tmp_path / "lora")
    assert {*tuned} - {*plain} == {"adapter", "adapter_digest", "base_weight_hash"}
    other = load_target(config(base, tmp_path / "other")).fingerprint()
    assert other["adapter_digest"] != tuned["adapter_digest"]
    with pytest.raises(TargetError, match="target weight_hash"):
        check_fingerprint(plain, tuned, tmp_path)
    # a small adapter can leave the sampled, rounded values as they are
    with pytest.raises(TargetError, match="adapter_digest: found None"):
        check_fingerprint(plain, {**tuned, "weight_hash": plain["weight_hash"]}, tmp_path)


def test_another_adapter_is_another_target(base: Path, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora", model_of())
    save_lora(tmp_path / "other", model_of(), seed=2)
    plain, one, other = (of_target(config(base, x)) for x in (None, tmp_path / "lora", tmp_path / "other"))
    assert "adapter" not in plain and len({json.dumps(x, sort_keys=True) for x in (plain, one, other)}) == 3
    # the digest does not depend on where the adapter is or for whom it was saved, but on its scale
    place = tmp_path / "lora" / "adapter_config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "base_model_name_or_path": "elsewhere"}))
    assert of_target(config(base, tmp_path / "lora")) == one
    place.write_text(json.dumps({**json.loads(place.read_text()), "lora_alpha": 9}))
    assert of_target(config(base, tmp_path / "lora")) != one


def test_a_saved_tuned_target_says_so(base: Path, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora", model_of())
    tuned = load_target(config(base, tmp_path / "lora"))
    assert tuned.merged_adapter is not None
    setattr(tuned.model.config, TUNED_KEY, tuned.merged_adapter.mark("me/base"))
    tuned.tokenizer.save_pretrained(tmp_path / "merged")
    tuned.model.save_pretrained(tmp_path / "merged")
    again = load_target(config(tmp_path / "merged", None))
    for key in ("weight_hash", "adapter_digest", "base_weight_hash"):
        assert again.fingerprint()[key] == tuned.fingerprint()[key]
    for load in (load_target, weightless_target):  # what training refuses, plan and doctor refuse
        with pytest.raises(TargetError, match="this adapter is merged into it already: leave it out"):
            load(config(tmp_path / "merged", tmp_path / "lora"))


def test_a_written_target_does_not_say_where_its_base_was(tmp_path: Path) -> None:
    """Some releases of transformers write that into these files."""

    class Tokenizer:
        def save_pretrained(self, place: Path) -> None:
            (place / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "/home/me", "kept": 1}))

    save_tuned(model_of(), Tokenizer(), tmp_path / "target", torch.float32, {"base": None})
    assert json.loads((tmp_path / "target" / "tokenizer_config.json").read_text()) == {"kept": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_written_target_holds_every_weight_once(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    model = model_of(tie_word_embeddings=tied)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old.safetensors").write_bytes(b"of an earlier export")
    save_tuned(model, None, tmp_path / "there", dtype, {"adapter_digest": "abc"})
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    weights = dict(model.named_parameters())  # tied ones once
    assert tensors.keys() == weights.keys() and ("lm_head.weight" in tensors) is not tied
    assert all(torch.equal(tensor, weights[name].to(dtype)) for name, tensor in tensors.items())
    assert sum(x.nbytes for x in tensors.values()) == tuned_bytes(model, dtype)
    assert not (tmp_path / "there" / "old.safetensors").exists() and len(list(tmp_path.iterdir())) == 1
    made_of = merged_adapter_in(transformers.AutoConfig.from_pretrained(tmp_path / "there"))
    assert made_of is not None and made_of.digest == "abc"


def test_merging_for_now_leaves_no_trace(base: Path, tmp_path: Path) -> None:
    theirs = save_lora(tmp_path / "lora", model_of(), target_modules=["q_proj", "lm_head"])
    model = load_target(config(base, None)).model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with merged_for_now(model, read_adapter(tmp_path / "lora")):
        assert (logits(model) - logits(theirs)).abs().max() < 1e-5
    assert merged_adapter_in(model.config) is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        path = place / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        tensors = load_file(place / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, place / "adapter_model.safetensors")

    return edit


A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another kind": (edit_config(peft_type="PREFIX_TUNING"), "peft_type: found 'PREFIX_TUNING', expected 'LORA'"),
    "a bias": (edit_config(bias="all"), "bias: found 'all', which is not merged here"),
    "whole modules": (edit_config(modules_to_save=["lm_head"]), r"modules_to_save: found \['lm_head'\]"),
    "activated": (edit_config(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens: found"),
    "unheard of": (edit_config(use_tomorrow=True), "use_tomorrow: found True, which is not merged here"),
    "changes the base": (edit_config(init_lora_weights="pissa"), "init_lora_weights: found 'pissa'"),
    "no tensors": (lambda place: (place / "adapter_model.safetensors").unlink(), "found no adapter_model.safetensors"),
    "no settings": (lambda place: (place / "adapter_config.json").unlink(), "found no adapter_config.json"),
    "settings that are none": (lambda place: (place / "adapter_config.json").write_text("[1]"), "expected an object"),
    "damaged": (lambda place: (place / "adapter_model.safetensors").write_bytes(b"x" * 90), "cannot be read"),
    "half a pair": (edit_tensors(lambda t: t.pop(A0)), "lora_A"),
    "another width": (
        edit_tensors(lambda t: t.update({A0: torch.ones(4, 31)})), r"is \[4, 31\].*makes it \[4, 32\].*another base"
    ),
    "another layer": (
        edit_tensors(lambda t: t.update({A0.replace("layers.0", "layers.77"): t[A0].clone()})),
        r"the target has no model.layers.77.self_attn.q_proj: it belongs to another base model \(me/base\)",
    ),
    "foreign tensor": (edit_tensors(lambda t: t.update({"prompt_embeddings": torch.ones(2, 2)})), "prompt_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_fitting_lora_is_refused_before_loading(base: Path, tmp_path: Path, name: str) -> None:
    save_lora(tmp_path / "lora", model_of())
    damage, words = REFUSED[name]
    damage(tmp_path / "lora")
    with pytest.raises(TargetError, match=words) as ahead:
        weightless_target(config(base, tmp_path / "lora"))
    assert "target.adapter" in str(ahead.value)
    with pytest.raises(TargetError, match=words):
        load_target(config(base, tmp_path / "lora"))


def test_a_tied_output_matrix_is_not_adapted(tmp_path: Path) -> None:
    place = save_model(tmp_path / "tied", model_of(tie_word_embeddings=True))
    save_lora(tmp_path / "lora", model_of(tie_word_embeddings=True), target_modules=["lm_head"])
    with pytest.raises(TargetError, match="adapts lm_head, which the target shares with its embeddings"):
        weightless_target(config(place, tmp_path / "lora"))


def test_an_embedding_is_not_adapted(base: Path, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora", model_of(), target_modules=["embed_tokens"])
    with pytest.raises(TargetError, match="embed_tokens"):
        weightless_target(config(base, tmp_path / "lora"))


def test_where_an_adapter_can_be(base: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such directory; expected one with adapter_config.json"):
        weightless_target(config(base, tmp_path / "nowhere"))
    with pytest.raises(TargetError, match="a whole model is given as target.name"):
        weightless_target(config(base, base))
    save_lora(tmp_path / "head" / "adapter", model_of())
    with pytest.raises(TargetError, match=r"its adapter is .*head.adapter"):
        weightless_target(config(base, tmp_path / "head"))
    with pytest.raises(ConfigError, match="target.adapter: found ' '"):
        weightless_target(config(base, Path(" ")))
    with pytest.raises(ConfigError, match="target.parallel=fsdp2.*merge it with peft"):
        load_target(config(base, tmp_path / "head" / "adapter", parallel="fsdp2"))


def test_the_files_of_an_adapter_stay_as_they_are(base: Path, tmp_path: Path) -> None:
    save_lora(tmp_path / "lora", model_of())
    before = {path.name: sha256_file(path) for path in (tmp_path / "lora").iterdir()}
    load_target(config(base, tmp_path / "lora"))
    assert {path.name: sha256_file(path) for path in (tmp_path / "lora").iterdir()} == before
