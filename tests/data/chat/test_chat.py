"""Which tokens are the assistant's: expected masks written out token by token."""

from __future__ import annotations

import pytest
import torch
from chat_templates import TEMPLATES

from headstart.data.chat.chat import ChatFormat
from headstart.data.chat.rendering import RefusedError
from headstart.heads.errors import TemplateError
from headstart.heads.positions import supervised_depths

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye bye"},
]


def marked(chat, encoded) -> str:
    """Tokens separated by `|`; every turn's tokens between `«n:` and `»`; newlines shown as ⏎."""
    out, open_turn = [], -1
    for token, turn in zip(encoded.token_ids, encoded.turn_ids, strict=True):
        if turn != open_turn and open_turn >= 0:
            out[-1] += "»"
        piece = chat.tokenizer.decode([token]).replace("\n", "⏎")
        out.append(f"«{turn}:{piece}" if turn >= 0 and turn != open_turn else piece)
        open_turn = turn
    if open_turn >= 0:
        out[-1] += "»"
    return "|".join(out)


def one(chat, messages, *arguments, **kwargs) -> str:
    (encoded,) = chat.encode(messages, *arguments, **kwargs)
    return marked(chat, encoded)


SYSTEM = "<|im_start|>|system|⏎|Be| kind|<|im_end|>|⏎|"
CHATML = SYSTEM + (
    "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|"
    "<|im_start|>|assistant|⏎|«0:Hello| there|.|<|im_end|>»|⏎|"
    "<|im_start|>|user|⏎|Bye|<|im_end|>|⏎|<|im_start|>|assistant|⏎|«1:Bye| bye|<|im_end|>»|⏎"
)
EXPECTED = {
    "chatml": CHATML,
    "llama3": (
        "<|begin_of_text|>|<|start_header_id|>|user|<|end_header_id|>|⏎⏎|Hi|<|eot_id|>|"
        "<|start_header_id|>|assistant|<|end_header_id|>|⏎⏎|«0:Hello| there|.|<|eot_id|>»|"
        "<|start_header_id|>|user|<|end_header_id|>|⏎⏎|Bye|<|eot_id|>|"
        "<|start_header_id|>|assistant|<|end_header_id|>|⏎⏎|«1:Bye| bye|<|eot_id|>»"
    ),
    "gemma": (
        "<bos>|<start_of_turn>|user|⏎|Hi|<end_of_turn>|⏎|<start_of_turn>|model|⏎|«0:Hello| there|.|<end_of_turn>»|⏎|"
        "<start_of_turn>|user|⏎|Bye|<end_of_turn>|⏎|<start_of_turn>|model|⏎|«1:Bye| bye|<end_of_turn>»|⏎"
    ),
    "mistral": "<s>|[INST]| Hi| |[/INST]|«0: Hello| there|.|</s>»|[INST]| Bye| |[/INST]|«1: Bye| bye|</s>»",
    "tagged": CHATML.removeprefix(SYSTEM),
    "tagged_wide": CHATML.removeprefix(SYSTEM),
    "phi3": (
        "<s>|user|⏎|Hi|<|im_end|>|⏎|<s>|assistant|⏎|«0:Hello| there|.|<|im_end|>»|⏎|"
        "<s>|user|⏎|Bye|<|im_end|>|⏎|<s>|assistant|⏎|«1:Bye| bye|<|im_end|>»|⏎"
    ),
    "plain": "user|:|Hi|⏎⏎|assistant|:|«0:Hello| there|.»|⏎⏎|user|:|Bye|⏎⏎|assistant|:|«1:Bye| bye»|⏎⏎",
}


@pytest.mark.parametrize("family", EXPECTED)
def test_mask_token_by_token(make_chat, family):
    chat = make_chat(family)
    assert one(chat, TWO_TURNS) == EXPECTED[family]


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "mistral", "tagged", "plain"])
def test_first_draft_of_every_turn_trains_and_nothing_after_its_end(make_chat, family):
    (encoded,) = make_chat(family).encode(TWO_TURNS)
    turn_R = torch.tensor(encoded.turn_ids)
    depths = supervised_depths(turn_R, torch.zeros_like(turn_R), 8).tolist()
    for turn in (0, 1):
        first, last = encoded.turn_ids.index(turn), len(encoded.turn_ids) - 1 - encoded.turn_ids[::-1].index(turn)
        length = last - first + 1
        assert depths[first - 1] == length - 1, "the last prompt token drafts the whole answer after its root"
        assert depths[first:last] == list(range(length - 2, -1, -1)), "no label lies beyond the end-of-turn token"
        assert depths[last] == 0
    assert sum(d > 0 for d in depths) == sum(t >= 0 for t in encoded.turn_ids) - 2, (
        "a turn of n tokens has n - 1 anchors"
    )


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_pad_token_missing_or_equal_to_eos_changes_nothing(make_chat, pad):
    assert one(make_chat("chatml", pad=pad), TWO_TURNS) == CHATML


