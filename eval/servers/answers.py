"""Reads a streamed answer: lines of a server-sent event stream → text, token counts and clock readings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from headstart.data.serving.checks import error_text, found, optional, parsed, whole
from headstart.heads.errors import ServerError

#: most bytes of one line of a stream
LINE = 1 << 20


@dataclass
class Served:
    """One answer of a server.

    Attributes:
        limit: most tokens that were asked for.
        text: what was generated.
        tokens: number of tokens generated, the stop token included.
        steps: new tokens of each message of the stream that brought any.
        details: what the server adds about its speculation (SGLang).
        finish: why the answer ended, where the server says it.
        done: whether the stream ended with [DONE].
        sent, first, last: clock readings in seconds.
    """

    limit: int
    text: str = ""
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    done: bool = False
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def committed(self) -> int:
        """Number of tokens after the first, which prefill gives."""
        return max(self.tokens - 1, 0)

    @property
    def seen(self) -> bool:
        """Whether the messages tell the tokens of every forward: the first has one token, and all tokens add up."""
        return bool(self.steps) and self.steps[0] == 1 and sum(self.steps) == self.tokens

    def read(self, line: bytes, where: str) -> bool:
        """Read one line of the stream. Returns whether it brought tokens. Raises: ServerError for a malformed line."""
        if not line.startswith(b"data:"):  # empty lines, and comments that keep the connection alive
            return False
        content = line[5:].strip()
        if content == b"[DONE]":
            self.done = True
            return False
        event = parsed(content, where)
        if not isinstance(event, dict):
            raise ServerError(f"{where}: an event of the stream is {found(event)}, expected an object")
        # older vLLMs send the error as the event itself, and then [DONE]
        error = event if event.get("object") == "error" else event.get("error")
        if error is not None:
            raise ServerError(f"{where}: the server reports an error: {error_text(error)}")
        return self._add(event, where)

    def _add(self, event: dict[str, Any], where: str) -> bool:
        now, before = time.perf_counter(), self.tokens
        usage = optional(event.get("usage"), dict, f"{where}: usage") or {}
        if usage.get("completion_tokens") is not None:
            name = f"{where}: usage.completion_tokens"
            total = whole(usage["completion_tokens"], name, self.tokens, self.limit)
            if total > self.tokens:
                self.steps.append(total - self.tokens)
                self.tokens, self.last = total, now
                self.first = self.first or now
        extension = optional(event.get("sglext"), dict, f"{where}: sglext") or {}
        details = extension.get("spec_tokens_details")
        for choice in optional(event.get("choices"), list, f"{where}: choices") or []:
            if not isinstance(choice, dict):
                raise ServerError(f"{where}: choices: found {found(choice)}, expected objects")
            if choice.get("index") is not None:
                whole(choice["index"], f"{where}: choices.index (one answer was asked for)", 0, 0)
            delta = optional(choice.get("delta"), dict, f"{where}: choices.delta") or {}
            self.text += optional(choice.get("text"), str, f"{where}: choices.text") or ""
            self.text += optional(delta.get("content"), str, f"{where}: choices.delta.content") or ""
            self.finish = optional(choice.get("finish_reason"), str, f"{where}: finish_reason") or self.finish
            details = choice.get("meta_info") or details
            self.first = self.first or now
        details = optional(details, dict, f"{where}: details of the speculation") or {}
        self.details |= {name: value for name, value in details.items() if name.startswith("spec_")}
        return self.tokens > before

    def check(self, where: str) -> None:
        """Raises ServerError, with the remedy, for an answer that is not complete."""
        if not self.done:
            raise ServerError(
                f"{where}: the stream ended after {self.tokens} tokens and without [DONE]: the answer is not whole. "
                "See the server's log, or whether a proxy in between cuts long answers"
            )
        if self.finish in ("abort", "error"):
            raise ServerError(f"{where}: the server gave up an answer (finish_reason {self.finish}); see its log")
        if not self.tokens:
            raise ServerError(
                f"{where}: the server did not say how many tokens it generated (stream_options.include_usage)"
            )


class Lines:
    """Cuts the bytes that arrive into lines. Raises ServerError for a line longer than LINE."""

    def __init__(self, where: str):
        self.where, self._open = where, bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        *ended, rest = chunk.split(b"\n")
        lines = []
        for piece in ended:
            lines.append((bytes(self._open) + piece).rstrip(b"\r"))
            self._open.clear()
        self._open += rest
        if len(self._open) > LINE:
            raise ServerError(
                f"{self.where}: a line of the stream is longer than {LINE} bytes; is this the right server?"
            )
        return lines
