"""What a record holds reaches the rendering, in the form that the template takes, or the loss is told."""

from __future__ import annotations

import json

import pytest
from chat_templates import TEMPLATES

from headstart.data.chat.rendering import Form, RefusedError, Renderer

USER = {"role": "user", "content": "Hi"}
ARGUMENTS = {"city": 'Zürich "x"', "days": [1, 2], "now": True}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Look up now", "parameters": {}}}
RESULT = {"role": "tool", "content": '{"t": 3}', "tool_call_id": "abcdefgh1", "name": "weather"}
THINKING = {"role": "assistant", "content": "<think>\nBe brief\n</think>\n\nHello"}

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
#: how a template writes tool calls → the form in which it takes them
CALLS = {
    # arguments as an object
    "json": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | tojson }}"
             "{% endfor %}", Form()),
    "whole": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}", Form()),
    "tags": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<call=' + c.function.name + '>' }}"
             "{% for k, v in c.function.arguments.items() %}{{ '<arg=' + k + '>' }}"
             "{{ v if v is string else v | tojson }}{% endfor %}{% endfor %}", Form()),
    # as text
    "text": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}"
             "{% endfor %}", Form(text_arguments=True)),
    "any": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}"
            "{% endfor %}", Form(text_arguments=True)),
    # both are taken
    "either": ("{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% if c.function.arguments is "
               "string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
               "{% endfor %}", Form()),
    # an empty content becomes a second answer
    "answer": ("{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}"
               "{% endfor %}{% if m.content is not none %}{{ '<|im_end|>\n<|im_start|>assistant\n' + m.content }}"
               "{% endif %}{% else %}{{ m.content }}{% endif %}", Form(text_arguments=True, no_content=True)),
}  # fmt: skip


def template(body: str, tools: str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}") -> str:
    return tools + HEAD + body + "{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION


def trained(chat, messages, **kwargs) -> list[str]:
    """Text of every supervised turn; each holds one stop token, its last."""
    texts = []
    for encoded in chat.encode(messages, **kwargs):
        for turn in range(max(encoded.turn_ids) + 1):
            ids = [i for i, t in zip(encoded.token_ids, encoded.turn_ids, strict=True) if t == turn]
            assert [n for n, i in enumerate(ids) if i in chat.stop_token_ids] == [len(ids) - 1]
            texts.append(chat.tokenizer.decode(ids))
    return texts


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_arrive_once_in_the_form_that_the_template_takes(make_chat, kind):
    body, form = CALLS[kind]
    chat = make_chat("chatml", template=template(body))
    assert chat.renderer.form == form
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):  # a record may hold either
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        messages = [USER, {**CALLING, "tool_calls": [call]}, RESULT, {"role": "assistant", "content": "Bye"}]
        text = chat.render(messages, tools=[TOOL])
        assert text.count("city") == 1 and '\\"city' not in text and "'city'" not in text
        assert text.count("<|im_end|>") == 4, "one end for every message"
        first, last = trained(chat, messages, tools=[TOOL])
        assert "city" not in last and len(first) > len(last), "the call is trained, and it alone"


def test_a_template_without_stop_tokens_trains_the_whole_call(make_chat):
    body = CALLS["json"][0]
    chat = make_chat("plain", template=template(body).replace("<|im_end|>", ""))
    (encoded,) = chat.encode([USER, CALLING], tools=[TOOL])
    assert encoded.turn_ids[-2:] == [0, -1], "all of it but the newline behind it"


def test_tools_reach_the_rendering(make_chat):
    chat = make_chat("tools")
    messages = [USER, {"role": "assistant", "content": "Bye"}]
    (encoded,) = chat.encode(messages, tools=[TOOL])
    assert len(encoded.token_ids) > len(chat.encode(messages)[0].token_ids)
    assert json.dumps(TOOL) in chat.render(messages, tools=[TOOL])
    ids = chat.prompt_ids(messages[:1], tools=[TOOL])
    assert encoded.token_ids[: len(ids)] == ids and encoded.turn_ids[len(ids)] == 0


def test_a_tokenizer_with_a_template_for_tools_uses_it(make_chat):
    tokenizer = make_chat("chatml").tokenizer
    tokenizer.chat_template = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["tools"]}
    renderer = Renderer(tokenizer)
    assert "weather" in renderer.render([USER], tools=[TOOL])[0] and "weather" not in renderer.render([USER])[0]


def test_each_of_two_templates_says_what_is_trained_in_its_own_way(make_chat):
    chat = make_chat("tagged", template={"default": TEMPLATES["tagged"], "tool_use": TEMPLATES["tools"]})
    messages = [USER, {"role": "assistant", "content": "Bye"}]
    assert trained(chat, messages) == trained(chat, messages, tools=[TOOL]) == ["Bye<|im_end|>"]


def test_parts_are_given_where_text_vanishes(make_chat):
    chat = make_chat("parts")
    assert chat.notes == ["contents are given as lists of text parts (the chat template drops plain text)"]
    assert trained(chat, [USER, {"role": "assistant", "content": "Hello there."}]) == ["Hello there.<|im_end|>"]
    assert make_chat("chatml").notes == []


