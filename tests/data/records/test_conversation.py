"""One parser: a record gives the same prompt in training, distillation, evaluation and a served evaluation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.distilling.distill import distill
from headstart.data.prepare import tokenize
from headstart.data.prompts import prompt_of
from headstart.data.records.conversation import parse_record
from headstart.data.records.messages import wire_message
from headstart.data.sources.sources import load_conversations
from headstart.eval.config import EvalConfig
from headstart.eval.measuring.contexts import first_contexts
from headstart.eval.prompts import load_prompts
from headstart.eval.servers.probes import Sglang, Vllm
from headstart.eval.servers.served import chat_fields
from headstart.heads.errors import DataError
from headstart.heads.targets.target import Target, TargetConfig

#: shows everything that a record can bring along
TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}{% if style is defined %}[style {{ style }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target over bytes: what is decoded is what was rendered, to the character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    settings = TargetConfig(name="tiny", device="cpu", dtype="float32")
    return Target.from_model(LlamaForCausalLM(config).float(), tokenizer, settings)


ASK = {"role": "user", "content": "Rain?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Ulm"}'}}]}  # fmt: skip
RESULT = {"role": "tool", "name": "look", "tool_call_id": "c1", "content": "dry"}
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = "[tools " + json.dumps([TOOL]) + "]"

#: record → the prompt of its last question
PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "prompt + system": ({"prompt": "Name a fruit.", "system": "Answer in French."},
                        "<system>Answer in French.<|end|><user>Name a fruit.<|end|>"),
    "messages": ({"messages": [{"role": "system", "content": "S"}, ASK]}, "<system>S<|end|><user>Rain?<|end|>"),
    "messages + system": ({"messages": [ASK], "system": "S"}, "<system>S<|end|><user>Rain?<|end|>"),
    "the same system twice": ({"messages": [{"role": "system", "content": "S"}, ASK], "system": "S"},
                              "<system>S<|end|><user>Rain?<|end|>"),
    "developer": ({"messages": [{"role": "developer", "content": "D"}, ASK]}, "<developer>D<|end|><user>Rain?<|end|>"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text":
              "in?"}]}]}, "<user>Rain?<|end|>"),
    "sharegpt + system": ({"conversations": [{"from": "human", "value": "Rain?"}], "system": "S"},
                          "<system>S<|end|><user>Rain?<|end|>"),
    "sharegpt system": ({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Rain?"}]},
                        "<system>S<|end|><user>Rain?<|end|>"),
    "sharegpt with roles": ({"conversations": [ASK]}, "<user>Rain?<|end|>"),
    "turns + system": ({"turns": ["Rain?"], "system": "S"}, "<system>S<|end|><user>Rain?<|end|>"),
    "question": ({"question": "Rain?", "system": "S"}, "<system>S<|end|><user>Rain?<|end|>"),
    "instruction + input": ({"instruction": "Translate.", "input": "Hallo"}, "<user>Translate.\n\nHallo<|end|>"),
    "tools": ({"messages": [ASK], "tools": [TOOL]}, TOOLS + "<user>Rain?<|end|>"),
    "tools as text": ({"prompt": "Rain?", "tools": json.dumps([TOOL])}, TOOLS + "<user>Rain?<|end|>"),
    "functions": ({"turns": ["Rain?"], "functions": [FUNCTION]}, TOOLS + "<user>Rain?<|end|>"),
    "template variables": ({"prompt": "Rain?", "chat_template_kwargs": {"style": "kind"}},
                           "[style kind]<user>Rain?<|end|>"),
    "tool calls": ({"messages": [ASK, CALL, RESULT], "tools": [TOOL]},
                   TOOLS + '<user>Rain?<|end|><assistant>[look {"city": "Ulm"}]<|end|><tool look c1>dry<|end|>'),
    "called twice": ({"messages": [ASK, CALL, RESULT, {"role": "assistant", "content": "No."}, ASK]},
                     '<user>Rain?<|end|><assistant>[look {"city": "Ulm"}]<|end|><tool look c1>dry<|end|>'
                     "<assistant>No.<|end|><user>Rain?<|end|>"),
    "older form of a call": ({"messages": [ASK, {"role": "assistant", "function_call": {"name": "look", "arguments":
                             {"city": "Ulm"}}}, {"role": "function", "name": "look", "content": "dry"}]},
                             '<user>Rain?<|end|><assistant>[look {"city": "Ulm"}]<|end|><tool look>dry<|end|>'),
    "thinking": ({"messages": [ASK, {**CALL, "thinking": "Hm"}, RESULT]},
                 '<user>Rain?<|end|><assistant>(Hm)[look {"city": "Ulm"}]<|end|><tool look c1>dry<|end|>'),
}  # fmt: skip


def with_answer(record: dict[str, Any]) -> dict[str, Any] | None:
    """The record as training has it: with a recorded answer, where its layout has a place for one."""
    answer = {"role": "assistant", "content": "Yes."}
    for key in ("messages", "conversations"):
        if key in record:
            return {**record, key: [*record[key], answer]}
    return {**record, "response": "Yes."} if "prompt" in record else None


@pytest.fixture(params=PROMPTS.values(), ids=PROMPTS.keys())
def case(request, target, write_jsonl):
    record, expected = request.param
    return record, expected + "<assistant>", write_jsonl([record])


ANSWERED = {name: (whole, text) for name, (record, text) in PROMPTS.items() if (whole := with_answer(record))}


@pytest.mark.parametrize(("record", "prompt"), ANSWERED.values(), ids=ANSWERED.keys())
def test_training_renders_the_prompt(target, record, prompt, write_jsonl):
    expected = prompt + "<assistant>"
    node = DataConfig(sources=[SourceConfig(path=str(write_jsonl([record])))], turns="last")
    samples, report = tokenize(load_conversations(node.sources), target.tokenizer, node, target.stop_token_ids)
    assert report.dropped == {}
    (sample,) = samples
    first = int((sample.turn_ids >= 0).argmax())
    assert target.tokenizer.decode(sample.token_ids[:first]) == expected
    assert target.tokenizer.decode(sample.token_ids[first:]) == "Yes.<|end|>"


def test_distillation_renders_the_prompt(target, case, tmp_path):
    _, expected, path = case
    out = tmp_path / "out.jsonl"
    prompts = read_prompts([SourceConfig(path=str(path))])
    made = json.loads(distill(target, prompts, DistillConfig(max_new_tokens=2), out).read_text())
    assert target.tokenizer.decode(made["prompt_token_ids"]) == expected
    # what was made is found finished again, and its messages render the same prompt
    assert distill(target, prompts, DistillConfig(max_new_tokens=2), out).read_text().count("\n") == 1
    (again,) = read_prompts([SourceConfig(path=str(out))])
    text = target.tokenizer.apply_chat_template(
        again.messages(), tools=list(again.tools) or None, tokenize=False, add_generation_prompt=True,
        **again.template_kwargs,
    )  # fmt: skip
    assert text == expected


def test_evaluation_renders_the_prompt(target, case):
    _, expected, path = case
    _, (context,), _ = first_contexts(load_prompts(path), target, EvalConfig())
    assert target.tokenizer.decode(context) == expected


@pytest.mark.parametrize("engine", [Vllm, Sglang])
def test_a_server_is_sent_what_renders_the_prompt(target, case, engine):
    """Servers parse `arguments` before they render, as the API has them as text."""
    _, expected, path = case
    (prompt,) = load_prompts(path)
    body = json.loads(json.dumps(chat_fields(prompt, [], EvalConfig(), engine.__new__(engine))))
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = target.tokenizer.apply_chat_template(
        body["messages"], tools=body.get("tools"), tokenize=False, add_generation_prompt=True,
        **body.get("chat_template_kwargs", {}),
    )  # fmt: skip
    assert text == expected
    assert body.get("tool_choice") == ("none" if "tools" in body and engine is Vllm else None)


def asked(record: dict[str, Any], how: str) -> list[str]:
    prompt = prompt_of(parse_record(record, "f:1", "1"), how)
    return [" ".join(f"{m['role'][0]}:{m['content']}" for m in group) for group in (prompt.first, *prompt.later)]


def say(*texts: str) -> dict[str, Any]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[text[0]], "content": text[2:]} for text in texts]}


@pytest.mark.parametrize(
    ("record", "each", "last"),
    [
        (say("u:1", "a:x", "u:2", "a:y"), ["u:1", "u:2"], ["u:1 a:x u:2"]),
        (say("s:S", "u:1", "a:x", "u:2"), ["s:S u:1", "u:2"], ["s:S u:1 a:x u:2"]),
        # what nobody answered stays together; a greeting is history
        (say("u:1", "u:2", "a:x", "u:3"), ["u:1 u:2", "u:3"], ["u:1 u:2 a:x u:3"]),
        (say("a:Hi", "u:1", "a:x"), ["a:Hi u:1"], ["a:Hi u:1"]),
        (say("s:S", "a:Hi", "u:1"), ["s:S a:Hi u:1"], ["s:S a:Hi u:1"]),
        (say("u:1", "a:x", "a:y", "u:2"), ["u:1", "u:2"], ["u:1 a:x a:y u:2"]),
        (say("u:1", "a:x", "s:S", "u:2", "a:y"), ["u:1", "s:S u:2"], ["u:1 a:x s:S u:2"]),
        # results of calls belong to the recorded calls
        (say("u:1", "a:x", "t:r", "a:y"), ["u:1 a:x t:r"], ["u:1 a:x t:r"]),
        (say("u:1", "a:x", "t:r", "a:y", "u:2"), ["u:1 a:x t:r a:y u:2"], ["u:1 a:x t:r a:y u:2"]),
        ({"messages": [ASK, CALL]}, ["u:Rain?"], ["u:Rain?"]),
        ({"turns": ["1", "2"], "system": "S"}, ["s:S u:1", "u:2"], ["s:S u:1", "u:2"]),
        ({"prompt": ["1", "2"]}, ["u:1", "u:2"], ["u:1", "u:2"]),
        ({"prompt_token_ids": [1, 2]}, [""], [""]),
    ],
)  # fmt: skip
def test_where_the_target_answers(record, each, last):
    assert (asked(record, "each"), asked(record, "last")) == (each, last)


def ids_of(record: dict[str, Any], how: str) -> tuple[int, ...] | None:
    return prompt_of(parse_record(record, "f:1", "1"), how).prompt_token_ids


def test_token_ids_belong_to_the_question_they_were_made_for():
    earlier = [{"prompt_token_ids": [1], "response_token_ids": [2], "finish_reason": "stop"}]
    distilled = {**say("u:1", "a:x", "u:2", "a:y"), "prompt_token_ids": [1, 2, 3], "response_token_ids": [4]}
    whole = {**distilled, "earlier_turns": earlier}
    assert (ids_of(whole, "each"), ids_of(whole, "last")) == ((1,), (1, 2, 3))
    # without the earlier turn nobody knows the ids of the first question
    assert (ids_of(distilled, "each"), ids_of(distilled, "last")) == (None, (1, 2, 3))
    assert ids_of({**say("u:1"), "prompt_token_ids": [7]}, "each") == (7,)
    assert ids_of({"turns": ["1", "2"], "prompt_token_ids": [7]}, "last") is None
    assert ids_of({"prompt_token_ids": [7], "response_token_ids": [8]}, "each") == (7,)


def test_fields_that_are_not_read_are_counted(target, write_jsonl):
    path = write_jsonl([
        {"messages": [{**ASK, "weight": 0, "id": "m1"}, {"role": "assistant", "content": "No.", "weight": 1}]},
        {"messages": [{**ASK, "id": "m2", "refusal": None, "audio": []}, {"role": "assistant", "content": "No."}]},
    ])  # fmt: skip
    node = DataConfig(sources=[SourceConfig(path=str(path))])
    _, report = tokenize(load_conversations(node.sources), target.tokenizer, node, target.stop_token_ids)
    assert report.unread == {"id": 2, "weight": 1}
    assert "fields that are not read and reach no prompt, by conversations: 'id' (2), 'weight' (1)" in report.lines()
    assert [prompt.unread for prompt in load_prompts(path)] == [("id", "weight"), ("id",)]


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"prompt": "x", "system_prompt": "S", "history": [], "enable_thinking": False, "source": "web"},
         ("enable_thinking", "system_prompt")),
        ({"instruction": "x", "input": "y", "context": "z", "output": "o"}, ("context",)),
        ({"prompt": "x", "input": "y", "response": "z", "reasoning_content": "r"}, ("input",)),
        ({"messages": [ASK], "reasoning": "r", "reasoning_content": "r"}, ("reasoning", "reasoning_content")),
    ],
)  # fmt: skip
def test_fields_by_which_others_give_the_model_more_to_read_are_told(record, unread):
    assert parse_record(record, "f:1", "1").unread == unread


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "system", "content": "A"}, ASK], "system": "B"}, "system: found 'B' beside a first"),
        ({"prompt": "x", "system": 5}, "system.content: found int 5, expected text"),
        ({"prompt": "x", "tools": {"a": 1}}, "tools: found an object, expected a list of tools"),
        ({"prompt": "x", "tools": ["look"]}, r"tools\[0\]: found text, expected an object with a function's"),
        ({"prompt": "x", "tools": [{"type": "function", "function": [1]}]}, r"tools\[0\].function: found a list"),
        ({"prompt": "x", "functions": [{"name": 5}]}, r"functions\[0\].function: found an object, expected"),
        ({"prompt": "x", "tools": "[{"}, "tools: not valid JSON"),
        ({"prompt": "x", "tools": [TOOL], "functions": [FUNCTION]}, "found both tools and functions"),
        ({"prompt": "x", "chat_template_kwargs": [1]}, "chat_template_kwargs: found a list, expected an object"),
        ({"prompt": "x", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: found 'messages'"),
        ({"messages": [{**CALL, "tool_calls": {"name": "f"}}]}, r"messages\[0\].tool_calls: found an object"),
        ({"messages": [{**CALL, "tool_calls": [{"function": {"name": 5}}]}]}, r"tool_calls\[0\]: .*function.name"),
        ({"messages": [{**CALL, "tool_calls": [{"name": "f", "arguments": 3}]}]}, "arguments: found int 3, expected"),
        ({"messages": [{**ASK, "thinking": "a", "reasoning": "b"}]}, "different texts in reasoning and thinking"),
        ({"messages": [{**ASK, "name": ["x"]}]}, r"messages\[0\].name: found a list, expected text"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\].role: found a list, expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, r"not text \('refusal'\)"),
        ({"prompt": "x", "finish_reason": ["stop"]}, "finish_reason: found a list, expected one of stop"),
        ({"prompt_token_ids": 5}, "prompt_token_ids: found int 5, expected a list of token ids"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids: found int 2147483648 in it"),
        ({"prompt_token_ids": [None]}, "prompt_token_ids: found nothing in it"),
        ({"prompt_token_ids": [1], "response_token_ids": [2], "earlier_turns": 3}, "earlier_turns: found int 3"),
        ({"prompt_token_ids": []}, "found an empty list|found no user message"),
        ({"prompt": "x", "response": None, "completion": 5}, "completion: found int 5, expected text"),
    ],
)  # fmt: skip
def test_bad_fields_are_named_alike_in_every_use(write_jsonl, record, message):
    path = write_jsonl(["", record])
    for read in (lambda: list(load_conversations([SourceConfig(path=str(path))])), lambda: load_prompts(path)):
        with pytest.raises(DataError, match=f"data.jsonl:2: .*({message})"):
            read()


def test_arguments_that_are_no_object_stay_text():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not JSON"}}]}
    (message,) = parse_record({"messages": [call]}, "f:1", "1").messages
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "not JSON"}}]
    empty = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}
    (message,) = parse_record({"messages": [empty]}, "f:1", "1").messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_calls_as_text_of_sharegpt():
    """LLaMA-Factory's names: `function_call` holds the calls as JSON, `observation` what the function returned."""
    said = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": '{"name": "rain", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "no"},
        {"from": "tool_call", "value": '[{"name": "a"}, {"name": "b", "arguments": "{}"}]'},
        {"from": "tool_response", "value": "12"},
        {"from": "gpt", "value": "No."},
    ]
    messages = parse_record({"conversations": said}, "f:1", "1").messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    rain = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Rome"}}}
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [rain]}
    assert [call["function"] for call in messages[3]["tool_calls"]] == [
        {"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}
    ]  # fmt: skip
    for value, found in (("rain()", "not valid JSON"), ("[]", "found an empty list"), ("[1]", "found a list")):
        with pytest.raises(DataError, match=rf"f:1: conversations\[0\].value: {found}"):
            parse_record({"conversations": [{"from": "function_call", "value": value}]}, "f:1", "1")
    with pytest.raises(DataError, match=r"conversations\[0\].value: found nothing, expected calls as JSON"):
        parse_record({"conversations": [{"from": "function_call"}]}, "f:1", "1")


def test_an_answer_of_prompt_and_response_has_its_reasoning_and_calls():
    record = {"prompt": "Rain?", "response": "No.", "reasoning_content": "Hm", "tool_calls": CALL["tool_calls"]}
    conversation = parse_record(record, "f:1", "1")
    assert conversation.messages[1]["reasoning_content"] == "Hm" and conversation.messages[1]["tool_calls"]
    assert conversation.meta == {}


def test_thoughts_reach_a_server_by_both_names():
    thinking = {"role": "assistant", "content": "Hi", "reasoning_content": "Be brief"}
    assert wire_message(thinking) == {**thinking, "reasoning": "Be brief"}
    assert wire_message(ASK) == ASK


@pytest.mark.parametrize(
    ("given", "read"), [("eos_token", "stop"), ("end_turn", "stop"), ("tool_calls", "stop"), ("max_tokens", "length")]
)
def test_finish_reasons_of_other_servers(given, read):
    """TGI says eos_token; Anthropic's interface end_turn and max_tokens."""
    record = {"prompt": "x", "response": "y", "finish_reason": given}
    assert parse_record(record, "f:1", "1").finish_reason == read
