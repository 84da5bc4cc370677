"""Harmony's messages by channel, as one message an answer."""

from __future__ import annotations

import copy
import random

import pytest

from headstart.data.records.conversation import parse_record
from headstart.heads.errors import DataError, HeadstartError
from tests.reference.hostile import VALUES, within_seconds

CONVERSATION = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "channel": "analysis", "content": [{"type": "text", "text": "Add them."}]},
    {"role": "assistant", "channel": "commentary", "recipient": "functions.add", "content": '{"a": 1}',
     "content_type": "<|constrain|>json"},
    {"author": {"role": "tool", "name": "functions.add"}, "recipient": "assistant", "channel": "commentary",
     "content": "2"},
    {"role": "assistant", "channel": "analysis", "content": "It is 2."},
    {"role": "assistant", "channel": "final", "content": "2"},
]  # fmt: skip


def said(messages, **more):
    return list(parse_record({"messages": messages, **more}, "f:1", "f:1").messages)


def test_channels_become_thoughts_calls_and_text():
    before = copy.deepcopy(CONVERSATION)
    user, call, result, answer = said(CONVERSATION)
    assert user == CONVERSATION[0]
    function = {"name": "add", "arguments": {"a": 1}}
    assert call == {
        "role": "assistant", "content": "", "reasoning_content": "Add them.",
        "tool_calls": [{"type": "function", "function": function}],
    }  # fmt: skip
    assert result == {"role": "tool", "name": "add", "content": "2"}
    assert answer == {"role": "assistant", "content": "2", "reasoning_content": "It is 2."}
    assert before == CONVERSATION and parse_record({"messages": CONVERSATION}, "f:1", "f:1").unread == ()


def test_a_preamble_and_two_calls_are_one_answer():
    calls = [
        {"role": "assistant", "channel": "commentary", "recipient": f"functions.f{n}", "content": "{}"} for n in (1, 2)
    ]
    _, answer = said([CONVERSATION[0], {"role": "assistant", "channel": "commentary", "content": "I look."}, *calls])
    assert answer["content"] == "I look." and [c["function"]["name"] for c in answer["tool_calls"]] == ["f1", "f2"]


def test_answers_in_a_row_without_channels_stay_apart():
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "assistant", "reasoning_content": "c", "content": "d"}]  # fmt: skip
    assert said(plain) == plain


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"channel": "secret", "content": "x"}, r"messages\[1\].channel: found 'secret', expected one of analysis"),
        ({"recipient": "browser.open", "content": "x"}, r"messages\[1\].recipient: found 'browser.open'"),
        ({"channel": "analysis", "content": 5}, r"messages\[1\].content: found int 5, expected text"),
        ({"channel": "final", "content": [{"type": "developer_content"}]}, "found a part of type developer_content"),
    ],
)
def test_refusals(message, found):
    with pytest.raises(DataError, match="f:1: " + ".*" + found):
        said([CONVERSATION[0], {"role": "assistant", **message}])


def test_any_value_in_any_field_is_read_or_refused():
    dice, read = random.Random(0), 0
    for _ in range(600):
        messages = copy.deepcopy(CONVERSATION)
        message = dice.choice(messages)
        message[dice.choice([*message, "channel", "recipient", "author"])] = dice.choice(VALUES)
        try:
            with within_seconds(5):
                read += len(said(messages)) > 0
        except HeadstartError as error:
            assert str(error).startswith("f:1: ") and len(str(error)) < 1000
    assert 50 < read < 600
