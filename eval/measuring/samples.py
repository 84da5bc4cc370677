"""A few answers with every token's author: drafted and accepted, drafted and rejected, or written by the target.

They are decoded once more, one by one, after everything that is timed.
Shape legend: B batch (1 here), N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from headstart.data.inspection import token_texts
from headstart.eval.config import EvalConfig
from headstart.eval.decoding.decode import Answer
from headstart.eval.decoding.drafter import Drafter
from headstart.eval.decoding.rows import Rows
from headstart.eval.decoding.scheduler import Scheduler
from headstart.eval.decoding.session import Decoder
from headstart.eval.tree import Tree
from headstart.heads.targets.target import Target

#: most tokens of a sample's answer: enough to see where drafting fails, and few kilobytes of a report
TOKENS = 128
#: most tokens of a prompt that are shown, its last ones
PROMPT_TOKENS = 200
#: tokens before a rejected draft that it is decoded behind
BEFORE = 8


@dataclass(frozen=True)
class Node:
    """A drafted token: its id, the index of its parent (-1 = the root), and how sure the draft was of it, if known."""

    token: int
    parent: int
    score: float | None


@dataclass(frozen=True)
class SampledCycle:
    """A cycle in words. Joined with the texts before, each text shows as the tokenizer writes it.

    Attributes:
        drafted: nodes that were drafted, 0 = nothing.
        accepted: texts of the drafts that joined the answer.
        rejected: texts of what was drafted behind them: the likeliest path of a tree, or the rest of a chain. Empty
            where every draft was accepted, or where the answer ended.
        own: text of the target's own token behind them; None where the answer ended before it.
    """

    drafted: int
    accepted: list[str]
    rejected: list[str]
    own: str | None


@dataclass(frozen=True)
class Sample:
    """An answer that was decoded alone. Attributes: prompt: its last tokens. first: the token that prefill gave."""

    task: str
    prompt: str
    first: str
    cycles: list[SampledCycle]
    tau: float
    finish_reason: str


class DraftRecorder(Scheduler):
    """A scheduler that keeps all drafts of one row and writes them down. It asks the host, so cycles are not captured.

    Attributes: trees: the drafts of every cycle since the batch began.
    """

    captures = False

    def __init__(self) -> None:
        self.trees: list[list[Node]] = []

    def start(self, context: Rows) -> None:
        self.trees = []

    def choose(self, tree: Tree, roots_B: Tensor, active_B: Tensor) -> Tensor | None:
        scores = [None] * tree.nodes if tree.score_BN is None else tree.score_BN[0].tolist()
        rows = zip(tree.tokens_BN[0].tolist(), tree.parent_BN[0].tolist(), scores, strict=True)
        # what is not valid keeps its place, because parents are named by place
        nodes = [Node(*row) for row in rows]
        valid = tree.valid_BN[0].tolist()
        self.trees.append([node if kept else Node(-1, -2, None) for node, kept in zip(nodes, valid, strict=True)])
        return None


def rejected_path(tree: Sequence[Node], accepted: Sequence[int]) -> list[int]:
    """The tokens that were drafted behind the accepted ones, by the best child at each level.

    Args: accepted: tokens of the accepted path. Siblings hold different tokens, so the tokens name the path.

    >>> chain = [Node(5, -1, None), Node(6, 0, None), Node(7, 1, None)]
    >>> rejected_path(chain, [5])
    [6, 7]
    >>> rejected_path([Node(5, -1, -0.9), Node(8, -1, -0.2), Node(6, 0, -1.0)], [])
    [8]
    """
    at = -1
    for token in accepted:
        at = next(n for n, node in enumerate(tree) if node.parent == at and node.token == token)
    path = []
    while children := [n for n, node in enumerate(tree) if node.parent == at]:
        # the first one unless scores differ: drafters put the likelier one first
        at = max(children, key=lambda n: (tree[n].score if tree[n].score is not None else 0.0, -n))
        path.append(tree[at].token)
    return path


def sample_of(answer: Answer, trees: Sequence[Sequence[Node]], context: list[int], task: str, tokenizer: Any) -> Sample:
    """The answer in words. Args: trees: what each of its cycles drafted, [] for a cycle that drafted nothing."""
    ids = [*context[-PROMPT_TOKENS:], *answer.tokens]
    before = len(ids) - len(answer.tokens)
    texts = _texts(ids, tokenizer)
    cycles, at = [], before + 1
    for cycle, tree in zip(answer.cycles, trees, strict=False):
        end = at + cycle.accepted
        whole = cycle.committed > cycle.accepted  # else the answer ended among its accepted drafts
        rejected = rejected_path(tree, ids[at:end]) if whole else []
        shown = _texts([*ids[max(end - BEFORE, 0) : end], *rejected], tokenizer)[-len(rejected) :] if rejected else []
        drafted = sum(node.parent >= -1 for node in tree)
        cycles.append(SampledCycle(drafted, texts[at:end], shown, texts[end] if whole else None))
        at += cycle.committed
    tau = sum(cycle.committed for cycle in answer.cycles) / len(answer.cycles) if answer.cycles else 1.0
    return Sample(task, "".join(texts[:before]), texts[before], cycles, tau, answer.finish_reason)


def _texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """What each token adds to the text; its id where the target has no tokenizer."""
    return [f" {token}" for token in ids] if tokenizer is None else token_texts(ids, tokenizer)


def record_samples(
    target: Target, drafter: Drafter, config: EvalConfig, contexts: Sequence[tuple[str, list[int]]]
) -> list[dict[str, Any]]:
    """Decode some contexts with the evaluation's drafts and sampling; returns `Sample`s as JSON values.

    Args: contexts: (task, token ids) of each.
    """
    # to choose kernels and to capture cycles for one row would take longer than this decodes
    decoder = Decoder(target, replace(config, engine="transformers", max_new_tokens=min(config.max_new_tokens, TOKENS)))
    samples = []
    for number, (task, context) in enumerate(contexts):
        recorder = DraftRecorder()
        limits = decoder.limits([context])
        (answer,) = decoder.run([context], drafter, limits, config.seed + number, scheduler=recorder).answers
        samples.append(asdict(sample_of(answer, recorder.trees, context, task, target.tokenizer)))
    return samples
