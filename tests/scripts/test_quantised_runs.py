"""A target with quantised weights through every step: answers, features, training, evaluation and export."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.quantised import CONFIGS, quantise, quantise_by_package

from headstart.heads.files import read_json


def torchao_settings() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def nf4_settings() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


#: method → module that its run needs, and settings of the package that writes it; without them it is written by hand
METHODS: dict[str, tuple[str | None, Callable[[], Any] | None]] = {
    "fp8": (None, None),
    "compressed-tensors": ("compressed_tensors", None),
    "torchao": ("torchao", torchao_settings),
    "bitsandbytes": ("bitsandbytes", nf4_settings),
}


def quantised_target(method: str, source: Path, directory: Path) -> Path:
    module, settings = METHODS[method]
    if module is not None:
        pytest.importorskip(module, reason=f"pip install {method}")
    if settings is None:
        quantise(source, directory, method)
    else:
        quantise_by_package(source, directory, settings())
    return directory


def wider(tiny_target: Path, directory: Path) -> Path:
    """A target of hidden size 128: bitsandbytes packs blocks of 64 numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny_target, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = LlamaConfig.from_pretrained(tiny_target, hidden_size=128, intermediate_size=256, head_dim=32)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_a_quantised_target(
    method: str, headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path
) -> None:
    source = wider(tiny_target, tmp_path / "wider") if method == "bitsandbytes" else tiny_target
    place = quantised_target(method, source, tmp_path / "quantised")
    changes = (f"target.name={place}", "export.engines=[portable]")
    done = headstart("run", recipe, *changes)
    assert done.code == 0, done.err
    report = read_json(tmp_path / "run" / "report.json")
    assert report["target"]["quantised"] == method
    planned = headstart("plan", recipe, *changes, "--json")
    assert planned.code == 0, planned.err
    assert any(method in note for note in planned.json["notes"] if note.startswith("target:"))
    # the original has other weights: nothing that was made from the quantised target passes for one of its own
    same = (f"target.name={source}", f"target.dtype={report['target']['dtype']}", "export.engines=[portable]")
    again = headstart("eval", recipe, *same)
    assert again.code == 0 and "trained on a target with another set of weights" in " ".join(again.err.split())
    assert read_json(tmp_path / "run" / "report.json")["target"] != report["target"]


def test_adapters_joint_training_and_shards_are_refused_before_anything_is_loaded(
    headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    place = quantised_target("fp8", tiny_target, tmp_path / "quantised")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    joint = ("head={type: medusa, depth: 2, lm_head: own}", "joint.enabled=true", "train.save_every=0")
    for options, words in (
        (joint, "found a model with quantised weights, into which no adapter can be merged"),
        (("target.parallel=fsdp2", "--gpus", "2"), "found quantised weights, expected plain ones to shard"),
    ):
        refused = headstart("plan", recipe, f"target.name={place}", *options)
        assert refused.code != 0 and words in " ".join(refused.err.split()), refused.err


@pytest.mark.parametrize("command", ["plan", "doctor", "run"])
def test_a_missing_package_ends_a_command_in_one_line(
    command: str, headstart: Callable, recipe: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headstart.heads.targets import quantised

    quantise(tiny_target, tmp_path / "t", "compressed-tensors")
    monkeypatch.setattr(quantised, "_installed", lambda module: False)
    result = headstart(command, recipe, f"target.name={tmp_path / 't'}")
    said = re.sub(r"[\s│┃]+", " ", result.out + result.err)
    assert result.code == 1 and "Traceback" not in said
    assert "pip install compressed-tensors (looked for the module compressed_tensors)" in said
    assert CONFIGS["compressed-tensors"]["quant_method"] in said and not (tmp_path / "run" / "head").exists()
