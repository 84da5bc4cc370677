"""Masks of a conversation by the definition: every prefix is rendered and tokenised from its beginning, O(n²).

An answer starts where the prompt before it ends; the ids of that prompt must be the first ids of the whole.
"""

from __future__ import annotations

import os
from typing import Any

from headstart.data.chat.chat import ChatFormat, Encoded, RefusedError


def encode_slowly(
    chat: ChatFormat, messages: list[dict[str, Any]], finish_reason: str = "stop", turns: str = "all", tools=()
) -> list[Encoded]:
    """`ChatFormat.encode` for conversations that the template takes and of which it leaves nothing out."""
    asked = [message["role"] for message in messages].index("user")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > asked]
    groups: list[list[tuple]] = []
    for index in reversed(answers if turns == "all" else answers[-1:]):
        text, spans = _turn(chat, messages, index, tools)
        content = (messages[index].get("content") or "").split("</think>")[-1].strip()
        if messages[index].get("tool_calls"):
            content = text[spans[-1][0] :].strip()
        if groups and groups[-1][-1][0].startswith(text[: spans[-1][1]] if spans else ""):
            groups[-1].insert(0, (text, spans, content, index))
        else:
            groups.append([(text, spans, content, index)])
    groups.reverse()
    made = []
    for group in groups:
        for part in _by_tokens(chat, group):
            made.append(_encode(chat, part, messages, finish_reason if part[-1] is groups[-1][-1] else "stop", tools))
    return made


def _by_tokens(chat: ChatFormat, group: list[tuple]) -> list[list[tuple]]:
    """Turns whose prompts' ids the whole text's ids begin with stay together, each other turn stands alone."""
    ids = _ids(chat, group[-1][0])
    heads = [[_ids(chat, text[:start]) for start, _ in spans] for text, spans, *_ in group]
    apart = [not all(ids[: len(head)] == head for head in mine) for mine in heads]
    if not any(apart) or len(group) == 1:
        return [group]
    together = [turn for turn, alone in zip(group, apart, strict=True) if not alone]
    parts = [[turn] for turn, alone in zip(group, apart, strict=True) if alone]
    parts += _by_tokens(chat, together) if together else []
    return sorted(parts, key=lambda part: part[-1][3])


def _turn(chat: ChatFormat, messages: list[dict[str, Any]], index: int, tools):
    text, tags = chat.renderer.render(messages[: index + 1], tools=tools)
    prompt = chat.render(messages[:index], add_generation_prompt=True, tools=tools)
    assert text.startswith(prompt)
    if not chat.renderer.tagged(tools):
        return text, [(len(prompt), len(text))]
    fresh = len(os.path.commonprefix([chat.render(messages[:index], tools=tools), text]))
    spans = [(max(start, len(prompt)), end) for start, end in tags if start >= fresh and end > len(prompt)]
    begins = [start for start, _ in spans if start not in [end for _, end in spans]]
    ends = [end for _, end in spans if end not in [start for start, _ in spans]]
    return text, list(zip(begins, ends, strict=True))


def _encode(chat: ChatFormat, group: list[tuple], messages, finish_reason: str, tools) -> Encoded:
    text = group[-1][0]
    spans = [(start, end, content, index) for _, turn_spans, content, index in group for start, end in turn_spans]
    ids, offsets, starts, origins = _split(chat, text, [start for start, *_ in spans])
    turn_ids, stop_at = [-1] * len(ids), len(ids)
    for number, (start, end, content, index) in enumerate(spans):
        first, final = starts[number], number + 1 == len(spans)
        limit = next((i for i in range(first, len(ids)) if offsets[i][0] >= end), len(ids)) + 1
        stops = [i for i in range(first, min(limit, len(ids))) if ids[i] in chat.stop_token_ids]
        if stops:
            past = stops[0] if final and finish_reason == "length" else stops[0] + 1
        elif (
            final and finish_reason != "length" and end == len(text)
            and (ending := _ending(chat, messages, index, tools)) is not None
        ):  # fmt: skip
            ids, turn_ids = [*ids, ending], [*turn_ids, -1]
            past = stop_at = len(ids)
        else:
            origin, token, front = origins[number]
            kept = _ids(chat, front + text[origin : text.index(content, start, end) + len(content)])
            kept = kept[len(_ids(chat, front)) :]
            past = token + len(os.path.commonprefix([kept, ids[token:]]))
        turn_ids[first:past] = [number] * (past - first)
        if final and finish_reason == "length":
            stop_at = past
    return Encoded(ids[:stop_at], turn_ids[:stop_at], finish_reason)


def _ending(chat: ChatFormat, messages, index: int, tools) -> int | None:
    """The stop token with which the next message begins: a result where the answer calls, else a question."""
    result = {"role": "tool", "name": "weather", "tool_call_id": "probe1234", "content": "1"}
    more = result if messages[index].get("tool_calls") else {"role": "user", "content": "Hi"}
    try:
        before, after = (chat.render([*messages[: index + 1], *m], tools=tools) for m in ((), (more,)))
    except RefusedError:
        return None
    token = _ids(chat, after[len(before) :])[0] if after.startswith(before) else None
    return token if token in chat.stop_token_ids else None


def _split(chat: ChatFormat, text: str, cuts: list[int]):
    ids, offsets = _ids(chat, text), _offsets(chat, text)
    heads = [_ids(chat, text[:cut]) for cut in cuts]
    if all(ids[: len(head)] == head for head in heads):
        return ids, offsets, [len(head) for head in heads], [(0, 0, "")] * len(cuts)
    for front in ("", ".", "0", "a"):  # stands before a piece, so that no ▁ is put there
        pieces, spans, starts, kept = [], [], [], True
        for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            before = front if begin else ""
            drop = _ids(chat, before)
            made = _ids(chat, before + text[begin:stop])
            kept = kept and made[: len(drop)] == drop
            pieces += made[len(drop) :]
            found = _offsets(chat, before + text[begin:stop])[len(drop) :]
            spans += [(max(a - len(before), 0) + begin, b - len(before) + begin) for a, b in found]
            starts.append(len(pieces))
        if kept and _decode(chat, pieces) == _decode(chat, ids):
            return pieces, spans, starts[:-1], [(cut, start, front) for cut, start in zip(cuts, starts, strict=False)]
    raise RefusedError("cannot be encoded apart")


def _ids(chat: ChatFormat, text: str) -> list[int]:
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def _offsets(chat: ChatFormat, text: str) -> list[tuple[int, int]]:
    return chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]


def _decode(chat: ChatFormat, ids: list[int]) -> str:
    return chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
