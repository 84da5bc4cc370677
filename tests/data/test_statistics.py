"""Numbers about samples, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.data.samples import Sample
from headstart.data.statistics import exact_copies, label_tokens, scripts, summarise
from headstart.heads.vocab import membership

SPREAD = ("min", "p5", "median", "p95", "max")


class Unicode:
    """A tokenizer whose token ids are code points; 0 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: object) -> str:
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)


def sample(turns: list[int], tokens: list[int] | None = None, finish: str = "stop", task: str | None = None) -> Sample:
    ids = list(range(len(turns))) if tokens is None else tokens
    return Sample("s", np.array(ids, np.int32), np.array(turns, np.int32), finish, {"task": task})


def spoken(prompt: str, answer: str) -> Sample:
    ids = [0, *map(ord, prompt), *map(ord, answer), 0]
    return sample([-1] * (len(prompt) + 1) + [0] * (len(answer) + 1), ids)


def test_counts_and_lengths():
    found = summarise([sample([-1, 0, 0, -1, 1], task="chat"), sample([-1] * 2 + [0] * 5, finish="length")])
    assert found == {
        "samples": 2, "tokens": 12, "supervised_tokens": 8, "turns": 3, "tasks": {"-": 1, "chat": 1}, "open_ended": 1,
        "length": dict(zip(SPREAD, (5, 5, 5, 7, 7), strict=True)),
        "answer": dict(zip(SPREAD, (1, 1, 2, 5, 5), strict=True)),
    }  # fmt: skip
    assert summarise([])["length"] == dict.fromkeys(SPREAD, 0)
    hundred = summarise([sample([0] * n) for n in range(1, 101)])["length"]
    assert hundred == dict(zip(SPREAD, (1, 5, 50, 95, 100), strict=True))


def test_tokens_that_are_drafted_somewhere():
    """All tokens of an answer but its first, where a row stands before the answer."""
    samples = [sample([-1, 0, 0, 0, -1, 1, 1]), sample([0, 0, 0]), sample([-1, -2, -2, 0])] * 300  # several blocks
    assert label_tokens(samples) == (4 * 300, 4 * 300)
    assert label_tokens(samples, membership(torch.tensor([2, 6]), 7)) == (4 * 300, 3 * 300)
    assert label_tokens([samples[0].with_all_supervised()]) == (5, 5)
    assert label_tokens([]) == (0, 0)


def test_exact_copies():
    def of(name: str, turns: list[int], tokens: list[int] | None = None) -> Sample:
        return replace(sample(turns, tokens), meta={"conversation": name})

    one, other = of("a", [-1, 0, 0]), of("b", [-1, 0, 0], [5, 6, 7])
    assert exact_copies([one, other, of("c", [-1, 0, 0]), of("d", [-1, 0, 0])]) == 2
    assert exact_copies([one, of("c", [-1, -1, 0])]) == exact_copies([]) == 0  # other turns train otherwise
    assert exact_copies([one, one, replace(one, id="s#3")]) == 0  # repeated by a weight


def test_scripts_of_answers():
    """Letters of answers alone: not prompts, digits, punctuation, spaces, symbols or special tokens."""
    found = scripts([spoken("Ответь", "Hi, 12!"), spoken("Hello", "你好！Привет 😀")], Unicode(), 0)
    assert found["samples"] == 2 and found["letters"] == 10
    assert found["shares"] == {"Cyrillic": 0.6, "Latin": 0.2, "Han": 0.2}
    assert list(found["shares"]) == ["Cyrillic", *list(found["shares"])[1:]]
    assert scripts([spoken("a", "1 + 1 = 2")], Unicode(), 0) == {"samples": 1, "letters": 0, "shares": {}}
    # of everything supervised, answers count
    assert scripts([spoken("Ответь", "Hi").with_all_supervised()], Unicode(), 0)["shares"] == {"Latin": 1.0}


@pytest.mark.parametrize("limit", [1, 30, 10**6])
def test_scripts_look_at_a_bounded_part_that_the_seed_chooses(limit: int):
    samples = [spoken("?", "abc" if n % 2 else "где") for n in range(40)]
    found = scripts(samples, Unicode(), 3, limit)
    assert found == scripts(samples, Unicode(), 3, limit)
    assert found["samples"] == min(-(-limit // 4), 40) and found["letters"] == 3 * found["samples"]
