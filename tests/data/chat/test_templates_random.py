"""Random conversations through the templates of all families: each trains as served, or is refused with a reason."""

from __future__ import annotations

import random
from typing import Any

import pytest
from templates.checking import by_serving, chat_of, tokenizer
from templates.expected import EXPECTED
from templates.families import TOOL, asked, calling, found, said

from headstart.data.chat.rendering import RefusedError

TEXTS = (
    "Hi", "Hello there.", "\nHi", "\n\nHello", " Hi ", "", "Bye bye\n", "<think>\nGreet.\n</think>\n\nHi", "[/INST] x",
    "</think>", "<|im_end|>", "Hi</s>", '{"a": 1}', "\t", "<think>", "'\"<&>", "Part.</think>Hi",
)  # fmt: skip
ARGUMENTS: tuple[Any, ...] = ({}, "no json", {"city": {"x": [1, None, True]}})


def conversation(dice: random.Random) -> list[dict[str, Any]]:
    """One to three questions, some with calls and results, thoughts, and texts that look like marks."""
    messages = []
    if dice.random() < 0.3:
        messages.append({"role": dice.choice(("system", "developer")), "content": dice.choice(TEXTS)})
    for _ in range(dice.choice((1, 1, 2, 3))):
        messages.append(asked(dice.choice(TEXTS)))
        cities = dice.choice((("Rome",), ("Rome", "Oslo")))
        if dice.random() < 0.3:
            messages.append(call(dice, *cities))
            for city in cities:
                result = found(city, dice.choice(TEXTS))
                messages.append({k: v for k, v in result.items() if k != "tool_call_id" or dice.random() < 0.7})
        messages.append(said(dice.choice(TEXTS), dice.choice(TEXTS) if dice.random() < 0.4 else None))
    return messages


def call(dice: random.Random, *cities: str) -> dict[str, Any]:
    made = calling(*cities, thoughts=dice.choice(TEXTS) if dice.random() < 0.3 else None)
    if dice.random() < 0.3:
        made["content"] = dice.choice(TEXTS)
    if dice.random() < 0.3:
        made["tool_calls"] = [{k: v for k, v in each.items() if k != "id"} for each in made["tool_calls"]]
    if dice.random() < 0.2:
        made["tool_calls"][0] |= {"function": {"name": "weather", "arguments": dice.choice(ARGUMENTS)}}
    return made


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "sentencepiece", "metaspace"])
def test_every_conversation_trains_as_served_or_is_refused(kind):
    dice, trained = random.Random(kind), 0
    for family in EXPECTED:
        chat, tokens = chat_of(family, kind), tokenizer(family, kind)
        for _ in range(12):
            messages, tools = conversation(dice), [TOOL] if dice.random() < 0.4 else []
            try:
                encoded = chat.encode(messages, tools=tools)
            except RefusedError as error:
                assert error.reason.startswith(("the chat template ", "chat template: ", "a token reaches over"))
                continue
            samples = [(each.token_ids, each.turn_ids) for each in encoded]
            complaints = by_serving(family, tokens, samples, chat.renderer.prepared(messages), tools)
            # a text may hold a stop token; GLM-4 writes nothing of an empty question, whose mark would end the answer
            known = ("a stop token within it", "is not a stop token")[: 1 + (family == "glm4")]
            wrong = [each for each in complaints if not each.endswith(known)]
            assert wrong == [], (family, messages)
            trained += 1
    assert trained > 60
