"""The text of prompts is told from answers and from the marks of a chat template."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.data.prompt_tokens import prompt_tokens
from headstart.data.samples import COPIED, Sample

#: marks of a chat template: begin of a message and its role, end of a message
BEGIN, USER, SYSTEM, ASSISTANT, END = 90, 91, 92, 93, 94
ASK = [END, BEGIN, ASSISTANT]


def sample(*runs: tuple[list[int], int]) -> Sample:
    """Runs of tokens, each with the number of its turn (-1: unsupervised)."""
    tokens = [token for run, _ in runs for token in run]
    turns = [turn for run, turn in runs for _ in run]
    return Sample("s", np.asarray(tokens, np.int32), np.asarray(turns, np.int32))


def text(samples: list[Sample]) -> list[list[int]]:
    """The tokens that count, of each sample."""
    return [one.token_ids[mask_T].tolist() for one, mask_T in zip(samples, prompt_tokens(samples), strict=True)]


def test_marks_do_not_count_and_a_shared_beginning_counts_once() -> None:
    head, again = [BEGIN, SYSTEM, 50, 51, 52, END, BEGIN, USER], [99, BEGIN, USER]
    samples = [
        sample((head + [1, 2, 3] + ASK, -1), ([7, 8, END], 0), ([99], -1)),
        sample((head + [1, 4] + ASK, -1), ([7, END], 0), (again + [5, 6] + ASK, -1), ([7, END], 1), ([99], -1)),
        sample((head + [3, 3] + ASK, -1), ([7, END], 0), (again + [2] + ASK, -1), ([8, END], 1)),
    ]
    # every token once per different context: the head once, then what differs
    assert text(samples) == [[*head, 1, 2, 3], [4, 5, 6], [3, 3, 2]]


def test_several_answers_to_a_prompt_count_it_once() -> None:
    prompt, other = ([BEGIN, USER, 1, 2, 3] + ASK, -1), ([BEGIN, USER, 4, 2] + ASK, -1)
    samples = [sample(prompt, ([7, 8], 0)), sample(prompt, ([9], 0)), sample(other, ([7], 0)), sample(prompt, ([5], 0))]
    found = text(samples)
    assert sorted(found, key=len) == [[], [], [4, 2], [BEGIN, USER, 1, 2, 3]] and found[2] == [4, 2]


def test_without_a_second_prompt_marks_are_not_known() -> None:
    one = sample(([BEGIN, USER, 1] + ASK, -1), ([7], 0), ([END], -1))
    assert text([one]) == [[BEGIN, USER, 1, *ASK]] and text([]) == []


def test_what_nobody_asked_is_no_text_of_a_prompt() -> None:
    everything, copied = sample(([1, 2, 3], 0)), sample(([1], -1), ([5, 6], COPIED), ([7], -1), ([8], 0))
    assert text([everything]) == [[]]
    # copied answers are answers, although they do not train
    assert text([copied]) == [[1, 7]]
    unanswered = sample(([4, 5], -1))
    assert text([everything, unanswered]) == [[], [4, 5]]


def test_short_prompts_that_are_all_marks() -> None:
    samples = [
        sample((ASK, -1), ([7], 0), (ASK, -1), ([8], 1)),
        sample(([1, *ASK], -1), ([7], 0), ([2, *ASK], -1), ([8], 1)),
    ]
    assert text(samples) == [[], [1, 2]]


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("chatml", "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n"),
        ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"),
    ],
)
def test_of_real_templates(make_chat, family: str, head: str) -> None:
    chat, samples = make_chat(family), []
    for texts in (["How are you", "Hello"], ["Hi", "Hello", "now be fast", "done"], ["How two", "Bye", "One", "Hello"]):
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]
        (found,) = chat.encode(messages)
        samples.append(Sample("s", np.asarray(found.token_ids, np.int32), np.asarray(found.turn_ids, np.int32)))
    texts = ["".join(chat.tokenizer.convert_ids_to_tokens(ids)) for ids in text(samples)]
    # sorted by their ids, Hi comes first and has the beginning of all; then "How two", whose first word counts once
    assert texts == [" are you", f"{head}Hinow be fast", "How twoOne"]
