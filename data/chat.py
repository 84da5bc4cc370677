"""Chat template → text → tokens, and where each assistant turn begins and ends, exact to the token.

How a turn is found. For the assistant message i, `render(messages[: i + 1])` is the text and its answer starts where
`render(messages[:i], add_generation_prompt=True)` ends (or where the template's `{% generation %}` tag begins): the
very prompt a serving engine would answer. In tokens, the answer starts after the ids of that prompt, and it ends with
the first stop token, which is supervised; what the template writes after it (ChatML's newline) is not.

Several turns share one sample when each turn's text is the beginning of the next one's. Templates that rewrite history
(Qwen3 drops `<think>` blocks of earlier turns) break that: such a turn becomes a sample of its own, so that every
answer is trained in exactly the context in which it is generated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.heads.errors import TemplateError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."})


class RefusedError(TemplateError):
    """The template does not take this conversation; others may be fine. `reason` is the message without its details."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason + detail)
        self.reason = reason


class UnmaskableError(RefusedError):
    """Rendered, but which tokens are the assistant's cannot be told; when the probe fails so, no conversation can."""


@dataclass(frozen=True)
class Encoded:
    """Token ids and the assistant turn of each (-1 = unsupervised)."""

    token_ids: list[int]
    turn_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class _Turn:
    """An assistant turn in the text that ends with it: character spans `start … end` and the message's content."""

    text: str
    spans: tuple[tuple[int, int], ...]
    content: str


