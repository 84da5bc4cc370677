"""P-EAGLE's files: what is exported for vLLM, what is saved, and the layouts of others."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.families import DIMS, VOCAB, Example, draft_ids, example_head, peagle
from reference.tiny import ends_of, random_ends
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import PEagleHead, build_head
from headstart.heads.formats import (
    ExportConfig,
    check_directory,
    check_embeddings,
    export_head,
    load_head,
    save_head,
)
from headstart.heads.formats.export import check_ahead
from headstart.heads.formats.launch import launch_commands

MASK = 11
EXPORT = ExportConfig(["vllm"], "float32")
TARGET = {"target": {"name": "someone/target", "model_type": "llama"}}


def made(**fields: Any) -> tuple[PEagleHead, Any]:
    head, ends = example_head(Example(peagle(**fields)))
    assert isinstance(head, PEagleHead)
    return head, ends


def exported(place: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    export_head(made(**fields)[0], place, EXPORT, TARGET)
    return json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")


def rewritten(place: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A directory of these files alone, as others publish them."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    (place / "headstart.json").unlink(missing_ok=True)
    return place


def same(one: PEagleHead, two: Any) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_but_for_the_table(one: PEagleHead, two: Any, tensors: dict[str, Tensor]) -> bool:
    """The same head, where `two` keeps the file's table and `one` the mask token's row of it."""
    a, b = one.state_dict(), two.state_dict()
    assert torch.equal(a.pop("mask_embedding"), tensors["embed_tokens.weight"][MASK]) and two.own_embeddings
    return torch.equal(b.pop("embed_tokens.weight"), tensors["embed_tokens.weight"]) and all(
        torch.equal(a[name], b[name]) for name in a.keys() | b.keys()
    )


# what is written


@pytest.mark.parametrize("layers", [1, 2])
def test_an_export_holds_all_embeddings_with_the_mask_tokens_trained_one(tmp_path: Path, layers: int) -> None:
    head, ends = made(layers=layers)
    config, tensors = exported(tmp_path, layers=layers)
    table_VD = tensors["embed_tokens.weight"]
    others = [token for token in range(VOCAB) if token != MASK]
    assert torch.equal(table_VD[others], ends.embed_VD[others]) and torch.equal(table_VD[MASK], head.mask_embedding)
    assert not torch.equal(table_VD[MASK], ends.embed_VD[MASK])
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert torch.equal(tensors["mask_hidden"].flatten(), head.mask_hidden)
    assert "mask_embedding" not in tensors and "draft_ids_U" not in tensors
    assert config["mask_token_id"] == MASK and config["num_hidden_layers"] == layers
    # vLLM takes a name that begins or ends with Eagle3 as it is, and puts Eagle3 before any other
    assert config["architectures"] == ["Eagle3LlamaForCausalLM"] and config["norm_before_residual"] is False
    assert same(head, load_head(tmp_path, DIMS))


def test_q_k_norms_have_qwen3s_name(tmp_path: Path) -> None:
    config, _ = exported(tmp_path, qk_norm=True)
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"] and config["model_type"] == "qwen3"


def test_a_head_with_embeddings_of_its_own_has_the_mask_tokens_among_them(tmp_path: Path) -> None:
    head, _ = made(hidden_size=24)
    assert head.mask_embedding is None and head.replaced is None
    _, tensors = exported(tmp_path, hidden_size=24)
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_tokens.weight)  # type: ignore[union-attr]
    assert same(head, load_head(tmp_path, DIMS))


def test_a_saved_head_leaves_the_targets_embeddings_out_and_is_exported_once_bound(tmp_path: Path) -> None:
    head, ends = made()
    save_head(head, tmp_path / "head", TARGET)
    saved = load_file(tmp_path / "head/model.safetensors")
    assert "embed_tokens.weight" not in saved and torch.equal(saved["mask_embedding"], head.mask_embedding)
    assert check_directory(tmp_path / "head", DIMS).served == []
    again: Any = load_head(tmp_path / "head")
    with pytest.raises(FormatError, match="bind it to the target to export it"):
        export_head(again, tmp_path / "out", EXPORT, TARGET)
    again.bind(ends_of(ends))
    report = export_head(again, tmp_path / "out", EXPORT, TARGET)["vllm"]
    assert report.served == ["vllm"]
    assert same(head, load_head(tmp_path / "out", DIMS))


def test_bfloat16_rounds_the_trained_embedding_alone(tmp_path: Path) -> None:
    head, ends = made()
    head.bind(replace(ends_of(ends), embed_VD=ends.embed_VD.to(torch.bfloat16)))
    export_head(head, tmp_path, ExportConfig(["vllm"], "bfloat16"), TARGET)
    table_VD = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert table_VD.dtype == torch.bfloat16
    expected = ends.embed_VD.to(torch.bfloat16)
    expected[MASK] = head.mask_embedding.detach().to(torch.bfloat16)  # type: ignore[union-attr]
    assert torch.equal(table_VD, expected)


@pytest.mark.parametrize("engines", [["vllm"], ["portable"]])
def test_an_export_is_judged_before_training(engines: list[str]) -> None:
    with torch.device("meta"):
        head = build_head(peagle(layers=2), DIMS)
    head.bind(ends_of(random_ends(VOCAB, 32, 50)))
    check_ahead(head, ExportConfig(engines), TARGET)
    with pytest.raises(ConfigError, match="SGLang does not serve peagle heads"):
        check_ahead(head, ExportConfig(["sglang"]), TARGET)


def test_vllm_is_launched_to_draft_in_parallel(tmp_path: Path) -> None:
    export_head(made()[0], tmp_path, EXPORT, TARGET)
    side = json.loads((tmp_path / "headstart.json").read_text())
    words = shlex.split(launch_commands(str(tmp_path), side, ["vllm"])["vllm"])
    spec = json.loads(words[words.index("--speculative-config") + 1])
    assert spec == {
        "method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 4, "parallel_drafting": True,
    }  # fmt: skip


# what is read


@pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (1, 96), (96,)])
def test_the_names_and_shapes_that_vllm_reads(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    config, tensors = exported(tmp_path / "ours")
    config[name] = config.pop("mask_token_id")
    del config["train_embeddings"]  # others' files do not say it: their whole table was trained
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shape)
    place = rewritten(tmp_path / "theirs", config, tensors)
    assert same_but_for_the_table(made()[0], load_head(place, DIMS), tensors)
    report = check_directory(place, DIMS)
    assert report.family == "peagle" and report.served == ["vllm"], report.render()


def speculators(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json in the layout of the speculators library, with its own defaults."""
    ours = ("eagle_config", "mask_token_id", "architectures", "train_embeddings")
    layer = {key: value for key, value in config.items() if key not in ours}
    outer = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "mask_token_id": config["mask_token_id"],
    }
    for name in ("norm_before_residual", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm"):
        layer.pop(name, None)
    return {key: value for key, value in {**outer, **changes}.items() if value is not None}


def test_the_speculators_library_trains_the_variant_that_we_run(tmp_path: Path) -> None:
    """There, norm_before_residual is false by default for P-EAGLE, and true for EAGLE-3."""
    config, tensors = exported(tmp_path / "ours", layers=2)
    place = rewritten(tmp_path / "theirs", speculators(config), tensors)
    assert same_but_for_the_table(made(layers=2)[0], load_head(place, DIMS), tensors)
    report = check_directory(place, DIMS)
    assert report.layout == "speculators P-EAGLE" and report.served == ["vllm"], report.render()
    assert not any("norm_before_residual" in note for note in report.engines["vllm"].notes)


@pytest.mark.parametrize(
    ("changes", "ours", "vllm"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is true", None),
        ({"mask_token_id": None}, "mask_token_id is missing", "without mask_token_id"),
        ({"mask_token_id": None, "ptd_token_id": MASK}, None, "names the mask token mask_token_id, which is missing"),
        ({"mask_token_id": VOCAB}, "mask_token_id is 97, expected an integer from 0 to 96", "mask_token_id is 97"),
        ({"speculators_model_type": "eagle3"}, "is 'eagle3' and the tensors are P-EAGLE's", None),
        ({"fc_norm": True}, "lacks fc_norm.0.weight", None),
    ],
)
def test_what_is_wrong_in_the_speculators_layout(
    tmp_path: Path, changes: dict[str, Any], ours: str | None, vllm: str | None
) -> None:
    config, tensors = exported(tmp_path / "ours")
    place = rewritten(tmp_path / "theirs", speculators(config, **changes), tensors)
    report = check_directory(place, DIMS)
    if ours is not None:
        with pytest.raises(FormatError, match=ours):
            load_head(place, DIMS)
    if vllm is not None:
        assert any(vllm in reason for reason in report.engines["vllm"].refused), report.render()


def test_vllm_does_not_take_over_the_norms_of_a_speculators_head(tmp_path: Path) -> None:
    """Of P-EAGLE's settings it reads norm_before_fc alone: it does not know the norms of the streams."""
    config, tensors = exported(tmp_path / "ours", fc_norm="stream")
    place = rewritten(tmp_path / "theirs", speculators(config, fc_norm=True), tensors)
    assert same_but_for_the_table(made(fc_norm="stream")[0], load_head(place, DIMS), tensors)
    assert any("unexpected tensors" in reason for reason in check_directory(place, DIMS).engines["vllm"].refused)


def test_an_output_norm_changes_nothing_where_nothing_is_recycled(tmp_path: Path) -> None:
    config, tensors = exported(tmp_path / "ours")
    place = rewritten(tmp_path / "theirs", {**config, "norm_output": True}, tensors)
    assert same(made()[0], load_head(place, DIMS))


@pytest.mark.parametrize("trained", [True, False])
def test_a_table_that_others_trained_is_kept_and_ours_is_compared(tmp_path: Path, trained: bool) -> None:
    """Of our own file, all embeddings but the mask token's are the target's, and looked at."""
    head, ends = made()
    config, tensors = exported(tmp_path / "ours")
    if trained:
        del config["train_embeddings"]
    place = rewritten(tmp_path / "theirs", config, tensors)
    assert load_head(place, DIMS).own_embeddings is trained
    if not trained:
        check_embeddings(place, ends.embed_VD, dims=DIMS)
        assert same(head, load_head(place, DIMS))
    moved_VD = tensors["embed_tokens.weight"] + 1
    other = rewritten(tmp_path / "other", config, {**tensors, "embed_tokens.weight": moved_VD})
    loaded: Any = load_head(other, DIMS)
    if trained:  # nothing of it is the target's
        assert torch.equal(loaded.embed_tokens.weight, moved_VD)
    else:
        with pytest.raises(FormatError, match="embed_tokens.weight differs from the target's embedding"):
            check_embeddings(other, ends.embed_VD, dims=DIMS)


def test_trained_embeddings_start_from_the_targets() -> None:
    head = build_head(peagle(train_embeddings=True), DIMS)
    ends = random_ends(VOCAB, 32, 50)
    head.initialise(ends_of(ends), draft_ids(40))
    assert torch.equal(head.embed_tokens.weight, ends.embed_VD)  # type: ignore[union-attr, arg-type]


def test_draft_ids_come_back(tmp_path: Path) -> None:
    exported(tmp_path)
    assert torch.equal(load_head(tmp_path, DIMS).draft_ids_U, draft_ids(40))  # type: ignore[arg-type]
