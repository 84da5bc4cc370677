"""Prompts that the target writes itself: what it continues, which of them stay, and that they are the same again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from chat_templates import TEMPLATES, word_tokenizer
from templates import families

import headstart.data.distilling.answering as answering
from headstart.data.config import DataConfig, DistillConfig, ServerConfig
from headstart.data.distilling import writing_prompts as module
from headstart.data.distilling.answering import Answer, Answerer
from headstart.data.distilling.writing_prompts import Opening, opening_of, tries_of, write_prompts
from headstart.heads.errors import ConfigError, DataError, TemplateError

CONFIG = DistillConfig(written=8, written_max_tokens=20, written_top_p=1.0, batch_size=4)
#: stops of the random target, so that its texts have a few words each
STOPS = "Hi Bye bye now fine thanks done more One two".split()


@pytest.fixture
def target(target):
    """A random target that ends what it writes after a few words."""
    ids = [i for word in STOPS for i in target.tokenizer.convert_tokens_to_ids([word, f" {word}"])]
    target.stop_token_ids = (*target.stop_token_ids, *ids)
    return target


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(path) -> list[str]:
    return [record["messages"][0]["content"] for record in read(path)]


class Says(Answerer):
    """Continues the opening of every try with a text that is known, cut where it ends with "…"."""

    def __init__(self, target, texts: Sequence[str]):
        self.target, self.texts, self.asked = target, texts, list[int]()

    def answers(self, requests):
        while batch := requests.take(3):
            for request in reversed(batch):
                number = int(request.id.removeprefix("try-"))
                self.asked.append(number)
                text = self.texts[number]
                ids = self.target.tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"]
                cut = text.endswith("…")
                yield Answer(request, (*ids, *([] if cut else [self.end])), "length" if cut else "stop")

    @property
    def end(self) -> int:
        return self.target.tokenizer.convert_tokens_to_ids("<|im_end|>")


def written(target, texts: Sequence[str], wanted: int, out, **more):
    """What becomes of these tries, and the numbers of those that were asked."""
    config = DistillConfig(written=wanted, written_max_tokens=20)
    says = Says(target, texts)
    return write_prompts(target, config, out, answerer_of=lambda target, config: says, **more), says.asked


def test_the_target_continues_the_opening_of_a_users_message(target):
    tokenizer = target.tokenizer
    opening = opening_of(target, CONFIG)
    # the template adds a system message where there is none
    text = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(opening.ids) == text
    assert list(opening.ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    end, begin = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert opening.stops == target.stop_token_ids and end in opening.stops
    assert {end, begin} <= opening.special
    assert not opening.special.intersection(tokenizer("Hello there", add_special_tokens=False)["input_ids"])


def test_a_template_without_a_system_message_begins_with_the_user(target):
    target.tokenizer = word_tokenizer(TEMPLATES["qwen3"], "<|im_end|>")
    assert target.tokenizer.decode(opening_of(target, CONFIG).ids) == "<|im_start|>user\n"


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "sentencepiece"])
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_opening_content_and_rest_are_the_templates_own_text(target, name, kind, monkeypatch):
    family, tokenizer = families.FAMILIES[name], families.tokenizer(name, kind)
    target.tokenizer, target.stop_token_ids = tokenizer, tuple(tokenizer.convert_tokens_to_ids(list(family.stops)))
    if name == "llama2":  # [/INST] is letters there
        with pytest.raises(TemplateError, match=r"data.distill.written: found .* behind it, expected .* special one"):
            opening_of(target, CONFIG, dict(family.variables))
        return
    monkeypatch.setattr(type(target), "positions", 4096)
    opening = opening_of(target, CONFIG, dict(family.variables))
    asked = [{"role": "user", "content": "Hello there."}]
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False, **family.variables)
    assert whole[: len(opening.ids)] == list(opening.ids)
    rest = whole[len(opening.ids) :]
    end = next(place for place, token in enumerate(rest) if token in opening.stops)
    assert tokenizer.decode(rest[:end]).strip() == "Hello there."
    assert not opening.special.intersection(rest[:end])


def test_prompts_are_written_as_records_that_can_be_asked(target, tmp_path):
    out = tmp_path / "written.jsonl"
    made = write_prompts(target, CONFIG, out, seed=3)
    records = read(out)
    assert made.kept == len(records) == 8 and made.wanted == 8 and 8 <= made.tries <= 16
    tries = {record["id"]: record for record in read(tries_of(out))}
    for record in records:
        number = record["id"].removeprefix("written-")
        (message,) = record["messages"]
        one = tries[f"try-{number}"]
        assert one["prompt_token_ids"] == list(opening_of(target, CONFIG).ids)
        assert one["response_token_ids"][-1] in target.stop_token_ids and one["finish_reason"] == "stop"
        said = target.tokenizer.decode(one["response_token_ids"][:-1]).strip()
        assert message == {"role": "user", "content": said} and said
    assert len(set(contents(out))) == 8
    assert made.tries - sum(made.left_out.values()) >= 8  # the others are counted


def test_the_settings_of_writing_are_used(target, tmp_path):
    write_prompts(target, CONFIG, tmp_path / "w.jsonl", seed=3)
    sampling = read(tmp_path / "w.tries.jsonl")[0]["sampling"]
    assert {name: sampling[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens", "seed")} == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 20, "seed": 3,
    }  # fmt: skip


def test_the_seed_alone_decides(target, tmp_path):
    def text(name: str, seed: int, **more) -> str:
        config = DistillConfig(**{**vars(CONFIG), **more})
        write_prompts(target, config, tmp_path / f"{name}.jsonl", seed=seed)
        return (tmp_path / f"{name}.jsonl").read_text()

    first = text("a", 3)
    assert text("b", 3) == first and text("c", 3, batch_size=1) == first
    assert text("d", 4) != first
    fewer = contents(tmp_path / "e.jsonl") if text("e", 3, written=4) else []
    assert contents(tmp_path / "a.jsonl")[:4] == fewer


def test_a_killed_run_goes_on_and_a_finished_one_decodes_nothing(target, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    first = write_prompts(target, CONFIG, whole, seed=5)
    real, calls = answering.generate, []

    def then_die(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    out = tmp_path / "killed.jsonl"
    monkeypatch.setattr(answering, "generate", then_die)
    with pytest.raises(KeyboardInterrupt):
        write_prompts(target, CONFIG, out, seed=5)
    assert not out.exists() and len(read(tries_of(out))) == 4
    monkeypatch.setattr(answering, "generate", real)
    write_prompts(target, CONFIG, out, seed=5)
    assert out.read_bytes() == whole.read_bytes()
    assert tries_of(out).read_bytes() == tries_of(whole).read_bytes()
    out.unlink()
    monkeypatch.setattr(answering, "generate", lambda *_: pytest.fail("nothing is left to decode"))
    again = write_prompts(target, CONFIG, out, seed=5)
    assert out.read_bytes() == whole.read_bytes()
    assert (again.kept, again.tries, again.left_out) == (first.kept, first.tries, first.left_out)


def test_tries_with_other_settings_are_refused(target, other_target, tmp_path):
    out = tmp_path / "w.jsonl"
    write_prompts(target, CONFIG, out, seed=5)
    with pytest.raises(DataError, match="w.tries.jsonl:1: sampling.seed: found 5, this run has 6: give another"):
        write_prompts(target, CONFIG, out, seed=6)
    for name, value in (("written_temperature", 0.5), ("written_top_p", 0.5), ("written_max_tokens", 19)):
        with pytest.raises(DataError, match=r"w.tries.jsonl:1: sampling\.(temperature|top_p|max_new_tokens): found"):
            write_prompts(target, DistillConfig(**{**vars(CONFIG), name: value}), out, seed=5)
    with pytest.raises(DataError, match="sampling.weights"):
        write_prompts(other_target, CONFIG, out, seed=5)


def test_what_is_no_prompt_is_left_out_and_counted(target, tmp_path):
    texts = ["Hello there", "\n \n", "How are you…", "Hello there", " How are you\n", "Be<|im_start|>brief", "One", ""]
    made, asked = written(target, texts, 4, tmp_path / "w.jsonl")
    assert contents(tmp_path / "w.jsonl") == ["Hello there", "How are you", "One"]
    assert [record["id"] for record in read(tmp_path / "w.jsonl")] == ["written-0", "written-4", "written-6"]
    assert made.left_out == {
        "cut at written_max_tokens": 1, "empty": 2, "said before": 1, "with special tokens inside": 1,
    }  # fmt: skip
    assert (made.wanted, made.kept, made.tries) == (4, 3, 8) and sorted(asked) == list(range(8))
    line = made.line()
    assert line.startswith("WARNING: the target wrote 3 prompts in 8 tries (left out: 1 cut at written_max_tokens, 2 ")
    assert "data.distill.written=4 asks for more, but has 2 tries for each" in line


def test_it_tries_again_only_until_there_are_enough(target, tmp_path):
    # of three tries two are good: one more is missing, which at this share takes two tries
    texts = ["Hello", "…", "there", "How", "are", "you"]
    made, asked = written(target, texts, 3, tmp_path / "w.jsonl")
    assert sorted(asked) == [0, 1, 2, 3, 4] and made.tries == 5
    assert contents(tmp_path / "w.jsonl") == ["Hello", "there", "How"]
    assert not made.line().startswith("WARNING") and "wrote 3 prompts in 5 tries (left out: 1 cut" in made.line()
    made, asked = written(target, ["Hello", "there", "How", "are"], 2, tmp_path / "enough.jsonl")
    assert (made.tries, sorted(asked), made.left_out) == (2, [0, 1], {})


def test_a_target_that_writes_nothing_of_use_is_told(target, tmp_path):
    with pytest.raises(DataError, match=r"found no prompt in 4 tries .*\(4 cut at .*\), expected 2: .*prompts.jsonl"):
        written(target, ["One…"] * 4, 2, tmp_path / "w.jsonl")


def test_words_that_look_like_a_special_token_are_left_out(tmp_path):
    record = {"id": "try-0", "finish_reason": "stop", "response_token_ids": [1, 2, 3]}
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")

    class Letters:
        """Decodes three tokens of text to letters that are read as one special token."""

        def decode(self, ids):
            return "<|im_end|>"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [9]}

    found = module._sort_out(
        tmp_path / "t.jsonl", tmp_path / "o.jsonl", 1, 1, Opening((5,), (3,), frozenset({9})), Letters()
    )
    assert found.left_out == {"with special tokens inside": 1} and found.kept == 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "found no chat template, expected one .base models have none.: use the instruct model"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "found the content .* 0 times .* expected once"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "found the content .* 2 times"),
        ("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}", "found '' before the content"),
        ("{% for m in messages %}{{ 'user ' + m.content + ' Hi' }}{% endfor %}", "and ' Hi.*' behind it, expected"),
    ],
)
def test_templates_that_show_no_users_message_are_refused(target, template, message):
    target.tokenizer = word_tokenizer(template, "<|im_end|>")
    with pytest.raises(TemplateError, match=message):
        opening_of(target, CONFIG)


def test_prompts_that_do_not_fit_are_refused(target):
    most = target.positions - len(opening_of(target, CONFIG).ids)
    opening_of(target, DistillConfig(written=1, written_max_tokens=most))
    with pytest.raises(ConfigError, match=f"written_max_tokens: found {most + 1}, .*written_max_tokens={most} or less"):
        opening_of(target, DistillConfig(written=1, written_max_tokens=most + 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"written": -1}, "data.distill.written: found -1, expected a number ≥ 0"),
        ({"written": 1, "written_temperature": 0.0}, "written_temperature: found 0.0, expected a number above 0 .at 0"),
        ({"written_top_p": 0.0}, "data.distill.written_top_p: found 0.0"),
        ({"written_max_tokens": 1}, "data.distill.written_max_tokens: found 1, expected a number ≥ 2"),
        (
            {"written": 5, "servers": [ServerConfig("http://127.0.0.1:1")]},
            "found 5 with data.distill.servers.*written.js",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistillConfig(**settings).check()


def test_written_prompts_are_data_enough():
    DataConfig(distill=DistillConfig(written=5, weight=1.0)).check()
    with pytest.raises(ConfigError, match="no sources and no distill.prompts: .* or data.distill.written=20000"):
        DataConfig().check()
    with pytest.raises(ConfigError, match="found a weight, but no data.distill.prompts or written"):
        DataConfig(distill=DistillConfig(weight=1.0)).check()
