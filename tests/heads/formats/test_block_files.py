"""Block heads on disk: every published layout becomes a head of ours, tensor by tensor, or is refused with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DFLASH_CONFIG,
    DIMS,
    DSPARK_CONFIG,
    LLAMA3,
    SPECFORGE_DSPARK_CONFIG,
    SPECULATORS_DFLASH_CONFIG,
    SPECULATORS_DSPARK_CONFIG,
    D,
    F,
    S,
    Tensors,
    U,
    V,
    dflash_tensors,
    draft_ids,
    drop,
    dspark_tensors,
    markov_tensors,
    our_head,
    random,
    reduced,
    same,
    same_state,
    trapped,
    write,
)
from safetensors.torch import load_file
from torch.testing import assert_close

from headstart.heads.batch import FeatureBatch
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dflash2.head import DFlash2Config
from headstart.heads.families.domino.head import DominoConfig
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.heads.families.jetspec.head import JetSpecConfig
from headstart.heads.formats import check_embeddings, load_head, save_head
from headstart.heads.formats.recognise import recognise

PEERS = Path(__file__).resolve().parents[2] / "fixtures/speculators"
COPIES = {"embed_tokens.weight": random(V, D, seed=90), "lm_head.weight": random(V, D, seed=91)}
DEEPSPEC_DFLASH = {**DSPARK_CONFIG, "markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
#: layout → (config, tensors, family, whether the first slot drafts, drafts of a block)
LAYOUTS: dict[str, tuple[dict[str, Any], Tensors, str, bool, int]] = {
    "z-lab": (DFLASH_CONFIG, dflash_tensors(), "dflash", False, 3),
    "z-lab, block inside dflash_config": (
        {**DFLASH_CONFIG, "block_size": None, "dflash_config": {**DFLASH_CONFIG["dflash_config"], "block_size": 4}},
        dflash_tensors(), "dflash", False, 3,
    ),
    "z-lab, anchor first": ({**DFLASH_CONFIG, "sample_from_anchor": True}, dflash_tensors(), "dflash", True, 4),
    "SpecForge's word for anchor first": (
        {**DFLASH_CONFIG, "dflash_config": {**DFLASH_CONFIG["dflash_config"], "shift_label": True}},
        dflash_tensors(), "dflash", True, 4,
    ),
    "z-lab, causal": (
        {**DFLASH_CONFIG, "dflash_config": {**DFLASH_CONFIG["dflash_config"], "causal": True}},
        dflash_tensors(), "jetspec", False, 3,
    ),
    "z-lab, causal at top level": ({**DFLASH_CONFIG, "is_causal": True}, dflash_tensors(), "jetspec", False, 3),
    "speculators DFlash": (SPECULATORS_DFLASH_CONFIG, reduced(dflash_tensors()), "dflash", False, 3),
    "speculators DFlash, no flag": (
        {**SPECULATORS_DFLASH_CONFIG, "sample_from_anchor": None}, reduced(dflash_tensors()), "dflash", False, 3,
    ),
    "DeepSpec DFlash": (DEEPSPEC_DFLASH, {**dflash_tensors(), **COPIES}, "dflash", True, 3),
    "DeepSpec": (DSPARK_CONFIG, {**dspark_tensors(), **COPIES}, "dspark", True, 3),
    "DeepSpec, model. before each name": (
        DSPARK_CONFIG, {f"model.{name}": tensor for name, tensor in dspark_tensors().items()}, "dspark", True, 3,
    ),
    "DSpark that fills in": ({**DSPARK_CONFIG, "sample_from_anchor": False}, dspark_tensors(), "dspark", False, 2),
    "SpecForge DSpark": (SPECFORGE_DSPARK_CONFIG, dspark_tensors(), "dspark", True, 3),
    "speculators DSpark": (SPECULATORS_DSPARK_CONFIG, reduced(dspark_tensors()), "dspark", True, 3),
    "speculators DSpark, no flag": (
        {**SPECULATORS_DSPARK_CONFIG, "sample_from_anchor": None}, reduced(dspark_tensors()), "dspark", False, 2,
    ),
    "gated": (
        {**DSPARK_CONFIG, "markov_head_type": "gated"}, {**dflash_tensors(), **markov_tensors("gated")}, "dspark", True,
        3,
    ),
    "rnn without a confidence head": (
        {**DSPARK_CONFIG, "markov_head_type": "rnn", "enable_confidence_head": False},
        {**dflash_tensors(), **markov_tensors("rnn", confidence=False)}, "dspark", True, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "family", "first", "drafts"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dims", [DIMS, None], ids=["target known", "target unknown"])
def test_published_layouts(
    tmp_path: Path, config: dict[str, Any], tensors: Tensors, family: str, first: bool, drafts: int, dims: Any
) -> None:
    config = {name: value for name, value in config.items() if value is not None}
    assert recognise(open_checkpoint(write(tmp_path, config, tensors))) == family
    head = load_head(tmp_path, dims)
    state, small = head.state_dict(), "d2t" in tensors
    not_ours = {"d2t", "t2d", "embed_tokens.weight", *([] if small else ["lm_head.weight"])}
    for name, tensor in tensors.items():
        if name not in not_ours:
            assert torch.equal(state.pop(name.removeprefix("model.")), tensor), name
    if small:
        assert torch.equal(state.pop("draft_ids_U"), draft_ids())
    assert not state
    given = head.config
    assert (given.type, given.sample_from_anchor, given.depth, given.layers) == (family, first, drafts, 2)
    assert (given.mask_token_id, given.draft_vocab_size, head.spec.layer_ids) == (5, U if small else V, (2, 4, 6))
    assert head.dims.rope_parameters == LLAMA3 and head.dims.rms_norm_eps == 1e-5 and head.dims.head_dim == 8
    if family == "dspark":
        kind = config.get("markov_head_type", "vanilla")
        assert (given.markov_rank, given.markov_head) == (6, kind)
        assert (given.confidence_weight > 0) == any("confidence_head." in name for name in tensors)


def test_what_a_qwen3_config_leaves_out_has_its_defaults(tmp_path: Path) -> None:
    """Published files leave out what transformers' Qwen3Config has by default: heads of 128."""
    config = {name: value for name, value in DFLASH_CONFIG.items() if name not in ("head_dim", "rms_norm_eps")}
    wide = {"q_proj": (512, D), "k_proj": (256, D), "v_proj": (256, D), "o_proj": (D, 512), "q_norm": (128,)}
    wide["k_norm"] = (128,)
    tensors = dflash_tensors()
    for n in range(2):
        tensors |= {f"layers.{n}.self_attn.{name}.weight": random(*shape, seed=n) for name, shape in wide.items()}
    head = load_head(write(tmp_path, config, tensors), DIMS)
    assert (head.dims.head_dim, head.dims.rms_norm_eps) == (128, 1e-6)


