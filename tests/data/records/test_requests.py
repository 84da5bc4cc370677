"""Request logs, batch files, Alpaca and mapped columns: right messages, and refusals that name the field."""

from __future__ import annotations

import copy
import json
import random

import pytest

from headstart.data.config import SourceConfig
from headstart.data.records.conversation import parse_record
from headstart.data.sources.sources import load_conversations
from headstart.heads.errors import ConfigError, DataError, HeadstartError
from tests.reference.hostile import VALUES, within_seconds

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "m", "temperature": 0.3, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False},
    "messages": [{"role": "system", "content": "Be kind"}, HI],
}  # fmt: skip
ANSWER = {
    "id": "chatcmpl-1",
    "choices": [{"index": 0, "message": {**HELLO, "reasoning_content": "Hm"}, "finish_reason": "length"}],
}
LOG = {"id": "r1", "request": CHAT, "response": ANSWER}
RESPONSES = {
    "request": {
        "instructions": "Be kind", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "input": [
            HI, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
    },
    "response": {
        "status": "incomplete",
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        ],
    },
}  # fmt: skip


def said(record):
    return list(parse_record(record, "f:1", "f:1").messages)


@pytest.mark.parametrize(
    "record",
    [
        LOG,
        {"id": "r1", "request": json.dumps(CHAT), "response": json.dumps(ANSWER)},
        {"id": "r1", "request": {"method": "POST", "body": CHAT}, "response": {"status_code": 200, "body": ANSWER}},
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT,
         "response": {"status_code": 200, "request_id": "x", "body": ANSWER}, "error": None},
    ],
    ids=["log", "JSON text", "HTTP", "batch"],
)  # fmt: skip
def test_request_and_response(record):
    conversation = parse_record(record, "f:1", "f:1")
    assert list(conversation.messages) == [*CHAT["messages"], {**HELLO, "reasoning_content": "Hm"}]
    assert (conversation.id, conversation.finish_reason, conversation.unread) == ("r1", "length", ())
    assert conversation.tools == (TOOL,) and conversation.template_kwargs == {"enable_thinking": False}


def test_a_request_alone_is_a_prompt_and_text_is_an_answer():
    assert said({"request": {"messages": [HI]}}) == said({"custom_id": "a", "body": {"input": "Hi"}}) == [HI]
    assert said({"request": {"messages": [HI]}, "response": None}) == [HI]
    assert said({"request": {"messages": [HI]}, "response": "Hello"}) == [HI, HELLO]
    assert said({"request": {"messages": [HI]}, "response": HELLO}) == [HI, HELLO]


def test_tool_calls_in_a_response():
    (_, answer) = said({
        "request": {"messages": [HI]},
        "response": {"choices": [{"finish_reason": "tool_calls", "message": {
            "role": "assistant", "content": None, "tool_calls": [CALL]}}]},
    })  # fmt: skip
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}} and answer["content"] == ""


def test_the_responses_api():
    before = copy.deepcopy(RESPONSES)
    conversation = parse_record(RESPONSES, "f:1", "f:1")
    system, user, call, result, answer = conversation.messages
    assert (system, user, answer) == ({"role": "system", "content": "Be kind"}, HI, HELLO)
    assert call["reasoning_content"] == "Add." and call["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert conversation.finish_reason == "length" and conversation.tools == (TOOL,) and before == RESPONSES


def test_two_calls_of_one_turn_stay_one_message():
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "add", "arguments": "{}"} for n in range(2)]
    _, made = said({"request": {"input": [HI, *calls]}})
    assert [call["id"] for call in made["tool_calls"]] == ["c0", "c1"]


