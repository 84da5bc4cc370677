"""Chat template → text → tokens, and where each assistant turn begins and ends, exact to the token.

`data.rendering` gives the text, `data.turns` the characters of every answer in it. In tokens, an answer starts after
the ids of its prompt, and it ends with the first stop token, which is supervised; what the template writes after it
(ChatML's newline) is not.

Several turns share one sample when each turn's text is the beginning of the next one's. Templates that rewrite history
(Qwen3 drops `<think>` blocks of earlier turns) break that: such a turn becomes a sample of its own, so that every
answer is trained in exactly the context in which it is generated.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.answers import parse_answer
from headstart.data.pieces import require_pieces, require_prompt
from headstart.data.rendering import PROBE, Message, RefusedError, Renderer, UnmaskableError, chat_template
from headstart.data.turns import Turn, find_turns, turn_at
from headstart.heads.errors import TemplateError

__all__ = ["ChatFormat", "Encoded", "RefusedError", "UnmaskableError"]

#: words before a cut from which on its text is tokenised anew: a tokenizer looks ahead by one
WORDS_BEFORE = 4
#: characters of a text that are looked at for one token, when only its first tokens are asked for
LETTERS = 8


@dataclass(frozen=True)
class Encoded:
    """Token ids and the assistant turn of each (-1 = unsupervised).

    Attributes:
        broken: answers whose text goes on behind a stop token; what stands there does not train.
    """

    token_ids: list[int]
    turn_ids: list[int]
    finish_reason: str
    broken: int = 0


@dataclass(frozen=True)
class _Cut:
    """A tokenised text.

    Attributes:
        ids, offsets: of the tokens, with their characters.
        words: number of the word (what the tokenizer splits a text into before it looks for tokens) of each token.
        starts: the first token of every answer.
        origins: for every answer, the character and token from which on it was tokenised on its own.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    words: list[int | None]
    starts: list[int]
    origins: list[tuple[int, int]]

    def after(self, character: int, first: int) -> int:
        """Index of the first token from `first` on that begins at `character` or later."""
        return next((i for i in range(first, len(self.ids)) if self.offsets[i][0] >= character), len(self.ids))

    def anchor(self, character: int, origin: int = 0) -> int:
        """A token some words before `character`, not before `origin`, that begins a word."""
        token = min(bisect_left(self.offsets, (character, 0), origin), len(self.ids) - 1)
        seen = 0
        while token > origin and seen < WORDS_BEFORE:
            token -= 1
            seen += self.words[token] is None or self.words[token] != self.words[token - 1]
        return max(token, origin)


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
        chat_template(tokenizer)  # a target without one is told so first
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                f"tokenizer {type(tokenizer).__name__}: found a slow tokenizer, expected a fast one (it knows the "
                "characters of each token): load it with a tokenizer.json"
            )
        self.renderer = Renderer(tokenizer, self.template_kwargs)
        if foot := self.renderer.find_foot():
            text = self.renderer.render(PROBE)[0].removesuffix(foot)
            # where nothing else ends an answer, the last one ends with it
            ended = self.stop_token_ids.intersection(self._ids(text[text.rfind(PROBE[1]["content"]) :]))
            self.renderer.foot = foot if ended else ""
        self._probed = False
        self._head: tuple[str, list[int]] = "", []

    @property
    def notes(self) -> list[str]:
        """What the data report says about the template."""
        return self.renderer.notes()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The template's text. Raises RefusedError with the template's own reason."""
        return self.renderer.render(messages, add_generation_prompt, tools)[0]

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of the prompt that a serving engine would answer (generation prompt included).

        Raises: RefusedError when the template refuses the messages or leaves a part of them out.
        """
        text = self.render(messages, add_generation_prompt=True, tools=tools)
        require_prompt(messages, text, tools)
        return self._ids(text)

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
            max_length: a sample whose answers all begin behind so many tokens is given by its first max_length + 1.
        Raises: TemplateError when the conversation cannot be rendered or masked, or the template leaves out a part.
        """
        self._probe()
        answers = answers_of(messages)
        found = find_turns(self.renderer, messages, answers if turns == "all" else answers[-1:], tools)
        groups: list[list[Turn]] = []
        for turn in reversed(found):
            if groups and _goes_on(turn, groups[-1][0]):
                groups[-1].append(turn)
            else:
                groups.append([turn])
        groups = [group[::-1] for group in reversed(groups)]
        for group in groups:
            require_pieces(messages, group, tools)
        reasons = ["stop"] * (len(groups) - 1) + [finish_reason]
        tagged = self.renderer.tagged(tools)
        encoded = []
        for group, reason in zip(groups, reasons, strict=False):
            beyond = None if max_length is None else self._beyond(group, max_length)
            encoded.append(beyond or self._encode_group(group, messages, reason, tagged))
        return encoded

    def _beyond(self, turns: list[Turn], max_length: int) -> Encoded | None:
        """The first max_length + 1 tokens where every answer begins behind them, else None.

        Where a template rewrites history, every answer of a long conversation is a sample with all before it. Most of
        these are too long, and they begin alike, so that their beginnings are tokenised once.
        """
        text, starts = turns[-1].text, [start for turn in turns for start, _ in turn.spans]
        head = text[: LETTERS * (max_length + 1)]
        if not starts or min(starts) < len(head):
            return None
        if head != self._head[0]:
            cut = _Cut(*self._tokens(head), [], [])
            # what follows a text may change its last words only
            self._head = head, cut.ids[: cut.anchor(len(head))]
        ids = self._head[1][: max_length + 1]
        return Encoded(ids, [-1] * len(ids), "length") if len(ids) > max_length else None

    def _encode_group(
        self, turns: list[Turn], messages: Sequence[Message], finish_reason: str, tagged: bool
    ) -> Encoded:
        text = turns[-1].text
        spans = [(turn, start, end) for turn in turns for start, end in turn.spans]
        cut = self._split(text, [start for _, start, _ in spans])
        turn_ids = [-1] * len(cut.ids)
        stop_at = len(cut.ids)
        broken = 0
        over: Turn | None = None
        for number, (turn, start, end) in enumerate(spans):
            if turn is over:
                continue  # tags go on behind a stop token, after which nothing is generated
            first, final = cut.starts[number], number + 1 == len(spans)
            # the token right behind may end the turn: a tag leaves it out, or it begins the next message as well (GLM)
            limit = cut.after(end, first) + 1
            stop = next((i for i in range(first, min(limit, len(cut.ids))) if cut.ids[i] in self.stop_token_ids), None)
            if stop is None:
                past = self._content_end(text, cut, number, messages[turn.index], start, end)
                past = cut.after(end, first) if past is None and tagged else past
                if past is None:
                    raise UnmaskableError(
                        "chat template: an answer has no stop token and its text is not found in the rendering",
                        f" (stop tokens: {sorted(self.stop_token_ids)}), so its end is unknown: give "
                        "target.chat_template=FILE.jinja with {% generation %} tags",
                    )
            else:
                past, over = stop + 1, turn
                broken += bool(text[cut.offsets[stop][1] : turn.spans[-1][1]].strip())
                if final and finish_reason == "length":
                    past = stop  # the answer was cut: its end was never generated
            turn_ids[first:past] = [number] * (past - first)
            if final and finish_reason == "length":
                stop_at = past
        return Encoded(cut.ids[:stop_at], turn_ids[:stop_at], finish_reason, broken)

    def _content_end(self, text: str, cut: _Cut, number: int, message: Message, start: int, end: int) -> int | None:
        """Index after the last token of an answer that no stop token ends (templates of base models).

        None where its text does not stand between the characters `start` and `end`.
        """
        content = message.get("content") or ""
        said = content.split("</think>")[-1].strip()
        thoughts = message.get("reasoning_content") or "</think>" in content  # they may hold the same words
        place = text.rfind(said, start, end) if said and thoughts else text.find(said, start, end)
        stop = place + len(said)
        if message.get("tool_calls"):  # they follow the content
            stop = start + len(text[start:end].rstrip())
        return None if place < 0 else self._shared(text, cut, stop, cut.origins[number])[0]

    def _split(self, text: str, cuts: list[int]) -> _Cut:
        """Tokens of `text`, with the token index of every character position in `cuts` (ascending).

        A prompt's ids must be the first ids of the whole, as in serving. Where a token would reach over the cut (an
        answer that begins with a newline after a prompt that ends with one) the two sides are tokenised apart.
        """
        whole = _Cut(*self._tokens(text), [], [])
        for cut in cuts:
            start, all_shared = self._shared(text, whole, cut)
            if not all_shared:
                break
            whole.starts.append(start)
            whole.origins.append((0, 0))
        else:
            return whole
        pieces = _Cut([], [], [], [], [])
        for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids, offsets, words = self._tokens(text[begin:stop])
            pieces.ids.extend(ids)
            pieces.offsets.extend((a + begin, b + begin) for a, b in offsets)
            pieces.words.extend(words)
            pieces.starts.append(len(pieces.ids))
        if self._decode(pieces.ids) != self._decode(whole.ids):
            raise RefusedError(
                "a token reaches over the start of an answer and the tokenizer cannot encode the sides apart"
            )
        starts = pieces.starts[:-1]
        return _Cut(pieces.ids, pieces.offsets, pieces.words, starts, list(zip(cuts, starts, strict=True)))

    def _shared(self, text: str, cut: _Cut, position: int, origin: tuple[int, int] = (0, 0)) -> tuple[int, bool]:
        """How many tokens `text[:position]` and `text` begin with alike, and whether these are all of the former's.

        Only the last words before `position` are tokenised again: what stands before a word does not change its tokens.
        Where even the first token differs (a tokenizer that does not begin anew at a word), the whole beginning is.

        Args: origin: a character, and its token, from which on the text was tokenised on its own.
        """
        begun, first = origin
        token = cut.anchor(position, first)
        # some tokenizers leave the space before a word out of its offsets
        tries = [(cut.offsets[token - 1][1], token)] if token > first else []
        for begin, token in [*tries, (begun, first)]:
            mine = self._ids(text[begin:position])
            alike = len(os.path.commonprefix([mine, cut.ids[token : token + len(mine)]]))
            if alike:
                break
        return token + alike, alike == len(mine)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]], list[int | None]]:
        """Ids, characters and words of the tokens of a text."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], encoding["offset_mapping"], encoding.word_ids(0)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _probe(self) -> None:
        """Fail at the first conversation when the template can mask none (TemplateError), not once per record."""
        if self._probed:
            return
        self._probed = True
        thinking = [PROBE[0], {**PROBE[1], "reasoning_content": "Be brief."}]  # some prompts open the thoughts
        failed: UnmaskableError | None = None
        for probe in (list(PROBE), thinking):
            try:
                turn = turn_at(self.renderer, probe, 1)
                self._encode_group([turn], probe, "stop", self.renderer.tagged())
            except UnmaskableError as error:
                failed = failed or error
                continue
            except RefusedError:
                return  # it may want a system message or tools: the data will tell
            if not turn.spans:
                raise TemplateError(
                    "chat template: its {% generation %} tags mark nothing in a plain question and answer: "
                    "put them around the assistant's content and end-of-turn token (target.chat_template=FILE.jinja)"
                )
            return
        raise TemplateError(str(failed)) from failed


def answers_of(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant messages that answer something.

    A greeting before the first question is context: no server is ever asked for it, and most templates cannot render
    its prompt, which is empty.
    """
    asked = next((i for i, message in enumerate(messages) if message["role"] in ("user", "tool")), -1)
    return [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked]


def _goes_on(turn: Turn, following: Turn) -> bool:
    """Whether the text up to the end of a turn's answer is the beginning of the following one's."""
    return turn.text is following.text or following.text.startswith(turn.trained)