STRIPPING = template("{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}")
LOST = {
    "the tools": ("chatml", [USER, {"role": "assistant", "content": "Bye"}]),
    "the system message": (
        template("{{ m.content if m.role != 'system' }}"),
        [{"role": "system", "content": "Be kind"}, USER, {"role": "assistant", "content": "Bye"}],
    ),
    "the developer message": (
        template("{{ m.content if m.role != 'developer' }}"),
        [{"role": "developer", "content": "Be kind"}, USER, {"role": "assistant", "content": "Bye"}],
    ),
    "a user message": (template("{{ m.content if not loop.first }}"), [USER, {"role": "assistant", "content": "Bye"}]),
    "a tool's result": (
        template(CALLS["json"][0].replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")),
        [USER, CALLING, RESULT, {"role": "assistant", "content": "Bye"}],
    ),
    "the tool calls of an answer": (template("{{ m.content }}"), [USER, CALLING]),
    "the reasoning of an answer": (
        template("{{ m.content }}"), [USER, {"role": "assistant", "content": "Bye", "reasoning_content": "Be brief"}],
    ),
    "the thoughts of an answer": (STRIPPING, [USER, THINKING]),
    "an answer": (
        template(CALLS["json"][0].replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")),
        [USER, {**CALLING, "content": "Bye"}],
    ),
    "an earlier answer": (
        template("{{ m.content if m.role != 'assistant' or loop.last }}"),
        [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"},
         {"role": "assistant", "content": "Bye bye"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST)
def test_what_a_template_leaves_out_is_the_reason_of_a_refusal(make_chat, lost):
    source, messages = LOST[lost]
    chat = make_chat("chatml", template=TEMPLATES.get(source, source))
    with pytest.raises(RefusedError) as refused:
        chat.encode(messages, turns="last", tools=[TOOL] if lost == "the tools" else ())
    assert refused.value.reason == f"the chat template leaves out {lost}"


def test_thoughts_that_the_trained_answer_keeps_are_no_loss_and_may_leave_the_history(make_chat):
    messages = [USER, THINKING, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Bye bye"}]
    first, second = make_chat("qwen3").encode(messages)
    assert 0 in first.turn_ids and 0 in second.turn_ids
    chat = make_chat("chatml", template=STRIPPING)
    chat.encode(messages, turns="last")  # they are of an earlier answer
    with pytest.raises(RefusedError, match="leaves out the thoughts of an answer"):
        chat.encode(messages)


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ m.content | escape }}",
        "{{ m.content.split() | join(' ') }}",
        "{{ m.content | replace('\n', '\n> ') if m.role == 'system' else m.content }}",
    ],
    ids=["trimmed", "json", "escaped", "folded", "untouched"],
)
def test_what_is_only_written_in_another_way_is_no_loss(make_chat, body):
    chat = make_chat("chatml", template=template(body))
    messages = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "  Hi  there,\n\n\"fast\" <b> & 'slow'\t"},
        {"role": "assistant", "content": " Hello\nthere: a < b && c "},
        {"role": "user", "content": '{"a": [1, "ü"]}'},
        {"role": "assistant", "content": "Bye"},
    ]
    assert len(chat.encode(messages)) == 1


def test_a_prompt_that_loses_a_part_is_refused(make_chat):
    chat = make_chat("chatml")
    assert chat.prompt_ids([USER])
    with pytest.raises(RefusedError, match="leaves out the tools"):
        chat.prompt_ids([USER], tools=[TOOL])
    with pytest.raises(RefusedError, match="leaves out the tool calls of an earlier answer"):
        chat.prompt_ids([USER, CALLING, RESULT])


def test_a_prompt_that_opens_the_thoughts_takes_answers_that_have_some(make_chat):
    body = (
        "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}{{ m.content }}"
    )
    opened = template(body).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    chat = make_chat("chatml", template=opened)
    answer = {"role": "assistant", "content": "Hello", "reasoning_content": "Be brief"}
    assert trained(chat, [USER, answer]) == ["Be brief\n</think>\nHello<|im_end|>"]
    with pytest.raises(RefusedError, match="is not the beginning of the text with the answer"):
        chat.encode([USER, {"role": "assistant", "content": "Hello"}])


NESTED = (
    "{% macro write(v) %}{% if v is mapping %}{% for k, x in v.items() %}{{ k }}:{{ write(x) }},{% endfor %}"
    "{% elif v is string %}'{{ v }}'{% elif v is iterable %}[{% for x in v %}{{ write(x) }},{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


def test_nested_arguments_may_be_written_in_a_way_of_the_templates_own(make_chat):
    body = CALLS["json"][0].replace("c.function.arguments | tojson", "write(c.function.arguments)")
    deep = {"where": {"city": "Zürich", "near": ["now", {"day": 1}]}, "none": None, "empty": {}}
    messages = [USER, {**CALLING, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": deep}}]}]
    chat = make_chat("chatml", template=NESTED + template(body))
    assert len(trained(chat, messages)) == 1
    assert chat.render(messages).endswith(
        "weatherwhere:city:'Zürich',near:['now',day:1,,],,none:null,empty:,<|im_end|>\n"
    )
    shallow = NESTED.replace("[{% for x in v %}{{ write(x) }},{% endfor %}]", "[…]")
    with pytest.raises(RefusedError, match="leaves out the tool calls of an answer"):
        make_chat("chatml", template=shallow + template(body)).encode(messages)


def test_a_result_may_stand_before_what_was_said_with_its_call(make_chat):
    """Gemma 4: call, result and only then the content of the message that called."""
    calls = CALLS["json"][0].removeprefix("{{ m.content }}")
    result = "{{ m.content }}{{ messages[loop.index0 - 1].content if m.role == 'tool' }}"
    body = f"{{% if m.tool_calls %}}{calls}{{{{ m.content if loop.last }}}}{{% else %}}{result}{{% endif %}}"
    messages = [USER, {**CALLING, "content": "Be kind"}, RESULT, {"role": "assistant", "content": "Bye"}]
    assert trained(make_chat("chatml", template=template(body)), messages)[-1] == "Bye<|im_end|>"
    lost = template(body.replace("{{ m.content }}{{ mess", "{{ m.content if m.role != 'tool' }}{{ mess"))
    with pytest.raises(RefusedError, match="leaves out a tool's result"):
        make_chat("chatml", template=lost).encode(messages)
