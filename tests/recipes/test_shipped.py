"""Every shipped recipe loads, builds its head at the target's real sizes, and says where its numbers come from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from headstart.auto import LEAST_GPU_PACK, PACKS
from headstart.eval.drafters import build_drafter
from headstart.heads.dims import HeadDims
from headstart.heads.families import build_head
from headstart.recipes.load import load_recipe, shipped_recipes, to_yaml

CONFIGS = Path(__file__).resolve().parents[1] / "fixtures" / "configs"
RECIPES = sorted(name for name in shipped_recipes() if not name.startswith("_"))
#: a draft layer of the block heads
SMOLLM2_LAYER = 4 * 576**2 + 3 * 576 * 1536 + 2 * 576 + 2 * 64  # as many key heads as query heads
QWEN3_LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
LLAMA_LAYER = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096 + 2 * 128
#: trained parameters in millions, worked out by hand from the published sizes
SIZES = {
    # H 4096, U 32000: fc 3·D·H, q 2H·H, k v 2·2H·1024, o H·H, MLP 3·H·14336, lm_head U·H, five norms
    "llama-3.1-8b-eagle3": (
        3 * 4096**2 + 2 * 4096**2 + 2 * 8192 * 1024 + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096 + 4 * 4096
    ),
    # four heads: a block with bias and a V × D matrix each
    "llama-3.1-8b-medusa": 4 * (4096**2 + 4096 + 128256 * 4096),
    "qwen3-8b-eagle3": (
        3 * 4096**2 + 2 * 4096**2 + 2 * 8192 * 1024 + 4096**2 + 3 * 4096 * 12288 + 32000 * 4096 + 4 * 4096
    ),
    # in each: fc 3·D·H, q, k v, o, MLP, lm_head U·H, four norms of H
    "qwen3-30b-a3b-eagle3": (
        3 * 2048**2 + 4096 * 4096 + 2 * 4096 * 512 + 4096 * 2048 + 3 * 2048 * 6144 + 32000 * 2048 + 4 * 2048
    ),
    "gpt-oss-20b-eagle3": (
        3 * 2880**2 + 5760 * 4096 + 2 * 5760 * 512 + 4096 * 2880 + 3 * 2880 * 17280 + 32000 * 2880 + 4 * 2880
    ),
    "gemma-3-12b-eagle3": (
        3 * 3840**2 + 7680 * 4096 + 2 * 7680 * 2048 + 4096 * 3840 + 3 * 3840 * 15360 + 32000 * 3840 + 4 * 3840
    ),
    "llama-3.3-70b-eagle3": (
        3 * 8192**2 + 2 * 8192**2 + 2 * 16384 * 1024 + 8192**2 + 3 * 8192 * 28672 + 32000 * 8192 + 4 * 8192
    ),
    "qwen3-next-80b-a3b-eagle3": (
        3 * 2048**2 + 4096 * 4096 + 2 * 4096 * 512 + 4096 * 2048 + 3 * 2048 * 5120 + 32000 * 2048 + 4 * 2048
    ),
    # D 576, 9 heads and 3 KV heads of 64, MLP 1536: fc 2D·D, q and o D·D, k v D·192, one norm; the rest is shared
    "smollm2-eagle": 2 * 576**2 + 2 * 576**2 + 2 * 576 * 192 + 3 * 576 * 1536 + 576,
    # k v are as wide as q, MLP 3072, a norm for each of three streams
    "smollm2-eagle3": 3 * 576**2 + 2 * 576**2 + 2 * 1152 * 576 + 576**2 + 3 * 576 * 3072 + 32000 * 576 + 7 * 576,
    # a norm over three streams
    "quickstart": 3 * 576**2 + 2 * 576**2 + 2 * 1152 * 192 + 576**2 + 3 * 576 * 1536 + 4096 * 576 + 7 * 576,
    # EAGLE-3's layer, and further ones: q and o H·H, k v H·192, MLP, two norms; mask_hidden 3·D, the mask token's H.
    # Of the small one, k v are as wide as q: it has as many key heads as query heads
    "smollm2-peagle": (
        3 * 576**2 + 2 * 576**2 + 2 * 1152 * 576 + 576**2 + 3 * 576 * 1536 + 16000 * 576 + 4 * 576
        + 2 * 576**2 + 2 * 576 * 576 + 3 * 576 * 1536 + 2 * 576 + 4 * 576
    ),
    "llama-3.1-8b-peagle": (
        3 * 4096**2 + 2 * 4096**2 + 2 * 8192 * 1024 + 4096**2 + 3 * 4096 * 14336 + 32000 * 4096 + 4 * 4096
        + 3 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4 * 4096
    ),
    # the heads of Medusa-1; the adapter is the target's
    "llama-3.1-8b-medusa2": 4 * (4096**2 + 4096 + 128256 * 4096),
    "smollm2-medusa2": 4 * (576**2 + 576 + 64 * (576 + 49152)),
    "smollm2-medusa": 4 * (576**2 + 576 + 64 * (576 + 49152)),
    # four heads: R and L of (d + 1) · D inputs, 14 · D over all heads, with biases; a V × D matrix each
    "llama-3.1-8b-hydra": 2 * (14 * 4096**2 + 4 * 4096) + 4 * 128256 * 4096,
    "smollm2-hydra": 2 * (14 * 576**2 + 4 * 576) + 4 * 64 * (576 + 49152),
    # and three more blocks per head; the prefix layer's q o, k v, MLP and three norms
    "llama-3.1-8b-hydrapp": (
        2 * (14 * 4096**2 + 4 * 4096) + 4 * 128256 * 4096 + 12 * (4096**2 + 4096)
        + 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 3 * 4096
    ),
    # block heads: fc m·D·D, hidden_norm, norm; per layer q o, k v, MLP, two norms of D and two of the head's width. The
    # output matrix is the target's
    "smollm2-dflash": 5 * 576**2 + 2 * 576 + 4 * SMOLLM2_LAYER,
    # and the GRU's three gates, W1 r·(D + G), W2 V·r
    "smollm2-domino": (
        5 * 576**2 + 2 * 576 + 2 * SMOLLM2_LAYER + 3 * 256 * (576 + 256) + 64 * (576 + 256) + 64 * 49152
    ),
    # and of each layer two convolutions: 2·2·D and 2·2·D/16·D; the selector's A V·r, B U·r, H r·D
    "smollm2-dflash2": (
        5 * 576**2 + 2 * 576 + 4 * (SMOLLM2_LAYER + 2 * (4 * 576 + 4 * 36 * 576)) + 64 * (49152 + 16000 + 576)
    ),
    "smollm2-jetspec": 5 * 576**2 + 2 * 576 + 4 * SMOLLM2_LAYER,
    # and W1 V·r, W2 U·r, the confidence head's D + r and its bias
    "smollm2-dspark": 7 * 576**2 + 2 * 576 + 2 * (SMOLLM2_LAYER + 3 * 576 * 1536) + 64 * (49152 + 16000) + 576 + 64 + 1,
    "qwen3-8b-dflash": 5 * 4096**2 + 2 * 4096 + 5 * QWEN3_LAYER,
    "qwen3-8b-dspark": 5 * 4096**2 + 2 * 4096 + 5 * QWEN3_LAYER + 256 * 2 * 151936 + 4096 + 256 + 1,
    "llama-3.1-8b-dspark": 5 * 4096**2 + 2 * 4096 + 5 * LLAMA_LAYER + 256 * 2 * 128256 + 4096 + 256 + 1,
    "smollm2-hydrapp": (
        2 * (14 * 576**2 + 4 * 576) + 4 * 64 * (576 + 49152) + 12 * (576**2 + 576)
        + 2 * 576**2 + 2 * 576 * 192 + 3 * 576 * 1536 + 3 * 576
    ),
}


def dims_of(target: str) -> HeadDims:
    values = json.loads((CONFIGS / f"{target.rsplit('/', 1)[-1]}.json").read_text())
    return HeadDims.from_hf_config(AutoConfig.for_model(**values))


def test_the_list_is_complete() -> None:
    expected = {"quickstart", "qwen3-8b-eagle3", "qwen3-30b-a3b-eagle3", "gpt-oss-20b-eagle3", "gemma-3-12b-eagle3"}
    expected |= {"llama-3.3-70b-eagle3", "qwen3-next-80b-a3b-eagle3"}
    expected |= {f"llama-3.1-8b-{head}" for head in ("medusa", "medusa2", "hydra", "hydrapp", "eagle3", "peagle")}
    expected |= {f"smollm2-{head}" for head in ("medusa", "medusa2", "hydra", "hydrapp", "eagle", "eagle3", "peagle")}
    expected |= {"smollm2-dflash", "smollm2-dspark", "qwen3-8b-dflash", "qwen3-8b-dspark", "llama-3.1-8b-dspark"}
    expected |= {"smollm2-dflash2", "smollm2-domino", "smollm2-jetspec"}
    assert set(RECIPES) == expected == set(SIZES)


@pytest.mark.parametrize("name", RECIPES)
def test_dry_build(name: str) -> None:
    recipe = load_recipe(name)
    dims = dims_of(recipe.target.name)
    with torch.device("meta"):
        head = build_head(recipe.head, dims)
    assert sum(p.numel() for p in head.parameters() if p.requires_grad) == SIZES[name]
    # the tree that the recipe asks for can be drafted by this head
    assert build_drafter(head, recipe.eval) is not None


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_reads_back_equal(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert recipe.name == name and recipe.run_dir == f"runs/{name}"


def test_published_layers() -> None:
    for name, layers in (
        ("llama-3.1-8b-eagle3", (2, 16, 29)),
        ("qwen3-8b-eagle3", (2, 18, 33)),
        ("qwen3-30b-a3b-eagle3", (2, 24, 45)),
        ("gpt-oss-20b-eagle3", (2, 12, 21)),
        ("gemma-3-12b-eagle3", (2, 24, 45)),
        ("llama-3.3-70b-eagle3", (2, 40, 77)),
        ("qwen3-next-80b-a3b-eagle3", (2, 24, 45)),
        ("quickstart", (2, 15, 27)),
    ):
        recipe = load_recipe(name)
        with torch.device("meta"):
            assert build_head(recipe.head, dims_of(recipe.target.name)).spec.layer_ids == layers


def test_targets_with_recurrent_states_draft_chains() -> None:
    """No tree can be verified by them (eval.tree.kind=chain)."""
    found = set()
    for name in RECIPES:
        recipe = load_recipe(name)
        config = json.loads((CONFIGS / f"{recipe.target.name.rsplit('/', 1)[-1]}.json").read_text())
        if "linear_num_key_heads" in config:
            found.add(name)
            assert recipe.eval.tree.kind == "chain", name
    assert found == {"qwen3-next-80b-a3b-eagle3"}


def test_larger_targets_than_a_card_are_shared_by_ranks() -> None:
    for name, parallel in (
        ("llama-3.3-70b-eagle3", "fsdp2"), ("qwen3-next-80b-a3b-eagle3", "fsdp2"), ("qwen3-30b-a3b-eagle3", "none"),
    ):  # fmt: skip
        recipe = load_recipe(name)
        assert recipe.target.parallel == parallel
        # packs are as small as it takes to give each of 8 ranks one
        assert recipe.data.pack_tokens == "auto"
        assert parallel == "none" or (recipe.train.accumulation * PACKS[0]) % (8 * LEAST_GPU_PACK) == 0


def test_gpt_oss_has_room_for_its_thoughts() -> None:
    recipe = load_recipe("gpt-oss-20b-eagle3")
    assert recipe.data.max_length == 4096, "the target's, not EAGLE-3's"
    assert recipe.data.template_kwargs == recipe.eval.template_kwargs == {"reasoning_effort": "medium"}


def test_rope_of_the_targets() -> None:
    llama = dims_of("meta-llama/Llama-3.1-8B-Instruct")
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.rope_parameters["rope_theta"] == 500000.0
    assert dims_of("Qwen/Qwen3-8B").rope_parameters["rope_theta"] == 1000000.0
    assert dims_of("Qwen/Qwen3-30B-A3B").rope_parameters["rope_theta"] == 1000000.0
    assert dims_of("openai/gpt-oss-20b").rope_parameters["rope_type"] == "yarn"
    gemma = dims_of("google/gemma-3-12b-it").rope_parameters  # that of the layers that attend to everything
    assert (gemma["rope_theta"], gemma["rope_type"], gemma["factor"]) == (1000000.0, "linear", 8.0)
    hybrid = dims_of("Qwen/Qwen3-Next-80B-A3B-Instruct").rope_parameters
    assert (hybrid["rope_theta"], hybrid["partial_rotary_factor"]) == (10000000, 0.25)
    assert dims_of("smollm2-135m-instruct").rope_parameters["rope_theta"] == 100000.0


@pytest.mark.parametrize(
    ("name", "node"),
    [(f"_{n}", "head") for n in ("eagle", "eagle3", "medusa", "hydra", "hydrapp")]
    + [(f"_{n}", "head") for n in ("dflash", "dflash2", "domino", "dspark", "jetspec")]
    + [("_medusa2", "joint")],
)
def test_hyper_parameters_cite_their_source(name: str, node: str) -> None:
    text = shipped_recipes()[name].read_text()
    assert "arXiv" in text
    for key in yaml.safe_load(text)[node]:
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
        said = "#" in line or key in ("type", "depth", "enabled", "alpha", "dropout")  # rank's line says the last two
        assert said, f"{name}: {node}.{key} says nothing about where it comes from"


def test_joint_training_and_hydra_are_as_published() -> None:
    """The recipes at the sizes of the papers; those of the small target follow measurements."""
    medusa2 = load_recipe("llama-3.1-8b-medusa2")
    joint = medusa2.joint
    assert (joint.enabled, joint.rank, joint.alpha, joint.dropout) == (True, 32, 16, 0.05)
    assert joint.modules == ["all-linear"]
    assert (joint.heads_only, joint.head_rate, joint.weight, joint.schedule, joint.loss) == (0.5, 4, 0.2, "sine", "kl")
    assert (medusa2.train.lr, joint.max_perplexity_rise) == (5e-4, 0.01) and medusa2.train.activation_checkpointing
    plain, plus = (load_recipe(f"llama-3.1-8b-{name}").head for name in ("hydra", "hydrapp"))
    for head, expected in ((plain, (4, 1, False, 0.0)), (plus, (4, 4, True, 0.2))):
        assert (head.depth, head.num_layers, head.prefix_layer, head.dropout) == expected
        assert head.lm_head == "own" and head.loss == "kl" and head.depth_decay == 1.0


def test_block_heads_are_as_published() -> None:
    """Layers, layout, block, weights of the losses; and the same block at training and at decoding."""
    for name, layout, drafts in (
        ("qwen3-8b-dflash", False, 15), ("smollm2-dflash", False, 7), ("smollm2-jetspec", False, 7),
        ("smollm2-dflash2", False, 7),
        ("qwen3-8b-dspark", True, 7), ("llama-3.1-8b-dspark", True, 7), ("smollm2-dspark", True, 8),
        ("smollm2-domino", True, 8),
    ):  # fmt: skip
        recipe = load_recipe(name)
        with torch.device("meta"):
            head = build_head(recipe.head, dims_of(recipe.target.name))
        assert (recipe.head.sample_from_anchor, head.depth) == (layout, drafts)
        assert head.block_size == (drafts if layout else drafts + 1)
        assert recipe.eval.tree.kind == "chain" and recipe.eval.tree.depth <= drafts
        weights = {term.name: term.weight for term in head.terms}
        assert weights.pop("confidence", None) == (1.0 if name.endswith("dspark") else None)
        assert weights.pop("select", None) == (1.0 if name.endswith("dflash2") else None)
        assert weights.pop("base_kl", None) == (1.0 if name.endswith("domino") else None)
        published = {"ce": 0.1, "l1": 0.9} if layout else {"ce": 1.0}
        small = {"kl": 0.5, "l1": 1.0} if name == "smollm2-dspark" else {"kl": 1.0}
        assert weights == (small if name.startswith("smollm2") else published)
    with torch.device("meta"):
        jetspec = build_head(load_recipe("smollm2-jetspec").head, dims_of("smollm2-135m-instruct"))
    assert jetspec.causal and jetspec.config.depth_decay == 1.0
    for gamma, recipe in ((7, load_recipe("qwen3-8b-dflash")), (4, load_recipe("qwen3-8b-dspark"))):
        assert recipe.head.depth_decay == pytest.approx(math.exp(-1 / gamma), abs=5e-5)
    assert build_ids("qwen3-8b-dflash") == (2, 10, 18, 26, 34)
    assert build_ids("llama-3.1-8b-dspark") == (2, 9, 16, 23, 30)


def build_ids(name: str) -> tuple[int, ...]:
    recipe = load_recipe(name)
    with torch.device("meta"):
        return build_head(recipe.head, dims_of(recipe.target.name)).spec.layer_ids


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "machines"),
    [
        ("single-gpu", "NO", 1, 1),
        ("ddp-2", "MULTI_GPU", 2, 1),
        ("ddp-4", "MULTI_GPU", 4, 1),
        ("ddp-8", "MULTI_GPU", 8, 1),
        ("two-nodes", "MULTI_GPU", 16, 2),
        ("fsdp2", "FSDP", 8, 1),
        ("zero2", "DEEPSPEED", 8, 1),
        ("zero3", "DEEPSPEED", 8, 1),
    ],
)
def test_launch_configs_are_what_accelerate_reads(name: str, kind: str, ranks: int, machines: int) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    folder = shipped_recipes()["quickstart"].parent / "accelerate"
    config = load_config_from_file(str(folder / f"{name}.yaml"))  # refuses keys that it does not know
    assert (config.distributed_type, config.num_processes, config.num_machines) == (kind, ranks, machines)
    assert config.mixed_precision == "no"  # train.mixed_precision decides
    if kind == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
    if kind == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[-1])
        assert config.deepspeed_config["zero3_init_flag"] is False  # else the frozen target would be partitioned too


def test_every_launch_config_is_known_to_the_test_above() -> None:
    folder = shipped_recipes()["quickstart"].parent / "accelerate"
    known = {"single-gpu", "ddp-2", "ddp-4", "ddp-8", "two-nodes", "fsdp2", "zero2", "zero3"}
    assert {path.stem for path in folder.glob("*.yaml")} == known
