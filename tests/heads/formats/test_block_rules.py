"""Traps of block heads in vLLM and SGLang: each has a directory here, and each is told with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DFLASH_CONFIG,
    DIMS,
    DSPARK_CONFIG,
    QWEN3,
    SPECFORGE_DSPARK_CONFIG,
    SPECULATORS_DFLASH_CONFIG,
    SPECULATORS_DSPARK_CONFIG,
    D,
    F,
    L,
    R,
    S,
    Tensors,
    U,
    V,
    W,
    dflash_tensors,
    draft_ids,
    drop,
    dspark_tensors,
    markov_tensors,
    our_head,
    random,
    reduced,
    same,
    trapped,
    write,
)
from transformers import AutoConfig

from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import FormatError
from headstart.heads.families import build_head
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.heads.formats import ExportConfig, Handling, check_directory, export_head, load_head, save_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.export import check_ahead
from headstart.heads.formats.launch import commented, drafted_tokens, launch_commands, why_tokens
from headstart.recipes.load import load_recipe

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
FU = ({**DFLASH_CONFIG, "draft_vocab_size": U}, lambda: reduced(dflash_tensors()))
SU = ({**DSPARK_CONFIG, "draft_vocab_size": U}, lambda: reduced(dspark_tensors()))
SF = (SPECFORGE_DSPARK_CONFIG, dspark_tensors)
LF = (SPECULATORS_DFLASH_CONFIG, lambda: reduced(dflash_tensors()))
LS = (SPECULATORS_DSPARK_CONFIG, lambda: reduced(dspark_tensors()))


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DFLASH_CONFIG["dflash_config"], **changes}}


def put(**tensors: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda held: {**held, **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}


#: directories that both engines serve rightly, or one alone: (directory, engines that load it)
RIGHT: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "DFlash": (F, {}, {"headstart", "vllm", "sglang"}),
    "DFlash, every flag written": (
        F, {"sample_from_anchor": False, "is_causal": False, **nested(causal=False, sample_from_anchor=False)},
        {"headstart", "vllm", "sglang"},
    ),
    "DFlash, draft vocabulary": (FU, {}, {"headstart", "vllm"}),
    "DSpark": (S, {}, {"headstart", "vllm", "sglang"}),
    "DSpark that fills in": (S, {"sample_from_anchor": False}, {"headstart", "vllm", "sglang"}),
    "DSpark, draft vocabulary": (SU, {}, {"headstart", "vllm"}),
    "DSpark as SpecForge writes it": (SF, {}, {"headstart", "sglang"}),
    "speculators DFlash": (LF, {}, {"headstart", "vllm"}),
    "speculators DSpark": (LS, {}, {"headstart", "vllm"}),
}  # fmt: skip


@pytest.mark.parametrize(("directory", "changes", "engines"), RIGHT.values(), ids=RIGHT)
def test_right_directories_load(tmp_path: Path, directory: Any, changes: dict[str, Any], engines: set[str]) -> None:
    report = check_directory(trapped(tmp_path, (directory, changes, same)), DIMS)
    assert {name for name in report.engines if report.loads(name)} == engines, report.render()


#: trap → (directory, config changes (None removes), tensor changes, engine → (handling, words of its reason or note))
TRAPS: dict[str, tuple[Any, dict[str, Any], Callable[[Tensors], Tensors], dict[str, tuple[Handling, str]]]] = {
    # the target's layers
    "ids of two places differ": (
        F, {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, same,
        {"vllm": (W, "it reads [1, 3, 5]"), "sglang": (W, "vLLM reads first, is not read: SGLang takes [2, 4, 6]")},
    ),
    "ids of two places agree": (
        F, {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, same, {"vllm": (L, ""), "sglang": (L, "")},
    ),
    "ids inside, others at top level": (
        F, {"target_layer_ids": [0, 3, 5]}, same,
        {"vllm": (W, "stands before target_layer_ids"), "sglang": (W, "stands before target_layer_ids")},
    ),
    "ids at top level only": (
        F, {"target_layer_ids": [1, 3, 5], "dflash_config": {"mask_token_id": 5}}, same,
        {"vllm": (W, "where vLLM's V1 runner does not look"), "sglang": (L, "")},
    ),
    "DSpark's ids under vLLM's name only": (
        S, {"target_layer_ids": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, same,
        {"vllm": (L, ""), "sglang": (R, "fc.weight is [32, 96]")},
    ),
    "ids hidden by eagle_config": (
        F, {"eagle_config": {}}, same, {"vllm": (W, "eagle_config hides dflash_config"), "sglang": (L, "")},
    ),
    "ids unsorted": (F, nested(target_layer_ids=[3, 1, 5]), same,
                     {"vllm": (W, "not ascending"), "sglang": (W, "not ascending")}),
    "ids are no list": (F, nested(target_layer_ids="all"), same, {"vllm": (R, "is 'all'"), "sglang": (R, "is 'all'")}),
    "the last layer": (F, nested(target_layer_ids=[1, 3, 7]), same,
                       {"vllm": (W, "last hidden state"), "sglang": (W, "last hidden state")}),
    "another target": (F, {"num_target_layers": 6}, same,
                       {"sglang": (W, "num_target_layers is 6, the target's 8"), "headstart": (R, "num_target")}),
    # which slots draft
    "DFlash, anchor first": (
        F, {"sample_from_anchor": True, **nested(sample_from_anchor=True)}, same,
        {"vllm": (R, "its first slot never drafts"), "sglang": (W, "does not read for DFLASH"), "headstart": (L, "")},
    ),
    "DFlash, anchor first at top level only": (
        F, {"sample_from_anchor": True}, same,
        {"vllm": (W, "which vLLM does not read here"), "sglang": (W, "writes it as a DSpark head")},
    ),
    "DFlash, shifted labels": (F, nested(shift_label=True), same,
                               {"vllm": (W, "which vLLM does not read here"), "sglang": (W, "DFLASH")}),
    "DSpark without the flag": (
        S, {}, same, {"vllm": (L, "missing and taken as true"), "sglang": (L, "missing and taken as true")},
    ),
    "DSpark's flag inside dflash_config": (
        S, {"dflash_config": {"sample_from_anchor": False}}, same,
        {"vllm": (W, "dflash_config.sample_from_anchor is False and is not read"), "sglang": (W, "at top level")},
    ),
    "speculators DSpark without the flag": (
        LS, {"sample_from_anchor": None}, same, {"vllm": (L, "missing and taken as false")},
    ),
    "DeepSpec's DFlash": (
        (DSPARK_CONFIG, dflash_tensors), {"markov_rank": 0, "enable_confidence_head": False}, same,
        {"headstart": (L, ""), "vllm": (R, "architectures is ['Qwen3DSparkModel']"), "sglang": (R, "architectures is")},
    ),
    # causality
    "windows without a flag": (
        F, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, same,
        {"vllm": (W, "takes those layers as causal"), "sglang": (W, "is_causal is missing"), "headstart": (R, "slid")},
    ),
    "windows, not causal in vLLM's words": (
        F, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, **nested(causal=False)}, same,
        {"vllm": (L, ""), "sglang": (W, "is_causal is missing")},
    ),
    "windows on some layers": (
        F, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "is_causal": False}, same,
        {"vllm": (L, "V2 runner alone"), "sglang": (L, "")},
    ),
    "causal in vLLM's words": (
        F, nested(causal=True), same,
        {"vllm": (L, "dflash_config.causal is true"), "sglang": (W, "dflash_config.causal is True and is not read"),
         "headstart": (L, "")},
    ),
    "a causal block whose first slot drafts": (
        F, {"is_causal": True, "sample_from_anchor": True, **nested(causal=True)}, same,
        {"vllm": (W, "train with head.sample_from_anchor=false"), "sglang": (W, "train with"), "headstart": (L, "")},
    ),
    "causal and not": (F, {"is_causal": True, **nested(causal=False)}, same,
                       {"vllm": (W, "contradict each other: vLLM takes is_causal"), "sglang": (W, "causal is False")}),
    "speculators' flag for windows, on full attention": (
        LF, {"sliding_window_non_causal": False}, same,
        {"vllm": (W, "which vLLM takes for all layers"), "headstart": (L, "")},
    ),
    "kinds for too few layers": (F, {"layer_types": ["full_attention"]}, same,
                                 {"vllm": (R, "one kind for each of 2"), "sglang": (R, "one kind for each of 2")}),
    # the mask token
    "no mask token": (F, {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, same,
                      {"vllm": (R, "mask_token_id is None"), "sglang": (W, "takes the tokenizer's <|MASK|>")}),
    "DSpark without a mask token": (S, {"mask_token_id": None}, same,
                                    {"vllm": (R, "mask_token_id is None"), "sglang": (R, "mask_token_id is None")}),
    "a mask token beyond the vocabulary": (
        F, nested(mask_token_id=V), same, {"vllm": (R, "below 97"), "sglang": (R, "below 97"), "headstart": (R, "97")},
    ),
    "two mask tokens": (F, {"mask_token_id": 6}, same,
                        {"vllm": (W, "stands before mask_token_id 6"), "sglang": (W, "before mask_token_id 6")}),
    "the mask token ends texts": (
        F, {"eos_token_id": [5, 6]}, same, {"vllm": (L, "is the eos token"), "sglang": (L, "is the eos token")},
    ),
    "the mask token pads": (S, {"pad_token_id": 5}, same, {"vllm": (L, "is the pad token")}),
    "speculators without a mask token": (LF, {"mask_token_id": None}, same, {"vllm": (R, "mask_token_id is missing")}),
    "mask_hidden": (F, {}, put(mask_hidden=torch.ones(1, 1, 96)),
                    {"vllm": (R, "mask_hidden must be absent"), "sglang": (W, "mask_hidden would be skipped")}),
    # tensors
    "a tensor is missing": (
        F, {}, drop("layers.1.mlp.up_proj.weight"),
        {"vllm": (W, "up_proj.weight [64, 32] is missing"), "sglang": (W, "uninitialised"), "headstart": (R, "lacks")},
    ),
    "a norm is missing": (F, {}, drop("hidden_norm.weight"),
                          {"vllm": (W, "the norm stays at ones"), "sglang": (W, "the norm stays at ones")}),
    "an unknown tensor": (F, {}, put(gate__weight=torch.ones(2, 2)),
                          {"vllm": (R, "unexpected tensors gate.weight"), "sglang": (W, "skipped in silence")}),
    "biases that nobody reads": (
        F, {}, put(layers__0__self_attn__q_proj__bias=torch.ones(32)),
        {"vllm": (W, "dropped in silence"), "sglang": (W, "dropped in silence"), "headstart": (R, "unknown")},
    ),
    "biases that are not there": (F, {"attention_bias": True}, same,
                                  {"vllm": (W, "stay random"), "sglang": (W, "stay random"), "headstart": (R, "bias")}),
    "a wrong width of fc": (F, nested(target_layer_ids=[1, 3]), same,
                            {"vllm": (R, "fc.weight is [32, 96]"), "sglang": (R, "fc.weight is [32, 96]")}),
    "integers for weights": (F, {}, put(norm__weight=torch.ones(D, dtype=torch.int32)), {"vllm": (W, "in silence")}),
    "another activation": (F, {"hidden_act": "gelu"}, same,
                           {"vllm": (R, "compute silu"), "sglang": (R, "compute silu"), "headstart": (L, "")}),
    "sinks of the attention": (
        F, nested(attention_sink_bias=True), put(layers__0__self_attn__attention_sink_bias=torch.ones(4)),
        {"vllm": (L, ""), "sglang": (L, ""), "headstart": (R, "attention_sink_bias is True")},
    ),
    # the draft vocabulary
    "reduced, in SGLang": (FU, {}, same, {"sglang": (W, "reads neither lm_head nor d2t"), "vllm": (L, "")}),
    "reduced DSpark, in SGLang": (SU, {}, same, {"sglang": (R, "export.engines=[vllm]"), "vllm": (L, "")}),
    "reduced without lm_head": (FU, {}, drop("lm_head.weight"), {"vllm": (W, "rows of the target's 97")}),
    "reduced DSpark without lm_head": (SU, {}, drop("lm_head.weight"), {"vllm": (R, "the loader stops")}),
    "reduced without d2t": (FU, {}, drop("d2t", "t2d"), {"vllm": (W, "draft ids pass as target ids")}),
    "reduced DSpark without d2t": (SU, {}, drop("d2t", "t2d"), {"vllm": (R, "d2t is missing")}),
    "ids, not offsets": (FU, {}, put(d2t=draft_ids() + 40), {"vllm": (W, "offsets"), "headstart": (R, "offsets")}),
    "d2t for a whole vocabulary": (F, {}, put(d2t=torch.zeros(V, dtype=torch.int64)),
                                   {"vllm": (R, "leave it out"), "sglang": (L, "")}),
    "an lm_head of other rows": (F, {}, put(lm_head__weight=torch.ones(U, D)),
                                 {"vllm": (R, "lm_head.weight is [40, 32]"), "sglang": (R, "lm_head.weight is")}),
    "tied": (F, {"tie_word_embeddings": True}, put(lm_head__weight=random(V, D, seed=3)),
             {"vllm": (L, "puts the embeddings in its place"), "sglang": (L, "write false")}),
    "another vocabulary": (F, {"vocab_size": 96}, same,
                           {"vllm": (W, "belongs to another target"), "sglang": (W, "belongs to another target")}),
    # the Markov and the confidence head
    "gated": (
        (DSPARK_CONFIG, lambda: {**dflash_tensors(), **markov_tensors("gated")}), {"markov_head_type": "gated"}, same,
        {"vllm": (R, "vLLM builds the vanilla head alone"), "sglang": (L, ""), "headstart": (L, "")},
    ),
    "rnn": (
        (DSPARK_CONFIG, lambda: {**dflash_tensors(), **markov_tensors("rnn")}), {"markov_head_type": "rnn"}, same,
        {"vllm": (R, "export.engines=[sglang]"), "sglang": (L, ""), "headstart": (L, "")},
    ),
    "gated without its gate": (S, {"markov_head_type": "gated"}, same, {"sglang": (W, "gate_proj.weight [6, 38]")}),
    "a gate that nobody announced": (
        (DSPARK_CONFIG, lambda: {**dflash_tensors(), **markov_tensors("gated")}), {}, same,
        {"vllm": (R, "unexpected tensors markov_head.gate_proj"), "sglang": (R, "a vanilla Markov head has none")},
    ),
    "no kind of Markov head": (S, {"markov_head_type": None}, same,
                               {"vllm": (L, ""), "sglang": (R, "markov_head_type None"), "headstart": (L, "")}),
    "no rank": (S, {"markov_rank": None}, same,
                {"vllm": (R, "markov_rank is missing at top level"), "sglang": (R, "markov_rank is None")}),
    "a rank inside dflash_config": (SF, {}, same, {"vllm": (R, "it stands in dflash_config only"), "sglang": (L, "")}),
    "W2 of a reduced vocabulary": (S, {}, lambda t: {**t, "markov_head.markov_w2.weight": torch.ones(U, 6)},
                                   {"vllm": (R, "markov_w2.weight is [40, 6]"), "sglang": (R, "markov_w2.weight is")}),
    "no confidence head": (
        S, {"enable_confidence_head": False}, drop("confidence_head.proj.weight", "confidence_head.proj.bias"),
        {"vllm": (L, ""), "sglang": (L, "with SGLANG_RAGGED_VERIFY_MODE=cap-accept or compact it stops")},
    ),
    "a confidence head that was lost": (
        S, {}, drop("confidence_head.proj.weight", "confidence_head.proj.bias"),
        {"vllm": (L, "the file holds none"), "sglang": (L, "it stops"), "headstart": (R, "holds no confidence head")},
    ),
    "a confidence head by halves": (S, {}, drop("confidence_head.proj.bias"),
                                    {"vllm": (W, "proj.bias [1] is missing"), "sglang": (L, "proj.bias missing")}),
    "confidence without its input": (S, {"confidence_head_with_markov": None}, same,
                                     {"vllm": (R, "proj.weight is [1, 38]"), "sglang": (L, ""), "headstart": (L, "")}),
    # rope and logits
    "interleaved rope": (F, {"is_neox_style": False}, same,
                         {"vllm": (L, "rotates interleaved pairs"), "sglang": (L, "rotates interleaved pairs"),
                          "headstart": (R, "is_neox_style is False")}),
    "interleaved rope in SGLang's words": (F, {"rope_is_neox_style": False}, same,
                                           {"vllm": (W, "is_neox_style decides"), "sglang": (L, "interleaved")}),
    "another rope": (F, {"rope_theta": 1e4}, same, {"vllm": (W, "differs from the target's"), "sglang": (W, "rope")}),
    "soft-capped logits": (F, {"final_logit_softcapping": 30.0}, same,
                           {"vllm": (W, "final_logit_softcapping is 30.0"), "sglang": (W, "is not applied")}),
    "scaled logits": (F, {"logit_scale": 0.5}, same, {"vllm": (L, ""), "sglang": (W, "logit_scale is 0.5")}),
    # launching
    "the length of a block": (F, {}, same, {"vllm": (L, "num_speculative_tokens 3"), "sglang": (L, "block-size 4")}),
    "the length of DSpark's": (S, {}, same, {"vllm": (L, "num_speculative_tokens 3"), "sglang": (L, "block-size 3")}),
    "DSpark's that fills in": (S, {"sample_from_anchor": False}, same,
                               {"vllm": (L, "num_speculative_tokens 2"), "sglang": (L, "block-size 2")}),
    "no length": (F, {"block_size": None}, same, {"vllm": (L, "block_size is missing"), "sglang": (L, "is missing")}),
    "DSpark's device": (S, {}, same, {"vllm": (L, "GPUs alone")}),
    "DFlash's device": (F, {}, same, {"vllm": (L, "on GPUs: vLLM's CPU build norms the keys")}),
    # architectures
    "DFlash 2": (F, {"architectures": ["DFlash2DraftModel"]}, same,
                 {"vllm": (R, "DFlash2DraftModel"), "sglang": (R, "DFlash2DraftModel")}),
    "speculators in SGLang": (LF, {}, same, {"sglang": (R, "of the speculators library")}),
    "a layer of no known kind": (LF, {"transformer_layer_config": None}, same,
                                 {"vllm": (R, "transformer_layer_config is missing"), "headstart": (R, "expected")}),
    "other engines": (S, {}, same, {"tgi": (R, "does not draft with dspark heads"),
                                    "tensorrt_llm": (Handling.UNKNOWN, "not been checked"),
                                    "llama_cpp": (Handling.UNKNOWN, "not been checked")}),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_traps_are_told(tmp_path: Path, trap: Any) -> None:
    report = check_directory(trapped(tmp_path, trap), DIMS)
    for engine, (handling, words) in trap[3].items():
        found = report.engines[engine]
        assert found.handling is handling, f"{engine}: {report.render()}"
        said = found.notes if handling is L else found.reasons
        assert not words or any(words in text for text in said), f"{engine}: {report.render()}"


def test_dflash_that_drafts_from_its_first_slot_is_exported_as_dspark(tmp_path: Path) -> None:
    """Engines serve that layout for DSpark alone. A Markov head of zeros corrects nothing."""
    config = DFlashConfig(layers=1, depth=3, mask_token_id=90, sample_from_anchor=True, draft_vocab_size=U)
    head = our_head(config)
    save_head(head, tmp_path / "saved", {})
    assert load_head(tmp_path / "saved", DIMS).config == config  # as it was trained
    export_head(head, tmp_path / "export", ExportConfig(["vllm"], "float32"), {"target": {"name": "t"}})
    written = json.loads((tmp_path / "export/config.json").read_text())
    assert (written["architectures"], written["sample_from_anchor"]) == (["Qwen3DSparkModel"], True)
    assert "dflash_config" not in written and written["enable_confidence_head"] is False
    side = json.loads((tmp_path / "export/headstart.json").read_text())
    assert side["type"] == "dspark" and '"method": "dspark"' in launch_commands("d", side, ["vllm"])["vllm"]
    back, state = load_head(tmp_path / "export", DIMS), head.state_dict()
    assert back.config.markov_rank == 16 and not back.state_dict()["markov_head.markov_w2.weight"].any()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items() if name in state)
    assert set(back.state_dict()) - set(state) == {f"markov_head.markov_w{n}.weight" for n in (1, 2)}
    report = check_directory(tmp_path / "export", DIMS)
    assert any("a draft does not depend on the one before it" in doubt for doubt in report.doubts)


def test_the_targets_own_end_token_counts(tmp_path: Path) -> None:
    write(tmp_path, DFLASH_CONFIG, dflash_tensors())
    report = check_directory(tmp_path, replace(DIMS, eos_token_id=5))
    assert any("is the eos token" in note for note in report.engines["vllm"].notes)


def test_an_embedding_of_the_mask_token_beside_the_weights(tmp_path: Path) -> None:
    """vLLM and SGLang read it for DFlash, neither for DSpark."""
    for name, (config, tensors) in {"dflash": F, "dspark": S}.items():
        directory = write(tmp_path / name, config, tensors())
        (directory / "mask_embedding.pt").write_bytes(b"")
        report = check_directory(directory, DIMS)
        assert not report.loads("headstart")
        for engine in ("vllm", "sglang"):
            told = [text for text in report.engines[engine].wrong if "mask_embedding.pt is not read" in text]
            assert bool(told) is (name == "dspark") and report.loads(engine) is (name == "dflash"), report.render()


HEADS: dict[str, tuple[Any, set[str]]] = {
    "DFlash": (DFlashConfig(layers=2, mask_token_id=90), {"portable", "vllm", "sglang"}),
    "DFlash, draft vocabulary": (DFlashConfig(layers=1, mask_token_id=90, draft_vocab_size=U), {"vllm"}),
    "DFlash, anchor first": (
        DFlashConfig(layers=1, mask_token_id=90, sample_from_anchor=True), {"portable", "vllm", "sglang"},
    ),
    "DFlash, anchor first, draft vocabulary": (
        DFlashConfig(layers=1, mask_token_id=90, sample_from_anchor=True, draft_vocab_size=U), {"vllm"},
    ),
    "DSpark": (DSparkConfig(layers=2, mask_token_id=90, markov_rank=6), {"portable", "vllm", "sglang"}),
    "DSpark, draft vocabulary": (
        DSparkConfig(layers=1, mask_token_id=90, markov_rank=6, draft_vocab_size=U), {"vllm"},
    ),
    "DSpark that fills in": (
        DSparkConfig(layers=1, mask_token_id=90, markov_rank=6, sample_from_anchor=False),
        {"portable", "vllm", "sglang"},
    ),
    "DSpark, gated": (DSparkConfig(layers=1, mask_token_id=90, markov_rank=6, markov_head="gated"), {"sglang"}),
    "DSpark, rnn, no confidence": (
        DSparkConfig(layers=1, mask_token_id=90, markov_rank=6, markov_head="rnn", confidence_weight=0.0), {"sglang"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "engines"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("engine", ["portable", "vllm", "sglang"])
def test_exports(tmp_path: Path, config: Any, engines: set[str], engine: str) -> None:
    """An engine that would not draft as the head was trained gets no export without force."""
    head, asked = our_head(config), ExportConfig([engine], "float32")
    if engine not in engines:
        with pytest.raises(FormatError, match="Set export.force=true"):
            export_head(head, tmp_path, asked, {"target": {"name": "t"}})
        return
    report = export_head(head, tmp_path, asked, {"target": {"name": "t"}})[engine]
    for name in ("vllm", "sglang") if engine == "portable" else (engine,):
        assert report.loads(name), report.render()


@pytest.mark.parametrize(("recipe", "target", "words"), [
    ("qwen3-8b-dflash", "Qwen3-8B", "a block of 16 slots drafts 15 tokens, mask token 151669"),
    ("qwen3-8b-dspark", "Qwen3-8B", "a block of 7 slots drafts 7 tokens, mask token 151669"),
    ("llama-3.1-8b-dspark", "Llama-3.1-8B-Instruct", "drafts 7 tokens, mask token 128002"),
    ("smollm2-dflash", "smollm2-135m-instruct", "a block of 8 slots drafts 7 tokens"),
    ("smollm2-dspark", "smollm2-135m-instruct", "a block of 8 slots drafts 8 tokens"),
    ("smollm2-dflash2", "smollm2-135m-instruct", "a block of 8 slots drafts 7 tokens"),
    ("smollm2-domino", "smollm2-135m-instruct", "a block of 8 slots drafts 8 tokens"),
    ("smollm2-jetspec", "smollm2-135m-instruct", "a block of 8 slots drafts 7 tokens"),
])  # fmt: skip
def test_what_shipped_recipes_export_is_known_before_training(recipe: str, target: str, words: str) -> None:
    """On the targets' published configs, by names and shapes alone."""
    config = load_recipe(recipe)
    published = json.loads((FIXTURES / f"configs/{target}.json").read_text())
    dims = HeadDims.from_hf_config(AutoConfig.for_model(**published))
    settings = config.head if config.head.placeholder_token is not None else config.head.with_placeholder(7)
    with torch.device("meta"):
        head = build_head(settings, dims)
        ends = torch.empty(dims.vocab_size, dims.hidden_size)
    head.bind(TargetEnds(ends, Teacher(ends)))
    check_ahead(head, config.export, {"target": {"name": target}})
    assert words in head.describe()


