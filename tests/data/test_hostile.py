"""Records and data settings that nobody should write: read, or refused by name of the place; no traceback, no hang."""

from __future__ import annotations

import copy
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reference.hostile import VALUES, mutated, within_seconds

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import prepare
from headstart.data.prompts import prompt_of
from headstart.data.sources.sources import load_conversations
from headstart.eval.prompts import data_label, describe_data, load_prompts
from headstart.heads.errors import ConfigError, DataError, HeadstartError

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}
RECORDS: tuple[dict[str, Any], ...] = (
    {"id": "a", "task": "t", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {
        "messages": [
            {"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "5"},
            {"role": "assistant", "reasoning_content": "think", "content": "five"},
        ],
        "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True},
    },
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "S"},
    {"turns": ["One", "Two"], "category": "writing", "question_id": 81},
    {"prompt": "Hi", "response": "Ho", "finish_reason": "length"},
    {"prompt": "def f(x):\n", "entry_point": "f", "task_id": "HumanEval/0"},
    {"instruction": "Do", "input": "this", "output": "Done"},
    {
        "prompt": "Hi", "prompt_token_ids": [5, 6], "response_token_ids": [7, 8], "finish_reason": "stop",
        "earlier_turns": [{"prompt_token_ids": [1], "response_token_ids": [2], "finish_reason": "stop"}],
    },
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of everything inside a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def changed(record: Any, dice: random.Random) -> Any:
    """The record with one thing in it exchanged, removed, doubled, wrapped or renamed."""
    path = dice.choice(places(record))
    what = dice.randrange(5)
    if not path:
        return [dice.choice(VALUES), [record], {"messages": record}, record, {**record, "x": dice.choice(VALUES)}][what]
    *way, last = path
    inside = record
    for part in way:
        inside = inside[part]
    if what == 0 or (what > 2 and isinstance(inside, list)):
        inside[last] = dice.choice(VALUES)
    elif what == 1:
        del inside[last]
    elif what == 2:
        inside[last] = [inside[last], copy.deepcopy(inside[last])]
    elif what == 3:
        inside[dice.choice(("content", "role", "tool_calls", "turns", "prompt", "name", "x", ""))] = inside.pop(last)
    else:
        inside[last] = {"value": inside[last]}
    return record


def lines() -> list[bytes]:
    """400 lines, always the same: records changed in their structure, or in the text that they are written as."""
    made = []
    for number in range(400):
        dice = random.Random(number)
        record = copy.deepcopy(dice.choice(RECORDS))
        for _ in range(dice.randint(1, 2)):
            record = changed(record, dice) if isinstance(record, dict) else record
        text = json.dumps(record, ensure_ascii=dice.random() < 0.5)
        if number % 4 == 0:
            text = mutated(text, dice)
        made.append(text.replace("\n", " ").encode("utf-8", "surrogatepass"))
    return made


def refusal(error: HeadstartError, path: Path) -> None:
    assert str(path) in str(error) and len(str(error)) < 1000
    str(error).encode()


def test_400_changed_records_are_read_or_refused_by_line(tmp_path: Path, tokenizer: Any) -> None:
    path, readable = tmp_path / "data.jsonl", []
    settings = DataConfig(sources=[SourceConfig(path=str(path))], held_out_fraction=0, min_supervised=1)
    for number, line in enumerate(lines()):
        path.write_bytes(line + b"\n")
        try:
            with within_seconds(10):
                found = list(load_conversations([SourceConfig(path=str(path))]))
        except DataError as error:
            refusal(error, path)
            continue
        except BaseException as error:
            error.add_note(f"line {number}: {line[:500]!r}")
            raise
        if not found:
            continue  # nothing but spaces
        readable.append(line)
        for read in (
            partial(prompt_of, found[0]), partial(read_prompts, settings.sources), partial(load_prompts, str(path)),
            partial(prepare, settings, tokenizer, [tokenizer.eos_token_id]),
        ):  # fmt: skip
            try:
                with within_seconds(10):
                    read()
            except HeadstartError as error:
                assert len(str(error)) < 3000
                str(error).encode()
            except BaseException as error:
                error.add_note(f"line {number}: {line[:500]!r}")
                raise
    assert 60 < len(readable) < 360  # neither everything nor nothing
    path.write_bytes(b"\n".join(readable))
    assert len({conversation.id for conversation in load_conversations(settings.sources)}) == len(readable)


FILES = {
    "empty": b"", "spaces": b" \n\t\n", "null": b"null\n", "number": b"5\n", "null bytes": b"\0" * 100,
    "long number": b'{"prompt": ' + b"9" * 5000 + b"}", "deep": b"[" * 100_000, "deep object": b'{"a": ' * 50_000,
    "not UTF-8": b'{"prompt": "\xff"}', "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "a"}', "NaN": b'{"prompt": NaN}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "twice": b'{"prompt": "a", "prompt": 5}', "gzip without its name": b"\x1f\x8b\x08\0",
    "two in a line": b'{"prompt": "a"}{"prompt": "b"}', "carriage returns": b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_bytes(FILES[name])
    for read in (lambda: list(load_conversations([SourceConfig(path=str(path))])), lambda: load_prompts(str(path))):
        try:
            with within_seconds(10):
                read()
        except DataError as error:
            refusal(error, path)


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_eval_data_of_any_kind(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    value = VALUES[number]
    for data in (value, [value], {"path": value}, {"dataset": value}, {"dataset": "a/b", "subset": value},
                 {"dataset": "a/b", "split": value}, {"dataset": "a/b", "limit": value},
                 {"path": "a.jsonl", "limit": value}, {"path": "a.jsonl", "split": value},
                 {"path": "a.jsonl", "x": value}, ["a.jsonl", value]):  # fmt: skip
        for read in (load_prompts, describe_data, data_label):
            try:
                with within_seconds(10):
                    read(data)
            except (ConfigError, DataError) as error:
                assert len(str(error)) < 4200
                str(error).encode()
            except BaseException as error:
                error.add_note(f"{read.__name__}({data!r})"[:300])
                raise
