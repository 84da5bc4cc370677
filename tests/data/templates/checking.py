"""Checks a mask against the text by hand and against the prompts that a server would answer. Uses no code of ours.

Legend: a *complaint* says in words what is wrong; no complaint means that the samples are right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from templates.expected import EXPECTED
from templates.families import CONVERSATIONS, FAMILIES, KINDS, TOOL, WITH_TOOLS, Family, tokenizer

#: token ids and the turn of each
Sample = tuple[list[int], list[int]]


def tools_of(family: str, conversation: str) -> list[dict[str, Any]]:
    """The tools that the record holds. DeepSeek's templates write none."""
    return [TOOL] if conversation in WITH_TOOLS and not family.startswith("deepseek") else []


def letters(tokens: Any, ids: Sequence[int], kind: str) -> list[str]:
    """The characters of every token. A ▁ that the tokenizer itself puts in front of a text is none."""
    if kind in ("bytes", "gpt2"):
        return [tokens.decode([i]) for i in ids]
    added, made, fresh = tokens.get_added_vocab(), [], True
    for token in tokens.convert_ids_to_tokens(ids):
        special = token in added
        text = token if special else token.replace("▁", " ")
        made.append(text[1:] if fresh and not special and text.startswith(" ") else text)
        fresh = special and kind == "sentencepiece"
    return made


def marked(tokens: Any, sample: Sample, kind: str) -> str:
    """The sample's text with ⟦ and ⟧ around every turn."""
    ids, turns = sample
    text, inside = "", -1
    for piece, turn in zip(letters(tokens, ids, kind), turns, strict=True):
        if turn != inside:
            text += ("⟧" if inside >= 0 else "") + ("⟦" if turn >= 0 else "")
        text, inside = text + piece, turn
    return text + ("⟧" if inside >= 0 else "")


