"""A head that is trained on eight short conversations alone drafts all of their blocks right."""

from __future__ import annotations

import pytest
import torch
from reference.tiny import SIZES
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.batch import FeatureBatch
from headstart.heads.families import build_head
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dflash2.head import DFlash2Config
from headstart.heads.families.domino.head import DominoConfig
from headstart.heads.families.dspark.head import DSparkConfig
from headstart.heads.families.jetspec.head import JetSpecConfig
from headstart.heads.targets.target import Target, TargetConfig

DEPTH, STEPS = 7, 80
#: prompts of four random tokens, answers of 11 that the target says
PROMPT, ANSWER = 4, 11


def conversations() -> tuple[Target, FeatureBatch]:
    """A random target, and what it answers to eight prompts, with its features."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()
    prompts = torch.randint(3, SIZES["vocab_size"], (8, PROMPT))
    with torch.no_grad():
        tokens = prompts
        for _ in range(ANSWER):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    turns = torch.tensor([-1] * PROMPT + [0] * ANSWER)
    target = Target.from_model(model, config=TargetConfig(name="random"))
    return target, FeatureBatch.pack([(line, turns) for line in tokens], DEPTH)


@pytest.mark.parametrize(
    "config",
    [
        DFlashConfig(depth=DEPTH, layers=2, mask_token_id=0),
        # a random target is unsure of its tokens: by its distribution alone, some stay as likely as the right one
        DSparkConfig(depth=DEPTH, layers=2, mask_token_id=0, markov_rank=16, ce_weight=1.0),
        JetSpecConfig(depth=DEPTH, layers=2, mask_token_id=0, kl_weight=0.0, ce_weight=1.0),
        DFlash2Config(
            depth=DEPTH, layers=2, mask_token_id=0, conv_group=8, selector_rank=16, selector_candidates=4
        ),
        DominoConfig(depth=DEPTH, layers=2, mask_token_id=0, correction_rank=16, gru_size=32),
    ],
    ids=[
        "fill in, cross-entropy", "anchor first, labels and total variation, markov head", "causal, cross-entropy",
        "convolutions and selector", "recurrent correction, share of the base",
    ],
)
def test_it_learns_eight_conversations_by_heart(config):
    target, batch = conversations()
    torch.manual_seed(0)
    head = build_head(config, target.dims)
    head.initialise(target.ends)
    batch = target.extract(batch, head.spec)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    count_T = head.loss_counts(batch)
    whole = batch.anchors.depths_A == DEPTH

    def walked() -> float:
        """Right drafts before the first wrong one, of blocks that lie inside their answer."""
        with torch.no_grad():
            return float(head.loss(batch, target.ends.teacher).run_A[whole].float().mean())

    before = walked()
    for step in range(STEPS):
        scale_T = head.term_weights((step + 1) / STEPS) / count_T
        optimizer.zero_grad()
        (head.loss(batch, target.ends.teacher, scale_T).sum_T * scale_T).sum().backward()
        optimizer.step()
    assert before < 1 < 0.97 * DEPTH < walked()
