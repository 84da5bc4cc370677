"""Masks of public model families: against their text by hand, against served prompts, and against wrong masks."""

from __future__ import annotations

import numpy as np
import pytest
from templates.checking import (
    FAULTS,
    by_serving,
    by_text,
    complaints_of,
    encode,
    encode_messages,
    families_ok,
    finished,
    last_alone,
    marked,
    mutations,
    served,
    tools_of,
)
from templates.expected import BEGUN, EXPECTED
from templates.families import CONVERSATIONS, FAMILIES, KINDS, TOOL, asked, calling, found, said, tokenizer

from headstart.data.chat.rendering import RefusedError
from headstart.data.records.conversation import parse_record
from headstart.data.samples import Sample

RIGHT = [(family, name) for family, found in EXPECTED.items() for name in found if isinstance(found[name], list)]
REFUSED = [(family, name) for family, found in EXPECTED.items() for name in found if isinstance(found[name], str)]


def test_every_family_is_tried():
    assert set(EXPECTED) == set(FAMILIES)
    assert all("chat" in found and len(found) > 1 for found in EXPECTED.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "conversation"), RIGHT)
def test_what_trains_is_the_text_by_hand_behind_the_served_prompt(family, conversation, kind):
    assert complaints_of(family, conversation, kind, encode(family, conversation, kind)) == []


@pytest.mark.parametrize(("family", "conversation"), REFUSED)
def test_what_a_template_cannot_show_is_refused_with_a_plain_reason(family, conversation):
    with pytest.raises(RefusedError) as refused:
        encode(family, conversation, "bytes")
    assert refused.value.reason == EXPECTED[family][conversation]


#: not DeepSeek-R1, whose histories have no thoughts, nor Command R, where words stand behind the last message
TAGGED = [(family, name) for family, name in RIGHT if "{#-gen#}" in FAMILIES[family].template()]


@pytest.mark.parametrize(("family", "conversation"), TAGGED)
def test_generation_tags_say_the_same(family, conversation):
    samples = encode(family, conversation, "bytes", tagged=True)
    assert complaints_of(family, conversation, "bytes", samples, tagged=True) == []


@pytest.mark.parametrize(("family", "conversation"), RIGHT)
def test_an_answer_cut_by_its_length_has_no_end(family, conversation):
    samples, tokens = encode(family, conversation, "bytes", finish_reason="length"), tokenizer(family, "bytes")
    assert by_text(tokens, samples, finished(EXPECTED[family][conversation]), "bytes") == []
    messages, tools = CONVERSATIONS[conversation], tools_of(family, conversation)
    assert by_serving(family, tokens, samples, messages, tools, finished=False) == []


@pytest.mark.parametrize(("family", "conversation"), RIGHT)
def test_the_last_turn_alone(family, conversation):
    samples = encode(family, conversation, "bytes", turns="last")
    expected = last_alone(EXPECTED[family][conversation])
    assert by_text(tokenizer(family, "bytes"), samples, expected, "bytes") == []


@pytest.mark.parametrize("family", EXPECTED)
def test_everything_trains_where_prompts_train_too(family):
    for ids, turns in encode(family, "chat" if isinstance(EXPECTED[family]["chat"], list) else "thoughts", "bytes"):
        sample = Sample("a", np.array(ids, np.int32), np.array(turns, np.int32))
        everything = sample.with_all_supervised()
        assert everything.supervised == len(ids) and everything.answer_ids.tolist() == turns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "conversation"), RIGHT)
def test_every_wrong_mask_is_noticed(family, conversation, kind):
    samples, tokens = encode(family, conversation, kind), tokenizer(family, kind)
    expected, messages, tools = (
        EXPECTED[family][conversation],
        CONVERSATIONS[conversation],
        tools_of(family, conversation),
    )
    seen = set()
    for name, wrong in mutations(tokens, samples, kind):
        if wrong == samples:
            assert name == "with what stands behind", "nothing does"
            continue
        seen.add(name)
        text, serving = by_text(tokens, wrong, expected, kind), by_serving(family, tokens, wrong, messages, tools)
        # a lone ▁ that the tokenizer itself put there has no letters
        assert text or (serving and kind == "sentencepiece"), f"{name}: the text by hand does not notice"
        # serving knows an answer's end by its stop token, and Command R's calls have none
        bare = family == "command r" and name in ("without the end token", "with what stands behind")
        assert serving or bare, f"{name}: serving does not notice"
    optional = {"with what stands behind", "with the result of a tool", "two turns as one"}
    assert seen | optional == set(FAULTS)
    assert "with the result of a tool" in seen or all(message["role"] != "tool" for message in messages)


def test_families_are_counted():
    ok = families_ok()
    assert set(ok) == set(FAMILIES) and all(ok.values())


#: an answer's first letters may share a token with the end of its prompt, its last with the template's next words
AWKWARD = ("\nHello", "\n\nHello there.", " Hi", "Hello\n\n", "\t \n Hi  ", "Bye bye", "[/INST] Hi", "\n")