def test_answer_cut_by_length_has_no_end(make_chat):
    text = one(make_chat("chatml"), TWO_TURNS, "length")
    assert text == CHATML.removesuffix("|<|im_end|>»|⏎") + "»"
    assert one(make_chat("plain"), TWO_TURNS, "length").endswith("«1:Bye| bye»")
    assert one(make_chat("mistral"), TWO_TURNS, "length").endswith("[/INST]|«1: Bye| bye»")
    assert one(make_chat("tagged"), TWO_TURNS, "length").endswith("«1:Bye| bye»")


def test_only_the_last_turn(make_chat):
    assert one(make_chat("chatml"), TWO_TURNS, turns="last") == CHATML.replace("«0:", "").replace("»", "", 1).replace(
        "«1:", "«0:"
    )


THOUGHTS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "Be brief"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "<think>\nBe kind\n</think>\n\nBye bye"},
]
QWEN_FIRST = (
    "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|"
    "<|im_start|>|assistant|⏎|«0:<think>|⏎|Be| brief|⏎|</think>|⏎⏎|Hello|<|im_end|>»|⏎"
)
QWEN_SECOND = (
    "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|<|im_start|>|assistant|⏎|Hello|<|im_end|>|⏎|<|im_start|>|user|⏎|Bye|<|im_end|>|⏎|"
    "<|im_start|>|assistant|⏎|«0:<think>|⏎|Be| kind|⏎|</think>|⏎⏎|Bye| bye|<|im_end|>»|⏎"
)


def test_qwen3_trains_every_answer_with_its_thoughts_in_its_own_context(make_chat):
    chat = make_chat("qwen3")
    assert [marked(chat, e) for e in chat.encode(THOUGHTS)] == [QWEN_FIRST, QWEN_SECOND]
    assert [e.finish_reason for e in chat.encode(THOUGHTS, "length")] == ["stop", "length"]


def test_qwen3_without_thinking_supervises_the_answer_only(make_chat):
    chat = make_chat("qwen3", enable_thinking=False)
    assert one(chat, TWO_TURNS[:2]) == (
        "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|"
        "<|im_start|>|assistant|⏎|<think>|⏎⏎|</think>|⏎⏎|«0:Hello| there|.|<|im_end|>»|⏎"
    )


def test_sample_starts_with_the_ids_a_server_would_be_sent(make_chat):
    for family in EXPECTED:
        chat = make_chat(family)
        (encoded,) = chat.encode(TWO_TURNS)
        for turn, size in ((0, 1), (1, 3)):
            first = encoded.turn_ids.index(turn)
            assert encoded.token_ids[:first] == chat.prompt_ids(TWO_TURNS[:size]), family


def test_newline_at_the_start_of_an_answer_does_not_merge_with_the_prompt(make_chat):
    messages = [
        *TWO_TURNS[:1],
        {"role": "assistant", "content": "\nHello"},
        *TWO_TURNS[2:3],
        {"role": "assistant", "content": "\n\nBye"},
    ]
    chat = make_chat("chatml")
    first, second = chat.encode(messages)
    assert marked(chat, first).endswith("assistant|⏎|«0:⏎|Hello|<|im_end|>»|⏎")
    # a server tokenises the second prompt as a whole, and the history in it holds the token of two newlines
    assert "assistant|⏎⏎|Hello|<|im_end|>|⏎" in marked(chat, second)
    assert marked(chat, second).endswith("assistant|⏎|«0:⏎⏎|Bye|<|im_end|>»|⏎")
    for encoded, size in ((first, 1), (second, 3)):
        assert encoded.token_ids[: encoded.turn_ids.index(0)] == chat.prompt_ids(messages[:size])
    plain = [*messages[:2], *TWO_TURNS[2:]]
    first, second = chat.encode(plain)
    assert marked(chat, first).count("«") == marked(chat, second).count("«") == 1 and "«0:Bye" in marked(chat, second)


def test_stop_token_inside_the_text_ends_the_turn(make_chat):
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "Hello<|im_end|> there"}]
    assert one(make_chat("chatml"), messages).endswith("«0:Hello|<|im_end|>»| there|<|im_end|>|⏎")


