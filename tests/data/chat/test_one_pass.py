"""The turns that one run of a template finds, against the definition; and the templates for which it must find none."""

from __future__ import annotations

import random

import pytest
from chat_templates import TEMPLATES, word_tokenizer
from test_chat_linear import WEATHER, conversation, make

from headstart.data import encoding
from headstart.data.chat.chat import ChatFormat
from headstart.data.chat.rendering import RefusedError, Renderer
from headstart.data.chat.turns import turn_at, turns_in_one_pass
from headstart.data.config import DataConfig
from headstart.data.records.conversation import Conversation, TokenTurn

#: templates that read their messages once, in order
ONCE = {"chatml", "llama3", "gemma", "mistral", "plain", "parts", "trimming", "phi3"}


@pytest.mark.parametrize("family", sorted(set(TEMPLATES) - {"thinking_prompt"}))
def test_one_run_finds_what_every_prefix_shows(family):
    chat, rng = make(family, "words"), random.Random(family)
    for count in (1, 1, 2, 5, 12):
        messages = conversation(rng, family, count)
        tools = [WEATHER] if family == "tools" else []
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = turns_in_one_pass(chat.renderer, messages, answers, tools)
        assert (found is not None) == (family in ONCE)
        for turn in found or ():
            exact = turn_at(chat.renderer, messages, turn.index, tools)
            assert turn.text.startswith(exact.text)
            assert turn == exact.moved(0, turn.text, turn.index)


def test_prompts_end_where_they_end_when_rendered_alone():
    """By hand: an answer begins after its generation prompt and ends before the next message."""
    chat = make("chatml", "words")
    messages = [{"role": role, "content": text} for role, text in (
        ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Bye bye"))]  # fmt: skip
    first, second = turns_in_one_pass(chat.renderer, messages, [1, 3])
    assert first.text[slice(*first.spans[0])] == "Hello<|im_end|>\n"
    assert second.text[slice(*second.spans[0])] == "Bye bye<|im_end|>\n"
    assert first.text[: first.begin].endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}HERE<|im_end|>{% endfor %}"
FOOT = "{% if add_generation_prompt %}<assistant>{% endif %}"


def within(text: str, before: str = "", foot: str = FOOT) -> str:
    """A plain template that writes more into every message."""
    return before + LOOP.replace("HERE", text) + foot


PLAIN = within("")
#: templates whose text before a message depends on more than the messages before it, or might
FURTHER = {
    "how many messages": within("{{ messages | length }}"),
    "the last one in the loop": within("{{ 'x' if loop.last }}"),
    "the last one, by item": within("{{ 'x' if loop['last'] }}"),
    "the next one": within("{{ 'x' if loop.nextitem is defined }}"),
    "the loop itself": within("{{ f(loop) }}", "{% macro f(l) %}{{ 'x' if l.last }}{% endmacro %}"),
    "a later message": within("{{ (messages[loop.index0 + 1] | default(m)).content }}"),
    "the second message at first": "{{ messages[1].role }}" + PLAIN,
    "the last message": "{{ messages[-1].role }}" + PLAIN,
    "a loop before": "{% for m in messages %}{% set x = m %}{% endfor %}" + PLAIN,
    "a filter before": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}" + PLAIN,
    "a test that hides errors": "{{ 'x' if messages is sequence else 'y' }}" + PLAIN,
    "whether it is equal": "{{ 'x' if messages == 1 }}" + PLAIN,
    "all as text": "{{ (messages | string)[:0] }}" + PLAIN,
    "a loop over a part": PLAIN.replace("in messages", "in messages[-4:]"),
    "only some": PLAIN.replace("in messages", "in messages if m.role != 'tool'"),
    "a loop that breaks off": within("{% if m.content == 'Bye' %}{% break %}{% endif %}"),
    "a prompt that counts": within("", foot="{% if add_generation_prompt %}{{ messages | length }}{% endif %}"),
    "a prompt with a state": within(
        "{% set ns.n = ns.n + 1 %}", "{% set ns = namespace(n=0) %}", FOOT.replace("<a", "{{ ns.n }}<a")
    ),
    "a prompt from a macro": within(
        "", "{% macro f() %}<assistant>{% endmacro %}", "{% if add_generation_prompt %}{{ f() }}{% endif %}"
    ),
    "a prompt that is known before": "{% if add_generation_prompt %}x{% endif %}" + PLAIN,
    "a block of its own": "{% set text %}" + within("", foot="") + "{% endset %}{{ text }}" + FOOT,
    "a filtered block": "{% filter trim %}" + within("", foot="") + "{% endfilter %}" + FOOT,
    "tags": PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
}
#: templates that look unusual and yet read their messages once
FINE = {
    "the first message again": within("{{ messages[0].role }}"),
    "the message before": within("{{ messages[loop.index0 - 1].role if loop.index0 }}"),
    "a state in the loop": within("{% set ns.n = ns.n + 1 %}{{ ns.n }}", "{% set ns = namespace(n=0) %}"),
    "an inner loop that looks ahead": within("{% for x in [1, 2] %}{{ loop.last }}{% endfor %}"),
    "a test of emptiness": "{% if messages %}x{% endif %}" + PLAIN,
    "no generation prompt": within("", foot=""),
}
MESSAGES = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(["Hi", "Hello"] * 4)]


