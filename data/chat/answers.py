"""A generated answer as the assistant message that a client would put into the history."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headstart.data.chat.pieces import require_prompt, thoughts_stand
from headstart.data.chat.rendering import PROBE, RefusedError, Renderer
from headstart.data.records.harmony import read_answer
from headstart.data.records.messages import Message

#: thoughts, then the answer itself; a prompt that ends with <think> leaves only </think> to the answer
THOUGHTS = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)
#: every part of an answer of gpt-oss has it
HARMONY = "<|channel|>"
#: an answer that holds thoughts, or begins with them
THINKS = re.compile(r"\A\s*<think>|</think>")


def parse_answer(renderer: Renderer, tokenizer: Any, token_ids: Sequence[int]) -> Message:
    """The assistant message (content, and reasoning_content or tool_calls) that a generated answer stands for.

    If the tokenizer has rules for this (transformers' response templates), they parse the answer. Otherwise its text is
    the content. `<think>…</think>` becomes reasoning_content if the prompt opens the thoughts, or if the template drops
    the thoughts of earlier answers: servers' parsers return it likewise. The channels of gpt-oss become thoughts, calls
    and text. In every case the template must be able to write the message into a history.

    Args: token_ids: without the stop token.
    Raises: RefusedError when there is no such message: the answer ends within its thoughts; or it holds special tokens,
        without which several parts would become one text.
    """
    ids = [int(token) for token in token_ids]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    message: Message = {"role": "assistant", "content": text}
    if getattr(tokenizer, "response_template", None) is not None:
        message = _by_rules(renderer, tokenizer, text)
    elif HARMONY in text:
        parts = read_answer(text)
        if parts is None:
            raise RefusedError("an answer ends within its thoughts, so that there is none to put into a history")
        message = parts
    elif renderer.opens_thoughts or (THINKS.search(text) and not _kept(renderer, text)):
        message = _without_thoughts(text)
    message["content"] = _as_written(renderer, text, message)
    # all_special_tokens lists those that have a name (eos, pad, …), not the channels of gpt-oss
    flagged = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special = {token for token in (*tokenizer.all_special_tokens, *flagged) if token} - {"<think>", "</think>"}
    for part in (message["content"], message.get("reasoning_content") or ""):
        if found := sorted(token for token in special if token in part):
            raise RefusedError(
                "an answer holds special tokens that cannot be put into a history",
                f" ({', '.join(found[:3])}), and the tokenizer has no rules to parse them (response_template)",
            )
    _require_written(renderer, message)
    return message


def _as_written(renderer: Renderer, text: str, message: Message) -> str:
    """The message's content, without the newline in front that the template itself writes there (GLM-4's does)."""
    content = str(message["content"])
    if message.keys() != {"role", "content"} or not content.startswith("\n"):
        return content
    said = f"{renderer.render(PROBE[:1], add_generation_prompt=True)[0]}{text}"
    bare = {**message, "content": content[1:]}
    return content[1:] if _history(renderer, bare).startswith(said) else content


def _without_thoughts(text: str) -> Message:
    """The message of a text, its thoughts apart from its answer. Raises: RefusedError when the thoughts do not end."""
    thoughts = THOUGHTS.fullmatch(text)
    if thoughts is None:
        raise RefusedError("an answer ends within its thoughts, so that there is none to put into a history")
    reasoning, content = (part.strip() for part in thoughts.groups())
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def _by_rules(renderer: Renderer, tokenizer: Any, text: str) -> Message:
    """The message that the tokenizer's own rules find. Raises: RefusedError when they find none."""
    prompt = renderer.render(PROBE[:1], add_generation_prompt=True)[0]
    try:
        found = tokenizer.parse_response(text, prefix=prompt)
    except Exception as error:  # the rules come with the model, so they may raise anything
        found = f"{type(error).__name__}: {error}"
    if not isinstance(found, dict) or not isinstance(found.get("content") or "", str):
        raise RefusedError("the tokenizer's rules (response_template) cannot parse an answer", f": {found!r}"[:200])
    reasoning = next((found[k] for k in ("reasoning_content", "thinking", "reasoning") if found.get(k)), None)
    message: Message = {"role": "assistant", "content": found.get("content") or ""}
    if reasoning is not None:
        message["reasoning_content"] = str(reasoning)
    if found.get("tool_calls"):
        message["tool_calls"] = found["tool_calls"]
    return message


def _history(renderer: Renderer, message: Message) -> str:
    return renderer.render([PROBE[0], message, PROBE[0]])[0]


def _kept(renderer: Renderer, text: str) -> bool:
    """Whether the template keeps the thoughts of an earlier answer whose content holds them."""
    text += "" if "</think>" in text else "</think>"
    return thoughts_stand(text, _history(renderer, {"role": "assistant", "content": text}))


def _require_written(renderer: Renderer, message: Message) -> None:
    """Raises: RefusedError when the template leaves a part of the message out of the history."""
    require_prompt([PROBE[0], message, PROBE[0]], _history(renderer, message))