def test_launch_commands() -> None:
    """Each engine counts a block in its own way: drafts, slots, or gamma."""
    for name, method, block in (
        ("dflash", "dflash", "dflash-block-size 8"), ("dspark", "dspark", "dspark-block-size 7"),
        ("jetspec", "dflash", "dflash-block-size 8"), ("domino", "dflash", "dflash-block-size 7"),
    ):  # fmt: skip
        side = {"type": name, "config": {"depth": 7}, "target": {"name": "a/b"}}
        commands = launch_commands("user/head", side, ["sglang"] if name == "domino" else ["vllm", "sglang"])
        said = f'"method": "{method}", "model": "user/head", "num_speculative_tokens": 7'
        assert name == "domino" or said in commands["vllm"]
        assert commands["sglang"] == (
            f"python -m sglang.launch_server --model-path a/b --speculative-algorithm {method.upper()} "
            f"--speculative-draft-model-path user/head --speculative-{block}"
        )


@pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark"])
def test_launch_commands_say_how_to_sample(family: str) -> None:
    """Block verification gains only on drafts that are drawn, so vLLM needs two settings."""
    vllm, sglang, other = (commented(engine, family, "run it").splitlines() for engine in ("vllm", "sglang", "tgi"))
    assert other == vllm[-1:] == sglang[-1:] == ["run it"]
    assert '"draft_sample_method": "probabilistic", "rejection_sample_method": "block" in the spec' in vllm[-2]
    assert sglang[-2].startswith("# temperature above 0: --speculative-use-block-verification (CUDA and ROCm)")
    assert "block" not in commented("vllm", "medusa", "run it")


