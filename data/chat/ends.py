"""Where an answer ends that has no stop token of its own in the text."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from headstart.data.chat.cutting import Cutter, Tokens
from headstart.data.chat.rendering import CALL_PROBE, PROBE, RefusedError, Renderer, UnmaskableError
from headstart.data.records.messages import Message


class Ends:
    """The ends of answers without a stop token, for one chat template."""

    def __init__(self, renderer: Renderer, cutter: Cutter, stop_token_ids: Set[int]):
        self.renderer, self.cutter, self.stop_token_ids = renderer, cutter, stop_token_ids
        self._stops: dict[tuple[bool, bool], int | None] = {}

    def next_stop(self, message: Message, tools: Sequence[dict[str, Any]]) -> int | None:
        """The stop token with which the message after this one begins; None where it begins with another.

        GLM's answers have no end of their own: the model says `<|user|>`, which begins the next question.
        """
        key = bool(message.get("tool_calls")), bool(tools)
        if key not in self._stops:
            messages = list(CALL_PROBE) if key[0] else [*PROBE, PROBE[0]]
            try:
                before, text = (self.renderer.render(m, tools=tools)[0] for m in (messages[:-1], messages))
                follows = self.cutter.ids(text[len(before) :])[:1] if text.startswith(before) else []
            except RefusedError:
                follows = []
            self._stops[key] = next((i for i in follows if i in self.stop_token_ids), None)
        return self._stops[key]

    def past(
        self,
        text: str,
        tokens: Tokens,
        number: int,
        span: tuple[int, int],
        message: Message,
        tools: Sequence[dict[str, Any]],
    ) -> int:
        """Index after the last token of an answer that has no stop token. Raises: UnmaskableError if it is unknown."""
        past = self._content_end(text, tokens, number, message, *span)
        if past is None and self.renderer.tagged(tools):
            past = tokens.after(span[1], tokens.starts[number])
        if past is None:
            raise UnmaskableError(
                "chat template: an answer has no stop token and its text is not found in the rendering",
                f" (stop tokens: {sorted(self.stop_token_ids)}), so its end is unknown: give "
                "target.chat_template=FILE.jinja with {% generation %} tags",
            )
        return past

    def _content_end(
        self, text: str, tokens: Tokens, number: int, message: Message, start: int, end: int
    ) -> int | None:
        """Index after the last token of an answer without a stop token (templates of base models).

        None if the answer's text is not found between the characters `start` and `end`.
        """
        content = message.get("content") or ""
        said = content.split("</think>")[-1].strip()
        thoughts = message.get("reasoning_content") or "</think>" in content  # thoughts may repeat the answer's words
        place = text.rfind(said, start, end) if said and thoughts else text.find(said, start, end)
        stop = place + len(said)
        if message.get("tool_calls"):  # which follow the content
            stop = start + len(text[start:end].rstrip())
        return None if place < 0 else self.cutter.shared(text, tokens, stop, tokens.origins[number])[0]
