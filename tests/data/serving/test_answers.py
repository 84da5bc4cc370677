"""What becomes of a server's answer: its tokens, its finish reason, its message, its log-probabilities; by hand."""

from __future__ import annotations

import json

import pytest
from chat_templates import TEMPLATES, word_tokenizer
from openai_server import State, answer_to, serving
from serving_help import digits, prompts_of

from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.distilling.answering import Request
from headstart.data.prepare import tokenize
from headstart.data.prompts import Prompt, prompt_of
from headstart.data.records.conversation import parse_record
from headstart.data.serving.answerer import request_hash
from headstart.data.sources.sources import load_conversations

LIKE_VLLM = {"owner": "vllm", "ids": True}
LIKE_OTHERS = {"owner": "llamacpp", "ids": False}


def prompt_ids(tokenizer, *chat, **kwargs):
    return tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False, **kwargs)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(("like", "source"), [(LIKE_VLLM, "server"), (LIKE_OTHERS, "text")])
def test_a_record_is_that_of_a_distillation_in_process(like, source, state, ask, target, tokenizer, tmp_path):
    with serving(state(**like)) as servers:
        records = ask(servers, prompts_of(12))
    stop = target.stop_token_ids[0]
    for number in range(12):
        record = records[f"p{number}"]
        answer = tokenizer(answer_to(digits(number)), add_special_tokens=False)["input_ids"] + [stop]
        assert record["prompt_token_ids"] == prompt_ids(tokenizer, user(digits(number)))
        assert record["response_token_ids"] == answer and record["finish_reason"] == "stop"
        assert record["token_ids_from"] == source and "server_tokens" not in record
        assert record["messages"] == [user(digits(number)), assistant(answer_to(digits(number)))]
        assert record["sampling"]["answered_by"] == "servers of tiny" and "weights" not in record["sampling"]
    node = DataConfig(sources=[SourceConfig(path=str(tmp_path / "out.jsonl"))])
    samples, report = tokenize(load_conversations(node.sources), tokenizer, node, target.stop_token_ids)
    assert report.samples == 12 and report.dropped == {}
    for sample in samples:
        record = records[sample.id]
        assert sample.token_ids.tolist() == record["prompt_token_ids"] + record["response_token_ids"]
        assert sample.supervised == len(record["response_token_ids"])


@pytest.mark.parametrize("like", [LIKE_VLLM, LIKE_OTHERS], ids=["ids", "text"])
def test_a_cut_answer_keeps_its_finish_reason_and_has_no_stop_token(like, state, ask, target, tokenizer):
    with serving(state(**like)) as servers:
        record = ask(servers, prompts_of(1), max_new_tokens=3)["p0"]
    assert record["finish_reason"] == "length"
    assert record["response_token_ids"] == tokenizer("Hello there-", add_special_tokens=False)["input_ids"]
    assert record["messages"][-1]["content"] == "Hello there-"


def test_a_server_that_leaves_the_stop_token_out_is_not_believed(state, ask, target):
    def without(body):
        body["choices"][0]["token_ids"].pop()
        body["usage"]["completion_tokens"] -= 1
        return body

    with serving(state(change=without)) as servers:
        record = ask(servers, prompts_of(1))["p0"]
    assert record["response_token_ids"][-1] in target.stop_token_ids
    assert record["token_ids_from"] == "text" and record["server_tokens"] == len(record["response_token_ids"]) - 1


@pytest.mark.parametrize("like", [LIKE_VLLM, LIKE_OTHERS], ids=["ids", "text"])
def test_later_questions_follow_the_servers_own_answers(like, state, ask, tokenizer):
    one = state(**like)
    with serving(one) as servers:
        record = ask(servers, [Prompt.ask("two", digits(12), digits(34), system="Be brief")])["two"]
    system = {"role": "system", "content": "Be brief"}
    chat = [system, user(digits(12)), assistant("Hello there-2-1."), user(digits(34)), assistant("Hello there-4-3.")]
    assert record["messages"] == chat
    assert [body["messages"] for _, body in one.asked] == [chat[:2], chat[:4]]
    (earlier,) = record["earlier_turns"]
    assert earlier["prompt_token_ids"] == prompt_ids(tokenizer, *chat[:2])
    assert record["prompt_token_ids"] == prompt_ids(tokenizer, *chat[:4])
    assert earlier["request"] != record["request"]


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "text"])
def test_thoughts_that_the_server_found_are_kept_and_left_out_of_the_history_as_the_template_does(
    ids, ask_target, target_with
):
    target = target_with(word_tokenizer(TEMPLATES["qwen3"], "<|im_end|>"))
    tokenizer = target.tokenizer
    texts = {digits(1): ("think fast", "Hello."), digits(2): ("fine", "Bye.")}

    def answer(messages):
        thoughts, said = texts.get(messages[-1]["content"], ("fast", "Hi."))
        return {"reasoning": thoughts, "content": said}

    one = State(tokenizer, target.stop_token_ids[0], owner="vllm" if ids else "sglang", ids=False, answer=answer)
    if ids:  # the tokens of the whole answer, thoughts included
        one.change = lambda body: _with_ids(body, tokenizer, target.stop_token_ids[0])
    with serving(one) as servers:
        record = ask_target(target, servers, [Prompt.ask("two", digits(1), digits(2))])["two"]
    assert record["messages"] == [
        user(digits(1)), assistant("Hello.", reasoning_content="think fast"),
        user(digits(2)), assistant("Bye.", reasoning_content="fine"),
    ]  # fmt: skip
    # the history holds no thoughts: that is what the template writes and the server must have rendered
    history = "<|im_start|>user\nQuestion-1<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert tokenizer.decode(record["prompt_token_ids"]) == (
        history + "<|im_start|>user\nQuestion-2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(record["response_token_ids"]) == "<think>\nfine\n</think>\n\nBye.<|im_end|>"
    assert tokenizer.decode(record["earlier_turns"][0]["response_token_ids"]) == (
        "<think>\nthink fast\n</think>\n\nHello.<|im_end|>"
    )


