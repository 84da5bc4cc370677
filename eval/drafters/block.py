"""Block heads as drafters: one forward drafts all tokens (arXiv 2602.06036, 2607.05147).

They are laid out as a chain or, where no draft depends on the ones before it, as a tree over marginals.

The KV cache of the draft layers holds keys and values made from the target's features of committed rows, one row per
token before the root. The slots of a block stand behind them: the root's at its own position, then the mask tokens'.
Their keys and values are scratch that the next cycle overwrites.
Shape legend: B batch, J new rows, N slots of a block, K drafts, R rows of a pass, C width of a product, D hidden,
m streams, r rank, U draft vocabulary, V target vocabulary, A rows of a document that drafts begin after, T its tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import (
    Sampling,
    add_seen,
    context_seen,
    most_likely,
    penalise,
)
from headstart.eval.drafters.cached import CachedDrafter
from headstart.eval.drafters.convolved import ConvolvedPass
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary, in_target_vocabulary
from headstart.eval.drafters.independent import choose_each
from headstart.eval.drafters.layer import LayerPass, norm_of, rope_tables
from headstart.eval.drafters.one_by_one import OneByOne
from headstart.eval.kernels.argmax import argmax_with_logit
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.block_input import BlockInput, block_input
from headstart.eval.kernels.confidence import confidence
from headstart.eval.kernels.context_store import ContextStore, context_store
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.marginals import drafted_marginals
from headstart.eval.kernels.walk import Walk, walk
from headstart.eval.tree import Tree, chain
from headstart.heads.families.block.head import BlockHead
from headstart.heads.kernels.block_attention import BlockAttention, BlockRows
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.layers import RMSNorm
from headstart.heads.losses.select import among_likeliest
from headstart.heads.numerics import compute_dtype, wide

#: logits that `block_everywhere` holds at a time, or attention scores
MOST_NUMBERS = 1 << 26


class BlockPass:
    """A copy of a head that is bound to its target. Frozen matrices of the target's dtype are not copied.

    Args: positions: length of the rotary tables. drafts: the most K, at most the head's.
    """

    def __init__(self, head: BlockHead, positions: int, drafts: int):
        self.dtype = compute_dtype(head.fc.weight)
        self.first = head.block_size - head.depth  # slots before the first one that drafts
        self.causal = head.causal
        layers = head.draft_layers

        def copied(*weights: Tensor) -> Tensor:
            return torch.cat([weight.detach().to(self.dtype) for weight in weights])

        self.fc, self.hidden_norm = Linear(copied(head.fc.weight)), norm_of(head.hidden_norm)
        attentions = [layer.self_attn for layer in layers]
        # keys and values of the context, of all layers in one product
        self.context_kv = Linear(copied(*(p.weight for a in attentions for p in (a.k_proj, a.v_proj))))
        self.tables = rope_tables(head.rope, positions, head.fc.weight.device)
        k_norms: list[RMSNorm] = [a.k_norm for a in attentions if a.k_norm is not None]
        factor_nd = torch.stack([norm.weight.detach().float() for norm in k_norms])
        self.store = ContextStore(factor_nd, k_norms[0].eps, *self.tables)
        first_norm, *later_norms = [layer.input_layernorm for layer in head.layers]
        self.input = BlockInput(
            head.bound_ends().embed_VD, head.mask_token, head.block_size, norm_of(first_norm), self.dtype
        )
        # each layer ends in the norm that the next one begins with, the last one in the head's
        self.layers = [
            (LayerPass if layer.attention_conv is None else ConvolvedPass)(
                layer, head.dims, self.dtype, self.tables, behind
            )
            for layer, behind in zip(layers, [*later_norms, head.norm], strict=True)
        ]
        self.output = Linear(head.output_UD.detach().to(self.dtype))
        up_Ur, table_Vr = head.correction_Ur, head.correction_table_Vr
        self.up = None if up_Ur is None else Linear(copied(up_Ur))
        self.walk: Walk | None = None
        if self.up is not None and table_Vr is not None:
            self.walk = Walk(copied(table_Vr), self.up.weight_NK, head.draft_ids_U, drafts)
        self.confidence_parts = head.confidence_parts

    def products(self, batch: int, drafts: int, walks: bool) -> dict[int, list[Linear]]:
        """Products of a cycle by their rows. Args: walks: whether the walk's kernel takes the correction's place."""
        found: dict[int, list[Linear]] = {}
        layers = [linear for layer in self.layers for linear in layer.linears()]
        for rows, linears in (
            (drafts + 1, [self.fc, self.context_kv]), (self.input.slots, layers), (drafts, [self.output]),
            (1, [self.up] if self.up is not None and not walks else []),
        ):  # fmt: skip
            found.setdefault(batch * rows, []).extend(linears)
        return found

    def append(self, streams_BJmD: Tensor, count_B: Tensor, length_B: Tensor, kv: Buffers) -> Tensor:
        """Store what the first `count_B` rows of each sequence give all layers. Returns: int64 [B], rows held now."""
        x_RC = streams_BJmD.to(self.dtype).flatten(2).flatten(0, 1)
        _, c_RD = self.fc.with_norm(x_RC, None, self.hidden_norm)
        return context_store(self.context_kv(c_RD), count_B, length_B, self.store, kv.whole)

    def hidden(self, roots_B: Tensor, length_B: Tensor, kv: Buffers, drafts: int) -> Tensor:
        """Normed outputs of the first K slots that draft, [K, B, D].

        All slots are computed, as others may see them. Args: drafts: K.
        """
        block = block_input(roots_B, length_B, self.input)
        residual_RD, x_RD = block.e_RD, block.normed_RD
        slots = Visibility(block.position_BN, block.position_BN, length_B)
        # every slot sees what the last one sees: the context and the whole block
        seen = slots if self.causal else Visibility(block.end_BN, block.position_BN, length_B)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            residual_RD, x_RD = layer(x_RD, residual_RD, slots, keys, values, seen=seen)
        hidden_BND = x_RD.unflatten(0, (len(roots_B), -1))
        return hidden_BND[:, self.first : self.first + drafts].transpose(0, 1).contiguous()

    def logits(self, hidden_KBD: Tensor) -> Tensor:
        """Without the correction, [K, B, U]."""
        return self.output(hidden_KBD.flatten(0, 1)).unflatten(0, hidden_KBD.shape[:2])


class BlockDrafter(CachedDrafter):
    """Drafts with a BlockHead bound to its target.

    A correction of the logits that is no table (`walk_step`) runs on the head's own weights. Fewer levels save logits
    and corrections, not the block's forward.
    """

    by_level = True
    head: BlockHead
    step: BlockPass

    def __init__(self, head: BlockHead, tree: TreeConfig, sampling: Sampling):
        super().__init__(head, tree, sampling)
        self.depth = self.max_nodes = min(tree.depth, head.depth)
        self.marginals = drafted_marginals(tree, self.depth, head.draft_vocab_size or head.dims.vocab_size)
        if self.marginals is not None:
            self.depth, self.max_nodes = len(self.marginals.levels), self.marginals.nodes

    @property
    def state(self) -> list[tuple[object, str]]:
        return [(self, name) for name in (["length_B"] if self.seen_BV is None else ["length_B", "seen_BV"])]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        by_rows = self.step.products(batch, self.drafted, self._walks)
        return [(linears, rows) for rows, linears in sorted(by_rows.items()) if linears]

    @property
    def confidence_source(self) -> str:
        return "confidence" if self.head.has_confidence else "draft_probability"

    @property
    def _walks(self) -> bool:
        """Whether one kernel makes all drafts from the logits."""
        return self.step.walk is not None and not self._sampled and not self.sampling.penalises

    @torch.inference_mode()
    def start(self, context: Rows, capacity: int) -> None:
        # a block stands behind the context
        self._prepare(context, capacity + self.head.block_size)
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, self.head.dims.vocab_size)
        self.length_B = torch.zeros_like(context.count_B)
        self._read_context(context, context.count_B)

    def _make_step(self, slots: int) -> BlockPass:
        return BlockPass(self.head, slots, self.depth)

    def _place(self, batch: int, device: torch.device) -> None:
        self._chain = chain(torch.zeros((batch, self.depth), dtype=torch.int64, device=device))
        if self.marginals is not None:
            self.marginals = self.marginals.to(device)

    def _append(self, rows: Rows, columns: slice, count_B: Tensor) -> None:
        if rows.streams_BJkD is None:
            raise ValueError("the rows carry no features: give the engine the drafter's spec")
        self.length_B = self.step.append(rows.streams_BJkD[:, columns], count_B, self.length_B, self.kv)

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)
        self._append(accepted, slice(None), accepted.count_B)

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        hidden_KBD = self.step.hidden(roots_B, self.length_B, self.kv, self.drafted)
        logits_KBU = self.step.logits(hidden_KBD)
        if self.marginals is not None:
            # only the context's tokens are penalised: nodes of one depth and rank share a token
            seen_BU = in_draft_vocabulary(self.seen_BV, self.head.draft_ids_U)
            best = self.marginals.first(self.drafted)
            log_p_KBR, ids_KBR = best.marginals(penalise(logits_KBU, self.sampling, seen_BU))
            marginals = log_p_KBR.transpose(0, 1), ids_KBR.transpose(0, 1)
            return best.tree(marginals, self.head.draft_ids_U, self.nodes)
        tokens_BK, q_BKU, confidence_BK = self._choose(hidden_KBD, logits_KBU, roots_B, generator)
        if q_BKU is not None:
            q_BKU = in_target_vocabulary(q_BKU, self.head.draft_ids_U, self.head.dims.vocab_size)
        if self.says_confidence and self.head.has_confidence:
            confidence_BK = self._confidence(hidden_KBD, roots_B, tokens_BK)
        drafted = self._chain.first(self.drafted)
        return replace(drafted, tokens_BN=tokens_BK, q_BNV=q_BKU, confidence_BN=confidence_BK)

    def _confidence(self, hidden_KBD: Tensor, roots_B: Tensor, tokens_BK: Tensor) -> Tensor:
        """Of the confidence head, float32 [B, K]."""
        parts = self.step.confidence_parts
        if parts is not None:
            return confidence(hidden_KBD, roots_B, tokens_BK, *parts)
        previous_BK = torch.cat([roots_B[:, None], tokens_BK[:, :-1]], 1)
        return self.head.confidence_logits(hidden_KBD.transpose(0, 1), previous_BK).float()

    @property
    def _says_own(self) -> bool:
        """Whether the drafts' own probability says how sure the drafter is."""
        return self.says_confidence and not self.head.has_confidence

    def _walked(self, logits_KBU: Tensor, roots_B: Tensor, tokens_BK: Tensor, walk: Walk) -> Tensor | None:
        """As the last result of `_one_by_one`. Args: logits_KBU: without the correction."""
        if not self._says_own:
            return None
        previous_R = torch.cat((roots_B[:, None], tokens_BK[:, :-1]), 1).t().flatten()
        logits_RU = self._corrected(walk.table_Vr[previous_R], logits_KBU.flatten(0, 1))
        return argmax_with_logit(logits_RU)[1].view(logits_KBU.shape[:2]).t()

    def _corrected(self, low_Rr: Tensor, base_RU: Tensor) -> Tensor:
        """Logits that drafts are chosen by."""
        assert self.step.up is not None
        logits_RU, count = self.step.up(low_Rr, base_RU), self.head.selects
        return among_likeliest(logits_RU, base_RU, count) if count else logits_RU

    def _choose(
        self, hidden_KBD: Tensor, logits_KBU: Tensor, roots_B: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `_one_by_one`, at once where that is possible."""
        if self._walks and self.step.walk is not None:
            tokens_BK = walk(logits_KBU, roots_B, self.step.walk)
            return tokens_BK, None, self._walked(logits_KBU, roots_B, tokens_BK, self.step.walk)
        if self.step.up is not None:
            return self._one_by_one(hidden_KBD, logits_KBU, roots_B, generator)
        ids_U = self.head.draft_ids_U
        if self._sampled or self.seen_BV is not None:
            logits_BKU = logits_KBU.transpose(0, 1)
            return choose_each(
                logits_BKU, self.sampling, self._sampled, self.seen_BV, ids_U, generator, self._says_own
            )
        best_KB, logit_KB = most_likely(logits_KBU, self.sampling, None, ids_U, self._says_own)
        return best_KB.t().contiguous(), None, None if logit_KB is None else logit_KB.t()

    def _one_by_one(
        self, hidden_KBD: Tensor, logits_KBU: Tensor, roots_B: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `OneByOne.all`: how sure the draft is, only with `_says_own`."""
        previous_B, state, ids_U = roots_B, None, self.head.draft_ids_U
        chosen = OneByOne(self.sampling, self._sampled, self._says_own, self.seen_BV, ids_U, generator)
        for hidden_BD, logits_BU in zip(hidden_KBD, logits_KBU, strict=True):
            low_Br, state = self.head.walk_step(hidden_BD, previous_B, state)
            previous_B = chosen.choose(self._corrected(low_Br, logits_BU))
        return chosen.all()


def block_everywhere(
    head: BlockHead, tokens_BT: Tensor, hidden_BTD: Tensor, streams_BTkD: Tensor | None, row_BA: Tensor, depth: int
) -> Tensor:
    """int64 [B, A, K]: a block behind every row, which sees the document's rows up to it.

    Args: see Drafting.draft_everywhere.
    """
    assert streams_BTkD is not None
    batch, length = tokens_BT.shape
    document_B1 = torch.arange(batch, device=row_BA.device)[:, None]
    c_RD = head.context(streams_BTkD).flatten(0, 1)
    tables = head.rope(torch.arange(length, device=row_BA.device).repeat(batch))
    context = [layer.self_attn.keys_values(c_RD, *tables) for layer in head.draft_layers]
    row_A = (document_B1 * length + row_BA).flatten()
    root_A, position_A = tokens_BT[document_B1, row_BA + 1].flatten(), row_BA.flatten()
    start_A = (document_B1 * length).expand_as(row_BA).flatten()
    # attention wants blocks in the order of their rows
    blocks, order_A = BlockRows(start_A, row_A + 1, head.block_size, head.causal).ascending()
    root_A, position_A = root_A[order_A], position_A[order_A]
    # only the eager twin of attention holds scores
    scores = 0 if wants_kernel(c_RD) else head.block_size * head.dims.num_heads * len(c_RD)
    count = max(1, MOST_NUMBERS // max(scores, len(head.output_UD)))
    parts = [
        _drafts_after(head, blocks.part(n, n + count), position_A[n : n + count] + 1, root_A[n : n + count], context,
                      min(depth, head.depth))
        for n in range(0, len(row_A), count)
    ]  # fmt: skip
    drafts_AK = torch.cat(parts)
    return torch.empty_like(drafts_AK).index_copy_(0, order_A, drafts_AK).unflatten(0, row_BA.shape)


def _drafts_after(
    head: BlockHead,
    blocks: BlockRows,
    position_A: Tensor,
    root_A: Tensor,
    context: list[tuple[Tensor, Tensor]],
    depth: int,
) -> Tensor:
    """Greedy drafts of some blocks, int64 [A, K].

    Args: position_A, root_A: of the roots. context: keys and values of all rows, of every layer.
    """
    z_RD = head.embed(head.block_tokens(root_A)).flatten(0, 1)
    slot_N = torch.arange(head.block_size, device=root_A.device)
    cos, sin = head.rope((position_A[:, None] + slot_N).flatten())
    attention = BlockAttention(blocks, context[0][0].shape[0])
    for layer, keys_values in zip(head.layers, context, strict=True):
        z_RD = layer.run(z_RD, keys_values, (cos, sin), attention)
    hidden_AND = head.norm(z_RD).unflatten(0, (-1, head.block_size))
    up_Ur, previous_A, state = head.correction_Ur, root_A, None
    drafts = []
    for hidden_AD in hidden_AND[:, head.block_size - head.depth :][:, :depth].unbind(1):
        logits_AU = wide(F.linear(hidden_AD, head.output_UD.to(hidden_AD.dtype)))
        if up_Ur is not None:
            low_Ar, state = head.walk_step(hidden_AD, previous_A, state)
            base_AU, logits_AU = logits_AU, logits_AU + wide(F.linear(low_Ar, up_Ur.to(low_Ar.dtype)))
            if head.selects:
                logits_AU = among_likeliest(logits_AU, base_AU, head.selects)
        previous_A = head.target_ids(logits_AU.argmax(-1))
        drafts.append(previous_A)
    return torch.stack(drafts, 1)