@pytest.mark.parametrize("name", FURTHER)
def test_templates_that_look_further_are_left_to_the_slow_way(name):
    renderer = Renderer(word_tokenizer(FURTHER[name], "<|im_end|>"))
    renderer.render(MESSAGES)  # it is a template that works
    found = turns_in_one_pass(renderer, [*MESSAGES[:6], {"role": "user", "content": "Bye"}, MESSAGES[7]], [1, 3, 5, 7])
    assert found is None


@pytest.mark.parametrize("name", FINE)
def test_templates_that_only_look_back_need_one_run(name):
    renderer = Renderer(word_tokenizer(FINE[name], "<|im_end|>"))
    for turn in turns_in_one_pass(renderer, MESSAGES, [1, 3, 5, 7]):
        exact = turn_at(renderer, MESSAGES, turn.index)
        assert turn.text.startswith(exact.text) and turn == exact.moved(0, turn.text, turn.index)


def test_the_first_conversation_of_a_kind_is_rendered_both_ways(monkeypatch):
    """If one run told something else, it would not be used."""
    chat, rendered = make("chatml", "words"), []
    chat.encode(MESSAGES)
    render = chat.renderer.render
    monkeypatch.setattr(chat.renderer, "render", lambda *given, **more: rendered.append(1) or render(*given, **more))
    expected = chat.encode(MESSAGES)
    assert not rendered
    named = [{**MESSAGES[0], "name": "Ann"}, *MESSAGES[1:]]
    assert chat.encode(named) == expected and rendered
    text, marks, prompt = chat.renderer.run_once(MESSAGES)
    chat.renderer.proven.clear()
    wrong = text, [mark + 1 for mark in marks[:-1]] + marks[-1:], prompt[1:]
    monkeypatch.setattr(chat.renderer, "run_once", lambda *_: wrong)
    assert turns_in_one_pass(chat.renderer, MESSAGES, [1, 3, 5, 7])
    assert chat.encode(MESSAGES) == expected and not chat.renderer.proven


@pytest.mark.parametrize("threads", ["true", "false"])
@pytest.mark.parametrize("family", ["chatml", "qwen3", "gemma", "tagged", "plain"])
def test_many_conversations_at_once_are_encoded_as_one_by_one(monkeypatch, family, threads):
    """Refused ones keep their places and reasons, whatever stands beside them and however many are rendered ahead."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
    monkeypatch.setattr(encoding, "BATCH", 300)
    chat, rng = make(family, "bytes"), random.Random(family)
    stops, config = list(chat.stop_token_ids), DataConfig(turns=rng.choice(("all", "last")))
    rows = [
        Conversation(str(n), tuple(conversation(rng, family, rng.choice((1, 2, 5)))), rng.choice(("stop", "length")))
        for n in range(40)
    ]
    system = {"role": "system", "content": "Be kind"}
    rows[7] = rows[11] = Conversation("refused", (system, *MESSAGES[:2]))  # by Gemma's template
    rows[20], rows[21] = Conversation("unanswered", (MESSAGES[0],)), Conversation("seen", (), media="images")
    rows[30] = Conversation("tokens", (), turns=(TokenTurn((5, 6), (7, stops[0] if stops else 8)),))
    rows[33] = Conversation("variables", rows[3].messages, template_kwargs={"unused": 1})
    made = list(encoding.Encoder(chat.tokenizer, stops, config)(iter(rows)))
    assert [row for row, _ in made] == rows
    for row, samples in made:
        if row.id in ("unanswered", "seen", "tokens"):
            assert isinstance(samples, str) == (row.id != "tokens")
            continue
        try:
            alone = ChatFormat(chat.tokenizer, stops).encode(row.messages, row.finish_reason, config.turns)
        except RefusedError as error:
            assert samples == error.reason
            continue
        assert [(ids.tolist(), turns.tolist(), *more) for ids, turns, *more in samples] == [
            (sample.token_ids, sample.turn_ids, sample.finish_reason, sample.broken) for sample in alone
        ]
    assert (family == "gemma") == any(row.id == "refused" and isinstance(samples, str) for row, samples in made)