THINKING = {"role": "assistant", "content": "Hello", "reasoning_content": "Hello there?"}


def test_an_answer_without_a_stop_token_ends_with_its_own_text_not_with_that_of_its_thoughts(make_chat):
    written = "message.role + ':' + ('' if not message.reasoning_content else '<think>' + message.reasoning_content + "
    written += "'</think>') + message.content + '\n\n'"
    template = TEMPLATES["plain"].replace("message.role + ':' + message.content + '\n\n'", written)
    expected = "user|:|Hi|⏎⏎|assistant|:|«0:<think>|Hello| there|?|</think>|Hello»|⏎⏎"
    chat = make_chat("plain", template=template)
    assert one(chat, [TWO_TURNS[0], THINKING]) == expected
    given = {"role": "assistant", "content": "<think>Hello there?</think>Hello"}
    assert one(chat, [TWO_TURNS[0], given]) == expected


def test_tags_that_mark_thoughts_and_answer_apart_train_both(make_chat):
    apart = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.reasoning_content }}{% endgeneration %}{{ '</think>' }}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    text = one(make_chat("plain", template=apart), [TWO_TURNS[0], {**THINKING, "content": "Bye"}])
    assert text == "user|:|Hi|⏎|assistant|:|«0:Hello| there|?»|</think>|«1:Bye»|⏎"


def test_tags_that_touch_are_one_answer(make_chat):
    """The text between them is drafted from one into the other, as the model says it."""
    touching = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endgeneration %}{% generation %}"
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    text = one(make_chat("chatml", template=touching), [TWO_TURNS[0], {**THINKING, "content": "Bye"}])
    assert text == "user|:|Hi|⏎|assistant|:|«0:<think>|Hello| there|?|</think>|Bye|<|im_end|>»|⏎"


def test_nothing_is_trained_behind_the_stop_token_of_an_answer(make_chat):
    twice = TEMPLATES["tagged"].replace(
        "{{ '<|im_end|>\n' }}{% else %}",
        "{{ '<|im_end|>\n' }}{% generation %}{{ 'Bye<|im_end|>\n' }}{% endgeneration %}{% else %}",
    )
    text = one(make_chat("tagged", template=twice), TWO_TURNS)
    assert "«0:Hello| there|.|<|im_end|>»|⏎|Bye|<|im_end|>|⏎|" in text, "neither a second answer nor a second end"
    assert text.count("«") == 2


def test_a_tag_that_begins_before_the_prompt_ends_trains_nothing_of_the_prompt(make_chat):
    """As the templates that TRL trains Qwen3.5 with: the tag holds the thoughts that the prompt has begun."""
    thoughts = "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content + '<|im_end|>' }}"
    tagged = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        + thoughts
        + "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
        "{% if quick %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
    )
    thinking = [TWO_TURNS[0], {**TWO_TURNS[1], "reasoning_content": "Be brief"}]
    ask = "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|<|im_start|>|assistant|⏎|<think>|"
    chat = make_chat("chatml", template=tagged)
    assert one(chat, thinking) == ask + "⏎|«0:Be| brief|⏎|</think>|⏎⏎|Hello| there|.|<|im_end|>»|⏎"
    chat = make_chat("chatml", template=tagged, quick=True)
    assert one(chat, TWO_TURNS[:2]) == ask + "⏎⏎|</think>|⏎⏎|«0:Hello| there|.|<|im_end|>»|⏎"
    with pytest.raises(RefusedError, match="is not the beginning of the text with the answer"):
        chat.encode(thinking)  # served, the prompt has closed the thoughts


def test_the_first_token_of_the_next_message_may_end_an_answer(make_chat):
    """GLM's answers end with the token that begins a question, Apertus' write their end before the next message."""
    glm = (
        "{% for m in messages %}{{ '<|im_end|>\n' if m.role == 'user' else '<|im_start|>\n' }}{{ m.content }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>\n' }}{% endif %}"
    )
    text = one(make_chat("chatml", template=glm), TWO_TURNS)
    assert text == (
        "<|im_end|>|⏎|Hi|<|im_start|>|⏎|«0:Hello| there|.|<|im_end|>»|⏎|Bye|<|im_start|>|⏎|«1:Bye| bye|<|im_end|>»"
    )
    # the last answer ends with the token that a question would begin with, unless it was cut
    assert one(make_chat("chatml", template=glm), TWO_TURNS, "length").endswith("«1:Bye| bye»")


