"""Fused models: every family's tree and chain logits equal plain transformers forwards; what does not fuse says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_engine import MODELS, PARENT, VOCAB, close, full_forward, random_tree, tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.bench.architectures import random_model
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused import layers
from headstart.eval.decoding.fused import model as fused_module
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.layers import Pass
from headstart.eval.decoding.fused.model import PREFETCH_BYTES, STACKED, FusedModel
from headstart.eval.kernels import choices
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.linear import Tiles, row_bucket
from headstart.eval.kernels.norm import NormWeights, norm_eager
from headstart.eval.kernels.ways import MOST_CLOSE, Measured
from headstart.eval.tree import with_root


def fused(model: nn.Module) -> FusedModel:
    return FusedModel(model, attention_windows(model.config))


#: architectures of the bench's table whose structure the fused layers cover
COVERED = [
    "Llama", "Qwen2", "Qwen3", "Mistral", "Granite", "Cohere2", "GLM-4", "SmolLM3", "ERNIE-4.5", "HunYuan dense",
    "StableLM", "Seed-OSS", "gpt-oss", "Gemma 2", "OLMo-2", "OLMo-3", "EXAONE-4", "Qwen3-MoE", "Mixtral", "Gemma 1",
    "Gemma 3", "Phi-2", "Phi-3", "StarCoder2", "GPT-NeoX", "Nemotron", "Mistral-3", "GLM-4.5",
]  # fmt: skip


def model_of(name: str) -> Any:
    return tiny(name) if name in MODELS else random_model(name)


@pytest.mark.parametrize("name", [*MODELS, *COVERED])
def test_tree_after_a_prompt(name: str) -> None:
    """A ragged batch and a tree behind it; windows of the architectures are shorter than the prompt."""
    model = model_of(name)
    twin = fused(model)
    noise = torch.Generator().manual_seed(1)
    count = 9 if name in MODELS else 15
    contexts = torch.randint(1, VOCAB, (2, count), generator=noise)
    buffers = twin.buffers(2, 32)
    position = torch.arange(count).expand(2, count)
    logits, hidden, streams = twin.forward(contexts, Visibility(position, position, position[:, 0]), buffers, (1, 2))
    for b in range(2):
        for t in (0, count - 1):
            expected = full_forward(model, contexts[b, : t + 1].tolist())
            for found, wanted in zip((logits, hidden, streams), expected, strict=True):
                close(found[b, t], wanted)
    # row 1 keeps six tokens only: its tree overwrites what follows
    length, tree = torch.tensor([count, 6]), random_tree(2)
    tokens = torch.cat([torch.tensor([[7], [8]]), tree.tokens_BN], 1)
    depth = torch.cat([torch.zeros(2, 1, dtype=torch.int64), tree.depth_BN], 1)
    slots = length[:, None] + torch.arange(7)
    visibility = Visibility(length[:, None] + depth, slots, length, with_root(tree.mask_BNN))
    logits, hidden, streams = twin.forward(tokens, visibility, buffers, (1, 2))
    for b in range(2):
        for n in range(-1, 6):
            path, node = [], n
            while node >= 0:
                path.insert(0, int(tree.tokens_BN[b, node]))
                node = PARENT[node]
            expected = full_forward(model, [*contexts[b, : length[b]].tolist(), int(tokens[b, 0]), *path])
            for found, wanted in zip((logits, hidden, streams), expected, strict=True):
                close(found[b, n + 1], wanted)


def test_parameters_are_shared_and_the_model_is_unchanged() -> None:
    model = tiny("llama")
    tokens = torch.randint(1, VOCAB, (1, 7))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(tokens).logits
    first, second = fused(model), fused(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model(tokens).logits, logits)
    projection = model.model.layers[0].self_attn.k_proj.weight
    for twin in (first, second):
        merged = twin.layers[0].attention.qkv.weight_NK
        assert projection.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()


def test_other_structures_are_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.q_proj = nn.Sequential(model.model.layers[1].self_attn.q_proj)
    with pytest.raises(Unfusable, match="q_proj .Sequential.*expected nn.Linear"):
        fused(model)
    model = tiny("llama")
    model.model.layers[0].forward = model.model.layers[1].forward
    with pytest.raises(Unfusable, match="LlamaDecoderLayer has no attention"):
        fused(model)


def test_a_model_over_several_devices_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(Unfusable, match="several devices: cpu, meta"):
        fused(model)


def test_visibility_holds_rows_that_kernels_can_index() -> None:
    shared = torch.arange(12).expand(2, 12)
    visibility = Visibility(shared, shared, shared[:, 3], torch.eye(12, dtype=torch.bool).expand(2, 12, 12))
    for name, given in (("position_BM", shared), ("write_BM", shared), ("base_B", torch.tensor([3, 3]))):
        held = getattr(visibility, name)
        assert held.is_contiguous() and torch.equal(held, given)
    assert visibility.tree_BMW is not None and visibility.tree_BMW.is_contiguous()


def test_a_norm_is_made_with_the_sum_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes the norm that the one before it made, unless what comes in is not what that one returned."""
    model = tiny("llama")
    twin = fused(model)
    ids = torch.randint(1, VOCAB, (2, 5))
    position = torch.arange(5).expand(2, 5)
    visibility = Visibility(position, position, position[:, 0])
    alone: list[torch.Size] = []

    def counted(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
        alone.append(x.shape)
        return norm_eager(x, norm)

    monkeypatch.setattr(layers, "apply_norm", counted)
    logits, _, _ = twin.forward(ids, visibility, twin.buffers(2, 5))
    assert len(alone) == 1 < len(twin.layers)
    # a norm with other weights is another norm
    stream, normed, first = torch.ones(1, 1, 4), torch.zeros(1, 4), NormWeights(torch.ones(4), 1e-5)
    run = Pass(visibility, twin.buffers(2, 5), stream, (first, normed))
    assert run.norm(stream, first) is normed and run.norm(stream, NormWeights(torch.ones(4), 1e-5)) is not normed
    alone.pop()
    twin.layers[1].register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))
    model.model.layers[1].register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))
    doubled, _, _ = twin.forward(ids, visibility, twin.buffers(2, 5))
    assert len(alone) == 3 and not torch.allclose(doubled, logits, atol=1e-3)
    torch.testing.assert_close(doubled, model(input_ids=ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_close_ways_compete_within_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wins by itself loses to a close way that is faster between its neighbours; the head has no neighbours."""
    twin = fused(tiny("llama"))
    fast, close, slow = Tiles(64, 64, 4, 4), Tiles(32, 64, 4, 4), Tiles(16, 64, 4, 4)
    qkv, head = [layer.attention.qkv for layer in twin.layers], twin.head.linear
    found = [Measured(qkv, {slow: 9.0, fast: 2.0, None: 9.0, close: 2.1}), Measured([head], {fast: 2.0, close: 2.1})]
    assert [each.close for each in found] == [[fast, close], [fast, close]]
    assert len(Measured(qkv, {Tiles(n, 64, 4, 4): 1.0 for n in range(16)}).close) == MOST_CLOSE
    prefetch_bytes: list[int] = []
    ran: list[int] = []

    def timed(run: Callable[[], object], replays: int) -> float:
        ran.append(len(run_layers(run)))
        bucket = row_bucket(5)
        prefetch_bytes.append(twin.layers[0].attention.prefetch_bytes.get(bucket, 0))
        return {fast: 3.0, close: 2.0}[qkv[0].tiles[bucket]] - (prefetch_bytes[-1] == PREFETCH_BYTES[2])

    def run_layers(run: Callable[[], object]) -> list[int]:
        indices: list[int] = []
        handles = [
            layer.register_forward_pre_hook(lambda module, _: indices.append(module.index)) for layer in twin.layers
        ]
        run()
        for handle in handles:
            handle.remove()
        assert indices == list(range(min(STACKED, len(twin.layers))))
        return indices

    monkeypatch.setattr(fused_module, "graph_time", timed)
    monkeypatch.setattr(choices, "undecided", lambda linears, rows: [each.linears for each in found])
    monkeypatch.setattr(
        choices, "choose_ways", lambda linears, rows: [each.choose(rows, fast) or each for each in found]
    )
    times = twin.choose_ways(5)
    assert [linear.tiles[16] for linear in qkv] == [close] * len(qkv) and head.tiles[16] is fast
    assert list(times.values()) == [2.1, 2.0] and list(times)[0].endswith(" 5")
    assert {layer.attention.prefetch_bytes[16] for layer in twin.layers} == {PREFETCH_BYTES[2]}
    assert len(ran) == 2 + len(PREFETCH_BYTES)


@pytest.mark.parametrize("name", [*MODELS, "Cohere2", "GLM-4", "GPT-NeoX", "OLMo-2", "Nemotron"])
def test_layers_run_one_behind_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do in a forward, of every family: what comes out is what the final norm was made of."""
    monkeypatch.setattr("headstart.eval.decoding.fused.model.CONTEXT", 5)
    twin = fused(model_of(name))
    run = twin._stack(twin.layers, 3)
    made: list[torch.Tensor] = []
    handle = twin.norm.register_forward_pre_hook(lambda _, given: made.append(given[0]))
    position = 5 + torch.arange(3)[None]
    twin.forward(position.new_zeros(1, 3), Visibility(position, position, position[:, 0]), twin.buffers(1, 8))
    handle.remove()
    found = run()
    assert isinstance(found, torch.Tensor) and found.shape == made[0].shape
    assert twin._holder.current is None
    if len(twin.windows) == 1:  # a family with several kinds of layers has rotary tables for each
        torch.testing.assert_close(found, made[0])


def test_layers_to_time_push_each_other_out_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = fused(LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=12, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )).eval())  # fmt: skip
    weights = sum(linear.weight_NK.nbytes for linear in twin.layers[0].linears())
    assert len(twin._stacked()) == STACKED

    class Card:
        L2_cache_size = 0

    monkeypatch.setattr(twin, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    for fitting, expected in ((1, STACKED), (3, 6), (3.1, 7), (40, 12)):
        Card.L2_cache_size = int(fitting * weights)
        assert len(twin._stacked()) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 64, 96])
def test_two_layers_of_llama_8b(tokens: int) -> None:
    """Real widths and vocabulary, batch 1: a chain after a prompt equals the model's own forward."""
    device, context = torch.device("cuda"), 512
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    twin = fused(model)
    twin.choose_ways(tokens)
    buffers = twin.buffers(1, context + 128)
    ids = torch.randint(0, config.vocab_size, (1, context + tokens), device=device)
    position = torch.arange(context + tokens, device=device)[None]
    base = torch.full((1,), context, device=device)
    prompt = position[:, :context]
    twin.forward(ids[:, :context], Visibility(prompt, prompt, base), buffers)
    tree = torch.ones((1, tokens, tokens), dtype=torch.bool, device=device).tril() if tokens > 1 else None
    step = position[:, context:]
    logits, _, _ = twin.forward(ids[:, context:], Visibility(step, step, base, tree), buffers)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, context:]
    distance = (logits.float() - expected.float()).norm() / expected.float().norm()
    assert torch.isfinite(logits).all() and float(distance) < 0.05
