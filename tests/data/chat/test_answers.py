"""A generated answer as a message of the history: by the template's own rules, or refused."""

from __future__ import annotations

import pytest
from chat_templates import TEMPLATES
from templates.checking import chat_of, encode, tools_of
from templates.expected import EXPECTED
from templates.families import CONVERSATIONS, asked

from headstart.data.chat.rendering import RefusedError

THOUGHTS = "<think>\nBe brief\n</think>\n\nHello there."
GPT_OSS_LIKE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "{{ '<s>think</s>' + m.thinking + '[INST]' }}{% endif %}{{ '<s>Answer</s>' + m.content + '<|im_end|>' }}"
    "{% else %}{{ '<s>' + m.role + '</s>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


def ids(chat, text: str) -> list[int]:
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3", "gemma", "mistral", "plain", "tagged", "parts"])
def test_plain_text_is_the_content(make_chat, family):
    chat = make_chat(family)
    for text in ("Hello there.", " Hello\n\nthere. ", ""):
        assert chat.answer_message(ids(chat, text)) == {"role": "assistant", "content": text}


def test_thoughts_are_kept_apart_where_the_template_drops_them(make_chat):
    apart = {"role": "assistant", "content": "Hello there.", "reasoning_content": "Be brief"}
    qwen = make_chat("qwen3")
    assert qwen.answer_message(ids(qwen, THOUGHTS)) == apart
    assert qwen.answer_message(ids(qwen, THOUGHTS.removeprefix("<think>\n"))) == apart, "opened by the prompt"
    after = [{"role": "user", "content": "Hi"}, apart, {"role": "user", "content": "Bye"}]
    assert "Be brief" not in qwen.render(after, add_generation_prompt=True)
    plain = make_chat("chatml")
    assert plain.answer_message(ids(plain, THOUGHTS)) == {"role": "assistant", "content": THOUGHTS}


#: Nemotron 3 and others: the prompt opens the thoughts, and a history keeps what is given as text
OPENED = (
    TEMPLATES["chatml"]
    .replace(
        "message['content'] +",
        "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + "
        "message['content'] +",
    )
    .replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
)


def test_an_answer_that_goes_on_with_the_thoughts_of_its_prompt_leaves_no_loose_end_in_a_history(make_chat):
    chat = make_chat("chatml", template=OPENED)
    apart = {"role": "assistant", "content": "Hello there.", "reasoning_content": "Be brief"}
    assert chat.answer_message(ids(chat, "Be brief\n</think>\n\nHello there.")) == apart
    assert chat.answer_message(ids(chat, "\n</think>\n\nHello there.")) == {**apart, "reasoning_content": ""}
    ask = {"role": "user", "content": "Hi"}
    assert "<think>Be brief</think>Hello there.<|im_end|>" in chat.render([ask, apart, ask])


@pytest.mark.parametrize(("template", "text"), [(OPENED, "Be brief"), (TEMPLATES["qwen3"], "<think>\nBe brief")])
def test_an_answer_that_was_cut_in_its_thoughts_is_no_history(make_chat, template, text):
    chat = make_chat("chatml", template=template)
    with pytest.raises(RefusedError, match="ends within its thoughts"):
        chat.answer_message(ids(chat, text))


def test_special_tokens_are_refused_not_merged_into_the_text(make_chat):
    chat = make_chat("chatml", template=GPT_OSS_LIKE)
    with pytest.raises(RefusedError, match=r"special tokens that cannot be put into a history.*response_template"):
        chat.answer_message(ids(chat, "think</s>Be brief[INST]<s>Answer</s>Hello there."))


def test_the_tokenizers_own_rules_parse_an_answer(make_chat):
    chat = make_chat("chatml", template=GPT_OSS_LIKE)
    chat.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<s>",
        "fields": {
            "thinking": {"open": "think</s>", "close": "[INST]"},
            "content": {"open": "Answer</s>", "close": "<|im_end|>"},
        },
    }
    answer = ids(chat, "think</s>Be brief[INST]<s>Answer</s>Hello there.")
    assert chat.answer_message(answer) == {
        "role": "assistant", "content": "Hello there.", "reasoning_content": "Be brief"
    }  # fmt: skip


def test_an_answer_that_the_template_would_not_write_is_refused(make_chat):
    template = TEMPLATES["chatml"].replace("message['content'] +", "message['content'].split('Hello')[0] +")
    chat = make_chat("chatml", template=template)
    with pytest.raises(RefusedError, match="leaves out an earlier answer"):
        chat.answer_message(ids(chat, "Bye Hello"))


#: their marks of tool calls are special tokens, and no rules say how to read them
UNREAD_CALLS = ("llama4", "mistral v3", "mistral tekken", "mistral v7", "phi4 mini", "deepseek v3", "deepseek v3.1")


@pytest.mark.parametrize("family", EXPECTED)
def test_a_generated_answer_in_a_history_is_what_the_template_writes_of_the_record(family):
    chat, compared = chat_of(family, "bytes"), 0
    for name, expected in EXPECTED[family].items():
        if isinstance(expected, str):
            continue
        messages, tools = [*CONVERSATIONS[name], asked("More")], tools_of(family, name)
        turns = [
            [token for token, turn in zip(tokens, turns, strict=True) if turn == number]
            for tokens, turns in encode(family, name, "bytes") for number in sorted(set(turns) - {-1})
        ]  # fmt: skip
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index, own in zip(answers, turns, strict=True):
            stopped = own[-1] in chat.stop_token_ids
            try:
                message = chat.answer_message(own[:-1] if stopped else own)
            except RefusedError as error:
                assert family in UNREAD_CALLS and "tool_calls" in messages[index], error
                continue
            following = next((later for later in answers if later > index), len(messages))
            said = [*messages[:index], message, *messages[index + 1 : following]]
            # Command R's calls have no end
            assert stopped is (chat.prompt_ids(said, tools) == chat.prompt_ids(messages[:following], tools))
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("text", [
    "<|channel|>analysis<|message|>Look.", "<|channel|>final", "Hi<|channel|>", "<|channel|>secret<|message|>Hi",
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant",
])  # fmt: skip
def test_an_answer_that_ends_before_its_last_channel_is_refused(text):
    with pytest.raises(RefusedError, match="an answer ends within its thoughts"):
        chat_of("gpt-oss", "bytes").answer_message(ids(chat_of("gpt-oss", "bytes"), text))


def test_channels_in_the_order_of_the_model_itself_are_read():
    chat = chat_of("gpt-oss", "bytes")
    text = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    assert chat.answer_message(ids(chat, text))["tool_calls"][0]["function"] == {
        "name": "weather", "arguments": '{"city": "Rome"}',
    }  # fmt: skip
