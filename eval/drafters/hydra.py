"""Hydra as a drafter: a head runs once on all nodes of a level that have children (arXiv 2402.05109; methods §2).

Head d reads the feature after the last committed token, the root, and the drafts on the way to a node. So the input of
a node is its parent's and one more embedding. With a prefix layer (Hydra++) the feature comes from that layer, whose KV
cache holds committed rows only.
Shape legend: B batch, J new rows, N nodes, P nodes of a level that have children, R rows (B · P) or ranks, C width of a
head's input, D hidden, K levels, V vocabulary, A rows of a document, T its tokens.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.cache import Buffers
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.sampling import (
    Sampling,
    add_seen,
    context_seen,
    penalise,
)
from headstart.eval.drafters.everywhere import attend_earlier
from headstart.eval.drafters.layer import (
    LayerPass,
    all_start_widths,
    appended,
    norm_of,
    rope_tables,
    start_widths,
)
from headstart.eval.drafters.one_by_one import OneByOne
from headstart.eval.drafters.sized import Sized
from headstart.eval.kernels.add_silu import add_silu
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.candidates import Growth, seen_along, top_ids, top_log_p
from headstart.eval.kernels.extend_input import extend_input
from headstart.eval.kernels.launch import compile_ahead, synchronize
from headstart.eval.kernels.line_up import line_up
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.norm import apply_norm
from headstart.eval.tree import StaticShape, Tree, chain, drafted_shape
from headstart.heads.batch import FeatureSpec
from headstart.heads.families.hydra.head import HydraHead
from headstart.heads.sampling import logit_of


class DepthPass:
    """A copy of head d (from 1).

    Args: shared, scale: the target's output matrix and the scale of its logits, where the head has no own matrix.
    """

    def __init__(self, head: HydraHead, d: int, shared: Linear | None, scale: float):
        blocks, dtype = head.blocks[d - 1], head.compute_dtype()

        def copied(*parameters: Tensor) -> Tensor:
            return torch.cat([parameter.detach().to(dtype) for parameter in parameters])

        into, *later = blocks.layers
        # R x and L x of the first block are one product, whose weights hold the factor on embeddings (a power of two)
        weight_OC = copied(blocks.residual.weight, into.weight)
        weight_OC[:, head.dims.hidden_size :] *= head.embed_scale.to(dtype)
        self.first = Linear(weight_OC, copied(blocks.residual.bias, into.bias))
        self.later = [Linear(copied(layer.weight), copied(layer.bias)) for layer in later]
        self.shared, self.scale = shared, scale
        self.own = Linear(head.lm_heads[d - 1].weight.detach().to(dtype)) if shared is None else None
        self.update: tuple[Linear, Linear] | None = None
        if head.config.lm_head == "lowrank":
            self.update = Linear(copied(head.down[d - 1].weight)), Linear(copied(head.up[d - 1].weight))

    def linears(self) -> list[Linear]:
        outputs = [linear for linear in (self.own, self.shared, *(self.update or ())) if linear is not None]
        return [self.first, *self.later, *outputs]

    def __call__(self, x_BPC: Tensor) -> Tensor:
        """Logits [B, P, V] of head d after each node."""
        x_RD = add_silu(*self.first(x_BPC.flatten(0, 1)).chunk(2, 1))
        for layer in self.later:
            x_RD = add_silu(x_RD, layer(x_RD))
        return self._logits(x_RD).view(*x_BPC.shape[:2], -1)

    def _logits(self, x_RD: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(x_RD)
        assert self.shared is not None
        logits_RV = self.shared(x_RD.to(self.shared.weight_NK.dtype))
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.update is None:
            return logits_RV
        down, up = self.update
        return logits_RV + up(down(x_RD))


class PrefixCache:
    """The prefix layer with its KV cache of all committed rows.

    Attributes: length_B: int64, rows that the cache holds.
    """

    length_B: Tensor
    kv: Buffers

    def __init__(self, head: HydraHead, positions: int):
        prefix = head.prefix
        assert prefix is not None
        self.dtype, self.dims, self.positions = head.compute_dtype(), head.dims, positions
        self.input_norm = norm_of(prefix.input_layernorm)
        tables = rope_tables(prefix.rope, positions, prefix.norm.weight.device)
        self.layer = LayerPass(prefix.layer, head.dims, self.dtype, tables, prefix.norm)

    def place(self, batch: int, slots: int, device: torch.device) -> None:
        """Make buffers."""
        self.kv = Buffers([(self.dims.num_kv_heads, self.dims.head_dim)], batch, slots, self.dtype, device)

    def start(self, hidden_BJD: Tensor, count_B: Tensor) -> Tensor:
        """Begin with the first `count_B` rows of each sequence, in passes of few different widths.

        Returns: [B, D], what the heads read after the last of them.
        """
        self.length_B = torch.zeros_like(count_B)
        widths, begin = start_widths(hidden_BJD.shape[1]), 0
        hidden_BJD = torch.nn.functional.pad(hidden_BJD, (0, 0, 0, sum(widths) - hidden_BJD.shape[1]))
        last_BD = torch.zeros_like(hidden_BJD[:, 0], dtype=self.dtype)
        for width in widths:
            new_B = (count_B - begin).clamp(0, width)
            visibility = appended(new_B, width, self.length_B, self.kv.bin)
            last_B1 = (new_B - 1).clamp(min=0)[:, None]
            last_BD = self._pass(hidden_BJD[:, begin : begin + width], visibility, last_B1, new_B, last_BD)
            self.length_B = self.length_B + new_B
            begin += width
        return last_BD

    def append(self, rows: Rows, last_BD: Tensor) -> Tensor:
        """Add committed rows. Args: last_BD: what stays for rows without new tokens. Returns: as `start`."""
        # tokens play no part here, and the counts stand where roots would
        lined = line_up(rows.tokens_BJ, rows.count_B, rows.count_B, self.length_B, self.kv.bin, 1)
        visibility = Visibility(lined.position_BW, lined.write_BW, self.length_B)
        self.length_B = lined.length_B
        return self._pass(rows.features(), visibility, lined.last_B1, rows.count_B, last_BD)

    def _pass(
        self, hidden_BJD: Tensor, visibility: Visibility, last_B1: Tensor, count_B: Tensor, last_BD: Tensor
    ) -> Tensor:
        hidden_RD = hidden_BJD.to(self.dtype).flatten(0, 1)
        x_RD, (keys,), (values,) = apply_norm(hidden_RD, self.input_norm), self.kv.keys, self.kv.values
        _, normed_BD = self.layer(x_RD, hidden_RD, visibility, keys, values, last_B1)
        return torch.where((count_B > 0)[:, None], normed_BD, last_BD)


@dataclass(frozen=True)
class StaticLevel:
    """One level of a static tree.

    Attributes:
        ranks: candidates that are needed of each parent.
        child_N: int64, each node's place among the candidates of all parents (parent · ranks + rank).
        expand_P: int64, the nodes of this level that have children.
        under_BP: int64, the parent of each of these, by its place among the parents.
    """

    ranks: int
    child_N: Tensor
    expand_P: Tensor
    under_BP: Tensor


def static_levels(shape: StaticShape, batch: int, device: torch.device) -> list[StaticLevel]:
    """The levels of a tree, parents in the order of its nodes."""
    parent, depth, rank = (x.tolist() for x in (shape.parent_N, shape.depth_N, shape.rank_N))
    inner = set(parent)
    made, places = [], {-1: 0}
    for level in range(1, shape.levels + 1):
        nodes = [n for n in range(len(depth)) if depth[n] == level]
        ranks = 1 + max(rank[n] for n in nodes)
        expand = [n for n in nodes if n in inner]

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        child_N = on_device([places[parent[n]] * ranks + rank[n] for n in nodes])
        under_BP = on_device([places[parent[n]] for n in expand]).expand(batch, -1).contiguous()
        made.append(StaticLevel(ranks, child_N, on_device([nodes.index(n) for n in expand]), under_BP))
        places = {n: place for place, n in enumerate(expand)}
    return made


class HydraDrafter(Sized):
    """Drafts level by level with a HydraHead bound to its target. The first `start` copies its weights."""

    captures = True

    def __init__(self, head: HydraHead, tree: TreeConfig, sampling: Sampling):
        self.head, self.tree, self.sampling = head, tree, sampling
        self.name = head.family
        self.spec: FeatureSpec | None = head.spec
        self.depth = self.max_nodes = min(tree.depth, head.depth)
        self.shape = drafted_shape(tree, self.depth, head.dims.vocab_size)
        self.by_level = self.shape is None
        if self.shape is not None:
            self.depth, self.max_nodes = self.shape.levels, len(self.shape.parent_N)
        elif tree.kind == "dynamic":
            self.max_nodes = tree.total_tokens - 1
        self.says_confidence = False
        self.prepare_s = 0.0
        self.dtype: torch.dtype
        self.passes: list[DepthPass] = []
        self.prefix: PrefixCache | None = None
        self._placed: tuple[int, int] | None = None
        self._aside: HydraDrafter | None = None

    @property
    def confidence_source(self) -> str:
        return "draft_probability"

    @property
    def state(self) -> list[tuple[object, str]]:
        named: list[tuple[object, str]] = [(self, "feature_BD")]
        if self.prefix is not None:
            named.append((self.prefix, "length_B"))
        return named if self.seen_BV is None else [*named, (self, "seen_BV")]

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        by_rows: dict[int, list[Linear]] = {}
        for step, parents in zip(self.passes[: self.drafted], self._parents(), strict=True):
            by_rows.setdefault(batch * parents, []).extend(step.linears())
        if self.prefix is not None:
            qkv, *last = self.prefix.layer.linears()
            by_rows.setdefault(batch * (self.drafted + 1), []).append(qkv)
            by_rows.setdefault(batch, []).extend(last)
        # heads may share a product
        return [(list(dict.fromkeys(linears)), rows) for rows, linears in sorted(by_rows.items())]

    def _parents(self) -> list[int]:
        """Nodes that the head of each level runs on."""
        if self.shape is not None:
            return [1, *(level.under_BP.shape[1] for level in self._levels[:-1])]
        return [1] + [self.tree.k if self.tree.kind == "dynamic" else 1] * (self.drafted - 1)

    def aside(self) -> HydraDrafter:
        weights = None if self.prefix is None else self.prefix.layer
        given = self._aside.prefix if self._aside is not None else None
        if self._aside is None or (given is not None and given.layer is not weights):
            self._aside = copy.copy(self)
            # the same weights with another cache
            self._aside.prefix, self._aside._aside = copy.copy(self.prefix), None
        return self._aside

    @torch.inference_mode()
    def take_row(self, row: int, aside: Drafter, slots: int) -> None:
        assert isinstance(aside, HydraDrafter)
        if self.prefix is not None and aside.prefix is not None:
            self.prefix.kv.take_row(row, aside.prefix.kv, slots)

    @torch.inference_mode()
    def start(self, context: Rows, capacity: int) -> None:
        hidden_BJD = context.features()
        self._prepare(hidden_BJD, capacity)
        self.seen_BV = context_seen(self.sampling, context.tokens_BJ, context.count_B, self.head.dims.vocab_size)
        if self.prefix is not None:
            self.feature_BD = self.prefix.start(hidden_BJD, context.count_B)
        else:
            self.feature_BD = context.last_features().to(self.dtype)

    def _prepare(self, hidden_BJD: Tensor, capacity: int) -> None:
        """Make weights and buffers, unless those of an earlier batch fit."""
        batch, device = len(hidden_BJD), hidden_BJD.device
        # a commit's padding stands at most one tree's levels behind the context
        slots = capacity + self.depth + 1
        if self._placed is not None:
            same_batch, same_slots = self._placed[0] == batch, self._placed[1] == slots
            if same_batch and (same_slots or self.prefix is None):
                return
        synchronize(device)  # do not count the target's prefill, which may still run
        began = time.perf_counter()
        if not self.passes:
            self.dtype, self.passes = self.head.compute_dtype(), self._copy_heads()
        # captured cycles read these, so they must stay where they are
        self._zero_B = torch.zeros(batch, dtype=torch.int64, device=device)
        nodes = torch.zeros((batch, self.max_nodes), dtype=torch.int64, device=device)
        self._tree = chain(nodes)
        if self.shape is not None:
            self._tree, self._levels = self.shape.to(device).tree(nodes), static_levels(self.shape, batch, device)
        if self.head.prefix is not None:
            if self.prefix is None or self.prefix.positions < slots:
                self.prefix = PrefixCache(self.head, slots)
            self.prefix.place(batch, slots, device)
            compile_ahead(lambda: self._compile_start(hidden_BJD))
        self._placed = batch, slots
        self.prepare_s += time.perf_counter() - began

    def _copy_heads(self) -> list[DepthPass]:
        head, teacher = self.head, self.head.bound_ends().teacher
        shared = None if head.config.lm_head == "own" else Linear(teacher.weight_VD)
        return [DepthPass(head, d, shared, teacher.scale) for d in range(1, self.depth + 1)]

    def _compile_start(self, like_BJD: Tensor) -> None:
        """Run a pass of every width that `start` may need, to compile its kernels."""
        assert self.prefix is not None
        for columns in all_start_widths():
            self.prefix.start(like_BJD.new_zeros((len(like_BJD), columns, like_BJD.shape[2])), self._zero_B)

    @torch.inference_mode()
    def commit(self, accepted: Rows) -> None:
        self.seen_BV = add_seen(self.seen_BV, accepted.tokens_BJ, accepted.count_B)
        if self.prefix is not None:
            self.feature_BD = self.prefix.append(accepted, self.feature_BD)
        else:
            new_BD = accepted.last_features().to(self.dtype)
            self.feature_BD = torch.where((accepted.count_B > 0)[:, None], new_BD, self.feature_BD)

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        self.seen_BV = add_seen(self.seen_BV, roots_B[:, None])
        x_B1C = self._extend(self.feature_BD[:, None], roots_B[:, None])
        if self.shape is not None:
            return self._static(x_B1C)
        return self._dynamic(x_B1C) if self.tree.kind == "dynamic" else self._chain(x_B1C, generator)

    def _extend(self, x_BfC: Tensor, tokens_BP: Tensor, under_BP: Tensor | None = None) -> Tensor:
        return extend_input(x_BfC, tokens_BP, self.head.bound_ends().embed_VD, under_BP)

    def _chain(self, x_B1C: Tensor, generator: torch.Generator | None) -> Tree:
        sampled = self.tree.sample and not self.sampling.greedy
        chosen = OneByOne(self.sampling, sampled, self.says_confidence, self.seen_BV, None, generator)
        for step in self.passes[: self.drafted]:
            if chosen.tokens:
                x_B1C = self._extend(x_B1C, chosen.tokens[-1][:, None])
            chosen.choose(step(x_B1C)[:, 0])
        return chosen.fill(self._tree, self.head.dims.vocab_size)

    def _static(self, x_BPC: Tensor) -> Tree:
        """The candidates of each parent that the tree's paths name."""
        seen_BPV = None if self.seen_BV is None else self.seen_BV[:, None]
        tokens: list[Tensor] = []
        log_ps: list[Tensor] = []
        for step, level in zip(self.passes, self._levels, strict=True):
            logits_BPV = penalise(step(x_BPC), self.sampling, seen_BPV)
            if self.says_confidence:
                log_p_BPR, found_BPR = top_log_p(logits_BPV, level.ranks)
                log_ps.append(log_p_BPR.flatten(1).index_select(1, level.child_N))
            else:
                found_BPR = top_ids(logits_BPV, level.ranks)
            tokens.append(found_BPR.flatten(1).index_select(1, level.child_N))
            if len(tokens) < self.depth:
                expanded_BP = tokens[-1].index_select(1, level.expand_P)
                x_BPC = self._extend(x_BPC, expanded_BP, level.under_BP)
                seen_BPV = None if seen_BPV is None else seen_along(seen_BPV, level.under_BP, expanded_BP)
        confidence_BN = logit_of(torch.cat(log_ps, 1).exp()).float() if log_ps else None
        return replace(self._tree, tokens_BN=torch.cat(tokens, 1), confidence_BN=confidence_BN)

    def _dynamic(self, x_BPC: Tensor) -> Tree:
        """EAGLE-2's tree (methods §3): expand the k best nodes of each level, then keep the best of all candidates."""
        seen_BPV = None if self.seen_BV is None else self.seen_BV[:, None]
        first, *later = self.passes[: self.drafted]
        logits_BPV = penalise(first(x_BPC), self.sampling, seen_BPV)
        # the heads keep no KV of nodes: their slots and positions are not used
        growth = Growth.start(self._zero_B, self.tree.k, self.drafted, logits_BPV).grow(logits_BPV)
        for step in later:
            nodes = growth.frontier
            assert nodes is not None
            x_BPC = self._extend(x_BPC, nodes.tokens_Bk, nodes.under_Bk)
            seen_BPV = growth.seen_on_path(seen_BPV)
            growth = growth.grow(penalise(step(x_BPC), self.sampling, seen_BPV))
        return growth.tree(min(self.nodes or self.max_nodes, self.max_nodes))


