"""Targets whose own class in vLLM lacks the EAGLE-3 interface: the note of the check and the launch command."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from headstart.heads.checkpoints.geometry import dims_from_json
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.errors import FormatError
from headstart.heads.families import build_head
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.launch import launch_commands
from headstart.heads.formats.sidecar import notes
from headstart.heads.formats.vllm_targets import model_impl, served

DIMS = HeadDims(
    hidden_size=32, vocab_size=97, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)


def exported_for(model_type: str, place: Path, **changes: Any) -> tuple[list[str], str]:
    """What the check of an exported EAGLE-3 head notes about vLLM, and the launch command for vLLM."""
    dims = replace(DIMS, model_type=model_type, **changes)
    torch.manual_seed(0)
    head = build_head(Eagle3Config(draft_vocab_size=40), dims)
    head.bind(TargetEnds(torch.randn(97, 32), torch.randn(97, 32)))
    reports = export_head(head, place, ExportConfig(["portable"], "float32"), {"target": {"name": "user/target"}})
    command = launch_commands(str(place), notes(place), ["vllm"]).get("vllm", "")
    return reports["portable"].engines["vllm"].notes, command


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "mixtral"])
def test_a_class_without_the_interface_is_replaced_by_the_transformers_backend(model_type: str, tmp_path: Path) -> None:
    said, command = exported_for(model_type, tmp_path / "head")
    assert any(f"class for {model_type} targets" in note and "--model-impl transformers" in note for note in said)
    assert command.startswith("vllm serve user/target --model-impl transformers --speculative-config ")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "phi3", "qwen3_moe", "gemma4_text"])
def test_other_targets_are_launched_as_before(model_type: str, tmp_path: Path) -> None:
    said, command = exported_for(model_type, tmp_path / "head")
    assert not any("interface" in note for note in said)
    assert command.startswith("vllm serve user/target --speculative-config ")


def test_a_recurrent_target_without_the_interface_gets_no_launch_command(tmp_path: Path) -> None:
    said, command = exported_for("falcon_h1", tmp_path / "head")
    assert any("runs no recurrent layers" in note for note in said) and command == ""
    assert served("falcon_h1", "medusa") and served("qwen3_next", "eagle3") and not served("lfm2", "eagle3")


def test_heads_that_read_the_last_hidden_state_need_no_interface() -> None:
    assert model_impl("gemma3_text", "eagle3") == model_impl("gemma3_text", "dflash") == "transformers"
    assert model_impl("gemma3_text", "eagle") is None and model_impl("gemma3_text", "medusa") is None


@pytest.mark.parametrize(
    ("model_type", "settings", "window"),
    [
        ("phi3", {"sliding_window": 2047}, 2047),
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, None),
        ("gemma2", {"sliding_window": 4096}, None),  # every second layer
        ("gpt_oss", {"sliding_window": 128}, None),
    ],
)
def test_a_window_is_known_where_all_layers_share_it(
    model_type: str, settings: dict[str, Any], window: int | None
) -> None:
    assert HeadDims.from_hf_config(AutoConfig.for_model(model_type, **settings)).sliding_window == window


def test_a_window_that_vllm_gives_to_the_head_as_well_is_noted(tmp_path: Path) -> None:
    said, _ = exported_for("phi3", tmp_path / "windowed", sliding_window=2047)
    assert any("last 2047 positions" in note and "head's layers as well" in note for note in said)
    for name, window in (("whole", None), ("beyond", DIMS.max_position_embeddings)):
        said, _ = exported_for("phi3", tmp_path / name, sliding_window=window)
        assert not any("window" in note for note in said)


def test_a_window_is_kept_in_the_head_and_heads_from_before_have_none() -> None:
    dims = replace(DIMS, sliding_window=2047)
    assert dims_from_json(asdict(dims), "here") == dims
    earlier = {name: value for name, value in asdict(DIMS).items() if name != "sliding_window"}
    assert dims_from_json(earlier, "here") == DIMS
    with pytest.raises(FormatError, match="sliding_window is 'wide', expected a positive integer or null"):
        dims_from_json({**earlier, "sliding_window": "wide"}, "here")
