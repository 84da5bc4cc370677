"""The bundled workload: readable, trainable, held-out products unseen, made by the target that the quickstart uses."""

from __future__ import annotations

import re
from collections import Counter

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import prepare
from headstart.data.sources.sources import load_conversations, workload_path

STOP = 2  # <|im_end|> of SmolLM2

NODE = DataConfig(
    sources=[SourceConfig(path="workload:thank_you_train")], held_out=[SourceConfig(path="workload:thank_you_heldout")]
)


def test_everything_trains_without_a_tokenizer():
    data = prepare(NODE, None, [STOP])
    # of 250, three letters are near copies of held-out ones
    assert (len(data.train), len(data.held_out), len(data.split.near_copies)) == (247, 40, 3)
    assert data.report.dropped == {} and data.report.truncated == []
    assert data.report.supervised_tokens > 15000
    for sample in data.train:
        assert sample.supervised == len(sample) - int((sample.turn_ids < 0).sum())
        assert (sample.finish_reason == "stop") == (int(sample.token_ids[-1]) == STOP)


def repeats(text: str) -> int:
    """How often the most frequent run of five words occurs: a loop has many, a letter a few."""
    words = text.split()
    return max(Counter(tuple(words[i : i + 5]) for i in range(len(words) - 4)).values())


def test_answers_are_the_targets_and_hardly_ever_loops():
    for sources, allowed in ((NODE.held_out, 0), (NODE.sources, 1)):  # a loop among the held-out would flatter the head
        loops = []
        for conversation in load_conversations(sources):
            sampling = conversation.meta["sampling"]
            assert sampling["target"] == "smollm2-135m-instruct" and sampling["temperature"] == 0
            if repeats(conversation.messages[-1]["content"]) >= 8:
                loops.append(conversation.id)
        assert len(loops) <= allowed, loops


def test_held_out_products_are_unseen():
    def products(name):
        return {re.sub(r"thank_you/[a-z]+-", "", p.id) for p in read_prompts([SourceConfig(path=f"workload:{name}")])}

    train, held, more = (products(f"thank_you_{name}") for name in ("train", "heldout", "prompts"))
    assert (len(train), len(held), len(more)) == (50, 8, 4)
    assert held.isdisjoint(train | more) and train.isdisjoint(more)


def test_small_enough_to_ship():
    assert sum(workload_path(f"thank_you_{n}").stat().st_size for n in ("train", "heldout")) < 1_500_000
