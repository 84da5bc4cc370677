"""Saving and loading our own directories: bit-equal, complete, sealed, compact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_layouts import DIMS, LLAMA3, U, our_head, same_state
from transformers import AutoConfig

from headstart.heads.base import HeadConfig
from headstart.heads.checkpoints.raw import read_header
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.files import sha256_file
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, save_head
from headstart.heads.formats.card import render_card
from headstart.heads.formats.sidecar import seal
from headstart.recipes.load import load_recipe

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

CONFIGS = {
    "medusa": MedusaConfig(depth=3, num_layers=2),
    "medusa-shared": MedusaConfig(depth=2, lm_head="shared"),
    "eagle": EagleConfig(feature_noise=0.2),
    "eagle3": Eagle3Config(draft_vocab_size=U, depth=3),
    "eagle3-deep": Eagle3Config(draft_vocab_size=U, layers=3, fc_norm="concat", norm_output=True),
    "eagle3-full-vocabulary": Eagle3Config(draft_vocab_size=0, intermediate_size=48),
}


def test_eagle3_config_says_everything_to_every_engine() -> None:
    config = FAMILIES["eagle3"].files.config_json(our_head(CONFIGS["eagle3"]))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["draft_vocab_size"] == U and config["vocab_size"] == 97 and config["target_hidden_size"] == 32
    assert config["norm_before_residual"] is False and config["attention_bias"] is False
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    # vLLM counts hidden_states, SGLang adds one
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    # a plain head names none of the variants
    assert not {"fc_norm", "norm_before_fc", "norm_output"} & set(config)


def test_eagle3_variants_are_written_as_each_engine_reads_them() -> None:
    files, deep = FAMILIES["eagle3"].files, our_head(CONFIGS["eagle3-deep"])
    config, tensors = files.config_json(deep), files.tensors(deep)
    assert config["num_hidden_layers"] == 3 and config["norm_output"] is True and "fc_norm" not in config
    assert config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True  # TensorRT-LLM reads the latter
    assert not any(name.startswith("midlayer.") for name in tensors)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    for n in (1, 2):  # vLLM's name and SGLang's
        pair = [tensors[f"layers.{n}.{name}.weight"] for name in ("input_layernorm", "hidden_norm")]
        assert torch.equal(*pair) and pair[0].data_ptr() != pair[1].data_ptr()
        assert tensors[f"layers.{n}.self_attn.q_proj.weight"].shape == (32, 32)
    normed = files.config_json(our_head(Eagle3Config(draft_vocab_size=U, qk_norm=True, fc_norm="stream")))
    assert normed["architectures"] == ["Eagle3Qwen3ForCausalLM"] and normed["model_type"] == "qwen3"
    assert normed["fc_norm"] is True and "norm_before_fc" not in normed["eagle_config"]
    assert config["rope_parameters"] == LLAMA3
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}


def test_the_full_draft_vocabulary_is_still_stated_and_d2t_left_out() -> None:
    head = our_head(CONFIGS["eagle3-full-vocabulary"])
    assert FAMILIES[head.family].files.config_json(head)["draft_vocab_size"] == 97
    assert not {"d2t", "t2d", "draft_ids_U"} & set(FAMILIES[head.family].files.tensors(head))


def test_d2t_holds_offsets_and_t2d_marks_the_same_ids() -> None:
    head = our_head(CONFIGS["eagle3"])
    tensors = FAMILIES[head.family].files.tensors(head)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["d2t"] + torch.arange(U), head.draft_ids_U)
    assert torch.equal(torch.nonzero(tensors["t2d"]).squeeze(1), head.draft_ids_U)


def test_medusa_config_names_no_other_heads_or_layers() -> None:
    config = FAMILIES["medusa"].files.config_json(our_head(CONFIGS["medusa"]))
    counted = [key for key in config if "num" in key]
    assert sorted(counted) == ["num_heads", "num_hidden_layers"]
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (3, 2, True)


def test_default_rope_has_no_scaling_for_older_engines() -> None:
    dims = HeadDims(32, 97, 8, 4, 2, 8, 64, rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    config = FAMILIES["eagle"].files.config_json(our_head(CONFIGS["eagle"], dims))
    assert config["rope_theta"] == 100000.0 and config["rope_scaling"] is None


def test_partial_rope_is_written_where_older_engines_look() -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = FAMILIES["eagle"].files.config_json(
        our_head(CONFIGS["eagle"], HeadDims(32, 97, 8, 4, 2, 8, 64, rope_parameters=rope))
    )
    assert config["partial_rotary_factor"] == 0.5 and config["rope_parameters"]["partial_rotary_factor"] == 0.5


def bytes_of(head_config: HeadConfig, dims: HeadDims) -> int:
    with torch.device("meta"):
        head = build_head(head_config, dims)
    total = 0
    for name, tensor in head.state_dict().items():
        total += tensor.numel() * (2 if name != "draft_ids_U" else 8)
    return total + dims.vocab_size  # t2d


@pytest.mark.parametrize(
    ("recipe", "target", "limit"),
    [("llama-3.1-8b-eagle3", "Llama-3.1-8B-Instruct", 860e6), ("smollm2-eagle3", "smollm2-135m-instruct", 60e6)],
)
def test_export_sizes(recipe: str, target: str, limit: float) -> None:
    """Shipped recipes on the targets' published configs, bfloat16: nothing shared with the target is in the file."""
    config = json.loads((FIXTURES / f"configs/{target}.json").read_text())
    dims = HeadDims.from_hf_config(AutoConfig.for_model(**config))
    size = bytes_of(load_recipe(recipe).head, dims)
    assert 0.4 * limit < size <= limit


