"""Greedy draft-and-verify with nothing cached: what the decode engine must reproduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

#: consumed tokens x_0 … x_t and the root x_{t+1} → drafted tokens of depths 1 … K (possibly fewer)
Propose = Callable[[list[int], int], list[int]]


@dataclass
class Decoded:
    """tokens: what was generated. accepted: drafts accepted in each target forward after prefill.

    committed: tokens that each of those forwards added, after cutting at a stop token or the length limit.
    """

    tokens: list[int]
    accepted: list[int]
    committed: list[int]

    @property
    def tau(self) -> float:
        return sum(self.committed) / len(self.committed)


def plain_greedy(next_logits: Callable[[list[int]], Tensor], prompt: list[int], new: int, stop: set[int]) -> list[int]:
    """One token per forward. next_logits(tokens) → [T, V]."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < new:
        tokens.append(int(next_logits(tokens)[-1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def speculative_greedy(
    next_logits: Callable[[list[int]], Tensor], propose: Propose, prompt: list[int], new: int, stop: set[int]
) -> Decoded:
    """Chain speculation: accept drafts while each equals the target's argmax, then add the target's own token."""
    root = int(next_logits(list(prompt))[-1].argmax())
    out = Decoded([root], [], [])
    while len(out.tokens) < new and out.tokens[-1] not in stop:
        consumed = [*prompt, *out.tokens[:-1]]
        drafts = propose(consumed, out.tokens[-1])
        choice = next_logits([*consumed, out.tokens[-1], *drafts]).argmax(dim=-1).tolist()
        after_root = choice[len(consumed) :]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == after_root[accepted]:
            accepted += 1
        out.accepted.append(accepted)
        added = 0
        for token in after_root[: accepted + 1]:
            out.tokens.append(token)
            added += 1
            if token in stop or len(out.tokens) == new:
                break
        out.committed.append(added)
    return out


def accepted_from_hits(hits: list[list[bool]], first: int) -> list[int]:
    """Drafts accepted per forward, from teacher-forced hits on the target's own greedy continuation.

    hits[t][d - 1]: whether depth d of anchor t equals the continuation. While all earlier drafts of an anchor were
    right, what is fed while drafting equals the ground truth, so one teacher-forced pass knows every decision.
    first: anchor of the first root (the last prompt token). Stops where no anchor is left.
    """
    accepted, t = [], first
    while t < len(hits) and hits[t]:
        run = 0
        while run < len(hits[t]) and hits[t][run]:
            run += 1
        accepted.append(run)
        t += run + 1
    return accepted
