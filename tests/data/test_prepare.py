"""From conversations to samples: verbatim ids, policies with reports, counts, held-out split, inspection."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.encoding import encode_token_turns
from headstart.data.prepare import prepare, tokenize
from headstart.data.records.conversation import Conversation, TokenTurn
from headstart.data.samples import Sample, require_supervised, token_counts
from headstart.data.sources.sources import load_conversations
from headstart.heads.errors import ConfigError, DataError, TemplateError

END = 9


def conversation(answer="Hello there.", name="c", finish="stop", turns=()):
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer})
    return Conversation(name, messages, finish, turns, task="chat")


def config(**kwargs) -> DataConfig:
    return DataConfig(sources=[SourceConfig(path="x")], **kwargs)


def stops(tokenizer):
    return [tokenizer.eos_token_id]


def test_token_ids_are_used_verbatim(tokenizer):
    turn = TokenTurn((40, 41), (50, 51, END), "stop")
    (sample,), _ = tokenize([conversation(turns=(turn,))], tokenizer, config(), [END])
    assert sample.token_ids.tolist() == [40, 41, 50, 51, END] and sample.turn_ids.tolist() == [-1, -1, 0, 0, 0]
    assert sample.token_ids.dtype == sample.turn_ids.dtype == np.int32
    assert (sample.finish_reason, sample.meta["conversation"], sample.meta["task"]) == ("stop", "c", "chat")


def test_token_ids_need_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    turn = TokenTurn((40,), (50, 51), "length")
    (sample,), report = tokenize([conversation(turns=(turn,))], tokenizer, config(), [END])
    assert sample.finish_reason == "length" and report.open_ended == 1
    with pytest.raises(TemplateError, match="no chat template"):
        tokenize([conversation()], tokenizer, config(), [END])


def test_token_turns_share_a_sample_only_when_one_begins_the_next():
    first, second = TokenTurn((1, 2), (3, END)), TokenTurn((1, 2, 3, END, 4), (5, 6, END, 7))
    (whole,) = encode_token_turns([first, second], [END])
    assert whole.token_ids == [1, 2, 3, END, 4, 5, 6, END, 7]
    assert whole.turn_ids == [-1, -1, 0, 0, -1, 1, 1, 1, -1], "nothing after the end of the turn"
    rewritten = TokenTurn((1, 8, END, 4), (5, END))
    apart = encode_token_turns([first, rewritten], [END])
    assert [e.turn_ids for e in apart] == [[-1, -1, 0, 0], [-1, -1, -1, -1, 0, 0]]
    (last,) = encode_token_turns([first, second], [END], "last")
    assert last.turn_ids == [-1] * 5 + [0, 0, 0, -1]


def test_truncate_and_drop_are_reported(tokenizer):
    long = conversation(" ".join(["one"] * 30), "long")
    items = [conversation(name="short"), long]
    whole, _ = tokenize([long], tokenizer, config(), stops(tokenizer))
    prompt = int((whole[0].turn_ids < 0).argmin())
    samples, report = tokenize(items, tokenizer, config(max_length=prompt + 10), stops(tokenizer))
    assert [s.id for s in samples] == ["short", "long"] and len(samples[1]) == prompt + 10
    assert samples[1].supervised == 10 and samples[1].finish_reason == "length" and samples[0].finish_reason == "stop"
    assert report.truncated == ["long"]
    samples, report = tokenize(items, tokenizer, config(max_length=prompt + 10, too_long="drop"), stops(tokenizer))
    assert [s.id for s in samples] == ["short"]
    assert report.dropped == {f"longer than max_length={prompt + 10} tokens": ["long"]}
    samples, report = tokenize(items, tokenizer, config(max_length=prompt + 1), stops(tokenizer))
    assert samples == [] and report.truncated == []
    assert report.dropped == {"fewer than min_supervised=2 supervised tokens within max_length": ["short", "long"]}
    assert any(line.startswith("dropped 2: fewer than min_supervised=2") for line in report.lines())
    assert "a larger data.max_length keeps more of an answer behind a long prompt" in report.lines()


def test_report_counts(tokenizer):
    prompt_only = Conversation("p", ({"role": "user", "content": "Hi"},))
    samples, report = tokenize(
        [conversation(), prompt_only, conversation("", "empty")], tokenizer, config(), stops(tokenizer)
    )
    assert (report.conversations, report.samples, report.dropped_count) == (3, 1, 2)
    assert report.dropped["no assistant answer"] == ["p"]
    (remedy,) = (line for line in report.lines() if line.startswith("prompts alone belong in data.distill.prompts"))
    assert "named in columns of the source" in remedy
    assert report.dropped["fewer than min_supervised=2 supervised tokens"] == ["empty"]
    assert not any("data.max_length" in line for line in report.lines())
    assert report.tokens == len(samples[0]) and report.supervised_tokens == 4  # Hello | there | . | end


def test_token_counts_are_of_supervised_tokens():
    samples = [
        Sample("a", np.array([1, 2, 3, 3], np.int32), np.array([-1, 0, 0, 0], np.int32)),
        Sample("b", np.array([2, 5], np.int32), np.array([0, -1], np.int32)),
    ]
    counts = token_counts(samples, 6)
    assert counts.tolist() == [0, 0, 2, 2, 0, 0] and counts.dtype == torch.int64
    with pytest.raises(DataError, match="sample a: found token id 3, expected 0 … 2"):
        token_counts(samples, 3)


def test_all_unsupervised_is_refused():
    tokens = np.arange(4, dtype=np.int32)
    nothing = Sample("a", tokens, np.full(4, -1, np.int32))
    single = Sample("b", tokens, np.array([-1, 0, -1, 1], np.int32))
    with pytest.raises(
        DataError, match=r"2 samples with 2 supervised tokens and no answer of 2 tokens or more.*data.distill"
    ):
        require_supervised([nothing, single])
    with pytest.raises(DataError, match="0 samples"):
        require_supervised([])
    require_supervised([nothing, Sample("c", tokens, np.array([-1, 0, 0, -1], np.int32))])


def test_prepare_from_files(tokenizer, write_jsonl):
    train = write_jsonl([{"prompt": "Hi", "response": "Hello there."}] * 3, "train.jsonl")
    held = write_jsonl([{"prompt": "Bye", "response": "Bye bye"}], "held.jsonl")
    answers = write_jsonl([{"prompt": "Hi", "response": "Be kind", "id": "d"}], "distilled.jsonl")
    node = DataConfig(sources=[SourceConfig(path=str(train))], held_out=[SourceConfig(path=str(held))])
    data = prepare(node, tokenizer, stops(tokenizer), [SourceConfig(path=str(answers))])
    assert [s.id for s in data.train] == ["train:1", "d"] and [s.id for s in data.held_out] == ["held:1"]
    assert data.gathered is not None and data.gathered.exact == {"train:2": "train:1", "train:3": "train:1"}
    empty = write_jsonl([{"prompt": "Hi"}], "prompts.jsonl")
    with pytest.raises(
        DataError, match=r"no conversation can be trained on\n.*\ndropped 1: no assistant answer \(prompts:1\)"
    ):
        prepare(DataConfig(sources=[SourceConfig(path=str(empty))]), tokenizer, stops(tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"too_long": "cut"}, "data.too_long: found 'cut', expected one of truncate, drop"),
        ({"max_length": 1}, "data.max_length: found 1, expected a number ≥ 3"),
        ({"held_out_fraction": 1.0}, r"data.held_out_fraction: found 1.0, expected a number in \[0, 1\)"),
        ({"sources": []}, "no sources and no distill.prompts"),
        ({"distill": DistillConfig(temperature=float("nan"))}, "distill.temperature: found nan, expected 0"),
        ({"distill": DistillConfig(samples_per_prompt=2)}, "samples_per_prompt: found 2 with temperature 0"),
        ({"distill": DistillConfig(top_p=0.0)}, "data.distill.top_p: found 0.0"),
        ({"distill": DistillConfig(max_seconds=0.0)}, "data.distill.max_seconds: found 0.0, expected a number above 0"),
    ],
)
def test_config_is_checked(change, message):
    node = config()
    node.check()
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{**vars(node), **change}).check()


def test_config_node_is_omegaconf_structured():
    from omegaconf import OmegaConf

    node = OmegaConf.merge(
        OmegaConf.structured(DataConfig), {"sources": [{"path": "a"}], "template_kwargs": {"enable_thinking": False}}
    )
    made = OmegaConf.to_object(node)
    assert isinstance(made, DataConfig) and made.sources == [SourceConfig(path="a")]
    assert made.template_kwargs == {"enable_thinking": False}


def test_conversation_the_template_refuses_is_dropped_and_told(make_chat):
    chat = make_chat("mistral")
    twice = Conversation(
        "twice",
        ({"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}),
    )
    samples, report = tokenize([conversation(), twice], chat.tokenizer, config(), sorted(chat.stop_token_ids))
    assert [s.id for s in samples] == ["c"]
    assert report.dropped == {"the chat template refuses it: Conversation roles must alternate": ["twice"]}


def test_conversation_that_cannot_be_masked_is_dropped_when_others_can(make_chat):
    chat = make_chat("chatml")
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n' }}{{ 'now' if messages[-1].content == 'odd' }}"
    )
    odd = ({"role": "user", "content": "odd"}, {"role": "assistant", "content": "Bye bye"})
    samples, report = tokenize(
        [conversation(), Conversation("odd", odd)], chat.tokenizer, config(), sorted(chat.stop_token_ids)
    )
    assert [s.id for s in samples] == ["c"]
    assert report.dropped == {
        "chat template: the prompt before an answer is not the beginning of the text with the answer": ["odd"]
    }


def test_a_greeting_is_context_and_what_stands_behind_a_stop_token_is_told(tokenizer):
    hi, welcome = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}
    greeting = Conversation("greeting", (welcome, hi, {"role": "assistant", "content": "Bye"}))
    alone = Conversation("alone", (welcome, hi))
    broken = conversation("Hello<|im_end|> there", "broken")
    samples, report = tokenize([greeting, alone, broken], tokenizer, config(), stops(tokenizer))
    assert [s.id for s in samples] == ["greeting", "broken"]
    shown = [tokenizer.decode([t for t, n in zip(s.token_ids, s.turn_ids, strict=True) if n >= 0]) for s in samples]
    assert shown == ["Bye<|im_end|>", "Hello<|im_end|>"]
    assert (report.greetings, report.broken, report.dropped) == (1, ["broken"], {"no assistant answer": ["alone"]})
    assert "1 beginning with an answer that no question precedes: it is context only" in report.lines()
    told = "1 with a stop token inside an answer; what stands behind it does not train (broken)"
    assert told in report.lines()
    assert report.as_dict()["broken"] == ["broken"]


def test_what_the_template_leaves_out_is_counted_with_its_reason(tokenizer):
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"day": 1}}}
    thinking = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye", "reasoning_content": "Be"})
    calling = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    rows = [
        conversation(),
        dataclasses.replace(conversation(name="tools"), tools=(tool,)),
        Conversation("thinking", thinking),
        Conversation("calling", calling),
    ]
    samples, report = tokenize(rows, tokenizer, config(), stops(tokenizer))
    assert [sample.id for sample in samples] == ["c"]
    assert report.dropped == {
        "the chat template leaves out the tools": ["tools"],
        "the chat template leaves out the reasoning of an answer": ["thinking"],
        "the chat template leaves out the tool calls of an answer": ["calling"],
    }
    assert "dropped 1: the chat template leaves out the tools (tools)" in report.lines()
    assert sum("target.chat_template=FILE" in line for line in report.lines()) == 1
    assert not any("target.chat_template" in line for line in tokenize(rows[:1], tokenizer, config(), ())[1].lines())


def test_cut_answers_of_a_distillation_are_kept_or_dropped_with_what_follows_them(tokenizer, write_jsonl):
    def turn(prompt, answer, finish):
        return {"prompt_token_ids": prompt, "response_token_ids": answer, "finish_reason": finish}

    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    whole, cut = turn([1, 2], [3, 4, end], "stop"), turn([1, 2], [3, 4, 5], "length")
    later = turn([1, 2, 3, 4, end, 6], [7, 8, 9], "content_filter")
    after = turn([1, 2, 3, 4, 5, 6], [7, 8, end], "stop")
    made = {"messages": said, "sampling": {}}
    path = write_jsonl(
        [
            {"id": "whole", **made, **whole},
            {"id": "cut", **made, **cut},
            {"id": "later", **made, "messages": said * 2, **later, "earlier_turns": [whole]},
            {"id": "first", **made, "messages": said * 2, **after, "earlier_turns": [cut]},
            {"id": "somebody's", "messages": said, **cut},
        ]
    )
    node = DataConfig(sources=[SourceConfig(path=str(path))])
    kept, _ = tokenize(load_conversations(node.sources), tokenizer, node, [end])
    assert [sample.id for sample in kept] == ["whole", "cut", "later", "first", "somebody's"]
    node.distill.cut_answers = "drop"
    samples, report = tokenize(load_conversations(node.sources), tokenizer, node, [end])
    assert {sample.id: sample.token_ids.tolist() for sample in samples} == {
        "whole": [1, 2, 3, 4, end], "later": [1, 2, 3, 4, end], "somebody's": [1, 2, 3, 4, 5],
    }  # fmt: skip
    assert report.dropped == {"its answer was cut (data.distill.cut_answers=drop)": ["cut", "first"]}
