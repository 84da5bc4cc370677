"""The engine: every tree path gives the logits of a plain forward over that path, for every attention flavour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from headstart.bench.architectures import random_model
from headstart.eval.decoding import prefill
from headstart.eval.decoding.cache import SlotLayer, Slots, StaticKV
from headstart.eval.decoding.engine import Engine, attention_windows
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.memory import memory_of
from headstart.eval.decoding.prefill import Forward
from headstart.eval.decoding.rows import Step
from headstart.eval.tree import Tree, chain
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import TargetError

VOCAB = 53
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": (LlamaConfig, {}, "sdpa"),
    "llama eager": (LlamaConfig, {"attention_bias": True, "tie_word_embeddings": True}, "eager"),
    "llama3 rope": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "sdpa",
    ),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "sdpa"),
    "qwen3": (Qwen3Config, {}, "sdpa"),
    "mistral": (MistralConfig, {"sliding_window": 5}, "sdpa"),
    "mistral eager": (MistralConfig, {"sliding_window": 5}, "eager"),
    "gemma2": (Gemma2Config, {"sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 8}, "eager"),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 5, "layer_types": MIXED, "query_pre_attn_scalar": 8}, "sdpa"),
    "gpt-oss": (
        GptOssConfig,
        {"sliding_window": 5, "layer_types": MIXED, "num_local_experts": 2, "num_experts_per_tok": 1},
        "eager",
    ),
}
#: of the table of architectures: attention in chunks, latent keys, keys shared between layers, two head sizes
OTHERS = ["Llama 4", "DeepSeek-V3", "GLM-4.5", "Gemma 4", "Gemma 4 E2B"]
SPEC = FeatureSpec((1, 2))
# root → 0, 1; 0 → 2, 3; 1 → 4; 3 → 5; second row: node 4 and 5 missing
PARENT = [-1, -1, 0, 0, 1, 3]
DEPTH = [1, 1, 2, 2, 2, 3]


def tiny(name: str) -> Any:
    if name in OTHERS:
        return random_model(name)
    kind, extra, implementation = MODELS[name]
    torch.manual_seed(0)
    config = kind(**{**SHARED, **extra})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # new norms are all alike and new biases zero: what is mixed up among them would not show
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def full_forward(model: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Last row's (logits, post-norm hidden, streams) of an ordinary forward without any cache."""
    output = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    states = output.hidden_states
    return output.logits[0, -1], states[-1][0, -1], torch.stack([states[k][0, -1] for k in SPEC.layer_ids])


def random_tree(seed: int) -> Tree:
    noise = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (2, len(PARENT)), generator=noise)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expand = lambda x: torch.tensor(x).expand(2, -1)  # noqa: E731
    return Tree(tokens, expand(PARENT), expand(DEPTH), valid, 3)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_tree_rows_equal_plain_forwards(name: str) -> None:
    """Ragged batch, chunked prefill, tree, compaction of a branch, then a chain on top of the compacted KV."""
    model = tiny(name)
    noise = torch.Generator().manual_seed(1)
    contexts = [torch.randint(1, VOCAB, (n,), generator=noise).tolist() for n in (14, 4)]
    engine = Engine(model, 2, 40, bucket=8, prefill_chunk=4)
    logits_BV, rows = engine.prefill(contexts, SPEC)
    assert rows.count_B.tolist() == [14, 4]
    for b, context in enumerate(contexts):
        for t in (0, 2, len(context) - 1):
            logits, hidden, streams = full_forward(model, context[: t + 1])
            close(rows.hidden_BJD[b, t], hidden)
            close(rows.streams_BJkD[b, t], streams)
        close(logits_BV[b], logits)

    roots = torch.tensor([7, 8])
    tree = random_tree(2)
    step = engine.verify(roots, tree, SPEC, longest=14)
    for b, context in enumerate(contexts):
        close(step.logits_BMV[b, 0], full_forward(model, [*context, int(roots[b])])[0])
        for n in range(tree.nodes):
            if not tree.valid_BN[b, n]:
                continue
            path, node = [], n
            while node >= 0:
                path.insert(0, int(tree.tokens_BN[b, node]))
                node = PARENT[node]
            logits, hidden, streams = full_forward(model, [*context, int(roots[b]), *path])
            close(step.logits_BMV[b, n + 1], logits)
            close(step.hidden_BMD[b, n + 1], hidden)
            close(step.streams_BMkD[b, n + 1], streams)

    # row 0 accepts 0 → 3 → 5, row 1 accepts node 1 only
    path_BK = torch.tensor([[0, 3, 5], [1, -1, -1]])
    accepted = engine.commit(roots, tree, step, path_BK, torch.tensor([True, True]))
    assert accepted.count_B.tolist() == [4, 2]
    close(accepted.hidden_BJD[0, 3], step.hidden_BMD[0, 6])
    close(accepted.streams_BJkD[1, 1], step.streams_BMkD[1, 2])
    longest = int(engine.length_B.max())
    for b in range(2):
        contexts[b] += accepted.tokens_BJ[b, : accepted.count_B[b]].tolist()
    after = chain(torch.tensor([[3, 4], [5, 6]]))
    step, unbounded = (engine.verify(torch.tensor([1, 2]), after, longest=most) for most in (longest, None))
    close(unbounded.logits_BMV, step.logits_BMV)
    for b, context in enumerate(contexts):
        whole = [*context, b + 1, *after.tokens_BN[b].tolist()]
        for n in range(3):
            close(step.logits_BMV[b, n], full_forward(model, whole[: len(context) + 1 + n])[0])


