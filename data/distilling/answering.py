"""What distillation asks of whatever answers: requests go in, finished answers come out one at a time.

An *answerer* takes requests from `Requests` when it has room for them, and yields each answer as soon as it is
finished, in any order. While it is paused at a `yield`, a later question of the same conversation may join the
requests. So it looks at them again after every `yield`, and ends when no request is left and none is in flight.

`OwnForward` answers with the model's own forward, batch by batch. It serves targets that the decode engine does not
cover. The engine's answerer is in eval/decoding/generation.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headstart.data.config import DistillConfig
from headstart.data.features import Progress
from headstart.data.prompts import Prompt
from headstart.data.records.messages import Message
from headstart.data.row_random import draw_at, uniforms
from headstart.heads.sampling import distribution
from headstart.heads.targets.locate import cache_argument
from headstart.heads.targets.target import Target


@dataclass(frozen=True, eq=False)
class Request:
    """One answer that is wanted.

    Attributes:
        id: of the record; with `turn` (which of its answers, from 0) it is unique.
        prompt_ids: token ids of the chat that the answer follows.
        seed: of the answer's random numbers, 0 … 2^63 - 1.
        messages, tools, template_kwargs: the same chat as messages. Empty where a record has only token ids.
    """

    id: str
    turn: int
    prompt_ids: tuple[int, ...]
    seed: int
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Answer:
    """A finished answer, or why there is none.

    Attributes:
        token_ids: end with the stop token exactly when `finish_reason` is "stop"; otherwise it is "length".
        message: the assistant message, where the answerer knows it, as a server does. None: it is read from the tokens.
        failed: why there is no answer, else None. The conversation is then not written, so a run that continues asks
            again.
        for_good: of a failure: another try would fail alike. The answers to earlier questions are then written.
        more: further fields that the record gets for this turn, e.g. log-probabilities.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "length"
    message: Message | None = None
    failed: str | None = None
    for_good: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


class Requests:
    """What is still to be answered. Later questions of a conversation come before first ones.

    Args:
        first: first questions, in the order of work.
        may_begin: asked when first questions are taken: whether there is time for them.
    Attributes: over: whether first questions were left because there was no time.
    """

    def __init__(self, first: Iterable[Request], may_begin: Callable[[], bool] = lambda: True):
        self._first, self._later = deque(first), deque[Request]()
        self._may_begin = may_begin
        self.over = False

    def put(self, request: Request) -> None:
        """Add a later question."""
        self._later.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Requests that were taken and could not be answered come next again."""
        self._later.extendleft(reversed(requests))

    def peek(self, count: int) -> list[Request]:
        """The next requests, at most `count`, which stay where they are."""
        first = [] if self.over else list(islice(self._first, count))
        return [*self._later, *first][:count]

    def waiting(self, count: int, longest: int | None = None) -> int:
        """How many requests `take` would give now, if there is time for them."""
        found = sum(map(_fits(longest), self._later))
        if found < count and not self.over:
            found += sum(1 for _ in takewhile(_fits(longest), islice(self._first, count - found)))
        return min(found, count)

    def take(self, count: int, longest: int | None = None) -> list[Request]:
        """The next requests, at most `count`. None are given where all that is left depends on answers in flight.

        Args: longest: only prompts of at most so many tokens; None = all.
        """
        fits = _fits(longest)
        taken: list[Request] = []
        kept = deque[Request]()
        while self._later and len(taken) < count:
            request = self._later.popleft()
            (taken if fits(request) else kept).append(request)
        self._later.extendleft(reversed(kept))
        if self._first and len(taken) < count and not self.over:
            self.over = not self._may_begin()
        while self._first and len(taken) < count and not self.over and fits(self._first[0]):
            taken.append(self._first.popleft())
        return taken


def _fits(longest: int | None) -> Callable[[Request], bool]:
    return lambda request: longest is None or len(request.prompt_ids) <= longest


class Answerer(Protocol):
    """Answers requests.

    Attributes: decides: what its answers depend on beside the settings of `data.distill`, as JSON values. Every record
        holds it, and a run continues only where it is the same.
    """

    def adopt(self, out: Path, first: Sequence[tuple[Request, Prompt]], progress: Progress) -> None:
        """Make ready a file of earlier answers, before it is continued. Args: first: every first question."""
        return None

    @property
    def decides(self) -> Mapping[str, Any]:
        return {}

    def answers(self, requests: Requests) -> Iterator[Answer]:
        """Every request's answer, as soon as it is finished. See the top of this file."""
        ...


class OwnForward(Answerer):
    """Answers with the model's own forward: `data.distill.batch_size` requests together, until the last one ends."""

    def __init__(self, target: Target, config: DistillConfig):
        self.target, self.config = target, config

    def answers(self, requests: Requests) -> Iterator[Answer]:
        stops = set(self.target.stop_token_ids)
        while batch := requests.take(self.config.batch_size):
            prompts, seeds = [request.prompt_ids for request in batch], [request.seed for request in batch]
            for request, ids in zip(batch, generate(self.target, prompts, self.config, seeds), strict=True):
                yield Answer(request, tuple(ids), "stop" if ids[-1] in stops else "length")


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    config: DistillConfig,
    seeds: Sequence[int],
) -> list[list[int]]:
    """Decode a left-padded batch with a key/value cache; each answer ends with its stop token or at max_new_tokens.

    Args:
        prompts: token ids, one list per row.
        seeds: one per row, 0 … 2^63 - 1, for sampling.
    """
    from transformers import DynamicCache

    device, rows = target.device, len(prompts)
    longest = max(len(ids) for ids in prompts)
    tokens_BT = torch.zeros(rows, longest, dtype=torch.int64)
    mask_BT = torch.zeros(rows, longest, dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens_BT[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BT[row, longest - len(ids) :] = 1
    tokens_BT, mask_BT = tokens_BT.to(device), mask_BT.to(device)
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    cache = {cache_argument(target.model): DynamicCache(config=target.model.config)}
    stops = set(target.stop_token_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(rows))
    seed_B = torch.tensor(list(seeds), dtype=torch.int64, device=device)
    for step in range(config.max_new_tokens):
        output = target.model(
            input_ids=tokens_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=True,
            logits_to_keep=1, **cache,
        )  # fmt: skip
        uniform_B = uniforms(seed_B, position_BT[:, -1] + 1)
        chosen = choose(output.logits[:, -1], config, uniform_B).tolist()
        for row in sorted(open_rows):
            answers[row].append(chosen[row])
            if chosen[row] in stops:
                open_rows.discard(row)
        if not open_rows or step + 1 == config.max_new_tokens:
            break
        tokens_BT = torch.tensor(chosen, device=device)[:, None]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(rows, 1)], dim=1)
        position_BT = position_BT[:, -1:] + 1
    return answers


def choose(logits_BV: Tensor, config: DistillConfig, uniform_B: Tensor) -> Tensor:
    """The next token of every row, int64 [B]: argmax, or a draw after temperature, top-k and top-p.

    Args: uniform_B: float64 in [0, 1), where the cumulative distribution is read.
    """
    if config.temperature == 0:
        return logits_BV.argmax(-1)
    return draw_at(distribution(logits_BV, config.temperature, config.top_k, config.top_p), uniform_B)