def _with_ids(body, tokenizer, stop):
    message = body["choices"][0]["message"]
    text = f"<think>\n{message['reasoning']}\n</think>\n\n{message['content']}"
    body["choices"][0]["token_ids"] = tokenizer(text, add_special_tokens=False)["input_ids"] + [stop]
    body["usage"]["completion_tokens"] = len(body["choices"][0]["token_ids"])
    return body


TOOL = {
    "type": "function",
    "function": {"name": "think", "description": "Think fast", "parameters": {"type": "object"}},
}


def test_tool_calls_are_kept_with_their_finish_reason(ask_target, target_with):
    target = target_with(word_tokenizer(TEMPLATES["tools"], "<|im_end|>"))
    call = {"id": "one", "type": "function", "function": {"name": "think", "arguments": '{"two": "three"}'}}

    def answer(messages):
        return {"content": None, "tool_calls": [call], "finish_reason": "tool_calls"}

    one = State(target.tokenizer, target.stop_token_ids[0], owner="sglang", ids=False, answer=answer)
    one.change = lambda body: {**body, "usage": {"prompt_tokens": body["usage"]["prompt_tokens"]}}
    with serving(one) as servers:
        record = ask_target(target, servers, [Prompt.ask("p", "Hi", tools=(TOOL,))])["p"]
    assert one.asked[0][1]["tools"] == [TOOL]
    assert record["finish_reason"] == "tool_calls" and record["tools"] == [TOOL]
    (made,) = record["messages"][-1]["tool_calls"]
    assert made["function"] == {"name": "think", "arguments": {"two": "three"}}
    rendered = target.tokenizer.apply_chat_template(
        [user("Hi"), record["messages"][-1]], tools=[TOOL], return_dict=False
    )
    whole = record["prompt_token_ids"] + record["response_token_ids"]
    assert whole == rendered[: len(whole)] and whole[-1] == target.stop_token_ids[0]


def test_tool_turns_before_the_question_are_kept(ask_target, target_with):
    target = target_with(word_tokenizer(TEMPLATES["tools"], "<|im_end|>"))
    call = {"id": "one", "type": "function", "function": {"name": "think", "arguments": {"two": "three"}}}
    talk = [
        user("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "one", "content": "fine"},
    ]  # fmt: skip
    prompt = prompt_of(parse_record({"id": "p", "messages": talk, "tools": [TOOL]}, "here", "p"), "each")
    one = State(target.tokenizer, target.stop_token_ids[0], answer=lambda messages: {"content": "Bye."})
    with serving(one) as servers:
        record = ask_target(target, servers, [prompt])["p"]
    sent = one.asked[0][1]
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"two": "three"}'  # text on the wire
    assert sent["messages"][2] == talk[2] and sent["tool_choice"] == "none"
    assert record["messages"] == [*talk, assistant("Bye.")]
    assert record["prompt_token_ids"] == prompt_ids(target.tokenizer, *talk, tools=[TOOL])


def test_a_filtered_answer_counts_as_cut(state, ask, target):
    one = state(
        owner="openai", ids=False, answer=lambda messages: {"content": "Hello", "finish_reason": "content_filter"}
    )
    with serving(one) as servers:
        record = ask(servers, prompts_of(1))["p0"]
    assert record["finish_reason"] == "content_filter"
    assert record["response_token_ids"][-1] not in target.stop_token_ids


def test_a_text_that_was_cut_within_a_character(state, ask, tokenizer):
    one = state(owner="openai", ids=False)
    one.answer = lambda messages: {"content": "Hello there\ufffd", "finish_reason": "length"}
    with serving(one) as servers:
        record = ask(servers, prompts_of(1))["p0"]
    assert record["response_token_ids"] == tokenizer("Hello there", add_special_tokens=False)["input_ids"]


def test_an_unknown_finish_reason_is_skipped(state, ask, tmp_path):
    one = state(answer=lambda messages: {"content": "Hello", "finish_reason": "tired"})
    with serving(one) as servers:
        assert ask(servers, prompts_of(1)) == {}
    assert "finish_reason 'tired'" in json.loads((tmp_path / "out.jsonl.skipped.json").read_text())["p0"]