def served(family: str, tokens: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of the prompt that transformers' own template call gives, as servers use it."""
    text = tokens.apply_chat_template(
        [shaped(FAMILIES[family], message) for message in messages], tools=list(tools) or None,
        add_generation_prompt=True, tokenize=False, **FAMILIES[family].variables,
    )  # fmt: skip
    return tokens(text, add_special_tokens=False)["input_ids"]


def shaped(family: Family, message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form that the template takes, as its model card says."""
    made = dict(message)
    if "reasoning_content" in made:
        made["thinking"] = made["reasoning_content"]
    if family.text_arguments and made.get("tool_calls"):
        made["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in made["tool_calls"]
        ]
    return made


def by_text(tokens: Any, samples: Sequence[Sample], expected: Sequence[str], kind: str) -> list[str]:
    """Complaints about samples whose text or mask is not the one by hand."""
    found = [marked(tokens, sample, kind) for sample in samples]
    complaints = [f"{len(found)} samples, expected {len(expected)}"] if len(found) != len(expected) else []
    return complaints + [f"found {a!r}, expected {b!r}" for a, b in zip(found, expected, strict=False) if a != b]


def by_serving(
    family: str,
    tokens: Any,
    samples: Sequence[Sample],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    finished: bool = True,
) -> list[str]:
    """Complaints about turns that do not stand directly behind the prompt a server would answer, or do not end.

    Args: finished: the last answer has its end.
    """  # fmt: skip
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = {index: served(family, tokens, messages[:index], tools) for index in answers}
    stops = set(tokens.convert_tokens_to_ids(list(FAMILIES[family].stops)))
    complaints = []
    for ids, turns in samples:
        for turn in sorted({turn for turn in turns if turn >= 0}):
            at = [place for place, each in enumerate(turns) if each == turn]
            index = next((index for index, prompt in prompts.items() if prompt == ids[: at[0]]), None)
            if index is None:
                complaints.append(f"the tokens before turn {turn} are no prompt that is still to be answered")
                continue
            del prompts[index]
            if at != list(range(at[0], at[-1] + 1)):
                complaints.append(f"answer {index}: its tokens do not stand together")
            ends = [ids[place] in stops for place in at]
            if any(ends[:-1]):
                complaints.append(f"answer {index}: a stop token within it")
            if ends[-1] != (finished or index != answers[-1]) and family != "command r":
                complaints.append(f"answer {index}: its last token {'is' if ends[-1] else 'is not'} a stop token")
    return complaints + [f"answer {index} does not train" for index in prompts]


def complaints_of(
    family: str, conversation: str, kind: str, samples: Sequence[Sample], tagged: bool = False
) -> list[str]:
    """Complaints of both kinds about the samples of a conversation."""
    tokens, expected = tokenizer(family, kind, tagged), EXPECTED[family][conversation]
    assert isinstance(expected, list)
    messages, tools = CONVERSATIONS[conversation], tools_of(family, conversation)
    return by_text(tokens, samples, expected, kind) + by_serving(family, tokens, samples, messages, tools)


def encode(family: str, conversation: str, kind: str, tagged: bool = False, **how: Any) -> list[Sample]:
    """The samples that the code under test makes of a conversation."""
    how["tools"] = tools_of(family, conversation)
    return encode_messages(family, kind, CONVERSATIONS[conversation], tagged, **how)


def encode_messages(
    family: str, kind: str, messages: Sequence[dict[str, Any]], tagged: bool = False, **how: Any
) -> list[Sample]:
    """The samples that the code under test makes, twice: what it learns from one conversation must change nothing."""
    chat = _chat(family, kind, tagged)
    made = chat.encode(messages, **how)
    assert chat.encode(messages, **how) == made, "the second time is another way"
    return [(each.token_ids, each.turn_ids) for each in made]


@cache
def _chat(family: str, kind: str, tagged: bool) -> Any:
    from headstart.data.chat import ChatFormat

    known, tokens = FAMILIES[family], tokenizer(family, kind, tagged)
    return ChatFormat(tokens, tokens.convert_tokens_to_ids(list(known.stops)), known.variables)


def families_ok() -> dict[str, bool]:
    """For every family, whether all its conversations have the right masks with all kinds of tokenizers."""
    from headstart.data.rendering import RefusedError

    def right(family: str, conversation: str, kind: str) -> bool:
        expected = EXPECTED[family][conversation]
        try:
            samples = encode(family, conversation, kind)
        except RefusedError as error:
            return error.reason == expected
        return isinstance(expected, list) and not complaints_of(family, conversation, kind, samples)

    return {
        family: all(right(family, conversation, kind) for conversation in found for kind in KINDS)
        for family, found in EXPECTED.items()
    }


def finished(samples: Sequence[str]) -> list[str]:
    """The expected samples of a conversation whose last answer was cut by its length: it has no end token.

    The end token is the last special token that the answer holds; GLM's is the next message's.
    """
    *before, last = samples
    start, own = last.rsplit("⟦", 1)
    own = own[: own.index("⟧")]
    ends = [end for known in FAMILIES.values() for end in known.stops if own.endswith(end)]
    return [*before, start + "⟦" + own[: len(own) - max(map(len, ends), default=0)] + "⟧"]


def last_alone(samples: Sequence[str]) -> list[str]:
    """The expected samples where only the last answer is supervised."""
    start, own = samples[-1].rsplit("⟦", 1)
    return [start.replace("⟦", "").replace("⟧", "") + "⟦" + own]


def mutations(samples: Sequence[Sample], stops: set[int]) -> dict[str, list[Sample]]:
    """Wrong masks: name → the samples with one fault in the last turn of the first sample."""

    def changed(change: Any) -> list[Sample]:
        ids, turns = samples[0]
        at = [place for place, turn in enumerate(turns) if turn == max(turns)]
        made_ids, made = change(list(ids), list(turns), at[0], at[-1])
        return [(made_ids, made), *samples[1:]]

    def put(places: range, turn: Any) -> Any:
        def change(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
            for place in places:
                where = (first if place < 0 else last) + place
                turns[where] = turns[first] if turn is None else turn
            return ids, turns

        return change

    def shift(by: int) -> Any:
        def change(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
            if by > 0 and last + 1 == len(ids):  # there must be a token to move to
                ids, turns = [*ids, ids[-1]], [*turns, -1]
            moved = [turns[first]] * (last - first + 1)
            turns[first : last + 1] = [-1] * len(moved)
            turns[first + by : last + 1 + by] = moved
            return ids, turns

        return change

    def results(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
        number = turns[first]
        return ids, [turn if turn >= 0 or place < first - 40 else number for place, turn in enumerate(turns)]

    def all_but_one(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
        turns[(first + last) // 2] = -1
        return ids, turns

    def one_turn(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
        begin = turns.index(min(turn for turn in turns if turn >= 0))
        return ids, [0 if begin <= place <= last else turn for place, turn in enumerate(turns)]

    def other_token(ids: list[int], turns: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
        ids[first - 1 : first] = []  # the prompt lacks a token
        del turns[first - 1]
        return ids, turns

    made = {
        "one token later": changed(shift(1)),
        "one token earlier": changed(shift(-1)),
        "without the end token": changed(put(range(0, 1), -1)),
        "with the header": changed(put(range(-2, 0), None)),
        "with what stands between": changed(results),
        "a token within left out": changed(all_but_one),
        "a prompt without its last token": changed(other_token),
        "without a turn": changed(
            lambda ids, turns, first, last: (ids, [-1 if t == turns[first] else t for t in turns])
        ),
    }
    if max(samples[0][1]) > 0:
        made["two turns as one"] = changed(one_turn)
    return made