def test_chunks_that_are_captured_are_padded_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths come in powers of two and serve again; logits and features are those without padding."""
    made: list[int] = []

    class Uncaptured:
        """Stands in for a CUDA graph: the same forward on static inputs."""

        pool = None

        def __init__(
            self, forward: Forward, batch: int, width: int, bin: int, device: torch.device, pool: object
        ) -> None:
            made.append(width)
            self.forward, self.bin = forward, bin

        def run(self, tokens_BM: torch.Tensor, position_BM: torch.Tensor) -> Step:
            return prefill.chunk_forward(self.forward, tokens_BM.clone(), position_BM.clone(), self.bin, 40)

    monkeypatch.setattr(prefill, "ChunkGraph", Uncaptured)
    monkeypatch.setattr(prefill, "NARROWEST", 2)
    monkeypatch.setattr(Engine, "captures", property(lambda _: True))
    model = tiny("llama")
    fused = FusedModel(model, attention_windows(model.config))
    engine = Engine(model, 2, 40, prefill_chunk=8, fused=fused)
    noise = torch.Generator().manual_seed(1)
    for lengths, widths in (((11, 4), [4, 8]), ((1, 9), [4, 8, 2]), ((8, 16), [4, 8, 2]), ((3, 5), [4, 8, 2])):
        contexts = [torch.randint(1, VOCAB, (n,), generator=noise).tolist() for n in lengths]
        logits_BV, rows = engine.prefill(contexts, SPEC)
        assert rows.count_B.tolist() == list(lengths) and made == widths
        assert rows.tokens_BJ.shape[1] == rows.hidden_BJD.shape[1] == max(lengths)
        for b, context in enumerate(contexts):
            for t in range(len(context)):
                logits, hidden, streams = full_forward(model, context[: t + 1])
                close(rows.hidden_BJD[b, t], hidden)
                close(rows.streams_BJkD[b, t], streams)
            close(logits_BV[b], logits)
    monkeypatch.setattr(prefill, "CAPTURED_TOKENS", 15)  # two rows of eight are too many, two of four are not
    assert engine.prompts.widths(19) == [4, 8, 8] and engine.prompts.widths(21) == [5, 8, 8]


def test_idle_rows_stand_still() -> None:
    model = tiny("llama")
    engine = Engine(model, 2, 40, bucket=8)
    engine.prefill([[1, 2, 3], [4, 5]], SPEC)
    tree = random_tree(3)
    step = engine.verify(torch.tensor([7, 8]), tree, SPEC)
    path_BK, active_B = torch.tensor([[0, 2, -1], [0, 2, -1]]), torch.tensor([True, False])
    rows = engine.commit(torch.tensor([7, 8]), tree, step, path_BK, active_B)
    assert rows.count_B.tolist() == [3, 0]
    assert engine.length_B.tolist() == [6, 2]


def test_move_copies_before_it_overwrites() -> None:
    slots = Slots(2, 6, "cpu")
    kv = StaticKV(slots, [SlotLayer(slots)])
    states = torch.arange(12.0).reshape(2, 1, 6, 1)
    kv.aim(torch.arange(6).expand(2, 6), 6)
    kv.update(states, -states, 0)
    kv.move(torch.tensor([[2, 3, 5], [1, 6, 6]]), torch.tensor([[1, 2, 3], [0, 6, 6]]))
    kv.aim(torch.full((2, 1), kv.bin), 6)
    keys, values = kv.update(torch.full((2, 1, 1, 1), 99.0), torch.full((2, 1, 1, 1), 99.0), 0)
    assert keys[:, 0, :, 0].tolist() == [[0, 2, 3, 5, 4, 5], [7, 7, 8, 9, 10, 11]]
    assert torch.equal(values, -keys)


def test_windows_come_from_the_config() -> None:
    assert attention_windows(LlamaConfig()) == {"full_attention": None}
    assert attention_windows(MistralConfig(sliding_window=7)) == {"sliding_attention": 7}
    assert attention_windows(MistralConfig(sliding_window=None)) == {"full_attention": None}
    assert attention_windows(Gemma3TextConfig(sliding_window=9)) == {"sliding_attention": 9, "full_attention": None}
    assert attention_windows(Qwen2Config(use_sliding_window=False)) == {"full_attention": None}


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(TargetError, match="flash_attention_2.*attn_implementation=sdpa"):
        Engine(model, 1, 8)
    config = LlamaConfig(num_hidden_layers=1)
    config.layer_types = ["compressed_sparse_attention"]
    with pytest.raises(TargetError, match=r"compressed_sparse_attention.*expected attention of kind full_attention"):
        memory_of(config)
    config.layer_types = ["chunked_attention"]
    with pytest.raises(Unfusable, match="chunked_attention"):
        attention_windows(config)


class Positionless(LlamaForCausalLM):
    """As models do whose positions follow from slots: what it does not know goes into the keywords unread."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids)


def test_a_model_that_takes_no_positions_or_no_cache_is_refused() -> None:
    model = Positionless(LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1))
    with pytest.raises(TargetError, match="Positionless takes no position_ids, no cache; expected attention_mask"):
        Engine(model.eval(), 1, 8)


def test_chunks_of_transformers_own_forward_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "captures", True)
    model = tiny("llama")
    assert not Engine(model, 1, 8).prompts.captures
    assert Engine(model, 1, 8, fused=FusedModel(model, attention_windows(model.config))).prompts.captures