def test_another_count_of_the_servers_is_noted(state, ask):
    one = state(**LIKE_OTHERS)
    one.change = lambda body: {**body, "usage": {**body["usage"], "completion_tokens": 9}}
    said = []
    with serving(one) as servers:
        record = ask(servers, prompts_of(3), said=said)["p0"]
    assert record["server_tokens"] == 9 and len(record["response_token_ids"]) == 6
    assert any(line.startswith("3 of 3 answers whose tokens come from their text") for line in said)


def test_log_probabilities_are_kept_by_token_id(state, ask):
    one = state()
    with serving(one) as servers:
        record = ask(servers, prompts_of(1), top_logprobs=3)["p0"]
    body = one.asked[0][1]
    assert (body["logprobs"], body["top_logprobs"], body["return_tokens_as_token_ids"]) == (True, 3, True)
    ids = record["response_token_ids"]
    assert record["top_logprobs"] == {
        "token_ids": [[token, token + 1, token + 2] for token in ids],
        "logprobs": [[-0.5, -1.5, -2.5]] * len(ids),
    }


def test_log_probabilities_may_name_the_answers_tokens(state, ask):
    """As llama.cpp does: it returns no token ids of the answer elsewhere."""

    def as_llama_cpp(body):
        for entry in body["choices"][0]["logprobs"]["content"]:
            for each in (entry, *entry["top_logprobs"]):
                each["id"], each["token"] = int(each["token"].removeprefix("token_id:")), "x"
        return body

    with serving(state(**LIKE_OTHERS, change=as_llama_cpp)) as servers:
        record = ask(servers, prompts_of(1), top_logprobs=2)["p0"]
    assert record["token_ids_from"] == "server"
    assert record["top_logprobs"]["token_ids"] == [[token, token + 1] for token in record["response_token_ids"]]


def test_a_prompt_of_token_ids_is_asked_as_it_is(state, ask, tmp_path):
    prompt = Prompt("p", (), prompt_token_ids=(5, 6, 7))
    one = state()
    with serving(one) as servers:
        record = ask(servers, [prompt])["p"]
    assert one.paths[-1] == "/v1/completions" and one.asked[0][1]["prompt"] == [5, 6, 7]
    assert record["prompt_token_ids"] == [5, 6, 7]
    (tmp_path / "out.jsonl").unlink()
    with serving(state(owner="openai", ids=False)) as servers:
        assert ask(servers, [prompt]) == {}
    assert "token ids alone" in json.loads((tmp_path / "out.jsonl.skipped.json").read_text())["p"]


def test_samples_have_seeds_of_their_own_which_stay_the_same(state, ask, tmp_path):
    seeds = []
    for _ in range(2):
        one = state()
        with serving(one) as servers:
            records = ask(servers, prompts_of(2), samples_per_prompt=2, temperature=0.7, top_p=0.9, top_k=5)
        assert sorted(records) == ["p0/sample0", "p0/sample1", "p1/sample0", "p1/sample1"]
        assert {(b["temperature"], b["top_p"], b["top_k"]) for _, b in one.asked} == {(0.7, 0.9, 5)}
        seeds.append(sorted(body["seed"] for _, body in one.asked))
        assert len(set(seeds[0])) == 4 and all(0 <= seed < 2**31 for seed in seeds[0])
        (tmp_path / "out.jsonl").unlink()
    assert seeds[0] == seeds[1]


def test_everything_that_decides_an_answer_is_said(state, ask, target):
    one = state()
    with serving(one) as servers:
        ask(servers, prompts_of(1), template_kwargs={"color": "red"})
    assert one.asked[0][1] == {
        "model": "tiny", "messages": [user("Question-0")], "chat_template_kwargs": {"color": "red"}, "max_tokens": 32,
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False, "n": 1, "stream": False,
        "stop_token_ids": list(target.stop_token_ids), "return_token_ids": True,
    }  # fmt: skip


def test_the_hash_is_of_everything_that_decides_an_answer_and_nothing_else(target):
    config, request = DistillConfig(), Request("a", 0, (1, 2), 7, (user("Hi"),), (), {})
    base = request_hash(target, config, request)
    assert len(base) == 24
    assert request_hash(target, config, Request("b", 0, (1, 2), 8, (user("Hi"),), (), {})) == base  # greedy: no seed
    others = [
        request_hash(target, config, Request("a", 0, (1, 3), 7, (user("Hi"),), (), {})),
        request_hash(target, config, Request("a", 0, (1, 2), 7, (user("Hi "),), (), {})),
        request_hash(target, config, Request("a", 0, (1, 2), 7, (user("Hi"),), (TOOL,), {})),
        request_hash(target, config, Request("a", 0, (1, 2), 7, (user("Hi"),), (), {"x": 1})),
        request_hash(target, DistillConfig(max_new_tokens=9), request),
        *(request_hash(target, DistillConfig(temperature=0.5, **more), request) for more in ({}, {"top_p": 0.5})),
        request_hash(target, DistillConfig(temperature=0.5), Request("a", 0, (1, 2), 8, (user("Hi"),), (), {})),
    ]
    assert len({base, *others}) == len(others) + 1
