"""Tokenising on two CPU ranks: each does a part, all have what one process would have, and all fail alike."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from chat_templates import TEMPLATES, word_tokenizer
from train_fakes import on_two_ranks

from headstart.data import encoding
from headstart.data.chat.chat import ChatFormat
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import PreparedData, prepare
from headstart.train.sharing.distributed import all_ranks

#: refuses some conversations, and breaks at one
TEMPLATE = "{% if messages[0].content == 'Bye' %}{{ raise_exception('no goodbyes') }}{% endif %}" + TEMPLATES["chatml"]
COUNT = 23


def write(path: Path, count: int = COUNT, broken: int | None = None) -> DataConfig:
    lines = []
    for number in range(count):
        asked = ("Hi", "Hello", "Bye")[number % 3]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "One two three " * (number + 1)}]
        lines.append(json.dumps({"messages": turns, "finish_reason": ("stop", "length")[number % 2]}))
    if broken is not None:
        lines[broken] = "{"
    path.write_text("\n".join(lines))
    return DataConfig(sources=[SourceConfig(path=str(path))], max_length=60)


def outcome(config: DataConfig) -> dict:
    """What a rank prepares, or the error that it raises, and how many conversations it encoded itself."""
    tokenizer, encoded, parts = word_tokenizer(TEMPLATE, "<|im_end|>"), [], ChatFormat.parts

    def counting(chat, messages, *others):
        encoded.append(messages)
        if "poison" in str(messages):
            raise ZeroDivisionError("poisoned")
        return parts(chat, messages, *others)

    with mock.patch.object(encoding, "BLOCK", 4), mock.patch.object(ChatFormat, "parts", counting):
        try:
            made = prepare(config, tokenizer, [tokenizer.eos_token_id], ranks=all_ranks())
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "encoded": len(encoded)}
    return {**shown(made), "encoded": len(encoded)}


def shown(made: PreparedData) -> dict:
    return {
        "train": [(s.id, s.token_ids.tolist(), s.turn_ids.tolist(), s.finish_reason, s.meta) for s in made.train],
        "held_out": [s.id for s in made.held_out],
        "report": made.report.as_dict(),
    }


def outcomes(place: Path, configs: list[DataConfig]) -> list[dict]:
    """`outcome` of every rank, given a config of its own."""

    def work(rank: int) -> dict:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        found = outcome(configs[rank])
        dist.barrier()
        return found

    return on_two_ranks(work, place)


def test_two_ranks_share_the_work_and_hold_what_one_process_holds(tmp_path):
    config = write(tmp_path / "data.jsonl")
    alone = outcome(config)
    assert alone["encoded"] == COUNT and alone["report"]["dropped"] and alone["report"]["truncated"]
    ranks = outcomes(tmp_path, [config, config])
    assert [made.pop("encoded") for made in ranks] == [12, 11]
    alone.pop("encoded")
    assert ranks == [alone, alone]


@pytest.mark.parametrize("fault", ["a broken line", "an error of ours", "an error of another kind"])
def test_every_rank_raises_the_error_of_one_process(tmp_path, fault):
    config = write(tmp_path / "data.jsonl", broken=13 if fault == "a broken line" else None)
    path = tmp_path / "data.jsonl"
    if fault == "an error of another kind":
        path.write_text(path.read_text().replace("Hello", "poison", 1))
    if fault == "an error of ours":
        config.template_kwargs = {"messages": 1}  # what no template can be given
    alone = outcome(config)["error"]
    first, second = (made["error"] for made in outcomes(tmp_path, [config, config]))
    if fault == "an error of another kind":
        assert alone == second == "ZeroDivisionError: poisoned"
        assert first == "DataError: rank 1 failed: ZeroDivisionError: poisoned"
    else:
        assert alone == first == second


def test_ranks_that_read_other_files_are_refused(tmp_path):
    configs = [write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", COUNT - 1)]
    for made in outcomes(tmp_path, configs):
        assert made["error"].startswith("DataError: data.sources: found other conversations on some ranks")
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(text.replace('"finish_reason": "length"', '"finish_reason": "stop"', 1))
    (tmp_path / "again").mkdir()
    for made in outcomes(tmp_path / "again", configs):
        assert made["error"].startswith("DataError: data.sources: found other conversations on some ranks")
