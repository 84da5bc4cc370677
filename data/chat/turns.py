"""Where each assistant turn begins and ends in the rendered text.

For the assistant message i, `render(messages[: i + 1])` is the text. Its answer begins where
`render(messages[:i], add_generation_prompt=True)` ends: that is the prompt that a serving engine would answer. If the
template has `{% generation %}` tags, it begins where the tag after the prompt does. `turn_at` does this; for n turns it
renders n²/2 messages. Some templates write a prompt differently once it is answered. Then the text is the prompt,
followed by the answer (`prompts_apart.py`).

Most templates read their messages once, in order. For those, `turns_in_one_pass` finds the same turns in one run of the
template (`one_pass.py` says why that is a proof). The first conversation with messages of a kind (roles and fields)
is rendered both ways.

For other templates, `stable_turns` renders a long conversation only once. It renders each exchange alone after a fixed
context, and requires that the whole text consists of these pieces, to the character. It also requires that the real
renderings of a half, a quarter, … of the conversation are beginnings of the whole. If a template writes anything that
depends on earlier messages (a number) or on later ones (thoughts that it drops once the user asks again), the pieces do
not fit, and `turn_at` finds every turn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.chat.prompts_apart import answer_behind_prompt, no_beginning
from headstart.data.chat.rendering import PROBE, RefusedError, Renderer, UnmaskableError
from headstart.data.records.messages import Message

#: conversations with at most this many answers are rendered prefix by prefix
FEW_ANSWERS = 8


@dataclass(frozen=True)
class Turn:
    """An assistant turn in a text.

    Attributes:
        index: of the message.
        text: a rendering that begins with everything up to the end of the message.
        base: length of the rendered messages before it, without a generation prompt.
        begin: where the message's own text begins: after its prompt; with tags, where the text first differs from the
            rendered messages before it.
        end: where the rendering that ends with this message ends.
        spans: character spans that are the assistant's, most often one.
    """

    index: int
    text: str
    base: int
    begin: int
    end: int
    spans: tuple[tuple[int, int], ...]

    @property
    def trained(self) -> str:
        """The text up to the last supervised character."""
        return self.text[: self.spans[-1][1]] if self.spans else ""

    def moved(self, by: int, text: str, index: int) -> Turn:
        """The turn in another text, in which the same characters come `by` later."""
        spans = tuple((start + by, end + by) for start, end in self.spans)
        return Turn(index, text, self.base + by, self.begin + by, self.end + by, spans)


def find_turns(
    renderer: Renderer, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> list[Turn]:
    """The turns of the assistant messages `answers` (ascending indices).

    Raises: RefusedError when the template refuses a prefix; UnmaskableError when an answer does not follow its prompt.
    """
    found = turns_in_one_pass(renderer, messages, answers, tools)
    kinds = frozenset((message["role"], *message) for message in messages)
    if found is not None and kinds in renderer.proven:
        return found
    turns = _many_turns(renderer, messages, answers, tools)
    if found is not None and _same(found, turns):
        renderer.proven.add(kinds)
    return turns


def turns_in_one_pass(
    renderer: Renderer, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> list[Turn] | None:
    """What `turn_at` finds for every answer, from one run of the template; None if that cannot be proven."""
    run = renderer.run_once(messages[: answers[-1] + 1], tools)
    if run is None:
        return None
    text, marks, prompt = run
    turns = []
    for index in answers:
        begin, end = marks[index] + len(prompt), marks[index + 1]
        if begin > end or not text.startswith(prompt, marks[index]):
            return None
        turns.append(Turn(index, text, begin, begin, end, ((begin, end),)))
    return turns


def _same(found: Sequence[Turn], turns: Sequence[Turn]) -> bool:
    pairs = zip(found, turns, strict=True)
    return all(one.text.startswith(turn.text) and one == turn.moved(0, one.text, turn.index) for one, turn in pairs)


def _many_turns(
    renderer: Renderer, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[dict[str, Any]]
) -> list[Turn]:
    if len(answers) > FEW_ANSWERS:
        turns = stable_turns(renderer, messages, answers, tools)
        if turns is not None:
            return turns
    return [_turn(renderer, messages, index, tools) for index in answers]


def _turn(renderer: Renderer, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]]) -> Turn:
    """`turn_at`; if the text does not begin with the prompt, the prompt followed by the answer."""
    try:
        return turn_at(renderer, messages, index, tools)
    except UnmaskableError:
        answer = answer_behind_prompt(renderer, messages, index, tools)
        if answer is None:
            raise
        begin, text, end = answer
        return Turn(index, text, begin, begin, len(text), ((begin, end),))


def turn_at(renderer: Renderer, messages: Sequence[Message], index: int, tools: Sequence[dict[str, Any]] = ()) -> Turn:
    """Assistant message `index` in the text that ends with it."""
    text, tags = renderer.render(messages[: index + 1], tools=tools)
    prompt = renderer.render(messages[:index], add_generation_prompt=True, tools=tools)[0]
    if not text.startswith(prompt):
        raise UnmaskableError(*no_beginning(prompt, text, index))
    if not renderer.tagged(tools):
        return Turn(index, text, len(prompt), len(prompt), len(text), ((len(prompt), len(text)),))
    base = renderer.render(messages[:index], tools=tools)[0]
    fresh = len(os.path.commonprefix([base, text]))
    # a tag may enclose the whole message: the part in the prompt is not the answer's
    spans: list[tuple[int, int]] = []
    for start, end in tags:
        if spans and spans[-1][1] == start:  # thoughts and answer may have a tag each
            spans[-1] = spans[-1][0], end
        elif start >= fresh and end > len(prompt):
            spans.append((max(start, len(prompt)), end))
    return Turn(index, text, len(base), fresh, len(text), tuple(spans))


class _Unstable(Exception):
    """The text of a conversation does not consist of its exchanges, rendered one by one."""


def stable_turns(
    renderer: Renderer, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> list[Turn] | None:
    """What `turn_at` finds for every answer, in one text and in linear time; None if it might find something else."""
    try:
        last = turn_at(renderer, messages, answers[-1], tools)
        return _Chain(renderer, messages, tools, last).turns(answers)
    except (_Unstable, RefusedError):
        return None


class _Chain:
    """Fits exchanges, each rendered alone after a context, into the whole text one after another."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[dict[str, Any]], last: Turn):
        self.renderer, self.messages, self.tools, self.last = renderer, messages, tools, last
        self.contexts: dict[int, str] = {}

    def turns(self, answers: Sequence[int]) -> list[Turn]:
        last = self.last
        real = {last.index: last}
        count = len(answers) // 2
        while count:  # real renderings up to half of the answers, a quarter, …, the first one
            index = answers[count - 1]
            real[index] = turn_at(self.renderer, self.messages, index, self.tools)
            count //= 2
        for turn in real.values():
            if not last.text.startswith(turn.text):
                raise _Unstable
        turns = [real[answers[0]].moved(0, last.text, answers[0])]
        for index in answers[1:]:
            turn = self._next(turns[-1], index)
            if index in real and turn != real[index].moved(0, last.text, index):
                raise _Unstable
            turns.append(turn)
        return turns

    def _next(self, previous: Turn, index: int) -> Turn:
        """The turn of answer `index`, found from the one before it."""
        between = self.messages[previous.index + 1 : index]
        if any(message["role"] == "user" for message in between):
            # a new question, so the context ends with an answer
            return self._fit(PROBE, [*between, self.messages[index]], previous.end, index)
        # tool results or a further answer belong to the answer before, so the context ends with a question
        start = self._fit_base(previous)
        return self._fit(PROBE[:1], [self.messages[previous.index], *between, self.messages[index]], start, index)

    def _fit_base(self, turn: Turn) -> int:
        """Where the messages before `turn` end without a generation prompt."""
        if self.renderer.tagged(self.tools):
            return turn.base
        context = self._context(PROBE[:1])
        alone, _ = self.renderer.render([*PROBE[:1], self.messages[turn.index]], tools=self.tools)
        start = turn.end - (len(alone) - len(context))
        if not alone.startswith(context) or start < 0:
            raise _Unstable
        return start

    def _fit(self, context: Sequence[Message], window: Sequence[Message], start: int, index: int) -> Turn:
        """The last message of `window` as a turn of the whole text; `window` must be rendered at `start` there."""
        text = self._context(context)
        alone = turn_at(self.renderer, [*context, *window], len(context) + len(window) - 1, self.tools)
        if not alone.text.startswith(text) or not self.last.text.startswith(alone.text[len(text) :], start):
            raise _Unstable
        if self.renderer.tagged(self.tools) and alone.begin != alone.base:
            raise _Unstable
        return alone.moved(start - len(text), self.last.text, index)

    def _context(self, context: Sequence[Message]) -> str:
        if len(context) not in self.contexts:
            self.contexts[len(context)] = self.renderer.render(context, tools=self.tools)[0]
        return self.contexts[len(context)]
