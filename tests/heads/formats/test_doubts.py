"""`--check` tells of matrices without content, numbers that no model has, and what no engine looks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import (
    DIMS,
    DRAFT,
    E1,
    E3,
    LLAMA,
    SPECULATORS_CONFIG,
    D,
    F,
    L,
    M,
    R,
    Tensors,
    V,
    W,
    drop,
    eagle3_tensors,
    peagle_tensors,
    same,
    trapped,
)

from headstart.heads.formats import Handling, check_directory


def zeroed(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: torch.zeros_like(t) if name in names else t for name, t in tensors.items()}


DOUBTS: dict[str, tuple[Any, dict[str, Any], Callable[[Tensors], Tensors], list[str]]] = {
    "a zero projection": (
        E3, {}, zeroed("midlayer.self_attn.q_proj.weight"), ["midlayer.self_attn.q_proj.weight .32, 64.: every value"],
    ),
    "a zero output matrix": (E3, {}, zeroed("lm_head.weight"), ["lm_head.weight .40, 32.: every value is zero"]),
    "zero norms": (
        E3, {}, zeroed("norm.weight", "midlayer.hidden_norm.weight"),
        ["midlayer.hidden_norm.weight .32.: every value is zero", "^norm.weight .32.: every value is zero"],
    ),
    "one row over and over": (
        E1, {}, lambda t: {**t, "fc.weight": t["fc.weight"][:1].repeat(D, 1)}, ["fc.weight .*every row is the same"],
    ),
    "an untrained block": (
        M, {}, zeroed("blocks.1.layers.0.weight"), ["blocks.1.layers.0.weight .*as before training: this head repeats"],
    ),
    "a zero bias is none": (E1, {}, lambda t: {**t, "fc.bias": torch.zeros(D)}, []),
    "norms of ones are none": (E3, {}, lambda t: {**t, "norm.weight": torch.ones(D)}, []),
    "a large epsilon": (E3, {"rms_norm_eps": 0.01}, same, ["config.json: rms_norm_eps is 0.01, which no model has"]),
    "a tiny epsilon": (E1, {"rms_norm_eps": 1e-12}, same, ["config.json: rms_norm_eps is 1e-12, which no model has"]),
    "an epsilon inside": (
        (SPECULATORS_CONFIG, lambda: eagle3_tensors("layers.0.")),
        {"transformer_layer_config": {**LLAMA, "rms_norm_eps": 0}}, same, ["layer_config.rms_norm_eps is 0, which"],
    ),
    "a draft model": (DRAFT, {}, zeroed("model.norm.weight"), ["model.norm.weight .32.: every value is zero"]),
}  # fmt: skip


@pytest.mark.parametrize("trap", DOUBTS.values(), ids=DOUBTS.keys())
def test_what_is_doubtful_is_told(tmp_path: Path, trap: Any) -> None:
    report = check_directory(trapped(tmp_path, (*trap[:3], {})), DIMS)
    assert len(report.doubts) == len(trap[3]), report.doubts
    for doubt, words in zip(sorted(report.doubts), trap[3], strict=True):
        assert re.search(words, doubt) and f"doubtful: {doubt}" in report.render(), doubt
        assert doubt in report.to_json()["doubts"]


def test_every_engine_is_told_of_values_that_are_not_finite(tmp_path: Path) -> None:
    """None of them looks: a head of NaN would be served."""

    def broken(tensors: Tensors) -> Tensors:
        return {**tensors, "norm.weight": torch.full((D,), float("nan"))}

    for number, base in enumerate((E3, F)):
        report = check_directory(trapped(tmp_path / str(number), (base, {}, broken, {})), DIMS)
        assert not report.served and "norm.weight holds NaN" in report.engines["vllm"].wrong[0], report.render()


LM = "model.layers.0."
DRAFT_MODELS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], Handling, str]] = {
    "a missing tensor": ({}, drop(f"{LM}mlp.up_proj.weight"), R, "layers.0.mlp.up_proj.weight are missing"),
    "another width": ({"intermediate_size": 48}, same, R, r"down_proj.weight is \[32, 64\], .* makes it \[32, 48\]"),
    "more layers": ({"num_hidden_layers": 2}, same, R, "layers.1.input_layernorm.weight"),
    "no output matrix": ({}, drop("lm_head.weight"), R, "lm_head.weight is missing and tie_word_embeddings is false"),
    "tied": ({"tie_word_embeddings": True}, drop("lm_head.weight"), L, ""),
    "integers": ({}, lambda t: {**t, "model.norm.weight": t["model.norm.weight"].int()}, W, "cast in silence"),
    "a mixture": ({"model_type": "mixtral"}, same, L, "its layers are not compared with config.json"),
    "no configuration": ({"rope_scaling": "yarn"}, same, R, "no llama can be built from config.json"),
    "shorter texts": ({"max_position_embeddings": 128}, same, L, "texts of up to 128 tokens, the target's are"),
}


@pytest.mark.parametrize("trap", DRAFT_MODELS.values(), ids=DRAFT_MODELS.keys())
def test_layers_of_a_draft_model(tmp_path: Path, trap: Any) -> None:
    changes, edit, handling, words = trap
    found = check_directory(trapped(tmp_path, (DRAFT, changes, edit, {})), DIMS).engines["vllm"]
    assert found.handling is handling, found
    assert re.search(words, " ".join([*found.reasons, *found.notes])), found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is None, expected the name of an architecture"),
        ({"model_type": ["llama"]}, "model_type is .'llama'., expected the name"),
        ({"eagle_config": [1]}, "eagle_config is .1., expected an object"),
        ({"max_position_embeddings": 5.5}, "max_position_embeddings is 5.5, expected an integer"),
    ],
)
def test_what_transformers_cannot_parse_no_engine_serves(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    report = check_directory(trapped(tmp_path, (E3, changes, same, {})), DIMS)
    assert not report.served
    for engine in ("vllm", "sglang", "tensorrt_llm"):
        assert re.search(words, " ".join(report.engines[engine].refused)), report.render()


def test_a_mask_token_is_in_the_vocabulary(tmp_path: Path) -> None:
    report = check_directory(trapped(tmp_path, ((E3[0], peagle_tensors), {"ptd_token_id": V}, same, {})), DIMS)
    assert "ptd_token_id is 97" in report.engines["vllm"].refused[0]


def test_a_tensor_with_and_without_its_prefix(tmp_path: Path) -> None:
    def doubled(tensors: Tensors) -> Tensors:
        return {**tensors, "model.norm.weight": tensors["norm.weight"] + 1}

    report = check_directory(trapped(tmp_path, (F, {}, doubled, {})), DIMS)
    assert "norm.weight is there twice, also as model.norm.weight" in report.engines["vllm"].wrong[0]
