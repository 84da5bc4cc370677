"""Targets whose own class in vLLM lacks the EAGLE-3 interface: the note of the check and the launch command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.families import build_head
from headstart.heads.families.eagle3.head import Eagle3Config
from headstart.heads.formats import ExportConfig, export_head
from headstart.heads.formats.launch import launch_commands
from headstart.heads.formats.sidecar import notes
from headstart.heads.formats.vllm_targets import model_impl

DIMS = HeadDims(
    hidden_size=32, vocab_size=97, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)


def exported_for(model_type: str, place: Path) -> tuple[list[str], str]:
    """What the check of an exported EAGLE-3 head notes about vLLM, and the launch command for vLLM."""
    dims = replace(DIMS, model_type=model_type)
    torch.manual_seed(0)
    head = build_head(Eagle3Config(draft_vocab_size=40), dims)
    head.bind(TargetEnds(torch.randn(97, 32), torch.randn(97, 32)))
    reports = export_head(head, place, ExportConfig(["portable"], "float32"), {"target": {"name": "user/target"}})
    command = launch_commands(str(place), notes(place), ["vllm"])["vllm"]
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


def test_a_recurrent_target_without_the_interface_is_not_sent_to_the_backend(tmp_path: Path) -> None:
    said, command = exported_for("falcon_h1", tmp_path / "head")
    assert any("runs no recurrent layers" in note for note in said) and "--model-impl" not in command


def test_heads_that_read_the_last_hidden_state_need_no_interface() -> None:
    assert model_impl("gemma3_text", "eagle3") == model_impl("gemma3_text", "dflash") == "transformers"
    assert model_impl("gemma3_text", "eagle") is None and model_impl("gemma3_text", "medusa") is None