def test_dflash_2_needs_a_later_vllm() -> None:
    side = {"type": "dflash2", "config": {"depth": 7}, "target": {"name": "a/b"}}
    command = launch_commands("user/head", side, ["vllm"])["vllm"]
    assert '"method": "dflash", "model": "user/head", "num_speculative_tokens": 7' in command
    said = "# needs vLLM 0.33 or later: 0.32 has no DFlash2DraftModel"
    assert commented("vllm", "dflash2", command).startswith(said)


ON_CARDS = {
    "DFlash": (
        "8 slots (the last committed token, then mask token 90), all but the first draft", "arXiv [2602.06036]",
        "Chen, Jian", "--speculative-dflash-block-size 8",
    ),
    "DSpark": (
        "7 slots (the last committed token, then mask token 90), each drafts", "arXiv [2607.05147]", "Cheng, Xin",
        "vanilla, rank 6: logits + W2 W1[token before]", "trained to the acceptance rate",
        "--speculative-dspark-block-size 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CARDS)
def test_the_card_says_what_the_head_is_and_how_it_is_served(tmp_path: Path, name: str) -> None:
    config = HEADS[name][0]
    export_head(our_head(config), tmp_path, ExportConfig(), {"target": {"name": "someone/tiny"}})
    side, report = json.loads((tmp_path / "headstart.json").read_text()), check_directory(tmp_path)
    card = render_card("user/head", side, None, [name for name in report.engines if report.loads(name)])
    always = ("It reads `hidden_states` [2, 4, 6]", "without its bias, soft-cap or scale", "not causal")
    for said in (f"{name} draft head for **someone/tiny**", *ON_CARDS[name], *always):
        assert said in card, card
    assert f'"method": "{config.type}", "model": "user/head", "num_speculative_tokens": 7' in card
    assert "TGI" not in card and "llama.cpp" not in card


def test_a_tuning_of_a_shorter_chain_is_told_and_not_followed() -> None:
    """Engines draft a whole block; a tuning that found a shorter one to pay does not shorten it."""
    choice = {"tree": {"kind": "chain", "depth": 3}, "label": "chain3", "tau": 2.0, "predicted_speedup": 1.5,
              "measured_speedup": 1.4, "speculate": True}  # fmt: skip
    side = {"type": "dflash", "config": {"depth": 7}, "tuned": {"card": {"batches": {"1": choice}}}}
    assert drafted_tokens(side) == 7
    assert why_tokens(side) == (
        "7 drafted tokens, as engines draft with this head; the best chain at batch 1 on card (`headstart tune`, 1.50× "
        "predicted) has 3."
    )


def test_layers_of_an_unlike_target_are_run_by_the_transformers_backend() -> None:
    side = {"type": "dspark", "config": {"depth": 7}, "target": {"name": "a/b"}, "dims": {"model_type": "gemma2"}}
    assert "--model-impl transformers" in launch_commands("user/head", side, ["vllm"])["vllm"]


def test_a_speculators_layer_may_leave_out_defaults(tmp_path: Path) -> None:
    """What transformers' Qwen3Config has by default is not in the file: engines and reader fill it in alike."""
    layer = {name: value for name, value in QWEN3.items() if name != "hidden_act"}
    config = {**SPECULATORS_DFLASH_CONFIG, "transformer_layer_config": layer}
    report = check_directory(write(tmp_path, config, reduced(dflash_tensors())), DIMS)
    assert report.loads("vllm") and report.loads("headstart"), report.render()
