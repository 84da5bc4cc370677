"""The naive decode loop: τ by hand, identity with plain decoding, and equality with the teacher-forced count."""

from __future__ import annotations

import torch

from reference import eagle3, medusa
from reference.decode import accepted_from_hits, plain_greedy, speculative_greedy
from reference.documents import Document, Ends
from reference.llama import Shape, Weights

VOCAB, WIDTH, STREAMS = 11, 8, 3


def successor_target(tokens: list[int]) -> torch.Tensor:
    """A target that always says token + 1 (mod 10)."""
    return torch.nn.functional.one_hot((torch.tensor(tokens) + 1) % 10, 10).double()


def test_always_right_chain_commits_all_drafts_and_one_more():
    propose = lambda consumed, root: [(root + i) % 10 for i in (1, 2, 3)]  # noqa: E731
    out = speculative_greedy(successor_target, propose, [0], 9, set())
    assert out.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert out.accepted == [3, 3] and out.committed == [4, 4] and out.tau == 4


def test_always_wrong_chain_is_plain_decoding():
    out = speculative_greedy(successor_target, lambda consumed, root: [root, root], [0], 5, set())
    assert out.tokens == [1, 2, 3, 4, 5] and out.accepted == [0, 0, 0, 0] and out.tau == 1


def test_no_draft_still_counts_as_a_forward():
    propose = lambda consumed, root: [root + 1] if root % 2 else []  # noqa: E731
    out = speculative_greedy(successor_target, propose, [0], 6, set())
    assert out.accepted == [1, 1, 1] and out.committed == [2, 2, 1]
    assert plain_greedy(successor_target, [0], 6, set()) == out.tokens


def test_stop_token_inside_an_accepted_path_ends_there():
    propose = lambda consumed, root: [root + 1, root + 2, root + 3]  # noqa: E731
    out = speculative_greedy(successor_target, propose, [0], 50, {3})
    assert out.tokens == [1, 2, 3] and out.accepted == [3] and out.committed == [2]


class RandomTarget:
    """A causal "model" whose feature is a function of the last three tokens."""

    def __init__(self, seed: int):
        noise = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=noise, dtype=torch.float64)  # noqa: E731
        self.ends = Ends(draw(VOCAB, WIDTH), draw(VOCAB, WIDTH))
        self.mix = draw(WIDTH, 3 * WIDTH)
        self.streams = draw(STREAMS, WIDTH, 3 * WIDTH)

    def features(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        padded = [0, 0, *tokens]
        windows = torch.stack([self.ends.embed_VD[padded[t : t + 3]].flatten() for t in range(len(tokens))])
        return torch.tanh(windows @ self.mix.T), torch.einsum("tw,kdw->tkd", windows, self.streams)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.features(tokens)[0] @ self.ends.lm_head_VD.T


def random_eagle3(seed: int) -> tuple[Weights, Shape]:
    noise = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=noise, dtype=torch.float64) / shape[-1] ** 0.5  # noqa: E731
    ones = torch.ones(WIDTH, dtype=torch.float64)
    weights = {
        "fc.weight": draw(WIDTH, STREAMS * WIDTH),
        "midlayer.self_attn.q_proj.weight": draw(8, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": draw(4, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": draw(4, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": draw(WIDTH, 8),
        "midlayer.mlp.gate_proj.weight": draw(12, WIDTH),
        "midlayer.mlp.up_proj.weight": draw(12, WIDTH),
        "midlayer.mlp.down_proj.weight": draw(WIDTH, 12),
        "lm_head.weight": draw(VOCAB, WIDTH) * 3,
        "norm.weight": ones,
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.post_attention_layernorm.weight": ones,
    }
    return weights, Shape(num_heads=2, num_kv_heads=1, head_dim=4)


def test_training_time_test_logits_are_the_serving_chain_on_ground_truth():
    """Row p of step i attends to what serving has in its cache when the drafts so far were right."""
    target, (weights, shape) = RandomTarget(0), random_eagle3(1)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    hidden, streams = target.features(tokens)
    document = Document(tokens, [-1] * 2 + [0] * 8, hidden, streams)
    for p in (1, 3, 5):
        trained = eagle3.ttt_logits(weights, target.ends, shape, document, p, 3)
        served = eagle3.chain_logits(
            weights, target.ends, shape, tokens[: p + 1], streams[: p + 1], tokens[p + 1 : p + 4]
        )
        torch.testing.assert_close(torch.stack(trained), torch.stack(served), rtol=1e-12, atol=1e-12)


def check_teacher_forced_count(target: RandomTarget, propose, hits_of, depth: int) -> None:
    prompt, new = [7, 2, 8], 14
    out = speculative_greedy(target.logits, propose, prompt, new + depth + 1, set())
    plain = plain_greedy(target.logits, prompt, new + depth + 1, set())
    assert out.tokens == plain
    text = prompt + plain
    hits = [hits_of(text, t) for t in range(len(text) - depth - 1)]
    expected = accepted_from_hits(hits, len(prompt) - 1)
    assert out.accepted[: len(expected)] == expected and len(expected) >= 6


def test_teacher_forced_pass_counts_what_medusa_decoding_accepts():
    target, depth = RandomTarget(2), 3
    noise = torch.Generator().manual_seed(3)
    weights = {}
    for i in range(depth):
        weights[f"blocks.{i}.layers.0.weight"] = torch.randn(WIDTH, WIDTH, generator=noise, dtype=torch.float64) / 4
        weights[f"blocks.{i}.layers.0.bias"] = torch.zeros(WIDTH, dtype=torch.float64)
        weights[f"lm_heads.{i}.weight"] = target.ends.lm_head_VD

    def drafts(consumed: list[int]) -> list[int]:
        f_D = target.features(consumed)[0][-1]
        return [int(medusa.head_logits(weights, target.ends, f_D, d, 1, "own").argmax()) for d in range(1, depth + 1)]

    check_teacher_forced_count(
        target,
        lambda consumed, root: drafts(consumed),
        lambda text, t: [drafts(text[: t + 1])[d - 1] == text[t + 1 + d] for d in range(1, depth + 1)],
        depth,
    )


def test_teacher_forced_pass_counts_what_eagle3_decoding_accepts():
    target, (weights, shape), depth = RandomTarget(4), random_eagle3(5), 3

    def propose(consumed: list[int], root: int) -> list[int]:
        streams, fed = target.features(consumed)[1], [root]
        for _ in range(depth):
            logits = eagle3.chain_logits(weights, target.ends, shape, consumed, streams, fed)
            fed.append(int(logits[-1].argmax()))
        return fed[1:]

    def hits_of(text: list[int], t: int) -> list[bool]:
        hidden, streams = target.features(text)
        document = Document(text, [0] * len(text), hidden, streams)
        logits = eagle3.ttt_logits(weights, target.ends, shape, document, t, depth)
        return [int(z.argmax()) == text[t + 1 + d] for d, z in enumerate(logits, start=1)]

    check_teacher_forced_count(target, propose, hits_of, depth)
