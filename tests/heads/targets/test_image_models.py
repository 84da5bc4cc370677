"""Targets that read images: their text part is loaded, gives features, and is saved again, as a text model's is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference.image_models import MODELS, TEXT, TEXT_ALONE, save_image_model
from reference.tiny import turns_of
from reference.tuned_runs import save_random_adapter
from reference.words import save_word_tokenizer

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import HeadstartError, TargetError
from headstart.heads.targets.load import check_shardable, load_target, target_dims, weightless_target
from headstart.heads.targets.probe import probe_tokens
from headstart.heads.targets.sharded import WeightFiles, fill
from headstart.heads.targets.target import Target, TargetConfig
from headstart.heads.targets.tuned import MergedAdapter, save_tuned

VOCAB = 55  # tokens from here on stand for images
PATTERNS = ["..AAA", "." * 9 + "A" * 11 + "..BB", "AAA", "." * 3 + "A" * 14]
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Name → the directory of a model, and the whole model."""
    root = tmp_path_factory.mktemp("image-models")
    return {name: (root / name, save_image_model(name, root / name)) for name in MODELS}


def loaded(directory: Path) -> Target:
    return load_target(TargetConfig(name=str(directory), device="cpu", dtype="float32"))


@torch.no_grad()
def states_of(model: Any, tokens_T: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states (L + 1 of them) and logits of a document by itself, as the whole model makes them of text."""
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model = model.language_model  # a forward without images fails in transformers when it returns image states
    out = model(input_ids=tokens_T[None], output_hidden_states=True, use_cache=False)
    return [h[0] for h in out.hidden_states], out.logits[0].float()


@each_model
def test_features_are_those_of_the_whole_model_on_text(name: str, saved: dict[str, tuple[Path, Any]]) -> None:
    directory, whole = saved[name]
    target = loaded(directory)
    noise, layer_ids = torch.Generator().manual_seed(0), (1, 2, 4)
    documents = [
        (torch.randint(3, VOCAB, (len(p),), generator=noise), torch.tensor(turns_of(p), dtype=torch.int64))
        for p in PATTERNS
    ]
    packed, start = target.extract(FeatureBatch.pack(documents, 3, pad_to=70), FeatureSpec(layer_ids)), 0
    for tokens_T, _ in documents:
        states, logits_TV = states_of(whole, tokens_T)
        rows = slice(start, start + len(tokens_T))
        torch.testing.assert_close(packed.hidden_RD[rows], states[-1], rtol=1e-4, atol=1e-4)
        for slot, k in enumerate(layer_ids):
            torch.testing.assert_close(packed.streams_RkD[rows, slot], states[k], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.teacher.logits(packed.hidden_RD[rows]), logits_TV, rtol=1e-3, atol=1e-3)
        start += len(tokens_T)


@each_model
def test_dimensions_and_parts(name: str, saved: dict[str, tuple[Path, Any]]) -> None:
    """The dimensions are the text part's; a user reads which other parts were loaded, or left in the files."""
    directory, whole = saved[name]
    target = loaded(directory)
    weightless = weightless_target(TargetConfig(name=str(directory)))
    for dims in (target.dims, weightless.dims, target_dims(str(directory))):
        assert (dims.hidden_size, dims.vocab_size, dims.num_layers) == (32, TEXT["vocab_size"], 5)
        assert (dims.num_heads, dims.num_kv_heads, dims.head_dim) == (4, 2, 8)
    assert weightless.embed_VD.is_meta and type(weightless.model) is type(target.model)
    assert weightless.teacher.softcap == target.teacher.softcap and weightless.teacher.scale == target.teacher.scale
    assert target.stop_token_ids == (2,)
    said = "\n".join(target.notes)
    if name in TEXT_ALONE:
        assert type(target.model).__name__ == TEXT_ALONE[name]
        assert "loaded with it" not in said
        assert sum(x.numel() for x in target.model.parameters()) < sum(x.numel() for x in whole.parameters())
    else:
        assert type(target.model) is type(whole)
        assert f"heads are trained on the text part of {type(whole).__name__}" in said
        assert "loaded with it and not used" in said and "loaded with it" in "\n".join(weightless.notes)
        for x, y in zip(target.model.state_dict().values(), whole.state_dict().values(), strict=True):
            assert torch.equal(x, y)
    if name == "llama4":
        assert "does not use: multi_modal_projector, vision_model" in said


@each_model
def test_a_tuned_target_is_saved_whole_and_loads_again(
    name: str, saved: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    target = loaded(saved[name][0])
    mark = MergedAdapter("adapter", "0" * 64, target.weight_hash()).mark(None)
    save_tuned(target.model, target.tokenizer, tmp_path / "tuned", torch.float32, mark)
    again = loaded(tmp_path / "tuned")
    assert again.weight_hash() == target.weight_hash() and type(again.model) is type(target.model)
    assert again.merged_adapter is not None and again.merged_adapter.digest == "0" * 64


#: the others hold tensors under other names than the model does, or buffers that their config alone does not give
SHARDABLE = ("qwen3-vl",)


@each_model
def test_what_is_sharded_is_the_same_model_and_the_rest_is_refused_before_work_starts(
    name: str, saved: dict[str, tuple[Path, Any]]
) -> None:
    directory = saved[name][0]
    weightless = weightless_target(TargetConfig(name=str(directory), parallel="fsdp2"))
    if name not in SHARDABLE:
        with pytest.raises(TargetError, match=r"set target\.parallel=none"):
            check_shardable(weightless)
        return
    check_shardable(weightless)
    fill(weightless.model, WeightFiles(directory), torch.device("cpu"), None)
    whole, tokens_BT = loaded(directory), torch.randint(3, VOCAB, (2, 9))
    with torch.no_grad():
        found, expected = (model(input_ids=tokens_BT).logits for model in (weightless.model, whole.model))
    assert torch.equal(found, expected)


def test_a_template_beside_the_tokenizer_is_taken(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    for path in saved["qwen3-vl"][0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = TargetConfig(name=str(tmp_path))
    assert weightless_target(config).tokenizer.chat_template is None
    beside = tmp_path / "chat_template.json"
    beside.write_text('{"chat_template": "{{ messages[0].content }}"}')
    tokenizer = weightless_target(config).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=False) == "w7"
    (tmp_path / "chat_template.jinja").write_text("its own")
    assert weightless_target(config).tokenizer.chat_template == "its own"
    (tmp_path / "chat_template.jinja").unlink()
    for broken in ("[]", '{"chat_template": 5}', "{"):
        beside.write_text(broken)
        with pytest.raises(HeadstartError, match=r"chat_template\.json"):
            weightless_target(config)


def test_a_missing_weight_of_the_text_part_is_told(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory, _ = saved["llama4"]
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in weights.items() if not key.endswith("layers.3.self_attn.k_proj.weight")}
    assert len(kept) == len(weights) - 1
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.3\.self_attn\.k_proj\.weight is missing"):
        loaded(tmp_path)


SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("AutoModelForMaskedLM", SMALL, r"BertLMHeadModel: no list of 2 decoder layers.*expected a causal"),
    "modernbert": ("AutoModelForMaskedLM", SMALL, r"of type modernbert \(ModernBertForMaskedLM\).*expected a causal"),
    "t5": (
        "AutoModelForSeq2SeqLM", {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
        r"of type t5 \(T5ForConditionalGeneration\), whose decoder reads an encoder's output: expected a causal",
    ),
    "vit": ("AutoModel", {**SEES, "patch_size": 8}, r"of type vit \(ViTModel\).*no causal language model.*expected"),
    "qwen3_vl_text": ("AutoModel", TEXT, r"of type qwen3_vl_text \(Qwen3VLTextModel\).*expected a causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_target_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    auto, settings, message = UNFIT[name]
    extra = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2} if name == "modernbert" else {}
    config = transformers.AutoConfig.for_model(name, **settings, **extra)
    getattr(transformers, auto).from_config(config).save_pretrained(tmp_path)
    save_word_tokenizer(tmp_path)
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError, match=message) as caught:
            load(TargetConfig(name=str(tmp_path), device="cpu"))
        assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_an_unknown_type_is_refused_without_a_list_of_all_types(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    save_word_tokenizer(tmp_path)
    with pytest.raises(TargetError, match="Unrecognized model") as caught:
        weightless_target(TargetConfig(name=str(tmp_path)))
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_the_probe_leaves_out_tokens_that_stand_for_images(tmp_path: Path) -> None:
    """Gemma 4 embeds another token in their place, so the decoder alone would give other states."""
    plain = probe_tokens(259, torch.device("cpu"))
    taken = int(plain[0, 3])
    config = transformers.AutoConfig.for_model("gemma4", image_token_id=taken)
    assert taken not in probe_tokens(259, torch.device("cpu"), config)
    assert torch.equal(probe_tokens(259, torch.device("cpu"), config.get_text_config()), plain)
    model = save_image_model("gemma4", tmp_path, vocab_size=259)
    model.config.image_token_id = taken
    model.config.save_pretrained(tmp_path)
    assert loaded(tmp_path).dims.vocab_size == 259


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl", "gemma4"])
def test_an_adapter_of_the_text_part_is_merged_and_served_with_the_whole_model(
    name: str, saved: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Adapters touch the text part's layers alone, although image parts have layers of the same names."""
    from peft import PeftModel

    directory, _ = saved[name]
    save_random_adapter(directory, tmp_path / "adapter", 0.1)
    tuned = load_target(TargetConfig(name=str(directory), device="cpu", adapter=str(tmp_path / "adapter")))
    base = loaded(directory)
    changed = {
        key for key, value in tuned.model.state_dict().items() if not torch.equal(value, base.model.state_dict()[key])
    }
    assert changed and all("language_model.layers" in key for key in changed)
    tokens_BT = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    served = PeftModel.from_pretrained(base.model, tmp_path / "adapter")
    save_tuned(tuned.model, tuned.tokenizer, tmp_path / "tuned", torch.float32, {})
    with torch.no_grad():
        expected = served(input_ids=tokens_BT).logits
        torch.testing.assert_close(tuned.model(input_ids=tokens_BT).logits, expected, rtol=1e-3, atol=1e-3)
        again = loaded(tmp_path / "tuned").model(input_ids=tokens_BT).logits
        assert torch.equal(again, tuned.model(input_ids=tokens_BT).logits)

#: model type → hidden size, vocabulary, layers of the text part as transformers has it by default: full-sized models
FULL_SIZE = {
    "gemma3": (2304, 262208, 26), "gemma4": (2304, 262144, 30), "llama4": (5120, 202048, 48),
    "mistral3": (5120, 131072, 40), "qwen2_5_vl": (8192, 152064, 80), "qwen3_vl": (4096, 151936, 32),
    "glm4v_moe": (4096, 151424, 46), "qwen3_5": (4096, 248320, 32), "qwen3_5_moe": (2048, 248320, 40),
}  # fmt: skip


@pytest.mark.parametrize("kind", FULL_SIZE)
def test_a_full_sized_model_is_known_from_its_config_alone(kind: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    save_word_tokenizer(tmp_path)
    target = weightless_target(TargetConfig(name=str(tmp_path)))
    assert (target.dims.hidden_size, target.dims.vocab_size, target.dims.num_layers) == FULL_SIZE[kind]
    assert target.embed_VD.is_meta and target.dims == target_dims(str(tmp_path))


def test_a_published_config_is_read_as_its_makers_wrote_it(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "fixtures" / "configs" / "gemma-3-12b-it.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    save_word_tokenizer(tmp_path)
    target = weightless_target(TargetConfig(name=str(tmp_path)))
    assert type(target.model).__name__ == "Gemma3ForConditionalGeneration"
    assert (target.dims.hidden_size, target.dims.vocab_size, target.dims.num_layers) == (3840, 262208, 48)
    assert "multi_modal_projector, vision_tower are loaded with it and not used: 0.78 GiB, 3%" in target.notes[0]


def test_layers_of_experts_alone_give_a_draft_layer_its_width(tmp_path: Path) -> None:
    """The MLP of a draft layer is as wide as the experts together that a token passes through."""
    config = transformers.AutoConfig.for_model("qwen3_5_moe")
    text = config.get_text_config()
    width = text.moe_intermediate_size * text.num_experts_per_tok + text.shared_expert_intermediate_size
    config.save_pretrained(tmp_path)
    assert target_dims(str(tmp_path)).intermediate_size == width == 4608


def test_a_kernel_that_a_models_config_names_is_not_fetched(tmp_path: Path) -> None:
    """transformers would take it in the place of target.attn_implementation, and run its code."""
    save_image_model("gemma3", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    parts = {**written, "text_config": {**written["text_config"], "_attn_implementation": "some/kernels"}}
    (tmp_path / "config.json").write_text(json.dumps(parts))
    assert loaded(tmp_path).model.config.get_text_config()._attn_implementation == "sdpa"
    (tmp_path / "config.json").write_text(json.dumps({**written, "_attn_implementation": "some/kernels"}))
    for load in (weightless_target, load_target):
        with pytest.raises(TargetError, match="_attn_implementation to 'some/kernels', which is code on"):
            load(TargetConfig(name=str(tmp_path), device="cpu"))
