"""Ids of tool calls for templates that take nine characters only."""

from __future__ import annotations

import pytest
from templates.checking import tools_of
from templates.families import CONVERSATIONS, FAMILIES, asked, said, tokenizer

from headstart.data.chat.call_ids import nine_characters
from headstart.data.chat.chat import ChatFormat
from headstart.data.chat.rendering import RefusedError


def calls(*ids):
    made = [{"type": "function", "function": {"name": "f", "arguments": {}}} | ({"id": i} if i else {}) for i in ids]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(name=None):
    return {"role": "tool", "content": "1"} | ({"tool_call_id": name} if name else {})


def ids(messages):
    return [[c["id"] for c in m["tool_calls"]] if "tool_calls" in m else m.get("tool_call_id") for m in messages]


def test_an_id_keeps_its_last_nine_letters_and_its_result_has_the_same():
    given = [calls("call_9AbcdefgHIJ", "abcdefgh1"), result("abcdefgh1"), result("call_9AbcdefgHIJ")]
    assert ids(nine_characters(given)) == [["bcdefgHIJ", "abcdefgh1"], "abcdefgh1", "bcdefgHIJ"]
    assert given[0]["tool_calls"][0]["id"] == "call_9AbcdefgHIJ", "the record is as it was"


def test_numbers_are_ids_too():
    assert ids(nine_characters([calls(5), result("5")]))[0] == [ids(nine_characters([calls("5"), result("5")]))[1]]


def test_short_and_missing_ids_get_nine_characters_and_results_follow_their_calls():
    first, one, two = ids(nine_characters([calls(None, "1"), result(), result("1")]))
    assert [one, two] == first and all(len(each) == 9 and each.isalnum() for each in first) and one != two
    (again, *_), lone = ids(nine_characters([calls(None, "1")]))[0], ids(nine_characters([result()]))[0]
    assert again == first[0] and len(lone) == 9


@pytest.mark.parametrize("family", ["mistral v3", "mistral tekken", "mistral v7"])
def test_a_log_with_other_ids_trains_like_one_with_the_template_s(family):
    tokens = tokenizer(family, "bytes")
    chat = ChatFormat(tokens, tokens.convert_tokens_to_ids(list(FAMILIES[family].stops)))
    assert chat.notes == ["ids of tool calls are cut to nine characters (the chat template takes no others)"]
    messages, tools = CONVERSATIONS["parallel"], tools_of(family, "parallel")
    other = [
        {**m, "tool_calls": [{**c, "id": "call_" + c["id"]} for c in m["tool_calls"]]} if "tool_calls" in m
        else {**m, "tool_call_id": "call_" + m["tool_call_id"]} if m["role"] == "tool" else m for m in messages
    ]  # fmt: skip
    assert chat.encode(other, tools=tools) == chat.encode(messages, tools=tools)
    assert chat.prompt_ids(other[:4], tools) == chat.prompt_ids(messages[:4], tools)


def test_other_templates_get_ids_as_they_are():
    for family in ("qwen3", "deepseek v3", "chatml"):
        tokens = tokenizer(family, "bytes")
        chat = ChatFormat(tokens, tokens.convert_tokens_to_ids(list(FAMILIES[family].stops)))
        assert not chat.renderer.form.short_ids


def test_a_wrong_order_of_roles_is_refused_in_the_template_s_words():
    tokens = tokenizer("mistral v3", "bytes")
    chat = ChatFormat(tokens, tokens.convert_tokens_to_ids(["</s>"]))
    with pytest.raises(RefusedError, match="^the chat template refuses it: After the optional system message"):
        chat.encode([asked("Hi"), asked("Bye"), said("Hello")])
