"""Heads from elsewhere on the command line: exported for another engine, trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart import serving_check
from headstart.heads.base import Head
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import build_head
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.hydra.head import HydraConfig
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.families.peagle.head import PEagleConfig
from headstart.heads.formats import check_directory, load_head, save_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.sidecar import annotate
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig
from headstart.saved_heads import continued_head, require_same_head, trained_date, trained_otherwise

#: the head of the `recipe` fixture
SHAPE = Eagle3Config(depth=2, draft_vocab_size=64, intermediate_size=32)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetConfig(name=str(tiny_target), dtype="float32", device="cpu"))


def published(head: Head, directory: Path, **more: torch.Tensor) -> Path:
    """As somebody else would have written it: no headstart.json, maybe embeddings."""
    save_head(head, directory, {})
    (directory / "headstart.json").unlink()
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, **{name.replace("__", "."): t for name, t in more.items()}}, directory / "model.safetensors")
    return directory


def eagle3(target: Target, seed: int = 1) -> Head:
    torch.manual_seed(seed)
    head = build_head(SHAPE, target.dims)
    head.draft_ids_U.copy_(torch.arange(3, 67))
    return head


def test_a_published_head_is_exported_for_another_engine(
    headstart: Callable, tiny_target: Path, target: Target, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    head = build_head(EagleConfig(), target.dims)
    theirs = published(head, tmp_path / "theirs", embed_tokens__weight=target.embed_VD.clone())
    asked = ("export", "--head", theirs, "--target", tiny_target, "target.device=cpu", "export.dtype=float32")
    result = headstart(*asked, "export.engines=[sglang]", "--out", tmp_path / "ours", "--json")
    assert result.code == 0, result.err
    assert "serving sees the features that training saw" in result.err
    assert result.json["exports"] == {"sglang": str(tmp_path / "ours")}
    assert result.json["checks"]["sglang"]["engines"]["sglang"]["verdict"] == "loads"
    again = load_head(tmp_path / "ours", target.dims).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in head.state_dict().items())
    side = json.loads((tmp_path / "ours/headstart.json").read_text())
    assert side["provenance"]["exported_from"] == "a local head" and side["provenance"]["serving_parity"]["passed"]
    assert side["target"]["num_layers"] == 8

    itself = headstart(*asked, "--out", theirs)
    assert itself.code == 2 and "that is the head itself" in itself.err
    nowhere = headstart("export", "--head", tmp_path / "gone", "--target", tiny_target)
    assert nowhere.code == 1 and "--head" in nowhere.err and "no such directory" in nowhere.err
    assert headstart("export", "--head", theirs).code == 2
    unfit = headstart(*asked, "export.engines=[tgi]", "--out", tmp_path / "tgi")
    assert unfit.code == 2 and "TGI does not serve eagle heads" in unfit.err


def test_a_head_with_other_embeddings_than_the_targets_is_refused(
    headstart: Callable, tiny_target: Path, target: Target, tmp_path: Path
) -> None:
    """Headstart drafts with the target's: a head trained with its own would draft wrongly in silence."""
    theirs = published(eagle3(target), tmp_path / "theirs", embed_tokens__weight=target.embed_VD + 0.1)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    for command in (("eval", "--data", data), ("export", "--out", tmp_path / "ours")):
        result = headstart(*command, "--head", theirs, "--target", tiny_target, "target.device=cpu")
        assert result.code == 1 and "embed_tokens.weight differs from the target's embedding" in result.err