@dataclass(frozen=True)
class _Cut:
    """A tokenised text: ids, their characters, the first token of every answer, and where its tokenisation began."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    starts: list[int]
    origins: list[tuple[int, int]]

    def after(self, character: int, first: int) -> int:
        """Index of the first token from `first` on that begins at `character` or later."""
        return next((i for i in range(first, len(self.ids)) if self.offsets[i][0] >= character), len(self.ids))


class ChatFormat:
    """A tokenizer's chat template, ready to encode conversations.

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
        self.template = chat_template(tokenizer)
        if not getattr(tokenizer, "is_fast", False):
            raise TemplateError(
                f"tokenizer {type(tokenizer).__name__}: found a slow tokenizer, expected a fast one (it knows the "
                "characters of each token): load it with a tokenizer.json"
            )
        self.tagged = GENERATION_TAG.search(self.template) is not None
        self._probed = False

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The template's text. Raises RefusedError with the template's own reason."""
        return self._render(messages, add_generation_prompt, tools)[0]

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Token ids of the prompt that a serving engine would answer (generation prompt included)."""
        return self._ids(self.render(messages, add_generation_prompt=True, tools=tools))

    def answer_message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The assistant message that a generated answer (without its stop token) stands for in a history.

        Raises: RefusedError when it holds special tokens: without them the text would not be what was generated.
        """
        text = self._decode(list(token_ids))
        if text != self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False):
            raise RefusedError("an answer holds special tokens and the tokenizer says no rules to parse them by")
        return {"role": "assistant", "content": text}

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        finish_reason: str = "stop",
        turns: str = "all",
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[Encoded]:
        """Samples of one conversation, most often one; in the order of their last turn.

        Args:
            messages: dicts with role and content.
            finish_reason: "length" leaves out the end-of-turn token of the last answer and all that follows it.
            turns: "all" | "last" assistant turns are supervised.
            tools: JSON schemas of the functions that the model may call.
        Raises: TemplateError when the conversation cannot be rendered or masked.
        """
        self._probe()
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        groups: list[list[_Turn]] = []
        for index in reversed(answers if turns == "all" else answers[-1:]):
            turn = self._turn(messages, index, tools)
            text = turn.text[: turn.spans[-1][1]] if turn.spans else ""
            if groups and groups[-1][-1].text.startswith(text):
                groups[-1].insert(0, turn)
            else:
                groups.append([turn])
        last = len(groups) - 1
        ordered = [list(group) for group in reversed(groups)]
        return [self._encode_group(group, finish_reason if n == last else "stop") for n, group in enumerate(ordered)]

    def _turn(self, messages: Sequence[dict[str, Any]], index: int, tools: Sequence[dict[str, Any]] = ()) -> _Turn:
        """Where assistant message `index` stands in the text that ends with it."""
        text, tags = self._render(messages[: index + 1], tools=tools)
        prompt = self.render(messages[:index], add_generation_prompt=True, tools=tools)
        content = messages[index]["content"].strip()
        if not self.tagged:
            if not text.startswith(prompt):
                raise UnmaskableError(
                    "chat template: the prompt before an answer is not the beginning of the text with the answer",
                    f" (message {index}), so its tokens cannot be told apart: the prompt ends {prompt[-60:]!r}, the "
                    f"text there is {text[max(len(prompt) - 60, 0) : len(prompt) + 20]!r}. Set data.template_kwargs "
                    "(such as {enable_thinking: false}), give target.chat_template=FILE.jinja with {% generation %} "
                    "tags, or train on distilled answers (they carry token ids)",
                )
            return _Turn(text, ((len(prompt), len(text)),), content)
        base = self.render(messages[:index], tools=tools)
        header = prompt[len(base) :] if prompt.startswith(base) else ""
        fresh = len(os.path.commonprefix([base, text]))
        spans = []
        for start, end in tags:
            if start < fresh:
                continue
            if header and text[start:end].startswith(header):  # a tag around the whole message: the header is prompt
                start += len(header)
            spans.append((start, end))
        return _Turn(text, tuple(spans), content)

    def _encode_group(self, turns: list[_Turn], finish_reason: str) -> Encoded:
        text = turns[-1].text
        spans = [(turn, start, end) for turn in turns for start, end in turn.spans]
        cut = self._split(text, [start for _, start, _ in spans])
        turn_ids = [-1] * len(cut.ids)
        stop_at = len(cut.ids)
        for number, (turn, start, end) in enumerate(spans):
            first, final = cut.starts[number], number + 1 == len(spans)
            # a tag may leave out the end-of-turn token that stands right behind it
            limit = cut.after(end, first) + self.tagged
            stop = next((i for i in range(first, min(limit, len(cut.ids))) if cut.ids[i] in self.stop_token_ids), None)
            if stop is None:
                past = self._content_end(text, cut, number, turn.content, start, end)
            else:
                past = stop + 1
                if final and finish_reason == "length":
                    past = stop  # the answer was cut: its end was never generated
            turn_ids[first:past] = [number] * (past - first)
            if final and finish_reason == "length":
                stop_at = past
        return Encoded(cut.ids[:stop_at], turn_ids[:stop_at], finish_reason)

    def _content_end(self, text: str, cut: _Cut, number: int, content: str, start: int, end: int) -> int:
        """Index after the last token of an answer that no stop token ends (templates of base models)."""
        place = text.find(content, start, end)
        if place < 0:
            raise UnmaskableError(
                "chat template: an answer has no stop token and its text is not found in the rendering",
                f" (stop tokens: {sorted(self.stop_token_ids)}), so its end is unknown: give "
                " target.chat_template=FILE.jinja with {% generation %} tags",
            )
        origin, token = cut.origins[number]
        kept = self._ids(text[origin : place + len(content)])
        pairs = enumerate(zip(kept, cut.ids[token:], strict=False))
        return token + next((i for i, (mine, whole) in pairs if mine != whole), len(kept))

    def _split(self, text: str, cuts: list[int]) -> _Cut:
        """Tokens of `text`, with the token index of every character position in `cuts` (ascending).

        A prompt's ids must be the first ids of the whole, as in serving. Where a token would reach over the cut (an
        answer that begins with a newline after a prompt that ends with one) the two sides are tokenised apart.
        """
        ids, offsets = self._ids_offsets(text)
        heads = [self._ids(text[:cut]) for cut in cuts]
        if all(ids[: len(head)] == head for head in heads):
            return _Cut(ids, offsets, [len(head) for head in heads], [(0, 0)] * len(cuts))
        pieces: list[int] = []
        spans: list[tuple[int, int]] = []
        starts = []
        for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece, where = self._ids_offsets(text[begin:stop])
            pieces += piece
            spans += [(a + begin, b + begin) for a, b in where]
            starts.append(len(pieces))
        if self._decode(pieces) != self._decode(ids):
            raise RefusedError(
                "a token reaches over the start of an answer and the tokenizer cannot encode the sides apart"
            )
        return _Cut(pieces, spans, starts[:-1], list(zip(cuts, starts[:-1], strict=True)))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _ids_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoding["input_ids"], encoding["offset_mapping"]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2.exceptions import TemplateError as JinjaError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            result: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=self.tagged,
                add_generation_prompt=add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **self.template_kwargs},
            )
        except (JinjaError, TypeError, KeyError, AttributeError) as error:
            raise RefusedError(f"the chat template refuses it: {error}") from error
        rendered, tags = result
        return rendered[0], [(start, end) for start, end in tags[0]] if self.tagged else []

    def _probe(self) -> None:
        """Fail at the first conversation when the template can mask none (TemplateError), not once per record."""
        if self._probed:
            return
        self._probed = True
        try:
            turn = self._turn(PROBE, 1)
            self._encode_group([turn], "stop")
        except UnmaskableError as error:
            raise TemplateError(str(error)) from error
        except RefusedError:
            return  # it may want a system message or tools: the data will tell
        if not turn.spans:
            raise TemplateError(
                "chat template: its {% generation %} tags mark nothing in a plain question and answer: "
                "put them around the assistant's content and end-of-turn token (target.chat_template=FILE.jinja)"
            )


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template. Raises TemplateError with the remedy when there is none."""
    try:
        return tokenizer.get_chat_template()
    except (ValueError, AttributeError) as error:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise TemplateError(
            f"tokenizer {name}: found no chat template, expected one (base models have none): "
            "use the instruct model, or give a Jinja file with target.chat_template=FILE.jinja"
        ) from error
