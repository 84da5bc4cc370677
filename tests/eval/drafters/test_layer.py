"""The copy of a draft's decoder layer that decoding runs."""

from __future__ import annotations

from typing import Any

import torch

from headstart.eval.drafters.layer import LayerPass, rope_tables
from headstart.heads.dims import HeadDims
from headstart.heads.layers import LaterLayer, Rope


def test_queries_and_keys_each_keep_their_own_norm() -> None:
    """Briefly trained norms are near 1, so that drafts would hardly show it if one stood for the other."""
    dims = HeadDims(32, 97, 8, 4, 2, 8, 48, rms_norm_eps=1e-5)
    layer: Any = LaterLayer(32, 48, dims, "silu", True)
    attention = layer.self_attn
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.uniform_(0.5, 1.5)
    copied = LayerPass(layer, dims, torch.float32, rope_tables(Rope(dims), 16, torch.device("cpu")), None)
    queries, keys = copied.shape.norms or (None, None)
    assert queries is not None and torch.equal(queries.factor_D, attention.q_norm.weight)
    assert keys is not None and torch.equal(keys.factor_D, attention.k_norm.weight)