@pytest.mark.parametrize("kind", (*KINDS, "gpt2"))
@pytest.mark.parametrize("family", EXPECTED)
def test_whatever_an_answer_begins_with_it_stands_behind_the_served_prompt(family, kind):
    thoughts = {"reasoning_content": "Greet."} if EXPECTED[family]["chat"] == BEGUN else {}
    messages = []
    for number, content in enumerate(AWKWARD):
        messages += [asked("Hi" if number % 2 else " Bye\n"), said(content) | thoughts]
    tokens, refused = tokenizer(family, kind), 0
    for begin in range(0, len(messages), 2):
        for count in (2, 4, 8):
            part = messages[begin : begin + count]
            try:
                samples = encode_messages(family, kind, part)
            except RefusedError as error:
                # a ▁ in front of the answer alone would be another text
                assert kind in ("sentencepiece", "metaspace") and "the tokenizer cannot encode the sides apart" in str(
                    error
                )
                refused += 1
                continue
            assert by_serving(family, tokens, samples, part) == []
            for text in (marked(tokens, sample, kind) for sample in samples):
                for own in text.split("⟦")[1:]:
                    assert any(content.strip() in own for content in AWKWARD)
    assert refused == 0


@pytest.mark.parametrize("family", EXPECTED)
def test_long_conversations_are_cut_as_the_definition_says(family):
    thoughts = {"reasoning_content": "Greet."} if EXPECTED[family]["chat"] == BEGUN else {}
    messages = [m for n in range(12) for m in (asked(f"Hi {n}"), said(f"Hello {n}.") | thoughts)]
    samples = encode_messages(family, "bytes", messages)
    assert by_serving(family, tokenizer(family, "bytes"), samples, messages) == []


def test_harmony_messages_by_channel_train_as_one_answer():
    """gpt-oss's own form of a record: an earlier answer's analysis is dropped, the last one's trains."""
    record = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "channel": "analysis", "content": "Greet."},
            {"role": "assistant", "channel": "final", "content": "Hello there."},
            {"role": "user", "content": "Bye"},
            {"role": "assistant", "channel": "analysis", "content": "Part."},
            {"role": "assistant", "channel": "final", "content": "Bye bye"},
        ]
    }
    messages = list(parse_record(record, "f:1", "f:1").messages)
    assert messages == CONVERSATIONS["thoughts"]
    (first, second), tokens = encode_messages("gpt-oss", "bytes", messages), tokenizer("gpt-oss", "bytes")
    assert "Greet." in marked(tokens, first, "bytes").split("⟦")[1]
    assert "Greet." not in marked(tokens, second, "bytes") and "Part." in marked(tokens, second, "bytes").split("⟦")[1]


@pytest.mark.parametrize(("family", "line"), [
    ("llama3.1", "Today Date: 26 Jul 2024\n"), ("llama3.2", "Today Date: 31 Jan 2026\n"),
    ("gpt-oss", "Current date: 2026-01-31\n"),
])  # fmt: skip
def test_a_template_with_a_date_shows_one_day_in_prompts_and_in_training(family, line):
    (ids, _), *_ = encode(family, "chat", "bytes")
    prompt = served(family, tokenizer(family, "bytes"), CONVERSATIONS["chat"][:2], ())
    assert all(line in tokenizer(family, "bytes").decode(each) for each in (ids, prompt))


WITH_LIST = [
    family for family, found in EXPECTED.items() if isinstance(found.get("calls"), list) and "deepseek" not in family
]


@pytest.mark.parametrize("family", WITH_LIST)
def test_a_system_message_and_tools_stand_in_every_prompt(family):
    messages = [*CONVERSATIONS["chat"][:3], *CONVERSATIONS["calls"]]
    try:
        samples = encode_messages(family, "bytes", messages, tools=[TOOL])
    except RefusedError as error:
        # Mistral's older templates write the system message into the last message only if that is a question
        assert family in ("mistral v3", "mistral tekken")
        assert error.reason == "the chat template leaves out the system message"
        samples = encode_messages(family, "bytes", messages := messages[:3], tools=[TOOL])
    tokens = tokenizer(family, "bytes")
    assert by_serving(family, tokens, samples, messages, [TOOL]) == []
    for sample in samples:
        before = marked(tokens, sample, "bytes").split("⟦")[0]
        assert "Be brief." in before and "weather" in before


@pytest.mark.parametrize("family", WITH_LIST)
def test_words_beside_a_call_train_or_are_the_reason_of_a_refusal(family):
    messages = [asked("Weather in Rome?"), calling("Rome") | {"content": "Look."}, found("Rome", "12 C"), said("12.")]
    try:
        samples = encode_messages(family, "bytes", messages, tools=[TOOL])
    except RefusedError as error:
        assert error.reason == "the chat template leaves out an answer"
        return
    tokens = tokenizer(family, "bytes")
    assert by_serving(family, tokens, samples, messages, [TOOL]) == []
    assert "Look." in marked(tokens, samples[0], "bytes").split("⟦")[1]
