"""Features of the frozen target are transformers' own hidden states and logits, however documents are packed."""

from __future__ import annotations

import pytest
import torch
import transformers
from reference.models import MODELS, PATTERNS, VOCAB, build, model_for
from reference.tiny import turns_of

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.targets.load import require_present, resolve_device
from headstart.heads.targets.target import Target, forward_tokens, length_groups


def documents(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    noise = torch.Generator().manual_seed(seed)
    # id 0 is the pad token: it occurs as an ordinary token here and must be treated as one
    return [
        (torch.randint(0, VOCAB, (len(p),), generator=noise), torch.tensor(turns_of(p), dtype=torch.int64))
        for p in PATTERNS
    ]


def alone(model: torch.nn.Module, tokens_T: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """transformers' hidden states (L + 1 of them) and logits of one document by itself."""
    with torch.no_grad():
        out = model(input_ids=tokens_T[None], output_hidden_states=True, use_cache=False)
    return tuple(h[0] for h in out.hidden_states), out.logits[0].float()


@pytest.mark.parametrize("name", MODELS)
def test_extract_equals_transformers_per_document(name: str):
    model = model_for(name)
    target = Target.from_model(model)
    layer_ids = (2, 3, 5)
    packed = target.extract(FeatureBatch.pack(documents(), 3, pad_to=70), FeatureSpec(layer_ids))
    start = 0
    argmax_of_row = {}
    for (tokens, _), length in zip(documents(), packed.doc_lengths, strict=True):
        hidden, logits = alone(model, tokens)
        rows = slice(start, start + length)
        # same maths in another batch shape: float32 rounding of six layers
        torch.testing.assert_close(packed.hidden_RD[rows], hidden[-1], rtol=1e-4, atol=1e-4)
        for slot, k in enumerate(layer_ids):
            torch.testing.assert_close(packed.streams_RkD[rows, slot], hidden[k], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(target.teacher.logits(packed.hidden_RD[rows]), logits, rtol=1e-3, atol=1e-3)
        argmax_of_row.update({start + t: int(logits[t].argmax()) for t in range(length)})
        start += length
    expected = [argmax_of_row[row + 1] for row in packed.anchors.row_A.tolist()]
    assert packed.teacher_argmax_A.tolist() == expected and len(expected) > 20


def test_hidden_is_after_the_final_norm_and_streams_before_it():
    model = model_for("llama")
    packed = Target.from_model(model).extract(FeatureBatch.pack(documents(), 1), FeatureSpec((5,)))
    last_layer_input = packed.streams_RkD[:, 0]
    with torch.no_grad():
        position = packed.position_R[:5][None]
        rope = model.model.rotary_emb(last_layer_input[None, :5], position)
        mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
        layer = model.model.layers[5]
        out = layer(last_layer_input[None, :5], attention_mask=mask, position_ids=position, position_embeddings=rope)
        out = out[0] if isinstance(out, tuple) else out
        expected = model.model.norm(out).reshape(5, -1)
    torch.testing.assert_close(packed.hidden_RD[:5], expected, rtol=1e-4, atol=1e-4)


def test_features_do_not_depend_on_what_is_packed_beside_them():
    target, spec = Target.from_model(model_for("qwen3")), FeatureSpec((1, 4))
    together = target.extract(FeatureBatch.pack(documents(), 2, pad_to=80), spec)
    start = 0
    for document in documents():
        single = target.extract(FeatureBatch.pack([document], 2), spec)
        rows = slice(start, start + len(document[0]))
        torch.testing.assert_close(together.hidden_RD[rows], single.hidden_RD, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.streams_RkD[rows], single.streams_RkD, rtol=1e-4, atol=1e-4)
        start += len(document[0])


def test_small_forwards_give_the_same_features():
    target, spec = Target.from_model(model_for("llama")), FeatureSpec((2,))
    whole = target.extract(FeatureBatch.pack(documents(), 2), spec)
    target.max_forward_tokens = 25
    pieces = target.extract(FeatureBatch.pack(documents(), 2), spec)
    torch.testing.assert_close(whole.hidden_RD, pieces.hidden_RD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.streams_RkD, pieces.streams_RkD, rtol=1e-4, atol=1e-4)


def test_pack_without_answers_extracts():
    target = Target.from_model(model_for("llama"))
    tokens = torch.arange(5)
    packed = target.extract(FeatureBatch.pack([(tokens, torch.full((5,), -1))], 3), FeatureSpec())
    assert packed.streams_RkD is None and packed.teacher_argmax_A.shape == (0,)
    torch.testing.assert_close(packed.hidden_RD, alone(target.model, tokens)[0][-1], rtol=1e-4, atol=1e-4)


def test_a_narrow_target_takes_more_tokens_in_a_pass_on_a_gpu():
    """Widths of 8B, 1B, 135M and of a toy; the passes of equal memory, within limits."""
    assert [forward_tokens(False, width) for width in (4096, 2048, 576, 64)] == [32768, 32768, 116508, 131072]
    assert forward_tokens(True, 576) == forward_tokens(True, 4096) == 2048


def test_groups_cover_every_document_once():
    lengths = (5, 900, 7, 6, 30, 31, 2, 450)
    groups = length_groups(lengths, 1000)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert lengths[group[0]] == longest
        assert len(group) == 1 or longest * len(group) <= 1000


@pytest.mark.parametrize("ids", [(0, 2), (2, 2), (3, 2), (2, 6), (-1, 2)])
def test_bad_layer_ids_are_refused_with_the_remedy(ids: tuple[int, ...]):
    target = Target.from_model(model_for("llama"))
    with pytest.raises(ConfigError, match="head.feature_layers"):
        target.extract(FeatureBatch.pack(documents(), 1), FeatureSpec(ids))


def test_a_card_named_by_its_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert resolve_device("cuda") == torch.device("cuda") and resolve_device("cpu") == torch.device("cpu")
    assert current == []
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match=r"target.device: found 'cuda:2', this machine has 2 GPUs"):
        resolve_device("cuda:2")
    for cards, there in ((1, "this machine has 1 GPU, numbered from 0; expected one"), (0, "this machine has no GPU")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda cards=cards: cards)
        with pytest.raises(ConfigError, match=f"target.device: found 'cuda:2', {there}"):
            resolve_device("cuda:2")
    for other in ("mps", "meta", "xpu", "gpu", "cuda:-1", ""):
        with pytest.raises(ConfigError, match=f"target.device: found '{other}', expected auto, cpu, cuda or cuda:N"):
            resolve_device(other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_present(torch.device("cpu"))
    with pytest.raises(ConfigError, match="target.device: found cuda, this machine has no GPU that torch sees"):
        require_present(torch.device("cuda"))


def test_target_is_frozen():
    target = Target.from_model(MODELS["llama"]().train())
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())


def test_dims_are_read_from_the_model():
    dims = Target.from_model(model_for("qwen3")).dims
    assert (dims.hidden_size, dims.vocab_size, dims.num_layers, dims.num_heads, dims.num_kv_heads, dims.head_dim) == (
        32,
        97,
        6,
        4,
        2,
        16,
    )
    gemma3 = Target.from_model(model_for("gemma3")).dims
    assert gemma3.rope_parameters["rope_theta"] == 1_000_000.0 and gemma3.hidden_act == "silu"


def test_architectures_that_no_draft_layer_can_follow_are_refused():
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2)
    with pytest.raises(TargetError, match="target of type gpt2: its config has no intermediate_size; .* such as Llama"):
        HeadDims.from_hf_config(config)


def test_dynamic_rope_turns_as_at_first_past_the_end_too():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
    model = build("Llama", rope_parameters=rope, max_position_embeddings=16)()
    tokens = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(0))
    switched = alone(model, tokens)[1][:12]
    alone(model, tokens[:12])  # transformers goes back to the first frequencies
    target = Target.from_model(model)
    plain = build("Llama", max_position_embeddings=16)()
    plain.load_state_dict(model.state_dict())
    for length in (24, 12, 24):
        torch.testing.assert_close(alone(model, tokens[:length])[1], alone(plain, tokens[:length])[1])
    assert (switched - alone(plain, tokens)[1][:12]).abs().max() > 1e-4
    # vLLM's base is constant: (6 · 6 L / L - (6 - 1)) ^ (d / (d - 2)) times the target's
    assert target.positions == 16 and "with a base 31^(d/(d-2)) times as large" in target.notes[0]


def test_longrope_turns_by_its_short_factors_past_the_end_too():
    """A tree at the end of a context reaches beyond the original length: the rows before must not change by it."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = build("Phi3", rope_parameters=rope, original_max_position_embeddings=16)()
    tokens = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(0))
    switched = alone(model, tokens)[1][:12]
    target = Target.from_model(model)
    kept, short = alone(model, tokens)[1][:12], alone(model, tokens[:12])[1]
    torch.testing.assert_close(kept, short, rtol=1e-5, atol=1e-5)
    assert (switched - short).abs().max() > 1e-3
    assert target.positions == 16 and "LongRoPE: heads are trained, measured and served within its first 16" in (
        target.notes[0]
    )
