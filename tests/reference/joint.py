"""Joint training once more, as plain loops: the tuned target row by row, its own loss, and Medusa's beside it.

The update of every matrix is written out, W + (alpha / rank) · B A. Nothing here knows packs, padding or chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.documents import Document, Ends, Sums, kl_divergence, sum_over_positions, supervised_depth
from reference.llama import Shape, Weights, attend, mlp, project, rms_norm
from reference.medusa import head_logits

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass
class Tiny:
    """A Llama target with its updates. plain: its weights by transformers' names. adapter: by peft's names, or None."""

    plain: Weights
    shape: Shape
    layers: int
    scaling: float
    adapter: Weights | None

    def weights(self, layer: int) -> Weights:
        """The matrices of one layer, by their last names, tuned where there is an adapter."""
        found = {}
        for module, names in (("self_attn", ATTENTION), ("mlp", MLP)):
            for name in names:
                stem = f"model.layers.{layer}.{module}.{name}"
                weight = self.plain[f"{stem}.weight"]
                if self.adapter is not None and f"{stem}.lora_A.weight" in self.adapter:
                    down, up = self.adapter[f"{stem}.lora_A.weight"], self.adapter[f"{stem}.lora_B.weight"]
                    weight = weight + self.scaling * (up @ down)
                found[f"{name}.weight"] = weight
        return found

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.plain[name], self.shape.eps)

    def hidden(self, tokens: list[int]) -> list[Tensor]:
        """The hidden state after the final norm of every token of one document."""
        xs = [self.plain["model.embed_tokens.weight"][token] for token in tokens]
        for layer in range(self.layers):
            weights, prefix = self.weights(layer), f"model.layers.{layer}"
            normed = [self.norm(f"{prefix}.input_layernorm.weight", x) for x in xs]
            rows = [project(weights, "", x, t, self.shape) for t, x in enumerate(normed)]
            xs = [x + attend(weights, "", rows[t], rows[: t + 1], self.shape) for t, x in enumerate(xs)]
            after = f"{prefix}.post_attention_layernorm.weight"
            xs = [x + mlp(weights, "", self.norm(after, x), self.shape) for x in xs]
        return [self.norm("model.norm.weight", x) for x in xs]


def tuned_documents(target: Tiny, documents: list[Document]) -> list[Document]:
    """The documents with the target's features, differentiable in its adapter."""
    return [replace(document, hidden_TD=torch.stack(target.hidden(document.tokens))) for document in documents]


def target_sums(documents: list[Document], target: Tiny, ends: Ends, loss: str) -> tuple[Tensor, int, int]:
    """(summed loss, positions that carry it, positions on which the tuned target chooses what it should)."""
    total, count, right = torch.zeros((), dtype=torch.float64), 0, 0
    original = replace(target, adapter=None)
    for document in documents:
        tuned, plain = target.hidden(document.tokens), original.hidden(document.tokens)
        for t in range(len(document.tokens) - 1):
            if document.turns[t + 1] < 0:
                continue
            logits = ends.logits(tuned[t])
            if loss == "ce":
                wanted = document.tokens[t + 1]
                total = total - (logits[wanted] - torch.logsumexp(logits, dim=0))
            else:
                p = torch.softmax(ends.logits(plain[t]), dim=0).detach()
                wanted = int(p.argmax())
                total = total + kl_divergence(p, logits)
            count += 1
            right += int(logits.argmax()) == wanted
    return total, count, right


def medusa_sums(weights: Weights, ends: Ends, documents: list[Document], depth: int, lm_head: str, kind: str) -> Sums:
    """Medusa's terms on tuned documents. Gradients flow through the features, and never through what heads learn."""

    def draft(document: Document, t: int) -> list[Tensor]:
        depths = range(1, supervised_depth(document, t, depth) + 1)
        return [head_logits(weights, ends, document.hidden_TD[t], d, 1, lm_head) for d in depths]

    def loss(document: Document, t: int, d: int, logits: Tensor) -> Tensor:
        if kind == "ce":
            return torch.logsumexp(logits, dim=0) - logits[document.tokens[t + 1 + d]]
        return kl_divergence(torch.softmax(ends.logits(document.hidden_TD[t + d]), dim=0).detach(), logits)

    return sum_over_positions(documents, depth, draft, loss, ends)


def weight_at(schedule: str, weight: float, part: float, share: float) -> float:
    """λ0 · s(t)."""
    grown = {
        "constant": 1.0,
        "linear": part,
        "sine": math.sin(math.pi * part / 2),
        "sine_r": math.sin(math.pi * part / (2 * share)) if part < share else 1.0,
    }
    return weight * grown[schedule]


def joint_loss(target: tuple[Tensor, int], head: Sums, weights: list[float], factor: float) -> Tensor:
    """L_target / N + factor · Σ_d weight_d · S_d / N_d."""
    total, count = target
    terms = [w * s / n for w, s, n in zip(weights, head.loss, head.count, strict=True) if n]
    return total / count + factor * sum(terms)
