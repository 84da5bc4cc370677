"""P-EAGLE: EAGLE-3 that drafts all its tokens in one pass (arXiv 2602.01469; families §2).

The first draft comes from the last committed row, as EAGLE-3's. The others come from rows of masked places behind it,
which read the mask token's embedding and one learnt feature (`mask_hidden`). Both are trained.

Shape legend: R rows of a pack, A anchors, M = Σ_d count_d, K depths, D target hidden, H head hidden, V target
vocabulary, m streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.base import counted_adds
from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.errors import ConfigError
from headstart.heads.families.autoregressive import AutoregressiveConfig
from headstart.heads.families.eagle3.head import Eagle3Config, Eagle3Head
from headstart.heads.families.peagle.rollout import rollout
from headstart.heads.numerics import compute_dtype


@dataclass
class PEagleConfig(Eagle3Config):
    """Recipe node `head` for P-EAGLE.

    Rows are drawn as in the paper: of the supervised rows, `row_fraction ** (d - 1)`, and `row_fraction_min` at least,
    train at depth d, and those of depth d + 1 are among those of depth d. First, `row_fraction_first` (ours) draws
    the rows of depth 1, so that a step costs less.

    The losses differ in how depths are weighed. The paper's is one mean over all drawn rows: depth d counts for about
    the share of its rows, r^(d-1). Ours is the sum of every depth's unbiased mean, times `depth_decay ** (d - 1)`.
    With depth_decay = row_fraction = r, the weights agree, up to one common factor, until the smallest share is reached
    (depth 6 for 0.7 and 0.2). From there the paper's stay at that share and ours go on falling, as the chance that a
    draft so deep is reached does.
    """

    structure: ClassVar[tuple[str, ...]] = (*Eagle3Config.structure, "train_embeddings")
    behaviour: ClassVar[tuple[str, ...]] = ("mask_token_id",)
    added: ClassVar[tuple[str, ...]] = (
        *AutoregressiveConfig.added, "num_key_value_heads", "start_layers", "lk_weight", "l1_weight",
        "teacher_temperature", "feature_dropout", "feature_noise",
    )  # fmt: skip
    placeholder: ClassVar[str | None] = "mask_token_id"

    type: str = "peagle"
    #: Drafts of one pass that are trained (K).
    depth: int = 8
    depth_decay: float = 0.7
    row_fraction: float = 0.7
    #: Loss of every depth against the target's distribution: soft_ce, kl or lk (acceptance rate).
    loss: str = "kl"
    #: Decoder layers. With more than one, training computes the lower ones for every row, not only for supervised ones.
    layers: int = 1
    #: EAGLE-3.1's recycled feature. P-EAGLE recycles none, so it must stay false.
    norm_output: bool = False
    #: Token that stands in the places of tokens still to be drafted; its embedding is trained. null takes a reserved
    #: token of the target's tokenizer.
    mask_token_id: int | None = None
    #: Train the embeddings of all tokens, as the speculators library does, instead of the mask token's alone.
    train_embeddings: bool = False


class PEagleHead(Eagle3Head):
    """Rows (p, d): d = 0 reads x_{p+1} and the target's feature at p, d ≥ 1 a masked place, at rope position p + d.

    Row (p, d) sees the rows (s, 0) with s ≤ p, and (p, 1 … d). It drafts x_{p+2+d}, which is depth d + 1 of anchor p.

    Attributes:
        mask_hidden: [m · D], what masked places have in the place of the target's features, before any norm.
        mask_embedding: [H], the mask token's embedding. None in a head with embeddings of its own, where it is a row of
            them.
    """

    family = "peagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig, dims: HeadDims):
        super().__init__(config, dims)
        token = config.mask_token_id
        if token is not None and not 0 <= token < dims.vocab_size:
            raise ConfigError(
                f"head.mask_token_id: found {token}, expected a token of the target's vocabulary, 0 to "
                f"{dims.vocab_size - 1}"
            )
        if config.depth < 2:
            raise ConfigError(
                f"head.depth: found {config.depth}, expected 2 or more: the first draft reads no masked place. For a "
                "single draft, train head.type=eagle3"
            )
        if config.norm_output:
            raise ConfigError("head.norm_output: found true, but a P-EAGLE head feeds no output back: leave it false")
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        if config.train_embeddings and self.embed_tokens is None:
            self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        own = self.embed_tokens is not None
        self.mask_embedding = None if own else nn.Parameter(torch.randn(self.fc.out_features))

    @property
    def mask_token(self) -> int:
        """The token of masked places. Raises: ConfigError where it is not known: the head neither trains nor drafts."""
        token = self.config.mask_token_id
        if token is None:
            raise ConfigError(
                "head.mask_token_id: found null, and this head is to train or to draft; expected the id of a token "
                "that texts do not hold, such as a reserved one of the target's tokenizer"
            )
        return token

    @property
    def replaced(self) -> tuple[int, Tensor] | None:
        return None if self.mask_embedding is None else (self.mask_token, self.mask_embedding)

    def mask_feature(self) -> Tensor:
        """g of a masked place, [H] in the compute dtype: `mask_hidden` through the norms and fc of all features."""
        return self.fuse(self.mask_hidden, self.mask_hidden.unflatten(0, (len(self.feature_layers), -1)))

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """As EAGLE-3's; embeddings that are trained start from the target's, where they are as wide.

        Raises: ConfigError for a head whose mask token is not known.
        """
        super().initialise(ends, draft_ids_U)
        token = self.mask_token
        with torch.no_grad():
            if self.mask_embedding is not None:
                self.mask_embedding.copy_(ends.embed_VD[token])
            elif self.embed_tokens is not None and self.embed_tokens.weight.shape == ends.embed_VD.shape:
                self.embed_tokens.weight.copy_(ends.embed_VD)

    @property
    def by_autograd(self) -> bool:
        return True

    def rollout(self, batch: FeatureBatch) -> Tensor:
        """The normed outputs [M, H] of every depth's anchors, laid end to end, from one pass through the layers."""
        layer = self.midlayer
        e_RH = layer.input_layernorm(self.embed(self.next_tokens(batch)))
        mask_e_H = layer.input_layernorm(self._mask_embedding())
        g_RH, mask_g_H = self.training_features(batch), self.mask_feature()
        return self.norm(
            rollout(batch, self.draft_layers, layer.hidden_norm, self.rope, e_RH, g_RH, mask_e_H, mask_g_H)
        )

    def _mask_embedding(self) -> Tensor:
        """[H] in the compute dtype, with gradient."""
        own = self.embed_tokens.weight[self.mask_token] if self.embed_tokens is not None else self.mask_embedding
        assert own is not None
        return own.to(compute_dtype(self.fc.weight))

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """As the base class's. The first layer projects one masked place, whose result all of them share."""
        first, later, total = counts[0], sum(counts[1:]), self.fc.weight.numel() * rows
        for n, layer in enumerate(self.draft_layers):
            attention = layer.self_attn
            queries = attention.q_proj.weight.numel()
            key_value = attention.k_proj.weight.numel() + attention.v_proj.weight.numel()
            rest = attention.o_proj.weight.numel() + sum(p.numel() for p in layer.mlp.parameters())
            whole = rows if n < len(self.layers) else first
            total += key_value * rows + queries * whole + rest * (whole + later)
            if n > 0:
                total += (queries + key_value) * later
            elif n == len(self.layers):  # the embedding half of the queries runs on every row
                total += queries / 2 * (rows - first)
        return total + counted_adds(self.lm_head.weight) * sum(counts)

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """As the base class's, of the rows that are drawn. The layers below the last keep numbers for every row.

        Autograd also keeps the blocks of the attention, with slots for all places of an anchor, and two more outputs.
        """
        layers, hidden, attention = self.draft_layers, self.midlayer.hidden_size, self.midlayer.self_attn
        drawn_K, places = self.drawn_parts(), self.depth - 1
        per_layer = [layer.kept_numbers(recompute) for layer in layers]
        slots = places * drawn_K[1] if places else 0.0
        beside = len(layers) * 2 * (attention.heads + attention.kv_heads) * attention.head_dim * slots
        kept = anchors * (sum(drawn_K) * (sum(per_layer) + 2 * hidden) + beside)
        kept += self.teacher_rows(anchors) * self.lm_head.out_features
        kept += self.copied_features(rows)
        return kept + rows * 2 * hidden + (rows - anchors) * sum(per_layer[:-1])
