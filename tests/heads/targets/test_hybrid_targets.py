"""Targets with recurrent states: the documents of a pack do not see each other, in feature passes and live ones."""

from __future__ import annotations

import pytest
import torch

from headstart.bench.architectures import ARCHITECTURES, random_model
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import ConfigError
from headstart.heads.targets.adapter import LoraSettings, add_adapter, check_injectable
from headstart.heads.targets.live import LivePass
from headstart.heads.targets.target import Target

HYBRIDS = [name for name, entry in ARCHITECTURES.items() if not entry.trees and entry.vision is None]
SPEC = FeatureSpec((1, 4, 7))
LENGTHS = (19, 5, 11)


def documents() -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return [torch.randint(3, 97, (length,), generator=noise) for length in LENGTHS]


def pack(tokens: list[torch.Tensor]) -> FeatureBatch:
    return FeatureBatch.pack([(each, torch.zeros_like(each)) for each in tokens], 2)


@pytest.mark.parametrize("name", [*HYBRIDS, "Llama 4"])
def test_states_begin_anew_with_every_document(name: str) -> None:
    target = Target.from_model(random_model(name))
    whole = target.extract(pack(documents()), SPEC)
    hidden_RD, streams_RkD = LivePass(target)(pack(documents()), SPEC.layer_ids)
    start = 0
    for tokens in documents():
        rows = slice(start, start + len(tokens))
        with torch.no_grad():
            alone = target.model(input_ids=tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        for hidden, streams in ((whole.hidden_RD, whole.streams_RkD), (hidden_RD, streams_RkD)):
            torch.testing.assert_close(hidden[rows], alone[-1][0], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(streams[rows, 1], alone[4][0], rtol=1e-3, atol=1e-3)
        start += len(tokens)
    # one text without borders would give something else
    joined = target.forward_documents(torch.cat(documents())[None], ())[0][0]
    assert (joined - whole.hidden_RD[:start]).abs()[LENGTHS[0] :].max() > 0.1


@pytest.mark.parametrize("name", ["Qwen3.5", "LFM2", "Granite-4", "Llama 4"])
def test_gradients_reach_an_adapter(name: str) -> None:
    target = Target.from_model(random_model(name))
    settings = LoraSettings(rank=2)
    check_injectable(target.model, settings)
    parameters = add_adapter(target.model, settings, seed=0)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    hidden_RD, _ = LivePass(target)(pack(documents()), ())
    hidden_RD.square().sum().backward()
    for key, parameter in parameters.items():
        if ".lora_B." in key and "router" not in key and "gate" not in key:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, key


@pytest.mark.parametrize("name", ["Falcon-H1", "Qwen3-Next"])
def test_an_adapter_that_peft_refuses_is_refused_ahead(name: str) -> None:
    model = random_model(name)
    with pytest.raises(ConfigError, match=r"joint\.modules: found \['all-linear'\], which peft cannot adapt.*set"):
        check_injectable(model, LoraSettings())
    check_injectable(model, LoraSettings(modules=["q_proj", "v_proj"]))
