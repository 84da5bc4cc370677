"""What is refused before anything is asked: another model, another template, settings that a server cannot honour."""

from __future__ import annotations

import json

import pytest
from chat_templates import ENDS, TEMPLATES, word_tokenizer
from openai_server import State, serving
from serving_help import digits, prompts_of

from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.prompts import Prompt
from headstart.data.serving.connect import connect
from headstart.heads.errors import ConfigError, ServerError


def refused(ask, state, match, kind=ConfigError, prompts=None, **settings):
    """The message; checks that nothing but the test question was asked."""
    with serving(state) as servers, pytest.raises(kind, match=match) as caught:
        ask(servers, prompts_of(2) if prompts is None else prompts, **settings)
    assert state.asked == []
    return str(caught.value)


def test_another_model_is_refused_and_a_name_for_it_is_believed(state, ask):
    message = refused(ask, state(model="other/Big-7B"), "serves 'other/Big-7B', the recipe's target is 'tiny'")
    assert "data.distill.servers[0].model=other/Big-7B" in message
    one = state(model="alias")
    with serving(one) as servers:
        assert len(ask(servers, prompts_of(2), server={"model": "alias"})) == 2
    assert one.asked[0][1]["model"] == "alias"
    told = r"does not serve 'alias'; it serves tiny: correct data.distill.servers\[0\].model"
    refused(ask, state(), told, ServerError, server={"model": "alias"})


@pytest.mark.parametrize("name", ["tiny", "org/Tiny", "/models/tiny/"])
def test_the_last_part_of_a_name_tells_the_model(name, state, ask):
    with serving(state(model=name)) as servers:
        assert len(ask(servers, prompts_of(2))) == 2


def test_the_path_that_a_server_loaded_its_model_from_tells_it_too(state, ask):
    with serving(state(models=[{"id": "mine", "root": "/models/tiny", "owned_by": "vllm"}])) as servers:
        assert len(ask(servers, prompts_of(2))) == 2


def test_two_models_need_a_name(state, ask):
    models = [{"id": name, "owned_by": "vllm"} for name in ("tiny", "other")]
    message = refused(ask, state(models=models), "serves tiny, other; name one with", ServerError)
    assert "data.distill.servers[0].model" in message


@pytest.mark.parametrize(
    ("owner", "settings", "match"),
    [
        ("openai", {"top_k": 5, "temperature": 1.0}, "top_k: found 5, but a server of OpenAI's interface"),
        ("openai", {"template_kwargs": {"enable_thinking": False}}, "template_kwargs: found enable_thinking, but"),
        ("openai", {"top_logprobs": 2}, "top_logprobs: found 2, but a server of OpenAI's interface"),
        ("sglang", {"top_logprobs": 2}, "top_logprobs: found 2, but SGLang"),
    ],
)
def test_a_setting_that_the_server_cannot_honour(owner, settings, match, state, ask):
    refused(ask, state(owner=owner, ids=False), match, **settings)


def test_a_field_that_the_server_refuses_is_named(state, ask):
    one = state(change=lambda body: 1 / 0)  # never asked: the script comes first
    one.refuses = {"error": {"message": "max_logprobs is 5"}}
    message = refused(ask, one, "max_logprobs is 5", top_logprobs=20)
    assert "top_logprobs=20" in message and "HTTP 400" in message


def test_log_probabilities_that_do_not_come(state, ask):
    def without(body):
        del body["choices"][0]["logprobs"]
        return body

    refused(ask, state(change=without), "logprobs: found nothing", ServerError, top_logprobs=2)


def test_a_context_that_is_too_small(state, ask):
    models = [{"id": "tiny", "owned_by": "vllm", "max_model_len": 32}]
    refused(ask, state(models=models), "max_new_tokens: found 32, but .* takes 32 tokens with the prompt")


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(state, ask, tmp_path, monkeypatch):
    named = {"api_key_env": "MY_SERVER_KEY"}
    refused(ask, state(key="sesame"), "the environment variable MY_SERVER_KEY is not set", server=named)
    monkeypatch.setenv("MY_SERVER_KEY", "open-barley")
    message = refused(ask, state(key="sesame"), "wants an API key .HTTP 401.*MY_SERVER_KEY", ServerError, server=named)
    assert "open-barley" not in message
    monkeypatch.setenv("MY_SERVER_KEY", "sesame")
    said = []
    with serving(state(key="sesame", faults={digits(0): [("status", 500)]})) as servers:
        assert len(ask(servers, prompts_of(2), server=named, said=said)) == 2
    assert "sesame" not in (tmp_path / "out.jsonl").read_text() + "".join(said)
    refused(ask, state(key="sesame"), r"set data.distill.servers\[0\].api_key_env", ServerError)