def test_further_choices_are_told():
    record = copy.deepcopy(LOG)
    record["response"]["choices"] *= 2
    assert parse_record(record, "f:1", "f:1").unread == ("response.choices",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"request": {}}, "request: found an object, expected an object in OpenAI's form"),
        ({"request": "GET /"}, "request: found text, expected an object"),
        ({"request": {"model": "m"}}, "request: found fields 'model', expected messages or input"),
        ({"request": {"prompt": "x"}}, "request.prompt: found a prompt that no chat template writes"),
        ({"request": {"messages": []}}, "request.messages: found an empty list"),
        ({"request": {"messages": [HI, {"role": "bot"}]}}, r"request.messages\[1\].role: found 'bot'"),
        ({"body": {"messages": [HI]}, "response": {"status_code": 429, "body": {"x": 1}}},
         r"response.body: found an error \(status 429\), expected an answer"),
        ({"body": {"messages": [HI]}, "response": {"error": {"message": "x"}}}, "response: found an error, expected"),
        ({"request": {"messages": [HI]}, "response": {"choices": []}}, "response: found fields 'choices', expected"),
        ({"request": {"messages": [HI]}, "response": {"choices": [5]}}, r"response.choices\[0\]: found int 5"),
        ({"request": {"messages": [HI]}, "response": {"choices": [{}]}}, r"choices\[0\].message: found nothing"),
        ({"request": {"input": [{"type": "web_search_call"}]}}, r"input\[0\].type: found 'web_search_call'"),
        ({"custom_id": "a", "response": {"body": ANSWER}}, "the output of a batch, join each line"),
    ],
)  # fmt: skip
def test_refusals(record, message):
    with pytest.raises(DataError, match="f:1: .*" + message):
        parse_record(record, "f:1", "f:1")


def places(value, way=()):
    yield way
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*way, key))


@pytest.mark.parametrize("record", [LOG, RESPONSES, {"body": CHAT, "response": {"body": ANSWER}}])
def test_any_value_anywhere_is_read_or_refused(record):
    read = 0
    for way in places(record):
        for value in random.Random(str(way)).sample(VALUES, 12) if way else ():
            changed = copy.deepcopy(record)
            inside = changed
            for key in way[:-1]:
                inside = inside[key]
            inside[way[-1]] = value
            try:
                with within_seconds(5):
                    read += bool(parse_record(changed, "f:1", "f:1"))
            except HeadstartError as error:
                assert str(error).startswith("f:1: ") and len(str(error)) < 1000
    assert read > 50


def test_alpaca_and_input_output():
    assert said({"instruction": "Hi", "input": "", "output": "Hello"}) == [HI, HELLO]
    assert said({"instruction": "Hi", "response": "Hello"}) == said({"input": "Hi", "output": "Hello"}) == [HI, HELLO]
    assert said({"instruction": "A", "input": "b", "output": "c"})[0]["content"] == "A\n\nb"
    with pytest.raises(DataError, match="f:1: output: found int 5, expected text"):
        said({"instruction": "Hi", "output": 5})
    with pytest.raises(DataError, match="f:1: input: found int 5, expected text"):
        said({"input": 5, "output": "Hello"})


def mapped(path, **columns):
    return list(load_conversations([SourceConfig(path=str(path), columns=columns)]))


def test_columns(write_jsonl):
    path = write_jsonl([
        {"question": "Hi", "answer": "Hello", "messages": "not ours", "id": "a"},
        {"question": "Hi", "answer": None, "id": "b"},
    ])  # fmt: skip
    first, second = mapped(path, prompt="question", response="answer")
    assert (list(first.messages), list(second.messages)) == ([HI, HELLO], [HI])
    assert (first.id, second.id, first.unread) == ("a", "b", ())
    path = write_jsonl([{"log": {"in": [HI], "out": {"choices": [{"text": "Hello"}]}}, "key": 7}])
    (nested,) = mapped(path, prompt="log.in.0.content", response="log.out.choices.0.text", id="key")
    assert (list(nested.messages), nested.id) == ([HI, HELLO], "7")


def test_columns_that_are_not_there(write_jsonl):
    path = write_jsonl([{"question": "Hi"}, {"q": "Hi"}])
    with pytest.raises(DataError, match="data.jsonl:2: found fields 'q', expected 'question': correct columns.prompt"):
        mapped(path, prompt="question")
    with pytest.raises(DataError, match="data.jsonl:1: .*expected 'question.x': correct columns.prompt"):
        mapped(path, prompt="question.x")
    for columns, message in (({"x": "y"}, "found x, expected one of"), ({}, "expected {OURS"), ({"prompt": 5}, "5")):
        with pytest.raises(ConfigError, match=r"data.sources\[0\].columns.*" + message):
            mapped(path, **columns)


def test_messages_as_text_in_a_column(write_jsonl):
    path = write_jsonl([{"messages": json.dumps([HI, HELLO])}])
    (conversation,) = load_conversations([SourceConfig(path=str(path))])
    assert list(conversation.messages) == [HI, HELLO]
