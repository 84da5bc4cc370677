"""The target's own answers: equal to plain decoding, resumable to the byte, reported when something is left out."""

from __future__ import annotations

import dataclasses
import errno
import json

import pytest
import torch

import headstart.data.distilling.answer_file as files
import headstart.data.distilling.answering as module
import headstart.data.distilling.distill as distillation
from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.distilling.answering import Answer, Answerer, choose
from headstart.data.distilling.distill import distill
from headstart.data.prepare import tokenize
from headstart.data.prompts import Prompt
from headstart.data.row_random import draw_at, uniforms
from headstart.data.sources.sources import load_conversations
from headstart.eval.decoding.generation import EngineAnswerer
from headstart.heads.errors import DataError, StorageError, TemplateError

TEXTS = ["Hi", "Hello there", "Be brief now", "One two three", "Bye", "How are you", "thanks", "more"]


@pytest.fixture
def prompts():
    return [Prompt.ask(f"p{i}", text, task="t" if i % 2 else None) for i, text in enumerate(TEXTS)]


@pytest.fixture
def target(target):
    """A target that stops now and then: its answers end with `<|im_end|>` for some prompts and run on for others."""
    weight = target.model.get_output_embeddings().weight
    with torch.no_grad():
        weight.mul_(20)
    return target


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_greedy(target, ids, steps):
    """Without a cache, a batch or padding: the naive loop."""
    ids, answer = list(ids), []
    for _ in range(steps):
        token = int(target.model(torch.tensor([ids + answer])).logits[0, -1].argmax())
        answer.append(token)
        if token in target.stop_token_ids:
            return answer, "stop"
    return answer, "length"


def test_greedy_answers_equal_the_naive_loop(target, prompts, tmp_path):
    # make one token that is sampled in the answers the stop token, so that both endings occur
    answers = [plain_greedy(target, _ids(target, p), 6)[0] for p in prompts]
    target.stop_token_ids = (answers[0][3],)
    path = distill(target, prompts, DistillConfig(max_new_tokens=6, batch_size=3), tmp_path / "out.jsonl")
    records = {r["id"]: r for r in read(path)}
    assert sorted(records) == sorted(p.id for p in prompts)
    for prompt in prompts:
        record = records[prompt.id]
        answer, finish = plain_greedy(target, record["prompt_token_ids"], 6)
        assert record["prompt_token_ids"] == _ids(target, prompt)
        assert (record["response_token_ids"], record["finish_reason"]) == (answer, finish)
        assert record["messages"][0] == {"role": "user", "content": prompt.first[0]["content"]}
        text = target.tokenizer.decode(answer[:-1] if finish == "stop" else answer, skip_special_tokens=True)
        assert record["messages"][1] == {"role": "assistant", "content": text}
        assert record.get("task") == prompt.task
    assert {r["finish_reason"] for r in records.values()} == {"stop", "length"}


def _ids(target, prompt):
    return target.tokenizer.apply_chat_template(prompt.messages(), add_generation_prompt=True, return_dict=False)


def test_records_train_verbatim(target, prompts, tmp_path):
    path = distill(target, prompts, DistillConfig(max_new_tokens=5, batch_size=4), tmp_path / "out.jsonl")
    node = DataConfig(sources=[SourceConfig(path=str(path))])
    samples, report = tokenize(load_conversations(node.sources), target.tokenizer, node, target.stop_token_ids)
    assert report.samples == len(prompts) and report.dropped == {}
    for sample, record in zip(samples, read(path), strict=True):
        assert sample.token_ids.tolist() == record["prompt_token_ids"] + record["response_token_ids"]
        assert (
            sample.supervised == len(record["response_token_ids"]) and sample.finish_reason == record["finish_reason"]
        )