def test_a_key_that_the_server_repeats_is_not_shown(state, monkeypatch, target):
    monkeypatch.setenv("MY_SERVER_KEY", "sesame")
    one = state(key="sesame")
    one.refuses = {"error": {"message": "sesame is a fine key, but no"}}
    with serving(one) as servers, pytest.raises(ConfigError, match="is a fine key, but no") as caught:
        connect(target, DistillConfig(servers=[ServerConfig(servers[0].url, api_key_env="MY_SERVER_KEY")]))
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x/v1", "http://me:secret@host/v1", "host:8000"])
def test_an_address_that_is_none(url, target):
    with pytest.raises(ConfigError, match=r"data\.distill\.servers\[0\]\.url: found") as caught:
        connect(target, DistillConfig(servers=[ServerConfig(url)]))
    assert "secret" not in str(caught.value)


def other_template(target, family, **changes):
    """A server of the same vocabulary with another template."""
    eos, bos, _ = ENDS[family]
    return State(word_tokenizer(TEMPLATES[family], eos, None, bos), target.stop_token_ids[0], **changes)


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "tokenize"])
def test_another_template_is_refused_with_both_counts_and_the_first_difference(ids, target, ask):
    message = refused(ask, other_template(target, "gemma", ids=ids), "the server's prompt has", ServerError)
    # <bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n against ChatML with its system message
    assert "the server's prompt has 10 tokens, Headstart renders 16" in message
    assert "they differ from token 0 on: there '<bos><start_of_turn>user" in message
    assert "here '<|im_start|>system" in message and "--chat-template FILE" in message


def test_only_the_count_is_known(target, ask):
    message = refused(ask, other_template(target, "gemma", ids=False, owner="llamacpp"), "prompt has 10", ServerError)
    assert "Headstart renders 16" in message and "differ" not in message


def test_a_second_token_at_the_beginning(target_with, ask_target):
    tokenizer = word_tokenizer(TEMPLATES["llama3"], "<|eot_id|>", None, "<|begin_of_text|>")
    target = target_with(tokenizer)
    twice = word_tokenizer("{{ bos_token }}" + TEMPLATES["llama3"], "<|eot_id|>", None, "<|begin_of_text|>")
    for changes in ({"ids": True}, {"ids": False, "owner": "llamacpp"}):
        one = State(twice, target.stop_token_ids[0], **changes)
        with serving(one) as servers, pytest.raises(ServerError, match="adds a token at the beginning") as caught:
            ask_target(target, servers, prompts_of(1))
        assert "BOS, which the template writes already" in str(caught.value)


DATED = "{{ 'One ' + strftime_now('%Y') + '\n' }}" + TEMPLATES["chatml"]


def test_another_date_is_named_as_the_cause(target_with, ask_target):
    from headstart.heads.targets.template_date import fix_dates

    tokenizers = [word_tokenizer(DATED, "<|im_end|>") for _ in range(2)]
    for tokenizer, day in zip(tokenizers, ("2026-01-31", "2025-01-31"), strict=True):
        tokenizer.add_tokens(["2025", "2026"])
        fix_dates(tokenizer, day)
    target = target_with(tokenizers[0])
    one = State(tokenizers[1], target.stop_token_ids[0])  # as many tokens, but others
    with serving(one) as servers, pytest.raises(ServerError, match="the template shows the date, here 2026-01-31"):
        ask_target(target, servers, prompts_of(1))


def test_a_first_question_that_the_server_renders_differently_stops_the_run(state, ask):
    one = state(ids=False, owner="sglang", faults={digits(2): [("change", _one_more)]})
    with serving(one) as servers, pytest.raises(ServerError, match="p2, answer 1: the server's prompt has") as caught:
        ask(servers, prompts_of(4), concurrency=1)
    assert "the server has another chat template" in str(caught.value)


def test_a_later_question_that_the_server_renders_differently_ends_its_conversation(state, ask, tmp_path):
    one = state(ids=False, owner="sglang", faults={digits(2): [("change", _one_more)]})
    prompts = [Prompt.ask("three", digits(1), digits(2), digits(3))]
    with serving(one) as servers:
        record = ask(servers, prompts)["three"]
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"] and "earlier_turns" not in record
        reason = json.loads((tmp_path / "out.jsonl.skipped.json").read_text())["three"]
        assert reason.startswith("turn 2: ") and "the server's prompt has" in reason
        ask(servers, prompts)
    assert len(one.asked) == 2  # it failed for good: the next run does not ask again


def _one_more(body):
    body["usage"]["prompt_tokens"] += 1
    return body