def test_the_file_of_an_export_has_the_size_that_was_promised(tmp_path: Path) -> None:
    """SmolLM2 at the shipped recipe's draft vocabulary, as it lies on the disk."""
    smollm = HeadDims(576, 49152, 30, 9, 3, 64, 1536)
    head = build_head(Eagle3Config(draft_vocab_size=16000), smollm)
    head.draft_ids_U.copy_(torch.arange(16000))
    export_head(head, tmp_path, ExportConfig(), {})
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert bytes_of(head.config, smollm) <= size <= bytes_of(head.config, smollm) + 20_000 and size <= 60e6


def test_a_saved_directory_refuses_to_mix_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"old")
    with pytest.raises(FormatError, match=r"medusa_lm_head\.safetensors.*empty directory"):
        save_head(our_head(CONFIGS["eagle"]), tmp_path, {})


def test_saving_over_an_older_head_replaces_it(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle"]), tmp_path, {})
    head = our_head(CONFIGS["eagle"])
    with torch.no_grad():
        head.fc.weight.zero_()
    save_head(head, tmp_path, {})
    assert same_state(load_head(tmp_path), head)


def test_a_diverged_head_is_not_saved(tmp_path: Path) -> None:
    head = our_head(CONFIGS["eagle"])
    with torch.no_grad():
        head.fc.weight[0, 0] = float("nan")
    with pytest.raises(FormatError, match="fc.weight holds NaN"):
        save_head(head, tmp_path, {})


def test_an_uninitialised_draft_vocabulary_is_not_saved(tmp_path: Path) -> None:
    head = our_head(CONFIGS["eagle3"])
    head.draft_ids_U.zero_()
    with pytest.raises(FormatError, match="draft_ids_U"):
        save_head(head, tmp_path, {})


@pytest.mark.parametrize("file", ["config.json", "headstart.json"])
def test_a_changed_file_is_recognised(tmp_path: Path, file: str) -> None:
    save_head(our_head(CONFIGS["eagle3"]), tmp_path, {})
    content = bytearray((tmp_path / file).read_bytes())
    content[content.rfind(b"8")] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(FormatError, match="changed"):
        load_head(tmp_path)


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle3"]), tmp_path, {})
    with pytest.raises(FormatError, match="num_layers is 8 and the target has 12"):
        load_head(tmp_path, HeadDims(32, 97, 12, 4, 2, 8, 64, rope_parameters=LLAMA3))


def test_a_newer_schema_asks_for_an_update(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["eagle"]), tmp_path, {})
    side = json.loads((tmp_path / "headstart.json").read_text())
    (tmp_path / "headstart.json").write_text(json.dumps({**side, "schema": 2}))
    with pytest.raises(FormatError, match="update Headstart"):
        load_head(tmp_path)