def test_an_export_whose_features_differ_is_refused_or_recorded(
    headstart: Callable, tiny_target: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a serving loop that reads other layers would do to the features, as training's side sees it."""
    original = serving_check._serving_features
    other = FeatureSpec((2, 4, 6))

    def shifted(target: Target, spec: FeatureSpec, *rest: Any) -> dict[str, torch.Tensor]:
        return dict(zip(serving_check._names(spec), original(target, other, *rest).values(), strict=True))

    monkeypatch.setattr(serving_check, "_serving_features", shifted)
    save_head(eagle3(target), tmp_path / "head", {})
    asked = ("export", "--head", tmp_path / "head", "--target", tiny_target, "target.device=cpu", "--out")
    refused = headstart(*asked, tmp_path / "out")
    assert refused.code == 1 and "hidden_states[5], rounding explains" in refused.err and "force=true" in refused.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert headstart(*asked, tmp_path / "out", "--force").code == 0
    side = json.loads((tmp_path / "out/headstart.json").read_text())
    found = side["provenance"]["serving_parity"]
    assert not found["passed"] and found["where"].endswith("hidden_states[5]")
    card = render_card("me/head", side, None, ["vllm"])
    assert "**Exported by force**" in card and "hidden_states[5]" in card and "in the median token" in card


def test_an_export_carries_what_tune_chose(
    headstart: Callable, tiny_target: Path, target: Target, tmp_path: Path
) -> None:
    save_head(eagle3(target), tmp_path / "head", {})
    tree = {"kind": "chain", "depth": 6}
    choice = {"label": "chain6", "tree": tree, "tau": 2.0, "predicted_speedup": 1.5, "measured_speedup": 1.4,
              "speculate": True}  # fmt: skip
    tuned = {"card": {"device": "card", "batches": {"1": choice}}}
    annotate(tmp_path / "head", {"tuned": tuned})
    asked = ("export", "--head", tmp_path / "head", "--target", tiny_target, "target.device=cpu")
    exported = headstart(*asked, "--out", tmp_path / "out", "export.engines=[vllm,sglang]")
    assert exported.code == 0, exported.err
    for place in (tmp_path / "out", tmp_path / "out/sglang"):
        assert json.loads((place / "headstart.json").read_text())["tuned"] == tuned
    said = "".join(exported.err.split())
    assert '"num_speculative_tokens":6' in said and "--speculative-num-steps6" in said
    assert "6draftedtokens:thebestchainatbatch1oncard" in said


def test_training_goes_on_from_a_published_head(
    headstart: Callable, recipe: Path, target: Target, tmp_path: Path
) -> None:
    head = eagle3(target)
    theirs = published(head, tmp_path / "theirs")
    asked = ("train", recipe, f"start_from={theirs}", "data.distill.prompts=[]", "train.epochs=1", "train.lr=1e-9")
    result = headstart(*asked)
    assert result.code == 0, result.err
    assert f"training goes on from {theirs}" in result.err
    trained = load_head(tmp_path / "run/head", target.dims).state_dict()
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=0)
    assert check_directory(tmp_path / "run/head", target.dims).loads("vllm")
    assert "train: finished before" in headstart(*asked).err
    published(eagle3(target, seed=2), theirs)  # another head in its place
    assert "training goes on from" in headstart(*asked).err


def test_our_own_head_is_continued_with_other_settings_of_training(target: Target, tmp_path: Path) -> None:
    head = eagle3(target)
    save_head(head, tmp_path, {})
    longer = Eagle3Config(depth=5, draft_vocab_size=64, intermediate_size=32, feature_layers=[2, 4, 5])
    found = continued_head(str(tmp_path), longer, target)
    assert found.depth == 5
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in found.state_dict().items())


OTHERS = {
    "draft vocabulary": (
        Eagle3Config(draft_vocab_size=65, intermediate_size=32),
        r"\(draft_ids_U is .64., the recipe makes it .65.\): set head.draft_vocab_size=64",
    ),
    "MLP": (Eagle3Config(draft_vocab_size=64), r"head.intermediate_size=32"),
    "layers": (
        Eagle3Config(draft_vocab_size=64, intermediate_size=32, feature_layers=[1, 2, 3]),
        r"set 'head\.feature_layers=\[2, 4, 5\]'",
    ),
    "layers of the head": (
        Eagle3Config(draft_vocab_size=64, intermediate_size=32, layers=2),
        r"it has no layers.1.input_layernorm.weight, the recipe's head has.: set head.layers=1$",
    ),
    "what goes back in": (
        Eagle3Config(draft_vocab_size=64, intermediate_size=32, norm_output=True),
        r"recipe's: set head.norm_output=false$",
    ),
    "family": (MedusaConfig(), "is a head of type 'eagle3' and the recipe's is 'medusa': set head.type=eagle3"),
}


@pytest.mark.parametrize(("config", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_a_recipe_that_describes_another_head(target: Target, tmp_path: Path, config: object, words: str) -> None:
    theirs = published(eagle3(target), tmp_path / "theirs")
    with pytest.raises(ConfigError, match=words):
        continued_head(str(theirs), config, target)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="start_from .*no such directory"):
        continued_head(str(tmp_path / "gone"), config, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "asked", "words"),
    [
        (2, 1, r"it has blocks.0.layers.1.bias, the recipe's head has not.: set head.num_layers=2"),
        (1, 2, r"it has no blocks.0.layers.1.bias, the recipe's head has.: set head.num_layers=1"),
    ],
)
def test_a_layer_that_only_one_of_two_heads_has(target: Target, given: int, asked: int, words: str) -> None:
    head = build_head(MedusaConfig(depth=2, num_layers=given), target.dims)
    with pytest.raises(ConfigError, match=words):
        require_same_head(head, "theirs", MedusaConfig(depth=2, num_layers=asked), target.dims)


PEAGLE: dict[str, Any] = {"draft_vocab_size": 64, "feature_layers": [2, 4, 5], "mask_token_id": 7}


