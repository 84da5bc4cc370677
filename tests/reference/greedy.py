"""Greedy answers of a model's own forward: one forward over the whole text per token, without a cache."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def greedy(model: Any, context: list[int], count: int) -> tuple[list[int], float]:
    """(`count` tokens after the context, the smallest difference between the two largest logits of a token)."""
    tokens, gaps = list(context), []
    for _ in range(count):
        logits_V = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
        best = logits_V.topk(2).values
        gaps.append(float(best[0] - best[1]))
        tokens.append(int(logits_V.argmax()))
    return tokens[len(context) :], min(gaps)
