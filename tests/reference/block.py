"""DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147), families.md §1 and §3: one block and one slot at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference.documents import Document, Ends, greedy_choice, is_supervised, supervised_depth
from reference.llama import Row, Shape, Weights, attend, mlp, project, rms_norm


@dataclass(frozen=True)
class Block:
    """What a block head is, besides its weights.

    Attributes:
        depth: drafts, K. anchor_first: the slot of the root drafts too (K slots in all, else K + 1).
        mask: the token in all slots but the root's.
        draft_ids: target id of every logit; None = all tokens.
        markov: None, or vanilla, gated, rnn.
        causal: slots do not see those behind them.
        uncorrected: with a recurrent network's correction, the first drafts without it; None without such a network.
        selects: drafts are chosen among so many tokens that are most likely without the correction; 0 = all.
    """

    shape: Shape
    depth: int
    anchor_first: bool
    mask: int
    draft_ids: list[int] | None = None
    markov: str | None = None
    causal: bool = False
    uncorrected: int | None = None
    selects: int = 0


def layers_of(weights: Weights) -> list[str]:
    found = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    return [f"layers.{n}." for n in sorted(found)]


def context_rows(weights: Weights, block: Block, streams_TkD: Tensor) -> list[list[Row]]:
    """What each layer shows of the rows: hidden_norm(fc(features)) by the layer's own k and v, no input_layernorm."""
    eps = block.shape.eps
    c = [rms_norm(weights["fc.weight"] @ torch.cat(list(kD)), weights["hidden_norm.weight"], eps) for kD in streams_TkD]
    return [
        [project(weights, f"{prefix}self_attn.", c_D, t, block.shape) for t, c_D in enumerate(c)]
        for prefix in layers_of(weights)
    ]


