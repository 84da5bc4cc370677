"""Chat template → text → tokens, and where each assistant turn begins and ends, exact to the token.

`rendering.py` gives the text, `turns.py` finds the characters of every answer in it. An answer's tokens start after
the tokens of its prompt and end with the first stop token, which is supervised. What the template writes after that
(ChatML's newline) is not supervised.

Several turns share one sample when each turn's text is the beginning of the next one's. Some templates rewrite history:
Qwen3's drops the `<think>` blocks of earlier turns. Such a turn becomes a sample of its own, so that every answer is
trained in exactly the context in which it is generated. So does a turn whose first letters would share a token with the
end of its prompt: a server tokenises that prompt alone, and the prompts of later turns as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from headstart.data.chat.answers import parse_answer
from headstart.data.chat.cutting import Cutter, Tokens
from headstart.data.chat.ends import Ends
from headstart.data.chat.pieces import require_pieces, require_prompt
from headstart.data.chat.rendering import PROBE, RefusedError, Renderer, UnmaskableError, chat_template
from headstart.data.chat.turns import Turn, find_turns
from headstart.data.records.messages import Message
from headstart.heads.errors import TemplateError

#: characters read per token when only the first tokens of a text are needed
LETTERS = 8


@dataclass(frozen=True)
class Encoded:
    """Token ids and the assistant turn of each (-1 = unsupervised).

    Attributes:
        broken: number of answers with a stop token inside; what follows it is not supervised.
    """

    token_ids: list[int]
    turn_ids: list[int]
    finish_reason: str
    broken: int = 0


class Masked(NamedTuple):
    """What `Encoded` holds, as arrays: int32 [T] each."""

    token_ids: np.ndarray
    turn_ids: np.ndarray
    finish_reason: str
    broken: int = 0

    def lists(self) -> Encoded:
        return Encoded(self.token_ids.tolist(), self.turn_ids.tolist(), self.finish_reason, self.broken)


class Part(NamedTuple):
    """The turns that share one text, which becomes a sample once it is tokenised."""

    turns: list[Turn]
    messages: Sequence[Message]
    finish_reason: str
    tools: Sequence[dict[str, Any]]

    @property
    def text(self) -> str:
        return self.turns[-1].text


class ChatFormat:
    """A tokenizer's chat template, ready to encode conversations.

    Messages are dicts of role, content (text) and, where there are any, reasoning_content, tool_calls (OpenAI's form,
    arguments as an object), name, tool_call_id.

    Args:
        tokenizer: a fast transformers tokenizer.
        stop_token_ids: ids that end a turn (Target.stop_token_ids).
        template_kwargs: variables for the template, e.g. {"enable_thinking": False}.
    Raises: TemplateError when there is no template, or it cannot tell which tokens are the assistant's.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int], template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self.template_kwargs = dict(template_kwargs or {})
        chat_template(tokenizer)  # raises first where there is none: that is the more useful message
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                f"tokenizer {type(tokenizer).__name__}: found a slow tokenizer, expected a fast one (it knows the "
                "characters of each token): load it with a tokenizer.json"
            )
        self.renderer, self.cutter = Renderer(tokenizer, self.template_kwargs), Cutter(tokenizer)
        if foot := self.renderer.find_foot():
            text = self.renderer.render(PROBE)[0].removesuffix(foot)
            # the template's last words stay where they hold an answer's only stop token
            ended = self.stop_token_ids.intersection(self.cutter.ids(text[text.rfind(PROBE[1]["content"]) :]))
            self.renderer.foot = foot if ended else ""
        self.ends = Ends(self.renderer, self.cutter, self.stop_token_ids)
        self._probed = False
        self._head: tuple[str, list[int]] = "", []

    @property
    def notes(self) -> list[str]:
        """Lines about the template for the data report."""
        return self.renderer.notes()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The template's text. Raises RefusedError with the template's own reason."""
        return self.renderer.render(self.renderer.prepared(messages), add_generation_prompt, tools)[0]

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of the prompt that a serving engine would answer (generation prompt included).

        Raises: RefusedError when the template refuses the messages or leaves a part of them out.
        """
        text = self.render(messages, add_generation_prompt=True, tools=tools)
        require_prompt(messages, text, tools)
        return self.cutter.ids(text)

    def answer_message(self, token_ids: Sequence[int]) -> Message:
        """The assistant message that a generated answer (without its stop token) stands for; see `parse_answer`."""
        return parse_answer(self.renderer, self.tokenizer, token_ids)

    def encode(
        self,
        messages: Sequence[Message],
        finish_reason: str = "stop",
        turns: str = "all",
        tools: Sequence[dict[str, Any]] = (),
        max_length: int | None = None,
    ) -> list[Encoded]:
        """Samples of one conversation, most often one; in the order of their last turn.

        Args:
            finish_reason: "length" leaves out the end-of-turn token of the last answer and all that follows it.
            turns: "all" | "last" assistant turns are supervised.
            tools: JSON schemas of the functions that the model may call.
            max_length: where all answers of a sample begin after this many tokens, only the first max_length + 1
                tokens are returned: enough to report that it is too long.
        Raises: TemplateError when the conversation cannot be rendered or masked, or the template leaves out a part.
        """
        parts = self.parts(messages, finish_reason, turns, tools, max_length)
        tokens = list(self.cutter.tokens([part.text for part in parts if isinstance(part, Part)]))
        return [made.lists() for made in self.finish(parts, tokens)]

    def probe(self) -> Encoded:
        """A plain question and answer, encoded; the answer has thoughts, where the template's prompt begins them.

        Raises: TemplateError for a template that never tells which tokens are the assistant's; RefusedError for one
            that refuses such a conversation.
        """
        failed: UnmaskableError | None = None
        for probe in (list(PROBE), [PROBE[0], {**PROBE[1], "reasoning_content": "Be brief."}]):
            try:
                part = Part(find_turns(self.renderer, probe, [1]), probe, "stop", ())
                (encoded,) = self._masked(part, next(self.cutter.tokens([part.text])))
            except UnmaskableError as error:
                failed = failed or error
                continue
            if not part.turns[0].spans:
                raise TemplateError(
                    "chat template: its {% generation %} tags mark nothing in a plain question and answer: "
                    "put them around the assistant's content and end-of-turn token (target.chat_template=FILE.jinja)"
                )
            return encoded.lists()
        raise TemplateError(str(failed)) from failed

    def parts(
        self,
        messages: Sequence[Message],
        finish_reason: str = "stop",
        turns: str = "all",
        tools: Sequence[dict[str, Any]] = (),
        max_length: int | None = None,
        answers: Sequence[int] | None = None,
    ) -> list[Part | Masked]:
        """What becomes the samples of a conversation: texts to tokenise, or masked already where only the beginning
        counts.

        Args: as `encode`. answers: what `answers_of` gives, where it is known.
        Raises: TemplateError as `encode` does.
        """
        if not self._probed:
            self._probed = True
            try:
                self.probe()
            except RefusedError:
                pass  # it may only want a system message or tools, which the data may have
        messages = self.renderer.prepared(messages)
        answers = answers_of(messages) if answers is None else answers
        supervised = self._turns(messages, answers if turns == "all" else answers[-1:], tools)
        groups: list[list[Turn]] = []
        for turn in reversed(supervised):
            if groups and _goes_on(turn, groups[-1][0]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        groups = [group[::-1] for group in reversed(groups)]
        for group in groups:
            require_pieces(messages, group, tools)
        reasons = ["stop"] * (len(groups) - 1) + [finish_reason]
        made: list[Part | Masked] = []
        for group, reason in zip(groups, reasons, strict=False):
            beyond = None if max_length is None else self._beyond(group, max_length)
            made.append(beyond or Part(group, messages, reason, tools))
        return made

    def finish(self, parts: Sequence[Part | Masked], tokens: Sequence[Tokens]) -> list[Masked]:
        """The samples of a conversation.

        Args: parts: of `parts`. tokens: of each text among them, in order.
        Raises: TemplateError as `encode` does.
        """
        left = iter(tokens)
        made = ([part] if isinstance(part, Masked) else self._masked(part, next(left)) for part in parts)
        return [masked for each in made for masked in each]

    def _turns(
        self, messages: Sequence[Message], answers: Sequence[int], tools: Sequence[dict[str, Any]]
    ) -> list[Turn]:
        try:
            return find_turns(self.renderer, messages, answers, tools)
        except UnmaskableError:
            require_prompt(messages, self.render(messages, tools=tools), tools)  # a part left out is the better reason
            raise

    def _beyond(self, turns: list[Turn], max_length: int) -> Masked | None:
        """The first max_length + 1 tokens if every answer begins after them, else None.

        Where a template rewrites history, a long conversation gives one sample per answer. Most of them are too long,
        and all begin with the same text, which is tokenised once.
        """
        text, starts = turns[-1].text, [start for turn in turns for start, _ in turn.spans]
        head = text[: LETTERS * (max_length + 1)]
        if not starts or min(starts) < len(head):
            return None
        if head != self._head[0]:
            tokens = next(self.cutter.tokens([head]))
            # whatever follows, only the last words of `head` can be tokenised in another way
            self._head = head, tokens.ids[: tokens.word_before(len(head))]
        ids = self._head[1][: max_length + 1]
        unsupervised = np.full(len(ids), -1, np.int32)
        return Masked(np.array(ids, np.int32), unsupervised, "length") if len(ids) > max_length else None

    def _masked(self, part: Part, whole: Tokens) -> list[Masked]:
        """The sample of a part; and one more for each turn whose prompt alone has other ids.

        Args: whole: its text, tokenised.
        """
        starts = [[start for start, _ in turn.spans] for turn in part.turns]
        apart = self.cutter.starts(whole, part.text, starts)
        if apart and len(part.turns) > 1:
            groups = [[part.turns[number]] for number in apart]
            groups += [group] if (group := [turn for n, turn in enumerate(part.turns) if n not in apart]) else []
            groups.sort(key=lambda group: group[-1].index)
            return [made for group in groups for made in self._cut(part, group)]
        return [self._mask(part, self.cutter.split(part.text, starts[0], whole) if apart else whole)]

    def _cut(self, part: Part, turns: list[Turn]) -> list[Masked]:
        """Samples of some turns of a part, in the text up to the end of the last of them."""
        text = part.text[: turns[-1].end]
        reason = part.finish_reason if turns[-1] is part.turns[-1] else "stop"
        own = part._replace(turns=[replace(turn, text=text) for turn in turns], finish_reason=reason)
        return self._masked(own, next(self.cutter.tokens([text])))

    def _mask(self, part: Part, tokens: Tokens) -> Masked:
        text, finish_reason = part.text, part.finish_reason
        spans = [(turn, start, end) for turn in part.turns for start, end in turn.spans]
        ids, turn_ids = tokens.ids, np.full(len(tokens.ids), -1, np.int32)
        stop_at = len(ids)
        broken = 0
        over: Turn | None = None
        for number, (turn, start, end) in enumerate(spans):
            if turn is over:
                continue  # the template's tags go on after a stop token, but nothing is generated there
            first, final = tokens.starts[number], number + 1 == len(spans)
            # the next token may be the stop token: the tags leave it out, or it also begins the next message (GLM)
            limit = tokens.after(end, first) + 1
            stop = self._first_stop(ids, first, min(limit, len(tokens.ids)))
            cut = final and finish_reason == "length"
            bare = stop is None and final and not cut and end == len(text)  # no message follows
            message = part.messages[turn.index]
            ending = self.ends.next_stop(message, part.tools) if bare else None
            if stop is not None:
                past, over = stop + 1, turn
                broken += bool(text[tokens.offsets[stop][1] : turn.spans[-1][1]].strip())
                if cut:
                    past = stop  # the answer was cut: its end was never generated
            elif ending is not None:
                ids, turn_ids = [*ids, ending], np.append(turn_ids, np.int32(-1))
                past = stop_at = len(ids)
            else:
                past = self.ends.past(text, tokens, number, (start, end), message, part.tools)
            turn_ids[first:past] = number
            if cut:
                stop_at = past
        token_ids = np.array(ids, np.int32)
        return Masked(token_ids[:stop_at], turn_ids[:stop_at], finish_reason, broken)

    def _first_stop(self, ids: list[int], first: int, limit: int) -> int | None:
        """The first stop token from `first` on and before `limit`."""
        found = None
        for token in self.stop_token_ids:
            try:
                limit = found = ids.index(token, first, limit)
            except ValueError:
                continue
        return found


def answers_of(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant messages that answer a question or a tool's result.

    A greeting before the first question is context only: no server is asked for it, and its prompt would be empty,
    which most templates cannot render.
    """
    asked = next((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), -1)
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked]


def begins_with_answer(messages: Sequence[Message]) -> bool:
    """Whether an assistant message comes before any question."""
    return next((m["role"] for m in messages if m["role"] in ("assistant", "user", "tool")), "") == "assistant"


def _goes_on(turn: Turn, following: Turn) -> bool:
    """Whether the text of the following turn begins with everything up to the end of this turn's answer."""
    return turn.text is following.text or following.text.startswith(turn.trained)