def test_tgi_finds_the_target_by_its_hub_name(tmp_path: Path) -> None:
    """A registered name of Headstart's says nothing to TGI."""
    head = our_head(CONFIGS["medusa"])
    export_head(head, tmp_path / "e", ExportConfig(["tgi"]), {"target": {"name": "smollm2-135m-instruct"}})
    config = json.loads((tmp_path / "e/config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    export_head(head, tmp_path / "l", ExportConfig(["tgi"]), {"target": {"name": "/home/me/models/support-llama"}})
    # its directory stays here: TGI finds it by this name from the directory that holds it
    assert json.loads((tmp_path / "l/config.json").read_text())["base_model_name_or_path"] == "support-llama"
    with pytest.raises(FormatError, match="base_model_name_or_path is '', expected the target"):
        export_head(head, tmp_path / "f", ExportConfig(["tgi"]), {})


def test_an_export_can_serve_several_engines(tmp_path: Path) -> None:
    export_head(our_head(CONFIGS["eagle"]), tmp_path / "e", ExportConfig(["portable", "sglang"]), {})
    assert check_directory(tmp_path / "e", DIMS).loads("vllm")
    assert check_directory(tmp_path / "e/sglang", DIMS).loads("sglang")


def test_compact_medusa_is_refused_by_engines_rather_than_drafting_at_random(tmp_path: Path) -> None:
    save_head(our_head(CONFIGS["medusa-shared"]), tmp_path, {})
    report = check_directory(tmp_path, DIMS)
    assert report.loads("headstart") and not report.wrong
    assert "lm_head" not in "".join(read_header(tmp_path / "model.safetensors"))


def test_a_shared_lm_head_needs_its_target_to_be_exported(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="bind it"):
        export_head(our_head(CONFIGS["medusa-shared"], bound=False), tmp_path, ExportConfig(), {})


def test_export_names_the_engines_that_serve_the_family(tmp_path: Path) -> None:
    medusa = r"SGLang does not serve medusa heads; expected.*'tgi'"
    for engines, words in ((["portable", "sglang"], medusa), (["triton"], "expected some of")):
        with pytest.raises(ConfigError, match=words):
            export_head(our_head(CONFIGS["medusa"]), tmp_path, ExportConfig(engines), {})
    assert not list(tmp_path.iterdir())


def test_a_sealed_directory_brings_the_targets_facts_to_its_own_check(tmp_path: Path) -> None:
    save_head(our_head(Eagle3Config(draft_vocab_size=U, feature_layers=[1, 3, 6])), tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert check_directory(tmp_path).loads("sglang")
    # SGLang would fall back to its default layers, which only the target's depth tells from the head's
    side = json.loads((tmp_path / "headstart.json").read_text())
    del config["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    side["sha256"]["config.json"] = sha256_file(tmp_path / "config.json")
    (tmp_path / "headstart.json").write_text(json.dumps(seal(side)))
    report = check_directory(tmp_path)
    assert report.wrong["sglang"] and "[2, 4, 5]" in report.wrong["sglang"][0]


def test_facts_say_what_the_next_step_reads(tmp_path: Path) -> None:
    """In headstart.json and on the card: a head that feeds its normed output back says so."""
    for normed, words in ((False, "pre-norm output"), (True, "normed output")):
        place = tmp_path / words
        save_head(our_head(Eagle3Config(draft_vocab_size=U, norm_output=normed)), place, {"target": {"name": "t"}})
        side = json.loads((place / "headstart.json").read_text())
        assert side["facts"]["recycled"] == words
        assert f"recycled: {words}" in render_card("someone/head", side, None, [])
