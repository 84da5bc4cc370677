"""Checks a mask against the text by hand and against the prompts that a server would answer. Uses no code of ours.

Legend: a *complaint* says in words what is wrong; no complaint means that the samples are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
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
    chat = chat_of(family, kind, tagged)
    made = chat.encode(messages, **how)
    assert chat.encode(messages, **how) == made, "the second time is another way"
    return [(each.token_ids, each.turn_ids) for each in made]


@cache
def chat_of(family: str, kind: str, tagged: bool = False) -> Any:
    """The code under test."""
    from headstart.data.chat.chat import ChatFormat

    known, tokens = FAMILIES[family], tokenizer(family, kind, tagged)
    return ChatFormat(tokens, tokens.convert_tokens_to_ids(list(known.stops)), known.variables)


def families_ok() -> dict[str, bool]:
    """For every family, whether all its conversations have the right masks with all kinds of tokenizers."""
    from headstart.data.chat.rendering import RefusedError

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


def mutations(tokens: Any, samples: Sequence[Sample], kind: str) -> Iterator[tuple[str, list[Sample]]]:
    """Wrong masks: what is wrong, and the samples with this fault in the last turn of one of them."""
    for number, (ids, turns) in enumerate(samples):
        at = [place for place, turn in enumerate(turns) if turn == max(turns)]
        pieces = letters(tokens, ids, kind)
        for name, fault in FAULTS.items():
            made = fault(list(ids), list(turns), at[0], at[-1], pieces)
            if made is not None:
                yield name, [*samples[:number], made, *samples[number + 1 :]]


def _shifted(by: int, ids: list[int], turns: list[int], first: int, last: int, _: list[str]) -> Sample:
    own = range(first + by, min(last + 1 + by, len(ids)))
    return ids, [turns[first] if n in own else -1 if first <= n <= last else turn for n, turn in enumerate(turns)]


def _put(places: Callable[[int, int], range], own: bool) -> Fault:
    """Tokens that are supervised with the turn, or not supervised."""

    def fault(ids: list[int], turns: list[int], first: int, last: int, _: list[str]) -> Sample:
        changed = places(first, last)
        return ids, [(turns[first] if own else -1) if n in changed else turn for n, turn in enumerate(turns)]

    return fault


def _with_result(ids: list[int], turns: list[int], first: int, last: int, pieces: list[str]) -> Sample | None:
    """The result of a tool trains as a turn; None without one."""
    text = "".join(pieces)
    begin = text.find("12 C")
    if begin < 0:
        return None
    place, made = 0, []
    for piece, turn in zip(pieces, turns, strict=True):
        made.append(max(turns) + 1 if place < begin + 4 and place + len(piece) > begin else turn)
        place += len(piece)
    return ids, made


def _one_turn(ids: list[int], turns: list[int], first: int, last: int, _: list[str]) -> Sample | None:
    begin = turns.index(0)
    return None if begin == first else (ids, [0 if begin <= n <= last else turn for n, turn in enumerate(turns)])


#: token ids, turns, first and last token of the sample's last turn, characters of every token → the wrong sample
Fault = Callable[[list[int], list[int], int, int, list[str]], Sample | None]
FAULTS: dict[str, Fault] = {
    "one token later": partial(_shifted, 1),
    "one token earlier": partial(_shifted, -1),
    "without the end token": _put(lambda first, last: range(last, last + 1), own=False),
    "without the first token": _put(lambda first, last: range(first, first + 1), own=False),
    "with what stands behind": _put(lambda first, last: range(last + 1, last + 2), own=True),
    "with the header": _put(lambda first, last: range(first - 2, first), own=True),
    "with the whole prompt": _put(lambda first, last: range(0, first), own=True),
    "a token within left out": _put(lambda first, last: range((first + last) // 2, (first + last) // 2 + 1), own=False),
    "no turn": _put(lambda first, last: range(first, last + 1), own=False),
    "with the result of a tool": _with_result,
    "two turns as one": _one_turn,
    "a prompt without its last token": lambda ids, turns, first, last, _: (
        ids[: first - 1] + ids[first:], turns[: first - 1] + turns[first:],
    ),
}  # fmt: skip