def convolved(weights: Weights, prefix: str, side: int, inputs: list[Tensor], x: list[Tensor]) -> list[Tensor]:
    """DFlash 2: slot j of x by its own taps, over the slots up to it; x itself where the layer has no convolution.

    Args: inputs: what the sublayer's norm gave, which the taps depend on. side: 0 before the sublayer, 1 behind it.
    """
    if f"{prefix}base_kernel" not in weights:
        return x
    base_TD = weights[f"{prefix}base_kernel"][side]
    taps, width = base_TD.shape
    found = []
    for j, input_D in enumerate(inputs):
        delta = (weights[f"{prefix}kernel_projection.weight"] @ input_D).view(2, taps, -1)[side]
        group = width // delta.shape[1]
        y_D = torch.zeros_like(input_D)
        for tap in range(min(taps, j + 1)):
            kernel_D = torch.stack([base_TD[tap, c] + delta[tap, c // group] for c in range(width)])
            y_D = y_D + kernel_D * x[j - tap]
        found.append(y_D)
    return found


def slot_outputs(
    weights: Weights, ends: Ends, block: Block, context: list[list[Row]], root: int, position: int
) -> list[Tensor]:
    """norm(output) of the slots that draft, h_1 … h_K. `context`: of the rows before the root; `position`: its own."""
    eps, size = block.shape.eps, block.depth + (0 if block.anchor_first else 1)
    states = [ends.embed_VD[token] for token in [root] + [block.mask] * (size - 1)]
    for prefix, seen in zip(layers_of(weights), context, strict=True):
        inputs = [rms_norm(z_D, weights[f"{prefix}input_layernorm.weight"], eps) for z_D in states]
        normed = convolved(weights, f"{prefix}attention_conv.", 0, inputs, inputs)
        outputs = []
        own = [project(weights, f"{prefix}self_attn.", u_D, position + j, block.shape) for j, u_D in enumerate(normed)]
        for j, row in enumerate(own):
            # every slot sees the whole block, itself included
            visible = own[: j + 1] if block.causal else own
            outputs.append(attend(weights, f"{prefix}self_attn.", row, seen + visible, block.shape))
        outputs = convolved(weights, f"{prefix}attention_conv.", 1, inputs, outputs)
        states = [z_D + y_D for z_D, y_D in zip(states, outputs, strict=True)]
        inputs = [rms_norm(x_D, weights[f"{prefix}post_attention_layernorm.weight"], eps) for x_D in states]
        normed = convolved(weights, f"{prefix}mlp_conv.", 0, inputs, inputs)
        outputs = [mlp(weights, f"{prefix}mlp.", u_D, block.shape) for u_D in normed]
        outputs = convolved(weights, f"{prefix}mlp_conv.", 1, inputs, outputs)
        states = [x_D + y_D for x_D, y_D in zip(states, outputs, strict=True)]
    return [rms_norm(z_D, weights["norm.weight"], eps) for z_D in states[size - block.depth :]]


def corrections(weights: Weights, block: Block, hidden: list[Tensor], previous: list[int]) -> list[Tensor]:
    """What the Markov head adds to the logits of the first slots. `previous`: the token before each of them."""
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    s_r, added = torch.zeros_like(w1[0]), []
    for h_D, token in zip(hidden, previous, strict=False):
        e_r = w1[token]
        low_r = e_r
        if block.markov == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat([h_D, e_r])
            low_r = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * e_r
        if block.markov == "rnn":
            z = weights["markov_head.joint_proj.weight"] @ torch.cat([s_r, e_r, h_D])
            z = z + weights["markov_head.joint_proj.bias"]
            g_r, c_r, o_r = z[: len(e_r)], z[len(e_r) : 2 * len(e_r)], z[2 * len(e_r) :]
            s_r = torch.sigmoid(g_r) * s_r + (1 - torch.sigmoid(g_r)) * torch.tanh(c_r)
            low_r = torch.tanh(o_r)
        added.append(w2 @ low_r)
    return added


def recurrent_corrections(
    weights: Weights, ends: Ends, block: Block, hidden: list[Tensor], previous: list[int]
) -> list[Tensor]:
    """Domino's W2 SiLU(W1 [h ; g]), g the state of a GRU over the embeddings of all tokens so far (families §1b)."""
    w_ih, w_hh = weights["prefix_gru.weight_ih_l0"], weights["prefix_gru.weight_hh_l0"]
    size = w_hh.shape[1]
    g, added = w_hh.new_zeros(size), []
    for k, (h_D, token) in enumerate(zip(hidden, previous, strict=False)):
        x, s = w_ih @ ends.embed_VD[token], w_hh @ g
        r = torch.sigmoid(x[:size] + s[:size])
        z = torch.sigmoid(x[size : 2 * size] + s[size : 2 * size])
        n = torch.tanh(x[2 * size :] + r * s[2 * size :])
        g = (1 - z) * n + z * g
        e = weights["embed_proj.0.weight"] @ torch.cat([h_D, g])
        change = weights["embed_proj.2.weight"] @ (e * torch.sigmoid(e))
        added.append(change if k >= block.uncorrected else torch.zeros_like(change))
    return added


def selected_logits(
    weights: Weights, block: Block, base: list[Tensor], hidden: list[Tensor], previous: list[int]
) -> list[Tensor]:
    """DFlash 2's scores U(b) + <A[a] . H h, B[b]> of the likeliest tokens b; the others cannot be chosen."""
    found = []
    for z_U, h_D, token in zip(base, hidden, previous, strict=False):
        low_r = weights["candidate_selector.predecessor_codebook"][token]
        low_r = low_r * (weights["candidate_selector.hidden_projection.weight"] @ h_D)
        s_U = torch.full_like(z_U, -torch.inf)
        for b in z_U.argsort(descending=True)[: block.selects].tolist():
            s_U[b] = z_U[b] + weights["candidate_selector.successor_codebook"][b] @ low_r
        found.append(s_U)
    return found


def selector_term(
    weights: Weights, block: Block, z_U: Tensor, s_U: Tensor, h_D: Tensor, token: int, label: int
) -> Tensor:
    """Cross-entropy over the candidates; a label that is none of them replaces the least likely one."""
    likeliest = z_U.argsort(descending=True)[: block.selects].tolist()
    low_r = weights["candidate_selector.predecessor_codebook"][token]
    low_r = low_r * (weights["candidate_selector.hidden_projection.weight"] @ h_D)
    right = z_U[label] + weights["candidate_selector.successor_codebook"][label] @ low_r
    others = [b for b in likeliest if b != label][: block.selects - 1]
    return torch.logsumexp(torch.stack([right, *(s_U[b] for b in others)]), 0) - right


def block_logits(
    weights: Weights, ends: Ends, block: Block, hidden: list[Tensor], previous: list[int]
) -> list[Tensor]:
    """Logits [U] of as many slots as `previous` has tokens: the target's matrix, and the Markov head's correction."""
    matrix_UD = ends.lm_head_VD if block.draft_ids is None else ends.lm_head_VD[block.draft_ids]
    matrix_UD = weights.get("lm_head.weight", matrix_UD)
    found = [matrix_UD @ h_D for h_D in hidden[: len(previous)]]
    if block.selects:
        return selected_logits(weights, block, found, hidden, previous)
    if block.uncorrected is not None:
        added = recurrent_corrections(weights, ends, block, hidden, previous)
    elif block.markov is not None:
        added = corrections(weights, block, hidden, previous)
    else:
        return found
    return [a + b for a, b in zip(found, added, strict=True)]


def block_drafts(
    weights: Weights, ends: Ends, block: Block, streams_TkD: Tensor, root: int, depth: int
) -> tuple[list[int], list[Tensor]]:
    """Greedy drafts behind a root, whose context is all rows given, and their logits [U]."""
    context = context_rows(weights, block, streams_TkD)
    hidden = slot_outputs(weights, ends, block, context, root, len(streams_TkD))
    tokens: list[int] = []
    logits: list[Tensor] = []
    for _ in range(depth):
        logits = block_logits(weights, ends, block, hidden, [root, *tokens])
        choice = int(logits[-1].argmax())
        tokens.append(choice if block.draft_ids is None else block.draft_ids[choice])
    return tokens, logits


@dataclass
class BlockSums:
    """See Sums in documents.py."""

    loss: list[Tensor]
    count: list[float]
    correct: list[int]
    total: list[int]
    covered: int
    prefix: list[int]
    #: with a confidence head: sums over the slots that carry a loss, and their number
    means: dict[str, float] = field(default_factory=dict)
    slots: int = 0

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*(f"acc_{d}" for d in range(1, len(self.correct) + 1)), "coverage", *self.means)

    @property
    def numerators(self) -> list[float]:
        return [*self.correct, self.covered, *self.means.values()]

    @property
    def denominators(self) -> list[float]:
        return [*self.total, self.total[0], *(self.slots for _ in self.means)]


def slot_terms(q: Tensor, p: Tensor, label: int) -> dict[str, Tensor]:
    """The terms of one slot: q the draft's distribution, p the target's over the same tokens."""
    acceptance = sum(torch.minimum(a, b) for a, b in zip(q, p, strict=True))
    return {
        "ce": -torch.log(q[label]),
        "l1": sum(abs(a - b) for a, b in zip(q, p, strict=True)),
        "kl": sum(b * torch.log(b / a) for a, b in zip(q, p, strict=True)),
        "lk": -torch.log(acceptance),
        "acceptance": acceptance,
    }


def by_reach(found: list[tuple[float, dict[str, Tensor]]]) -> list[tuple[float, dict[str, Tensor]]]:
    """The slots of a block with D-PACE's weights."""
    reach = [0.5 * math.exp(-slot["ce"].item()) + 0.5 for _, slot in found]
    later = [math.prod(reach[: m + 1]) for m in range(len(found))]
    return [(sum(later[k:]), slot) for k, (_, slot) in enumerate(found)]


def block_loss(
    weights: Weights,
    ends: Ends,
    documents: list[Document],
    block: Block,
    kinds: tuple[str, ...],
    depth_decay: float,
    dpace: bool = False,
    confidence: bool = False,
    base: bool = False,
) -> BlockSums:
    """Σ w · term of every kind, and of the confidence head's cross-entropy, over all anchors.

    A slot carries a loss while all labels up to its own can be drafted. w of draft k: depth_decay^(k - 1); D-PACE: the
    sum over the later slots of the probability of getting there, and its divisor counts slots. With `base`, every term
    once more, of the logits without the correction.
    """
    terms = [*kinds, *(kinds if base else ()), *(["select"] if block.selects else [])]
    terms += ["confidence"] if confidence else []
    plain = replace(block, markov=None, uncorrected=None, selects=0)
    zero = torch.zeros((), dtype=ends.lm_head_VD.dtype)
    zeros = [[0] * block.depth for _ in range(3)]
    sums = BlockSums([zero] * len(terms), [0.0] * len(terms), zeros[0], zeros[1], 0, zeros[2])
    sums.means = {"confidence": 0.0, "overlap": 0.0} if confidence else {}
    listed = block.draft_ids if block.draft_ids is not None else list(range(len(ends.lm_head_VD)))
    for document in documents:
        context = context_rows(weights, block, document.streams_TkD)
        for t in range(len(document.tokens)):
            if not is_supervised(document.turns, t, 1):
                continue
            reached = supervised_depth(document, t, block.depth)
            labels = document.tokens[t + 2 : t + 2 + reached]
            seen = [rows[: t + 1] for rows in context]
            hidden = slot_outputs(weights, ends, block, seen, document.tokens[t + 1], t + 1)
            logits = block_logits(weights, ends, block, hidden, document.tokens[t + 1 : t + 1 + reached])
            active = 0
            while active < reached and labels[active] in listed:
                active += 1
            if base or block.selects:
                plain_logits = block_logits(weights, ends, plain, hidden, document.tokens[t + 1 : t + 1 + reached])
            sums.covered += active > 0
            found, found_plain, all_hit = [], [], True
            for k in range(1, reached + 1):
                q = torch.softmax(logits[k - 1], 0)
                hit = listed[int(q.argmax())] == greedy_choice(ends, document, t, k)
                all_hit = all_hit and hit
                sums.correct[k - 1] += hit
                sums.total[k - 1] += 1
                sums.prefix[k - 1] += all_hit
                if k <= active:
                    p = torch.softmax(ends.logits(document.hidden_TD[t + k])[listed], 0)
                    label = listed.index(labels[k - 1])
                    slot = slot_terms(torch.softmax(plain_logits[k - 1], 0) if block.selects else q, p, label)
                    if block.selects:
                        slot["select"] = selector_term(
                            weights, block, plain_logits[k - 1], logits[k - 1], hidden[k - 1], document.tokens[t + k],
                            label,
                        )  # fmt: skip
                    if confidence:
                        e_r = weights["markov_head.markov_w1.weight"][document.tokens[t + k]]
                        c = weights["confidence_head.proj.weight"][0] @ torch.cat([hidden[k - 1], e_r])
                        c = torch.sigmoid(c + weights["confidence_head.proj.bias"][0])
                        goal = slot["acceptance"].detach()
                        slot["confidence"] = -(goal * torch.log(c) + (1 - goal) * torch.log(1 - c))
                        sums.means["confidence"] += c.item()
                        sums.means["overlap"] += goal.item()
                    sums.slots += 1
                    found.append((depth_decay ** (k - 1), slot))
                    if base:
                        q = torch.softmax(plain_logits[k - 1], 0)
                        found_plain.append((depth_decay ** (k - 1), slot_terms(q, p, listed.index(labels[k - 1]))))
            if dpace:
                found, found_plain = by_reach(found), by_reach(found_plain)
            for k in range(len(found)):
                for n, term in enumerate(terms):
                    weight, slot = (found_plain if base and len(kinds) <= n < 2 * len(kinds) else found)[k]
                    # the confidence head's term is not weighed by D-PACE
                    own = 1.0 if dpace and term == "confidence" else weight
                    sums.loss[n] = sums.loss[n] + own * slot[term]
                    sums.count[n] += 1.0 if dpace else depth_decay**k
    return sums
