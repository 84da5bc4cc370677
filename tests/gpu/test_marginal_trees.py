"""Captured trees over marginals at the sizes of a large vocabulary (`pytest -m gpu`, on a machine with a GPU)."""

from __future__ import annotations

import pytest
import torch
from reference.ddtree import ddtree

from headstart.eval.kernels.candidates import top_log_p
from headstart.eval.kernels.capture import capture
from headstart.eval.kernels.marginals import MarginalTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("depth", "nodes"), [(8, 15), (8, 59), (16, 127)])
@torch.inference_mode()
def test_a_captured_tree_is_the_heaps(depth: int, nodes: int, batch: int) -> None:
    """One graph, three times new logits: a capture fails where anything waits for the device. In bfloat16 many tie."""
    card, vocab = torch.device("cuda"), 128256
    noise = torch.Generator(card).manual_seed(0)
    logits_BKU = torch.zeros((batch, depth, vocab), dtype=torch.bfloat16, device=card)
    shape, ids_U = MarginalTree.of(depth, nodes, vocab).to(card), torch.arange(vocab, device=card) + 7

    def run():  # type: ignore[no-untyped-def]
        marginals = shape.marginals(logits_BKU)
        return marginals, shape.tree(marginals, ids_U)

    graph, ((log_p_BKR, token_BKR), tree) = capture(run, card)
    for _ in range(3):
        logits_BKU.copy_(2 * torch.randn(logits_BKU.shape, generator=noise, device=card))
        graph.replay()
        values = logits_BKU.float().log_softmax(-1).topk(shape.ranks).values
        torch.testing.assert_close(log_p_BKR, values, rtol=1e-5, atol=1e-5)
        # which of equally likely tokens stand first is the card's choice, but each has its own probability
        assert torch.equal(logits_BKU.gather(-1, token_BKR), logits_BKU.topk(shape.ranks).values)
        again = top_log_p(logits_BKU, shape.ranks)[0]
        assert torch.equal(again, log_p_BKR)
        assert tree.valid_BN.all() and tree.score_BN is not None
        for row in range(batch):
            paths: list[tuple[int, ...]] = []
            for parent, token in zip(tree.parent_BN[row].tolist(), tree.tokens_BN[row].tolist(), strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token - 7))
            # the candidates of each depth are its tokens, by rank
            expected = ddtree(log_p_BKR[row].cpu().numpy(), nodes)
            tokens_KR = token_BKR[row].tolist()
            wanted = {tuple(tokens_KR[d][rank] for d, rank in enumerate(node.ranks)) for node in expected}
            assert set(paths) == wanted
            assert sorted(tree.score_BN[row].tolist()) == sorted(float(node.score) for node in expected)
