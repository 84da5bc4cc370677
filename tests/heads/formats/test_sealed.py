"""An export that somebody changed: consistent in itself, so that only headstart.json knows what the head is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from format_layouts import DIMS, LLAMA3, U, V, our_head
from safetensors.torch import load_file, save_file

from headstart.heads.errors import FormatError
from headstart.heads.families.eagle.head import EagleConfig
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.families.medusa.head import MedusaConfig
from headstart.heads.formats import ExportConfig, check_directory, export_head, load_head, save_head
from headstart.heads.formats.sidecar import notes, seal


def edited(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "rope, both spellings": (
        {"rope_theta": 1e4, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        "rope_theta is 10000",
    ),
    "layer ids, both countings": (
        {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
        },
        r"eagle_aux_hidden_state_layer_ids is \[1, 3, 4\], exported as \[2, 4, 5\]",
    ),
    "head split": (
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
        "num_attention_heads is 8, exported as 4",
    ),
    "epsilon": ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, exported as 1e-05"),
}


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize(("changes", "words"), EDITS.values(), ids=EDITS.keys())
def test_an_export_whose_config_was_edited(
    tmp_path: Path, changes: dict[str, Any], words: str, with_target: bool
) -> None:
    """Each edit leaves a consistent directory: only headstart.json knows what the head was trained with."""
    save_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path, {})
    edited(tmp_path, **changes)
    report = check_directory(tmp_path, DIMS if with_target else None)
    for engine in ("vllm", "sglang", "tensorrt_llm"):
        assert any(re.search(words, reason) for reason in report.wrong[engine]), report.render()
    assert not report.loads("headstart")


def test_an_export_whose_weights_were_exchanged(tmp_path: Path) -> None:
    """Another draft vocabulary, consistent in itself: engines would load it, and draft other tokens."""
    save_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path, {})
    weights = load_file(tmp_path / "model.safetensors")
    ids = torch.arange(V - U, V)
    weights |= {"d2t": ids - torch.arange(U), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    save_file(weights, tmp_path / "model.safetensors")
    report = check_directory(tmp_path)
    assert set(report.wrong) == {"vllm", "sglang", "tensorrt_llm"}, report.render()
    assert "not the file that was exported" in report.wrong["vllm"][0] and "copy it again" in report.wrong["vllm"][0]


def test_a_field_that_no_engine_reads_may_be_added_to_an_export(tmp_path: Path) -> None:
    save_head(our_head(Eagle3Config(draft_vocab_size=U)), tmp_path, {})
    edited(tmp_path, transformers_version="5.17.0")
    report = check_directory(tmp_path)
    assert report.loads("vllm") and not report.wrong
    assert any("in nothing that the head depends on" in note for note in report.engines["vllm"].notes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sha256", [{}, {}]), ("target", ["someone/target"]), ("recipe", "x"), ("provenance", 5), ("tuned", [1]),
     ("config", None), ("dims", [32]), ("type", {"eagle": 3}), ("layout", 1), ("feature_layers", 2)],
)  # fmt: skip
def test_a_sealed_sidecar_whose_fields_are_of_another_kind(tmp_path: Path, field: str, value: Any) -> None:
    """Whoever can write the file can seal it."""
    save_head(our_head(EagleConfig()), tmp_path, {})
    side = {**json.loads((tmp_path / "headstart.json").read_text()), field: value}
    (tmp_path / "headstart.json").write_text(json.dumps(seal(side)))
    with pytest.raises(FormatError, match=f"headstart.json: .*{field}"):
        load_head(tmp_path, DIMS)
    check_directory(tmp_path, DIMS)
    assert value is None or notes(tmp_path) == {}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi", "tensorrt_llm"])
def test_single_engine_exports_are_sealed_alike(tmp_path: Path, engine: str) -> None:
    """What an engine's own spelling changes is no edit."""
    head = our_head(EagleConfig() if engine == "sglang" else MedusaConfig(depth=2, lm_head="shared"))
    export_head(head, tmp_path, ExportConfig([engine]), {"target": {"name": "someone/target"}})
    edited(tmp_path, transformers_version="5.17.0")
    report = check_directory(tmp_path, DIMS)
    assert report.loads(engine), report.render()