def hydra_everywhere(
    head: HydraHead, tokens_BT: Tensor, hidden_BTD: Tensor, streams_BTkD: Tensor | None, row_BA: Tensor, depth: int
) -> Tensor:
    """int64 [B, A, K]: every head reads the root after the row and the drafts of the heads before.

    Args: see Drafting.draft_everywhere.
    """
    batch_B1 = torch.arange(len(row_BA), device=row_BA.device)[:, None]
    position_BT = torch.arange(tokens_BT.shape[1], device=row_BA.device).expand_as(tokens_BT)
    f_AD = head.prefix_states(hidden_BTD, position_BT, attend_earlier)[batch_B1, row_BA].flatten(0, 1)
    root_A = tokens_BT[batch_B1, row_BA + 1].flatten()
    parts = []
    # a few rows at a time: logits are large
    for f_ND, root_N in zip(f_AD.split(256), root_A.split(256), strict=True):
        tokens_Nd = root_N[:, None]
        for d in range(1, min(depth, head.depth) + 1):
            choice_N = head.draft_logits(d, f_ND, tokens_Nd).argmax(-1)
            tokens_Nd = torch.cat((tokens_Nd, choice_N[:, None]), 1)
        parts.append(tokens_Nd[:, 1:])
    return torch.cat(parts).unflatten(0, row_BA.shape)