def test_several_turns_are_answered_one_after_another(target, tmp_path):
    prompts = [Prompt.ask("two", "Hi", "Bye", system="Be brief"), Prompt.ask("one", "Hello")]
    records = {
        r["id"]: r for r in read(distill(target, prompts, DistillConfig(max_new_tokens=4), tmp_path / "o.jsonl"))
    }
    two = records["two"]
    assert [m["role"] for m in two["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    first = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    (earlier,) = two["earlier_turns"]
    assert earlier["prompt_token_ids"] == first and earlier["response_token_ids"] == plain_greedy(target, first, 4)[0]
    second = target.tokenizer.apply_chat_template(two["messages"][:-1], add_generation_prompt=True, return_dict=False)
    assert two["prompt_token_ids"] == second and two["response_token_ids"] == plain_greedy(target, second, 4)[0]
    assert "earlier_turns" not in records["one"]


SAMPLED = DistillConfig(max_new_tokens=6, batch_size=3, temperature=0.8, top_p=0.95, top_k=20, samples_per_prompt=2)


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may see to it."""


@pytest.mark.parametrize("config", [DistillConfig(max_new_tokens=6, batch_size=3), SAMPLED], ids=["greedy", "sampled"])
def test_killed_run_continues_to_the_same_file(target, prompts, tmp_path, monkeypatch, config):
    whole = distill(target, prompts, config, tmp_path / "whole.jsonl", seed=5).read_bytes()
    path = tmp_path / "killed.jsonl"
    calls = []

    def generate_then_die(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return real(*arguments)

    real = module.generate
    monkeypatch.setattr(module, "generate", generate_then_die)
    with pytest.raises(Killed):
        distill(target, prompts, config, path, seed=5)
    assert len(read(path)) == 6
    monkeypatch.setattr(module, "generate", real)
    distill(target, prompts, config, path, seed=5)
    assert path.read_bytes() == whole


def test_time_that_is_over_keeps_what_was_answered_and_more_of_it_answers_the_rest(
    target, prompts, tmp_path, monkeypatch
):
    now, said, path = [0.0], [], tmp_path / "limited.jsonl"
    real = module.generate

    def a_second_each(*arguments):
        now[0] += 1.0
        return real(*arguments)

    monkeypatch.setattr(distillation.time, "monotonic", lambda: now[0])
    limited = dataclasses.replace(SAMPLED, max_seconds=2.0)
    whole = {r["id"]: r for r in read(distill(target, prompts, SAMPLED, tmp_path / "whole.jsonl", seed=6))}
    monkeypatch.setattr(module, "generate", a_second_each)
    made = read(distill(target, prompts, limited, path, 6, lambda *progress: said.append(progress[2])))
    assert len(made) == 6 and now[0] == 2.0 and "data.distill.max_seconds=2 are over: 6 of 16 answers" in said
    assert [r["id"] for r in made] != list(whole)[:6]  # not the six shortest prompts
    assert all(record == whole[record["id"]] for record in made)
    distill(target, prompts, dataclasses.replace(SAMPLED, max_seconds=0.001), path, seed=6)  # one batch at least
    again = read(path)
    assert len(again) == 9 and [record for record in again if record in made] == made
    distill(target, prompts, SAMPLED, path, seed=6)
    assert {r["id"]: r for r in read(path)} == whole and len(read(path)) == 16


@pytest.mark.parametrize("block", [1 << 16, 7])
@pytest.mark.parametrize("keep", [0, 1, 200, -1, -40])
def test_torn_last_line_is_dropped_loudly_and_rewritten(target, prompts, tmp_path, monkeypatch, keep, block):
    monkeypatch.setattr(files, "BLOCK", block)
    whole = distill(target, prompts, SAMPLED, tmp_path / "whole.jsonl").read_bytes()
    path = tmp_path / "torn.jsonl"
    path.write_bytes(whole[:keep])
    messages = []
    distill(target, prompts, SAMPLED, path, progress=lambda done, total, message: messages.append(message))
    assert path.read_bytes() == whole
    torn = keep != 0
    assert any("dropped a last line" in m and "torn.jsonl" in m for m in messages) == torn


def test_finished_file_runs_nothing(target, prompts, tmp_path, monkeypatch):
    path = distill(target, prompts, SAMPLED, tmp_path / "o.jsonl")
    before = path.read_bytes()
    monkeypatch.setattr(module, "generate", lambda *_: pytest.fail("nothing is left to generate"))
    calls = []
    distill(target, prompts, SAMPLED, path, progress=lambda *a: calls.append(a))
    assert path.read_bytes() == before and calls[0][:2] == (16, 16)


def test_sampling_is_per_prompt_and_per_seed(target, prompts, tmp_path):
    everyone = {
        r["id"]: r["response_token_ids"] for r in read(distill(target, prompts, SAMPLED, tmp_path / "a.jsonl", seed=1))
    }
    few = {
        r["id"]: r["response_token_ids"]
        for r in read(distill(target, prompts[2:5], SAMPLED, tmp_path / "b.jsonl", seed=1))
    }
    assert few == {name: everyone[name] for name in few}
    assert sorted(few) == ["p2/sample0", "p2/sample1", "p3/sample0", "p3/sample1", "p4/sample0", "p4/sample1"]
    assert any(everyone[f"p{i}/sample0"] != everyone[f"p{i}/sample1"] for i in range(8))
    other = {
        r["id"]: r["response_token_ids"] for r in read(distill(target, prompts, SAMPLED, tmp_path / "c.jsonl", seed=2))
    }
    assert other != everyone


def test_choose_follows_the_filtered_distribution():
    logits_BV = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    uniform_B = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def share(**kwargs):
        config = DistillConfig(temperature=1.0, **kwargs)
        return torch.bincount(choose(logits_BV, config, uniform_B), minlength=4) / 4000

    assert torch.allclose(share(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)
    assert torch.allclose(share(top_k=2), torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.03)
    assert torch.allclose(share(top_p=0.9), torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95, atol=0.03)
    assert share(top_p=0.1).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert choose(logits_BV[:1], DistillConfig(), uniform_B[:1]).tolist() == [0]


def test_other_settings_or_prompts_are_refused(target, other_target, prompts, tmp_path):
    path = distill(target, prompts, SAMPLED, tmp_path / "o.jsonl")
    with pytest.raises(DataError, match=r"o.jsonl:1: sampling.seed: found 0, this run has 9: give another output file"):
        distill(target, prompts, SAMPLED, path, seed=9)
    with pytest.raises(DataError, match="sampling.max_new_tokens: found 6, this run has 7"):
        distill(target, prompts, DistillConfig(**{**vars(SAMPLED), "max_new_tokens": 7}), path)
    with pytest.raises(DataError, match="sampling.weights"):
        distill(other_target, prompts, SAMPLED, path)
    changed = [Prompt.ask(p.id, "fine") for p in prompts]
    with pytest.raises(DataError, match="found another prompt under the id 'p"):
        distill(target, changed, SAMPLED, path)


def test_bad_prompts_are_reported_and_the_rest_answered(target, prompts, tmp_path):
    long = Prompt.ask("long", " ".join(["one"] * 200))
    lines = []
    path = distill(
        target,
        [long, *prompts[:2]],
        DistillConfig(max_new_tokens=4),
        tmp_path / "o.jsonl",
        progress=lambda *a: lines.append(a[2]),
    )
    assert sorted(r["id"] for r in read(path)) == ["p0", "p1"]
    skipped = json.loads((tmp_path / "o.jsonl.skipped.json").read_text())
    assert list(skipped) == ["long"] and "at most 124 fit" in skipped["long"]
    assert any(line.startswith("skipped long:") for line in lines)
    with pytest.raises(DataError, match="none of 1 prompt can be answered; the first, long: "):
        distill(target, [long], DistillConfig(max_new_tokens=4), tmp_path / "n.jsonl")


def test_what_helps_where_the_template_leaves_out_tools(target, prompts, tmp_path):
    tools = ({"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": {}}},)
    config, lines, said = DistillConfig(max_new_tokens=4), [], [Prompt.ask("tools", "Hi", tools=tools)]
    helps = "to ask with what the chat template leaves out, give one that writes it (target.chat_template=FILE"

    def progress(done, total, line):
        lines.append(line)

    distill(target, [*said, prompts[0]], config, tmp_path / "a.jsonl", progress=progress)
    assert sum(line.startswith(helps) for line in lines) == 1
    with pytest.raises(DataError, match="first, tools: the chat template leaves out the tools .*; to ask with what"):
        distill(target, said, config, tmp_path / "b.jsonl")
    lines.clear()
    distill(target, prompts[:1], config, tmp_path / "c.jsonl", progress=progress)
    assert not any(helps in line for line in lines)


def test_later_turn_that_does_not_fit_keeps_the_earlier_ones(target, tmp_path):
    prompt = Prompt.ask("grows", "Hi", " ".join(["one"] * 200))
    path = distill(target, [prompt], DistillConfig(max_new_tokens=4), tmp_path / "o.jsonl")
    (record,) = read(path)
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"] and len(record["response_token_ids"]) == 4
    assert "turn 2 has" in json.loads((tmp_path / "o.jsonl.skipped.json").read_text())["grows"]
    assert distill(target, [prompt], DistillConfig(max_new_tokens=4), path) == path


class Scripted(Answerer):
    """Gives these answers, one request after another."""

    def __init__(self, stop, *answers):
        self.stop, self.left = stop, list(answers)

    def answers(self, requests):
        while batch := requests.take(1):
            tokens = tuple(self.left.pop(0))
            yield Answer(batch[0], tokens, "stop" if tokens[-1] == self.stop else "length")


def test_an_answer_with_special_tokens_is_no_history(target, tmp_path):
    """Left out, they would make one text of what was generated as two; so no later question is asked."""
    tokenizer = target.tokenizer
    stop, special, hello = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>", "Hello"])
    prompt, plain = Prompt.ask("talk", "Hi", "Bye"), Prompt.ask("plain", "Hi there", "Bye")
    out = tmp_path / "o.jsonl"
    config = DistillConfig(max_new_tokens=4, batch_size=1)
    answerer = Scripted(stop, [hello, special, hello, stop], [hello, stop], [hello, stop])
    distill(target, [prompt, plain], config, out, answerer=answerer)
    records = {record["id"]: record for record in read(out)}
    assert [m["role"] for m in records["talk"]["messages"]] == ["user", "assistant"]
    assert records["talk"]["response_token_ids"] == [hello, special, hello, stop]
    skipped = json.loads((tmp_path / "o.jsonl.skipped.json").read_text())
    assert list(skipped) == ["talk"] and "turn 2: an answer holds special tokens" in skipped["talk"]
    assert [m["content"] for m in records["plain"]["messages"]] == ["Hi there", "Hello", "Bye", "Hello"]
    assert distill(target, [prompt, plain], config, out, answerer=Scripted(stop)) == out


def test_a_later_question_that_the_template_refuses_ends_the_conversation(target, tmp_path):
    target.tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    distill(target, [Prompt.ask("two", "Hi", "Bye")], DistillConfig(max_new_tokens=2), tmp_path / "o.jsonl")
    (record,) = read(tmp_path / "o.jsonl")
    assert len(record["messages"]) == 2 and "earlier_turns" not in record
    assert "one message only" in json.loads((tmp_path / "o.jsonl.skipped.json").read_text())["two"]


def test_tools_and_template_variables_stay_with_the_answer(target, tmp_path):
    target.tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ mood }} "
        "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    tools = ({"type": "function", "function": {"name": "think", "parameters": {}}},)
    prompt = Prompt.ask("p", "Hi", tools=tools, template_kwargs={"mood": "kind"})
    path = distill(target, [prompt], DistillConfig(max_new_tokens=2), tmp_path / "o.jsonl", template_kwargs={"mood": 1})
    (record,) = read(path)
    assert (record["tools"], record["chat_template_kwargs"]) == (list(tools), {"mood": "kind"})
    ids = target.tokenizer("think kind Hi<|im_end|>", add_special_tokens=False)["input_ids"]
    assert record["prompt_token_ids"] == ids
    for other in ({"tools": ()}, {"template_kwargs": {"mood": "sad"}}):
        with pytest.raises(DataError, match="found another prompt under the id 'p'"):
            distill(target, [dataclasses.replace(prompt, **other)], DistillConfig(max_new_tokens=2), path,
                    template_kwargs={"mood": 1})  # fmt: skip


def test_prompts_of_token_ids_need_no_template(target, tmp_path):
    target.tokenizer.chat_template = None
    wrong = Prompt("wrong", (), prompt_token_ids=(1, 10**6))
    path = distill(target, [Prompt("p", (), prompt_token_ids=(5, 6, 7)), wrong], DistillConfig(max_new_tokens=3),
                   tmp_path / "o.jsonl")  # fmt: skip
    (record,) = read(path)
    assert record["prompt_token_ids"] == [5, 6, 7]
    assert record["response_token_ids"] == plain_greedy(target, [5, 6, 7], 3)[0]
    assert "token id 1000000, the target has" in json.loads((tmp_path / "o.jsonl.skipped.json").read_text())["wrong"]
    node = DataConfig(sources=[SourceConfig(path=str(path))], min_supervised=1)
    (sample,), _ = tokenize(load_conversations(node.sources), target.tokenizer, node, target.stop_token_ids)
    assert sample.token_ids.tolist() == [5, 6, 7, *record["response_token_ids"]]


@pytest.mark.parametrize(
    "line", ["[1]", '{"prompt": "x"}', '{"messages": 3}', '{"id": 1, "sampling": {}, "prompt": "x"}', "{", '"x"']
)
def test_a_file_that_no_distillation_wrote_is_refused(target, prompts, tmp_path, line):
    (tmp_path / "o.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="o.jsonl:1: "):
        distill(target, prompts, DistillConfig(max_new_tokens=2), tmp_path / "o.jsonl")


def test_what_was_left_out_stays_listed_when_answers_are_added(target, tmp_path):
    prompts = [Prompt.ask(f"p{i}", "Hi", "Hello there " * 40) for i in range(4)]
    config = DistillConfig(max_new_tokens=4, batch_size=2, max_prompt_tokens=60)
    path = tmp_path / "out.jsonl"
    distill(target, prompts, dataclasses.replace(config, max_seconds=1e-6), path)
    listed = json.loads((tmp_path / "out.jsonl.skipped.json").read_text())
    assert len(listed) == 2
    distill(target, prompts, config, path)
    assert json.loads((tmp_path / "out.jsonl.skipped.json").read_text()).keys() == {"p0", "p1", "p2", "p3"}


def test_full_disk_names_the_file_and_loses_nothing(target, prompts, tmp_path, monkeypatch):
    config = DistillConfig(max_new_tokens=6, batch_size=3)
    whole = distill(target, prompts, config, tmp_path / "whole.jsonl").read_bytes()
    path, real, calls = tmp_path / "o.jsonl", files.os.fsync, []
    monkeypatch.setattr(files, "SYNC_S", 0.0)

    def full(descriptor):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageError, match="o.jsonl: the disk is full"):
        distill(target, prompts, config, path)
    monkeypatch.setattr(files.os, "fsync", real)
    assert distill(target, prompts, config, path).read_bytes() == whole


def test_target_without_template(target, prompts, tmp_path):
    target.tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="target.chat_template="):
        distill(target, prompts, DistillConfig(), tmp_path / "o.jsonl")


@pytest.mark.parametrize("kind", ["transformers", "fused"])
@pytest.mark.parametrize("config", [DistillConfig(max_new_tokens=6, batch_size=3), SAMPLED], ids=["greedy", "sampled"])
def test_the_engine_gives_the_same_answers(target, prompts, tmp_path, config, kind):
    """Odd last batches, stops, several samples per prompt: to the byte what the model's own forward gives.

    Several batches' worth of prompts at once, of which rows that ended take the next one, change nothing.
    """
    plain = distill(target, prompts, config, tmp_path / "plain.jsonl", seed=3).read_bytes()
    answerer = EngineAnswerer(target, config, kind)
    out = tmp_path / "engine.jsonl"
    assert distill(target, prompts, config, out, 3, answerer=answerer).read_bytes() == plain
    assert answerer.decoder.engine.batch == 3
    assert (answerer.decoder.engine.fused is not None) == (kind == "fused")


def test_random_numbers_belong_to_seed_and_position():
    """SplitMix64 from its published constants, in Python's integers; uniform, and free of the neighbours' numbers."""

    def published(state):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    seeds, positions = torch.tensor([0, 1, 2**62 + 12345]), torch.tensor([0, 7, 4095])
    expected = [
        (published(s ^ published(p)) >> 11) / 2**53 for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert uniforms(seeds, positions).tolist() == expected
    many = uniforms(torch.arange(200)[:, None].expand(200, 100).flatten(), torch.arange(100).repeat(200))
    share = torch.histc(many, bins=20, min=0, max=1) / len(many)
    assert many.min() >= 0 and many.max() < 1 and torch.allclose(share, torch.full((20,), 0.05).double(), atol=0.006)
    neighbours = torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.03


def test_a_draw_never_takes_what_has_no_mass():
    p_BV = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    uniform_B = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw_at(p_BV, uniform_B).tolist() == [1, 1, 3, 3, 3]
