"""A server's answer to one request, read strictly: what is missing or of another type makes it worthless.

Log-probabilities are kept as two lists per answer, of which every entry belongs to a token of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headstart.data.records.messages import REASONING, Message, read_message
from headstart.data.serving.checks import error_text, found, one_line, optional, parsed, whole
from headstart.heads.errors import DataError, ServerError

#: finish reasons that mean that the server gave the answer up
GIVEN_UP = ("abort", "error", "cancelled")
#: digits kept of a log-probability
DIGITS = 4
#: what vLLM writes before a token's id
ID = "token_id:"


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        message: `role`, `content` and, where the server's parsers found them, `reasoning_content` and `tool_calls`.
        finish: the server's finish reason: stop, length, tool_calls, content_filter, ….
        prompt_tokens: tokens of the prompt that the server counted.
        completion_tokens: tokens that it generated, where it says so.
        prompt_ids, token_ids: where it gives them.
        logprobs: `token_ids` and `logprobs`, one list each per token of the answer, the most likely first.
    """

    message: Message
    finish: str
    prompt_tokens: int
    completion_tokens: int | None
    prompt_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    logprobs: dict[str, Any] | None

    @property
    def plain(self) -> bool:
        """Whether the message is text alone."""
        return not (self.message.keys() & {"reasoning_content", "tool_calls"})


def read_reply(content: bytes, where: str, limit: int, top_logprobs: int = 0) -> Reply:
    """The answer in a body.

    Args: limit: most tokens that were asked for. top_logprobs: log-probabilities that were asked for, per token.
    Raises: ServerError for anything but one whole answer.
    """
    body = _object(parsed(content, where), f"{where}: the answer")
    if body.get("error") is not None or body.get("object") == "error":
        raise ServerError(f"{where}: the server reports an error: {error_text(body.get('error') or body)}")
    choices = optional(body.get("choices"), list, f"{where}: choices") or []
    if len(choices) != 1:
        raise ServerError(f"{where}: choices: found {len(choices)}, expected 1")
    choice = _object(choices[0], f"{where}: choices[0]")
    finish = optional(choice.get("finish_reason"), str, f"{where}: finish_reason")
    if not finish or finish in GIVEN_UP:
        raise ServerError(f"{where}: the server gave up an answer (finish_reason {found(finish)}); see its log")
    usage = optional(body.get("usage"), dict, f"{where}: usage") or {}
    if usage.get("prompt_tokens") is None:
        raise ServerError(
            f"{where}: usage.prompt_tokens: found nothing, expected the number of the prompt's tokens, which shows "
            "whether the server renders it as training does"
        )
    made = usage.get("completion_tokens")
    # some servers say ids on the choice, and the prompt's on the choice or on the whole
    prompt_ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    ids = _ids(choice.get("token_ids"), f"{where}: token_ids")
    count = None if made is None else whole(made, f"{where}: usage.completion_tokens", 0, limit)
    if ids is None and top_logprobs:
        ids = _chosen(choice, count)
    if ids is not None and count is not None and len(ids) != count:
        raise ServerError(f"{where}: token_ids: found {len(ids)}, expected usage.completion_tokens={count}")
    return Reply(
        _message(choice, where),
        one_line(finish, 40),
        whole(usage["prompt_tokens"], f"{where}: usage.prompt_tokens"),
        count,
        _ids(prompt_ids, f"{where}: prompt_token_ids"),
        ids,
        _logprobs(choice, where, top_logprobs) if top_logprobs else None,
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServerError(f"{name}: found {found(value)}, expected an object")
    return value


def _message(choice: dict[str, Any], where: str) -> Message:
    if choice.get("message") is None:
        text = choice.get("text")
        if not isinstance(text, str):
            raise ServerError(f"{where}: found neither message nor text in choices[0]; expected an answer")
        given: dict[str, Any] = {"content": text}
    else:
        given = _object(choice["message"], f"{where}: message")
    kept = {name: given[name] for name in ("content", "tool_calls", "function_call", *REASONING) if given.get(name)}
    try:
        return read_message({"content": "", **kept, "role": "assistant"}, f"{where}: message")
    except DataError as error:
        raise ServerError(str(error)) from error


def _ids(value: Any, name: str) -> tuple[int, ...] | None:
    ids = optional(value, list, name)
    if ids is None:
        return None
    for token in ids:
        whole(token, name, 0, 2**31 - 1)
    return tuple(ids)


def _chosen(choice: dict[str, Any], count: int | None) -> tuple[int, ...] | None:
    """The answer's token ids as its log-probabilities name them (llama.cpp); None where they do not name all."""
    given = choice.get("logprobs")
    content = given.get("content") if isinstance(given, dict) else None
    ids = [_id(entry) for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []
    whole_ids = tuple(token for token in ids if type(token) is int and 0 <= token < 2**31)
    return whole_ids if ids and len(whole_ids) == len(ids) == count else None


def _id(entry: dict[str, Any]) -> Any:
    """The id of a token: a field of its own (llama.cpp), or written as its text (vLLM)."""
    text = entry.get("token")
    if entry.get("id") is None and isinstance(text, str) and text.startswith(ID) and text[len(ID) :].isdecimal():
        return int(text[len(ID) :])
    return entry.get("id")


def _logprobs(choice: dict[str, Any], where: str, most: int) -> dict[str, Any]:
    """Raises: ServerError where they are missing, or name their tokens by text alone."""
    name = f"{where}: logprobs"
    given = optional(choice.get("logprobs"), dict, name)
    if given is None:
        raise ServerError(f"{name}: found nothing, expected the {most} most likely tokens (data.distill.top_logprobs)")
    content = optional(given.get("content"), list, f"{name}.content")
    if content is None:  # the form of /v1/completions: text → log-probability
        tops = optional(given.get("top_logprobs"), list, f"{name}.top_logprobs") or []
        rows = [[{"token": t, "logprob": p} for t, p in _object(top, name).items()] for top in tops]
    else:
        rows = [
            optional(_object(entry, name).get("top_logprobs"), list, f"{name}.top_logprobs") or [] for entry in content
        ]
    ids, logs = [], []
    for row in rows:
        pairs = sorted((_pair(_object(entry, name), name) for entry in row), key=lambda pair: -pair[1])[:most]
        ids.append([token for token, _ in pairs])
        logs.append([round(value, DIGITS) for _, value in pairs])
    return {"token_ids": ids, "logprobs": logs}


def _pair(entry: dict[str, Any], name: str) -> tuple[int, float]:
    token, value = _id(entry), entry.get("logprob")
    if token is None:
        raise ServerError(
            f"{name}: found {found(entry.get('token'))}, expected a token's id; set data.distill.top_logprobs=0"
        )
    # JSON has no infinity: servers write -9999 or the like for a probability of 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-3:
        raise ServerError(f"{name}: found {found(value)}, expected a log-probability")
    return whole(token, name, 0, 2**31 - 1), float(value)
