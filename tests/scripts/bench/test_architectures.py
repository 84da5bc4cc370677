"""The table of architectures: every entry can be built, says what it means, and answers."""

from __future__ import annotations

import pytest
import torch

from headstart.bench.architectures import ARCHITECTURES, Architecture, config_of, random_model
from headstart.heads.errors import ConfigError
from headstart.heads.targets.locate import decoder_layers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_model_answers_with_a_clear_margin(name: str) -> None:
    model = random_model(name)
    text = model.config.get_text_config()
    assert (text.num_hidden_layers, text.hidden_size, text.vocab_size) == (8, 64, 97)
    tokens_BT = torch.randint(3, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_NV = model(input_ids=tokens_BT, use_cache=False).logits.flatten(0, 1)
    best, second = logits_NV.topk(2).values.unbind(-1)
    # float32 rounding of these logits is below 1e-5
    assert float((best - second).median()) > 0.02
    assert logits_NV.argmax(-1).unique().numel() >= 3


def test_same_tiny_weights_every_time() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, second = random_model("OLMo-2").state_dict(), random_model("OLMo-2").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(torch.random.get_rng_state(), state)


def read_weights(name: str) -> float:
    """Weights of the layers that four tokens read together: each expert with the probability that one of them takes it.

    Four tokens choose k of E experts each, so an expert is read with probability 1 - (1 - k / E)⁴.
    """
    model = random_model(name, "equal", "meta", torch.bfloat16)
    text = model.config.get_text_config()
    counts, choices = ("num_experts", "num_local_experts", "n_routed_experts"), ("num_experts_per_tok", "top_k_experts")
    experts = next((count for field in counts if (count := getattr(text, field, None))), 1)
    chosen = next((count for field in choices if (count := getattr(text, field, None))), 1)
    share = 1 - (1 - chosen / experts) ** 4
    weights = decoder_layers(model).named_parameters()
    return sum(weight.numel() * (share if ".experts." in key else 1.0) for key, weight in weights)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_models_read_equally_many_weights(name: str) -> None:
    assert read_weights(name) == pytest.approx(read_weights("Llama"), rel=0.06)


def test_wrong_names_and_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="architecture: found 'Lama', expected one of Llama"):
        config_of("Lama", "tiny")
    with pytest.raises(ConfigError, match="size: found 'huge', expected one of tiny, equal"):
        config_of("Llama", "huge")
    monkeypatch.setitem(ARCHITECTURES, "Llama", Architecture("Llama", {"sliding_windows": 12}))
    with pytest.raises(ConfigError, match="Llama: LlamaConfig does not know sliding_windows"):
        config_of("Llama", "tiny")