def test_an_end_of_text_behind_the_last_message_ends_the_answer_where_nothing_else_does(make_chat):
    chat = make_chat("phi3", template=TEMPLATES["phi3"].replace("<|im_end|>", ""))
    assert [marked(chat, encoded) for encoded in chat.encode(TWO_TURNS)] == [
        "<s>|user|⏎|Hi|⏎|<s>|assistant|⏎|«0:Hello| there|.|⏎|</s>»",
        "<s>|user|⏎|Hi|⏎|<s>|assistant|⏎|Hello| there|.|⏎|<s>|user|⏎|Bye|⏎|<s>|assistant|⏎|«0:Bye| bye|⏎|</s>»",
    ]


def test_a_greeting_before_the_first_question_is_context(make_chat):
    greeting = [{"role": "assistant", "content": "Hello"}, *TWO_TURNS[:2]]
    assert one(make_chat("plain"), greeting) == "assistant|:|Hello|⏎⏎|user|:|Hi|⏎⏎|assistant|:|«0:Hello| there|.»|⏎⏎"
    # most templates cannot render the greeting's own prompt, which is empty
    with_system = [{"role": "system", "content": "Be kind"}, *greeting]
    first = SYSTEM + "<|im_start|>|assistant|⏎|Hello|<|im_end|>|⏎|"
    end = "<|im_start|>|user|⏎|Hi|<|im_end|>|⏎|<|im_start|>|assistant|⏎|«0:Hello| there|.|<|im_end|>»|⏎"
    assert one(make_chat("chatml"), with_system) == first + end
    strict = "{{ messages[0].role[:0] }}" + TEMPLATES["chatml"]
    assert one(make_chat("chatml", template=strict), greeting).count("«") == 1


#: Mistral 7B v0.3 and Nemo: the system message stands in a question only while it is the last message
LATE = (
    "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_an_answer_stands_behind_its_prompt_where_the_template_then_writes_the_prompt_otherwise(make_chat):
    chat = make_chat("mistral", template=LATE)
    messages = [{"role": "system", "content": "Be kind"}, *TWO_TURNS]
    assert [marked(chat, e) for e in chat.encode(messages)] == [
        "<s>|[INST]|Be| kind|⏎⏎|Hi|[/INST]|«0: Hello| there|.|</s>»",
        "<s>|[INST]|Hi|[/INST]| Hello| there|.|</s>|[INST]|Be| kind|⏎⏎|Bye|[/INST]|«0: Bye| bye|</s>»",
    ]
    for encoded, size in zip(chat.encode(messages), (2, 4), strict=True):
        assert encoded.token_ids[: encoded.turn_ids.index(0)] == chat.prompt_ids(messages[:size])


def test_a_prompt_that_opens_thoughts_in_some_conversations_is_not_answered_without_any(make_chat):
    opening = TEMPLATES["chatml"].replace(
        "assistant\n' }}{% endif %}", "assistant\n' }}{{ '<think>\n' if messages[0].content == 'think' }}{% endif %}"
    )
    chat = make_chat("chatml", template=opening)
    assert one(chat, TWO_TURNS) == CHATML
    with pytest.raises(RefusedError, match="is not the beginning of the text with the answer"):
        chat.encode([{"role": "system", "content": "think"}, *TWO_TURNS])


def test_refusals_of_the_template_are_told(make_chat):
    with pytest.raises(RefusedError, match="System role not supported"):
        make_chat("gemma").encode([{"role": "system", "content": "Be kind"}, *TWO_TURNS])
    with pytest.raises(RefusedError, match="roles must alternate"):
        make_chat("mistral").encode(TWO_TURNS[1:])


def test_target_without_template_names_the_remedy(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="found no chat template, expected one.*target.chat_template="):
        ChatFormat(tokenizer, [1])


def test_template_that_cannot_be_masked_is_refused_at_once(make_chat):
    other = TEMPLATES["chatml"].replace("assistant\n' }}{% endif", "assistant:\n' }}{% endif")
    with pytest.raises(
        TemplateError, match=r"is not the beginning of the text with the answer.*target.chat_template"
    ) as info:
        make_chat("chatml", template=other).encode(TWO_TURNS)
    assert not isinstance(info.value, RefusedError)
    nothing = TEMPLATES["tagged"].replace("'assistant' %}{% generation", "'nobody' %}{% generation")
    with pytest.raises(TemplateError, match="tags mark nothing"):
        make_chat("tagged", template=nothing).encode(TWO_TURNS)


def test_slow_tokenizer_is_refused(tokenizer):
    class Slow:
        is_fast = False

        def get_chat_template(self):
            return "{{ messages }}"

    with pytest.raises(TemplateError, match="slow tokenizer, expected a fast one"):
        ChatFormat(Slow(), [1])