def test_the_targets_depth_is_the_files_or_what_the_layers_need(tmp_path: Path) -> None:
    write(tmp_path, DFLASH_CONFIG, dflash_tensors())
    assert load_head(tmp_path).dims.num_layers == 8
    config = {name: value for name, value in DFLASH_CONFIG.items() if name != "num_target_layers"}
    assert load_head(write(tmp_path, config, dflash_tensors())).dims.num_layers == 7


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DFLASH_CONFIG["dflash_config"], **changes}}


#: fault → (directory, config changes (None removes), tensor changes, words of the refusal)
REFUSED: dict[str, tuple[Any, dict[str, Any], Callable[[Tensors], Tensors], str]] = {
    "unknown tensors": (F, {}, lambda t: {**t, "layers.0.conv.kernel": torch.ones(2)}, "unknown layers.0.conv.kernel"),
    "mask_hidden": (F, {}, lambda t: {**t, "mask_hidden": torch.ones(1, 1, 96)}, "unknown mask_hidden"),
    "a missing tensor": (F, {}, drop("layers.1.self_attn.k_norm.weight"), "lacks layers.1.self_attn.k_norm.weight"),
    "no layers named": (F, {"dflash_config": {"mask_token_id": 5}}, same, "does not say which layers"),
    "layers counted twice": (
        F, {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, same,
        r"name different layers of the target, \[1, 3, 5\] and \[2, 4, 6\].*engines add 0 and 1",
    ),
    "the last layer": (F, nested(target_layer_ids=[1, 3, 7]), same, "the last state is post-norm"),
    "layers unsorted": (F, nested(target_layer_ids=[3, 1, 5]), same, "distinct ascending"),
    "no mask token": (F, {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, same, "mask_token_id is None"),
    "mask token beyond the vocabulary": (F, nested(mask_token_id=V), same, "mask_token_id is 97"),
    "two mask tokens": (F, {"mask_token_id": 6}, same, "mask_token_id is 6 at top level and 5 in dflash_config"),
    "two block sizes": (F, nested(block_size=5), same, "block_size is 4 at top level and 5"),
    "no block size": (F, {"block_size": None}, same, "block_size is None"),
    "a block that drafts nothing": (F, {"block_size": 1}, same, "block_size is 1, expected an integer from 2"),
    "contradicting layouts": (
        F, {"sample_from_anchor": True, **nested(sample_from_anchor=False)}, same,
        "sample_from_anchor is True at top level",
    ),
    "two words for the layout": (F, {"sample_from_anchor": False, **nested(shift_label=True)}, same, "contradict"),
    "a causal block with a Markov head": (S, {"is_causal": True}, same, "is_causal is True"),
    "causal and not": (F, {"is_causal": True, **nested(causal=False)}, same, "contradict each other"),
    "sliding windows": (F, {"layer_types": ["full_attention", "sliding_attention"]}, same, "no sliding windows"),
    "interleaved rope": (F, {"is_neox_style": False}, same, "is_neox_style is False"),
    "interleaved rope, in SGLang's words": (F, {"rope_is_neox_style": False}, same, "rope_is_neox_style is False"),
    "convolutions alone": (F, nested(conv_kernel_size=2), same, "conv_kernel_size is 2"),
    "DFlash 2 without its tensors": (
        F, nested(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_top_k=4), same, "candidate_selector",
    ),
    "Domino without its sizes": (F, nested(projector_type="domino"), same, "gru_hidden_dim is None"),
    "Domino without its network": (
        F, nested(projector_type="domino", gru_hidden_dim=5, emb_dim=4), same, "prefix_gru.weight_ih_l0",
    ),
    "another projector": (F, nested(projector_type="causal_v5"), same, "projector_type is 'causal_v5'"),
    "soft-capped logits": (F, nested(final_logit_softcapping=30.0), same, "final_logit_softcapping is 30"),
    "scaled logits": (F, {"logit_scale": 0.5}, same, "logit_scale is 0.5"),
    "another target's depth": (F, {"num_target_layers": 36}, same, "num_target_layers is 36 and the target has 8"),
    "reduced without d2t": (
        (DFLASH_CONFIG, lambda: reduced(dflash_tensors())), {"draft_vocab_size": U}, drop("d2t", "t2d"),
        "d2t is missing",
    ),
    "reduced without lm_head": (
        (DFLASH_CONFIG, lambda: reduced(dflash_tensors())), {"draft_vocab_size": U}, drop("lm_head.weight"),
        "lm_head.weight is missing",
    ),
    "reduced and tied": (
        (DFLASH_CONFIG, lambda: reduced(dflash_tensors())), {"draft_vocab_size": U, "tie_word_embeddings": True}, same,
        "tie_word_embeddings is true",
    ),
    "a width of its own": (F, {"target_hidden_size": 48}, same, "as wide as its target"),
    "an unknown Markov head": (S, {"markov_head_type": "lattice"}, same, "markov_head_type is 'lattice'"),
    "another kind than the tensors": (S, {"markov_head_type": "rnn"}, same, "lacks markov_head.joint_proj"),
    "no Markov rank": (S, {"markov_rank": None}, same, "markov_rank is None"),
    "a rank of another file": (S, {"markov_rank": 7}, same, "markov_w1.weight is .* expected floating point"),
    "confidence head lost": (
        S, {}, drop("confidence_head.proj.weight", "confidence_head.proj.bias"), "file holds no confidence head",
    ),
    "half a confidence head": (S, {}, drop("confidence_head.proj.bias"), "lacks confidence_head.proj.bias"),
    "confidence head not announced": (S, {"enable_confidence_head": False}, same, "file holds a confidence head"),
    "confidence without the token before": (S, {"confidence_head_with_markov": False}, same, "does not read the token"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED.values(), ids=REFUSED)
def test_faults_are_refused_by_name(tmp_path: Path, fault: Any) -> None:
    with pytest.raises(FormatError, match=fault[3]):
        load_head(trapped(tmp_path, fault), DIMS)


def test_an_embedding_of_the_mask_token_beside_the_weights_is_refused_unopened(tmp_path: Path) -> None:
    write(tmp_path, *F[:1], dflash_tensors())
    (tmp_path / "mask_embedding.pt").write_bytes(b"not even a pickle")
    with pytest.raises(FormatError, match=r"mask_embedding\.pt: .*Serve it with vLLM or SGLang"):
        load_head(tmp_path, DIMS)


def test_copies_of_the_targets_ends_are_compared_with_them(tmp_path: Path) -> None:
    """DeepSpec's files hold both. Rows of a draft vocabulary are the head's own and are kept."""
    embed_VD, output_VD = COPIES["embed_tokens.weight"], COPIES["lm_head.weight"]
    write(tmp_path, DSPARK_CONFIG, {**dspark_tensors(), **COPIES})
    check_embeddings(tmp_path, embed_VD, output_VD, DIMS)
    with pytest.raises(FormatError, match="lm_head.weight differs from the target's output matrix"):
        check_embeddings(tmp_path, embed_VD, output_VD + 0.1, DIMS)
    with pytest.raises(FormatError, match="embed_tokens.weight differs from the target's embedding"):
        check_embeddings(tmp_path, embed_VD + 0.1, output_VD, DIMS)
    write(tmp_path, {**DSPARK_CONFIG, "draft_vocab_size": U}, reduced(dspark_tensors()))
    check_embeddings(tmp_path, embed_VD, output_VD, DIMS)


HEADS = {
    "DFlash": DFlashConfig(layers=2, mask_token_id=90),
    "DFlash, anchor first, draft vocabulary": DFlashConfig(
        layers=1, depth=3, mask_token_id=90, sample_from_anchor=True, draft_vocab_size=U, feature_layers=[3]
    ),
    "DFlash 2": DFlash2Config(layers=2, mask_token_id=90, conv_group=8, selector_rank=4, selector_candidates=3),
    "Domino": DominoConfig(layers=2, mask_token_id=90, gru_size=5, correction_rank=4, uncorrected=2),
    "JetSpec": JetSpecConfig(layers=2, mask_token_id=90),
    "DSpark": DSparkConfig(layers=2, mask_token_id=90, markov_rank=6),
    "DSpark, draft vocabulary, no confidence": DSparkConfig(
        layers=2, mask_token_id=90, markov_rank=6, draft_vocab_size=U, confidence_weight=0.0, intermediate_size=24
    ),
    "DSpark, gated, fills in": DSparkConfig(
        layers=1, mask_token_id=90, markov_rank=6, markov_head="gated", sample_from_anchor=False, confidence_weight=0.5
    ),
    "DSpark, rnn": DSparkConfig(layers=1, mask_token_id=90, markov_rank=6, markov_head="rnn"),
}


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_ours_come_back_with_and_without_their_side_file(tmp_path: Path, config: Any) -> None:
    head = our_head(config)
    save_head(head, tmp_path, {})
    loaded = load_head(tmp_path, DIMS)
    assert same_state(loaded, head) and loaded.config == config and loaded.spec == head.spec
    (tmp_path / "headstart.json").unlink()
    bare = load_head(tmp_path, DIMS)
    assert same_state(bare, head) and bare.spec == head.spec and bare.block_size == head.block_size
    left_out = {
        "draft_vocab_size": V, "intermediate_size": DIMS.intermediate_size, "num_key_value_heads": DIMS.num_kv_heads,
    }  # fmt: skip
    for name in (*config.structure, *config.behaviour):
        assert getattr(bare.config, name) == (getattr(config, name) or left_out.get(name, False)), name


def test_config_json_of_dflash(tmp_path: Path) -> None:
    save_head(our_head(HEADS["DFlash"]), tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert (config["block_size"], config["num_target_layers"], config["num_hidden_layers"]) == (8, 8, 2)
    assert config["layer_types"] == ["full_attention"] * 2 and config["is_causal"] is False
    assert config["sample_from_anchor"] is False and config["tie_word_embeddings"] is False
    ids = [k - 1 for k in (2, 4, 6)]
    said = {"mask_token_id": 90, "target_layer_ids": ids, "causal": False, "sample_from_anchor": False}
    assert config["dflash_config"] == said
    assert not {"eagle_config", "eagle_aux_hidden_state_layer_ids", "target_layer_ids", "mask_token_id"} & set(config)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(dflash_tensors())


def test_config_json_of_domino(tmp_path: Path) -> None:
    """As the authors write it: the settings inside dflash_config, the tensors without a prefix of their own."""
    save_head(our_head(HEADS["Domino"]), tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 7
    assert config["dflash_config"] == {
        "mask_token_id": 90, "target_layer_ids": [1, 3, 5], "causal": False, "projector_type": "domino",
        "shift_label": True, "gru_hidden_dim": 5, "emb_dim": 4, "pure_draft_prefix_len": 2,
    }  # fmt: skip
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert {name: shapes.pop(name) for name in sorted(set(shapes) - set(dflash_tensors()))} == {
        "embed_proj.0.weight": (4, D + 5), "embed_proj.2.weight": (V, 4),
        "prefix_gru.weight_hh_l0": (15, 5), "prefix_gru.weight_ih_l0": (15, D),
    }  # fmt: skip
    # the authors' own config says nothing in our words
    del config["sample_from_anchor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "headstart.json").unlink()
    assert load_head(tmp_path, DIMS).config.sample_from_anchor


def test_config_json_of_jetspec_says_causal_in_both_places(tmp_path: Path) -> None:
    """vLLM reads `is_causal` and then `dflash_config.causal`, SGLang the first alone."""
    for name, causal in (("DFlash", False), ("JetSpec", True)):
        save_head(our_head(HEADS[name]), tmp_path / name, {})
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["is_causal"] is config["dflash_config"]["causal"] is causal
        assert config["architectures"] == ["DFlashDraftModel"]


def test_config_json_of_dspark(tmp_path: Path) -> None:
    save_head(our_head(HEADS["DSpark, draft vocabulary, no confidence"]), tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
    assert (config["block_size"], config["mask_token_id"], config["sample_from_anchor"]) == (7, 90, True)
    assert (config["target_layer_ids"], config["draft_vocab_size"], config["vocab_size"]) == ([1, 3, 5], U, V)
    assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
    assert config["enable_confidence_head"] is False
    assert config["is_causal"] is False and "dflash_config" not in config
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["markov_head.markov_w1.weight"] == (V, 6) and shapes["markov_head.markov_w2.weight"] == (U, 6)
    assert shapes["lm_head.weight"] == (U, D) and shapes["d2t"] == (U,) and shapes["t2d"] == (V,)
    assert set(shapes) == set(reduced({**dflash_tensors(), **markov_tensors(confidence=False)}))


def test_a_head_without_its_mask_token_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set head.mask_token_id"):
        save_head(our_head(DFlashConfig(layers=1)), tmp_path, {})


@pytest.mark.parametrize("name", ["dflash", "dspark-vanilla", "dspark-gated", "dspark-rnn"])
def test_heads_of_the_speculators_library_compute_what_they_compute_there(name: str) -> None:
    """Small heads with random weights that speculators 0.9.0 saved, and what its own forward gave for some anchors.

    Row t of ours is the anchor t + 1 of theirs. Logits are corrected with the tokens of the text, as in training.
    """
    head = load_head(PEERS / name)
    expected = load_file(PEERS / f"{name}.expected.safetensors")
    tokens, embed_VD = expected["tokens"], expected["embeddings"]
    head.bind(TargetEnds(embed_VD, Teacher(torch.zeros_like(embed_VD))))
    batch = FeatureBatch.pack([(tokens, torch.zeros_like(tokens))], head.depth)
    batch.hidden_RD = torch.zeros(len(tokens), embed_VD.shape[1])
    batch.streams_RkD = expected["features"].unflatten(-1, (3, -1))
    rows = batch.anchors.row_A.tolist()
    pairs = [(n, rows.index(a - 1)) for n, a in enumerate(expected["anchors"].tolist()) if a - 1 in rows]
    theirs, ours = (torch.tensor(side) for side in zip(*pairs, strict=True))
    assert len(pairs) >= 7
    drafts = slice(head.block_size - head.depth, None)
    with torch.no_grad():
        hidden_AKD = head.slots(batch)[ours]
        assert_close(hidden_AKD, expected["hidden"][theirs, drafts], rtol=1e-5, atol=1e-5)
        logits_AKU = hidden_AKD @ head.lm_head.weight.T
        if name != "dflash":
            anchor_A = expected["anchors"][theirs]
            previous_AK = tokens[anchor_A[:, None] + torch.arange(head.depth)]
            logits_AKU = logits_AKU + head.corrections(hidden_AKD, previous_AK) @ head.correction_Ur.T
            found = head.confidence_logits(hidden_AKD, previous_AK)
            assert_close(found, expected["confidence"][theirs, drafts], rtol=1e-5, atol=1e-5)
        assert_close(logits_AKU, expected["logits"][theirs, drafts], rtol=1e-5, atol=1e-5)
