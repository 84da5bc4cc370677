"""Answers behind prompts that the template writes otherwise once they are answered: texts by hand."""

from __future__ import annotations

import pytest
from chat_templates import TEMPLATES

from headstart.data.chat.rendering import RefusedError
from headstart.heads.errors import TemplateError

ASK = {"role": "user", "content": "Hi"}
#: the prompt ends with WORDS, and no answer in a history has them
APART = TEMPLATES["chatml"].replace("assistant\n' }}{% endif", "assistant\n' + WORDS }}{% endif")
START = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def texts(make_chat, words: str, answer: dict, template: str = APART) -> tuple[str, str]:
    """The text before the supervised tokens, and these."""
    chat = make_chat("chatml", template=template.replace("WORDS", repr(words)))
    (encoded,) = chat.encode([ASK, {"role": "assistant", **answer}])
    first = encoded.turn_ids.index(0)
    past = len(encoded.turn_ids) - encoded.turn_ids[::-1].index(0)
    return tuple(chat.tokenizer.decode(ids) for ids in (encoded.token_ids[:first], encoded.token_ids[first:past]))


@pytest.mark.parametrize(
    ("answer", "own"),
    [
        ({"content": "Hello", "reasoning_content": "Be brief"}, "Be brief\n</think>\n\nHello<|im_end|>"),
        ({"content": "Hello", "reasoning_content": "\nBe brief\n\n"}, "Be brief\n</think>\n\nHello<|im_end|>"),
        # what the model said stays as it was
        ({"content": "<think>\nBe brief\n</think>\n\nHello"}, "Be brief\n</think>\n\nHello<|im_end|>"),
        ({"content": "Be brief</think>Hello"}, "Be brief</think>Hello<|im_end|>"),
        ({"content": "<think>Be brief \n</think>\nHello"}, "Be brief \n</think>\nHello<|im_end|>"),
    ],
)
def test_thoughts_that_the_prompt_begins_are_the_answer_s(make_chat, answer, own):
    assert texts(make_chat, "<think>\n", answer) == (START + "<think>\n", own)


def test_white_space_around_thoughts_is_as_wide_as_the_prompt_s(make_chat):
    answer = {"content": "Hello", "reasoning_content": "Be brief"}
    assert texts(make_chat, "<think>", answer) == (START + "<think>", "Be brief</think>Hello<|im_end|>")


@pytest.mark.parametrize(
    "words", ["<think>\n\n</think>\n\n", "<think></think>", "<|channel>thought\n<channel|>", "[THINK][/THINK]",
              "<|START_THINKING|><|END_THINKING|>"],
)  # fmt: skip
def test_behind_closed_thoughts_the_answer_alone_trains(make_chat, words):
    assert texts(make_chat, words, {"content": "Hello"})[1] == "Hello<|im_end|>"
    with pytest.raises(RefusedError, match="its prompt closes the model's thoughts, and the answer has some"):
        texts(make_chat, words, {"content": "Hello", "reasoning_content": "Be brief"})


def test_words_that_are_no_thoughts_are_refused(make_chat):
    for words in ("Be brief ", "<think>\nBe brief", "</think>"):
        with pytest.raises(TemplateError, match="is not the beginning of the text with the answer"):
            texts(make_chat, words, {"content": "Hello", "reasoning_content": "Be brief"})


def test_a_question_that_ends_as_thoughts_begin_changes_nothing(make_chat):
    chat = make_chat("chatml")
    (encoded,) = chat.encode([{"role": "user", "content": "One <think>"}, {"role": "assistant", "content": "Hello"}])
    assert encoded.turn_ids.count(0) == 2


#: an instruction stands behind the last message, whoever said it
FOOT = TEMPLATES["chatml"].replace("{% if add_gen", "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% if add_gen")


def test_words_behind_the_last_message_stand_before_the_answer(make_chat):
    before, own = texts(make_chat, "", {"content": "Hello"}, FOOT)
    instruction = "<|im_start|>system\nBe brief<|im_end|>\n"
    assert before == START.removesuffix("<|im_start|>assistant\n") + instruction + "<|im_start|>assistant\n"
    assert own == "Hello<|im_end|>"
    chat = make_chat("chatml", template=FOOT)
    more = [ASK, {"role": "assistant", "content": "Hello"}, ASK, {"role": "assistant", "content": "Bye"}]
    first, second = chat.encode(more)
    for encoded, size in ((first, 1), (second, 3)):
        assert encoded.token_ids[: encoded.turn_ids.index(0)] == chat.prompt_ids(more[:size])
    # an instruction that counts the messages is another one behind the answer
    counting = FOOT.replace("Be brief<", "' + messages | length | string + '<")
    with pytest.raises(TemplateError, match="is not the beginning of the text with the answer"):
        make_chat("chatml", template=counting).encode(more)
