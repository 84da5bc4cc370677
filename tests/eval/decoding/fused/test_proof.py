"""A fused model whose kernels give something else is refused, by the part that differs, mixtures included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.bench.architectures import random_model
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused import model as fused_module
from headstart.eval.decoding.fused import proof
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.experts import FusedExperts
from headstart.eval.decoding.fused.layers import FusedLayer
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.fused.proof import check_model


def spoil_embedding(twin: Any) -> None:
    embedding = twin.view.get_input_embeddings()
    embedding.weight = nn.Parameter(1.3 * embedding.weight, requires_grad=False)


def spoil_attention(twin: Any) -> None:
    out = twin.layers[3].attention.out
    out.weight_NK = 1.5 * out.weight_NK


def spoil_mlp(twin: Any) -> None:
    mlp = twin.layers[5].mlp
    if mlp.linears():
        mlp.down.weight_NK = 1.5 * mlp.down.weight_NK
        return
    for part in mlp.mlp.modules():
        if isinstance(part, FusedExperts):
            part.experts = replace(part.experts, second_EDN=1.5 * part.experts.second_EDN)


def spoil_one_value(twin: Any) -> None:
    end = twin.layers[5].mlp.end

    def bad(*args: Any) -> Any:
        x_RD, normed = end(*args)
        return x_RD.index_fill(0, torch.tensor([0], device=x_RD.device), float("nan")), normed

    twin.layers[5].mlp.end = bad


def spoil_features(twin: Any) -> None:
    forward = twin.norm.forward

    def off(x: Tensor) -> Tensor:
        normed: Tensor = forward(x)
        twin.norm.last = 1.3 * normed
        return normed

    twin.norm.forward = off


def spoil_head(twin: Any) -> None:
    # a few tokens of the vocabulary
    weight = twin.head.linear.weight_NK.clone()
    weight[:9] = 0
    twin.head.linear.weight_NK = weight


#: what is spoilt, and the part that the error names
SPOILT = [
    (spoil_embedding, "embeddings"), (spoil_attention, "rows after layer 3"), (spoil_mlp, "rows after layer 5"),
    (spoil_one_value, "rows after layer 5"), (spoil_features, "hidden states"), (spoil_head, "logits"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spoil", "part"), SPOILT)
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Llama"])
def test_the_part_that_differs_is_named(
    name: str, spoil: Callable[[Any], None], part: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(name).to(dtype)
    windows = attention_windows(model.config)
    model(torch.zeros((1, 2), dtype=torch.int64), output_hidden_states=True)  # transformers leaves hooks of its own
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.layers]

    def check(twin: Any, model: Any) -> None:
        check_model(twin, model)
        spoil(twin)
        check_model(twin, model)

    monkeypatch.setattr(fused_module, "check_model", check)
    # a dense model also differs as a whole, which must not be what finds it
    monkeypatch.setattr(FusedModel, "mixes", True)
    with pytest.raises(Unfusable, match=f"the {part} of the fused .* differ from the model's by"):
        FusedModel(model, windows)
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.layers] == hooks


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Llama"])
def test_a_norm_that_the_sum_before_it_makes_is_compared_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are fed by hand make their own norm, so the other one is compared by itself."""
    model = random_model(name).to(torch.bfloat16)

    def check(twin: Any, model: Any) -> None:
        end = twin.layers[2].mlp.end
        twin.layers[2].mlp.end = lambda *args: (end(*args)[0], 1.3 * end(*args)[1])
        check_model(twin, model)

    monkeypatch.setattr(fused_module, "check_model", check)
    with pytest.raises(Unfusable, match="the norms after layer 2 of the fused"):
        FusedModel(model, attention_windows(model.config))


def test_what_stands_between_layers_is_compared_by_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("Llama")

    def check(twin: Any, model: Any) -> None:
        twin.layers[2].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))
        check_model(twin, model)

    monkeypatch.setattr(fused_module, "check_model", check)
    with pytest.raises(Unfusable, match="the last (hidden states|logits) of the fused"):
        FusedModel(model, attention_windows(model.config))


@pytest.mark.parametrize("rows", ["prompt", "later"])
def test_a_layer_whose_fused_form_differs_is_refused(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was found of its parts: in the prompt, or only in the rows that see a prompt in the buffers."""

    class Wrong(FusedLayer):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            y_BMD = super().forward(hidden_states, *args, **kwargs)
            later = hidden_states.shape[1] == proof.LATER
            return y_BMD + 1e-2 * (later == (rows == "later"))

    monkeypatch.setattr(proof, "FusedLayer", Wrong)
    model = random_model("Llama")
    with pytest.raises(Unfusable, match=r"layer 0 \(LlamaDecoderLayer\): its fused form differs by .*e-0\d in float32"):
        FusedModel(model, attention_windows(model.config))
