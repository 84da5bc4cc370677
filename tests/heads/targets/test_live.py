"""The target over a pack with gradients: packed where the model allows it, else padded; always its own states."""

from __future__ import annotations

import pytest
import torch
from reference.models import MODELS, PATTERNS, VOCAB, model_for
from reference.tiny import SIZES, turns_of

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.targets.live import LivePass
from headstart.heads.targets.target import Target

#: models whose layers attend to a window, or cap their scores
PADDED = {"mistral sliding", "gemma2", "gemma3"}


def pack(padding: int = 0) -> FeatureBatch:
    noise = torch.Generator().manual_seed(2)
    documents = [
        (torch.randint(VOCAB, (len(p),), generator=noise), torch.tensor(turns_of(p), dtype=torch.int64))
        for p in PATTERNS
    ]
    return FeatureBatch.pack(documents, 1, pad_to=sum(map(len, PATTERNS)) + padding)


@pytest.mark.parametrize("name", [*MODELS, "gemma3"])
def test_states_are_those_of_every_document_alone(name):
    target = Target.from_model(model_for(name))
    live, batch = LivePass(target), pack(padding=3)
    assert live.packed == (name not in PADDED), live.note
    if not live.packed:
        assert live.note is not None and not live.capturable
    with torch.no_grad():
        hidden_RD, streams_RkD = live(batch, (1, 3))
        alone = live(batch, ())
    used = sum(batch.doc_lengths)
    expected = target.extract(batch, FeatureSpec((1, 3)))
    size = expected.hidden_RD.abs().max()
    assert (hidden_RD[:used] - expected.hidden_RD[:used]).abs().max() < 1e-4 * size
    assert (streams_RkD[:used] - expected.streams_RkD[:used]).abs().max() < 1e-4 * expected.streams_RkD.abs().max()
    assert alone[1] is None and torch.equal(alone[0], hidden_RD)
    assert torch.isfinite(hidden_RD).all()
    # the model attends as it did before
    again = target.extract(batch, FeatureSpec((1, 3)))
    assert torch.equal(again.hidden_RD, expected.hidden_RD)


def test_both_ways_give_the_same_gradients():
    target = Target.from_model(model_for("llama"))
    weight = target.model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    live, batch = LivePass(target), pack()
    upstream = torch.randn(len(batch.tokens_R), 3, target.dims.hidden_size)
    found = []
    for live.packed in (True, False):
        hidden_RD, streams_RkD = live(batch, (1, 3))
        total = (torch.cat((hidden_RD[:, None], streams_RkD), 1) * upstream).sum()
        found.append(torch.autograd.grad(total, weight)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4 * float(found[1].abs().max()))


def test_a_leak_between_documents_is_noticed(monkeypatch):
    """Attention over the whole pack, which ignores its documents, must not be taken for the packed way."""
    from headstart.heads.targets import live as module

    def leaking(q, k, v, rows, scale):
        one = module.PackRows(rows.edges_E[[0, -1]], len(q), (len(q),))
        return real(q, k, v, one, scale)

    real = module.packed_attention
    monkeypatch.setattr(module, "packed_attention", leaking)
    for dtype in (torch.float32, torch.bfloat16):
        live = LivePass(Target.from_model(model_for("llama").to(dtype)))
        assert not live.packed and "document 2 of a pack differs by" in str(live.note)


def test_half_precision_is_not_mistaken_for_a_leak():
    live = LivePass(Target.from_model(model_for("llama").to(torch.bfloat16)))
    assert live.packed, live.note


def test_rope_that_depends_on_the_longest_text_is_not_captured():
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    live = LivePass(Target.from_model(LlamaForCausalLM(config).eval()))
    assert live.packed and not live.capturable