def test_a_head_that_uses_the_targets_embeddings_is_exported_with_them(
    headstart: Callable, target: Target, tiny_target: Path, tmp_path: Path
) -> None:
    """It is saved without them, and engines need the mask token's among all others."""
    head = build_head(PEagleConfig(**PEAGLE), target.dims)
    head.initialise(target.ends, torch.arange(64))
    with torch.no_grad():
        head.mask_embedding += 1  # type: ignore[operator]
    save_head(head, tmp_path / "head", {"target": target.fingerprint()})
    asked = ("export", "--head", tmp_path / "head", "--target", tiny_target, "target.device=cpu")
    exported = headstart(*asked, "--out", tmp_path / "out", "export.engines=[vllm]", "export.dtype=float32")
    assert exported.code == 0, exported.err
    assert '"parallel_drafting": true' in " ".join(exported.err.split()), exported.err
    table_VD = load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"]
    expected = target.embed_VD.clone()
    expected[7] += 1
    assert torch.equal(table_VD, expected)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layers": 2}, "it has no layers.1.*set head.layers=1$"),
        ({"draft_vocab_size": 60}, "draft_ids_U is .64.*set head.draft_vocab_size=64$"),
        ({"hidden_size": 16}, "it has no embed_tokens.weight, the recipe's head has.*head.hidden_size=null"),
        ({"qk_norm": True}, "set head.qk_norm=false$"),
        ({"mask_token_id": 8}, "set head.mask_token_id=7$"),
        ({"feature_layers": [1, 2, 3]}, r"set 'head.feature_layers=\[2, 4, 5\]'$"),
    ],
)
def test_a_parallel_head_goes_on_as_the_same_one(target: Target, asked: dict[str, Any], words: str) -> None:
    head = build_head(PEagleConfig(**PEAGLE), target.dims)
    with pytest.raises(ConfigError, match=words):
        require_same_head(head, "theirs", PEagleConfig(**{**PEAGLE, **asked}), target.dims)
    # what training does may differ, and null takes the head's own mask token
    for allowed in ({"depth": 3, "row_fraction": 1.0, "loss": "lk"}, {"mask_token_id": None}):
        require_same_head(head, "theirs", PEagleConfig(**{**PEAGLE, **allowed}), target.dims)


@pytest.mark.parametrize(("given", "asked"), [(False, True), (True, False)])
def test_the_settings_that_are_named_exist_and_can_be_given(target: Target, given: bool, asked: bool) -> None:
    """Hydra's activation is the target's and no setting. Values are written as overrides take them."""
    head = build_head(HydraConfig(depth=2, prefix_layer=given), target.dims)
    with pytest.raises(ConfigError) as refusal:
        require_same_head(head, "theirs", HydraConfig(depth=2, prefix_layer=asked), target.dims)
    assert str(refusal.value).endswith(f": set head.prefix_layer={str(given).lower()}")


def test_a_saved_head_tells_what_its_target_was(target: Target, tmp_path: Path) -> None:
    def other(**changes: str | None) -> str | None:
        save_head(eagle3(target), tmp_path, {"target": {**target.fingerprint(), **changes}})
        return trained_otherwise(tmp_path, target)

    assert other() is None
    assert other(template_date="2026-03-05") is None and trained_date(tmp_path) == "2026-03-05"
    assert other(template_hash=None) is None, "of a target without a template nothing is known"
    assert "trained on a target with another chat template: its" in str(other(template_hash="0" * 64))
    assert "another set of weights and another tokenizer:" in str(other(weight_hash="0" * 64, tokenizer_hash="0" * 64))
    assert other(weight_hash="0" * 64, dtype="bfloat16") is None, "rounded weights are not compared"
    assert trained_otherwise(None, target) is None
    (tmp_path / "headstart.json").unlink()
    assert trained_otherwise(tmp_path, target) is None


def test_an_evaluation_on_another_template_says_so(
    headstart: Callable, tiny_target: Path, target: Target, prompts: Path, tmp_path: Path
) -> None:
    """A head drafts badly on text that it was not trained on: τ alone would look like a bad head."""
    save_head(eagle3(target), tmp_path / "head", {"target": target.fingerprint()})
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}[assistant] ")
    asked = ("eval", "--head", tmp_path / "head", "--target", tiny_target, "--data", prompts, "eval.max_new_tokens=2")
    same = headstart(*asked, "--out", tmp_path / "same")
    assert same.code == 0 and "WARNING" not in same.err + same.out, same.err
    changed = headstart(*asked, f"target.chat_template={template}", "--out", tmp_path / "changed")
    assert changed.code == 0, changed.err
    for shown in (changed.err, changed.out, (tmp_path / "changed" / "report.md").read_text()):
        assert "WARNING: the head was trained on a target with another chat template" in shown
