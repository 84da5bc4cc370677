"""What block heads say that training costs, against the sizes of their tensors."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from reference.families import DIMS
from torch import Tensor

from headstart.heads.batch import FeatureBatch
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.families import build_head
from headstart.heads.families.block.stack import Stack
from headstart.heads.families.dflash.head import DFlashConfig
from headstart.heads.families.dspark.head import DSparkConfig

WIDTH, VOCAB, INNER = DIMS.hidden_size, DIMS.vocab_size, DIMS.intermediate_size
QUERIES, KEYS = DIMS.num_heads * DIMS.head_dim, DIMS.num_kv_heads * DIMS.head_dim
LAYER = WIDTH * (2 * QUERIES + 2 * KEYS + 3 * INNER)


def bound(config):
    torch.manual_seed(0)
    head = build_head(config, DIMS)
    head.bind(TargetEnds(torch.randn(VOCAB, WIDTH), Teacher(torch.randn(VOCAB, WIDTH))))
    return head


def test_multiply_adds_by_hand():
    """100 rows, 30 anchors, blocks of 4 slots; the fill-in layout drafts 3 tokens, the anchor-first one 4."""
    context = 100 * (3 * WIDTH * WIDTH + 2 * 2 * WIDTH * KEYS)
    head = bound(DFlashConfig(depth=3, layers=2, mask_token_id=1))
    products = context + 30 * 4 * 2 * LAYER + 30 * 3 * VOCAB * WIDTH * 2 / 3
    assert head.multiply_adds(100, (30, 20, 10)) == pytest.approx(products)  # no teacher: labels alone
    head = bound(DSparkConfig(depth=4, layers=2, mask_token_id=1, draft_vocab_size=20, markov_rank=6))
    correction = 20 * 6 + WIDTH + 6
    products = context + 30 * 4 * (2 * LAYER + 20 * WIDTH * 2 / 3 + correction) + 100 * 20 * WIDTH / 3
    assert head.multiply_adds(100, (30, 20, 10, 5)) == pytest.approx(products)


def test_dropout_keeps_a_copy_of_the_features(monkeypatch):
    """Without it, fc reads the batch's own tensor."""
    read: list[Tensor] = []

    def watched(stack, rows, slots, run=Stack.run):
        read.append(rows.streams_RF)
        return run(stack, rows, slots)

    monkeypatch.setattr(Stack, "run", watched)
    planned = []
    for share in (0.0, 0.2):
        head = bound(DFlashConfig(depth=3, layers=2, mask_token_id=1, feature_dropout=share)).train()
        batch = FeatureBatch.pack([(torch.randint(0, VOCAB, (30,)), torch.zeros(30, dtype=torch.int64))], head.depth)
        batch.streams_RkD = torch.randn(30, 3, WIDTH)
        head.slots(batch)
        planned.append(head.kept_numbers(30, len(batch.anchors), False))
        own = read[-1].untyped_storage().data_ptr() == batch.streams_RkD.untyped_storage().data_ptr()
        assert own is (share == 0)
    assert planned[1] - planned[0] == read[-1].numel() == 30 * 3 * WIDTH


@pytest.mark.parametrize("recompute", [False, True])
def test_the_layers_keep_what_the_plan_counts(recompute):
    head = bound(DFlashConfig(depth=3, layers=2, mask_token_id=1))
    if recompute:
        head.recompute_activations()
    tokens, turns = torch.randint(0, VOCAB, (30,)), torch.zeros(30, dtype=torch.int64)
    batch = FeatureBatch.pack([(tokens, turns)], head.depth)
    batch.streams_RkD = torch.randn(30, 3, WIDTH)
    run = head.slots(batch).grad_fn.next_functions[0][0]
    kept = sum(
        value.numel()
        for layer in run.kept
        for value in (getattr(layer, f.name) for f in fields(layer))
        if isinstance(value, Tensor)
    )
    anchors = len(batch.anchors)
    per_slot = 2 * WIDTH + 2 * QUERIES + 2 * KEYS + (0 if recompute else 2 * INNER)
    assert kept == anchors * 4 * 2 * per_slot
    assert kept < head.kept_numbers(30, anchors, recompute) < 3 * kept
