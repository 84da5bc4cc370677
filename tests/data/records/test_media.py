"""Records with images, video or audio are dropped with a count, in every use; text of the same file is used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.data.choosing.asked import read_prompts
from headstart.data.config import DataConfig, DistillConfig, SourceConfig
from headstart.data.distilling.distill import distill
from headstart.data.prepare import prepare
from headstart.data.records.conversation import parse_record
from headstart.data.records.media import dropped_lines, media_of_part
from headstart.data.sources.sources import load_conversations
from headstart.eval.prompts import load_prompts
from headstart.heads.errors import DataError

ANSWER = {"role": "assistant", "content": "A cat."}


def asked(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **more}


def shown(text: str, **more: Any) -> dict[str, Any]:
    """ShareGPT's form, as LLaVA writes it."""
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A cat."}], **more}


TEXT = {"type": "text", "text": "What is it?"}
#: record → what it holds beside text
RECORDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a part": (asked({"type": "image"}, TEXT), "images"),
    "OpenAI's part": (asked(TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), "images"),
    "a part of the responses API": (asked({"type": "input_image", "image_url": "http://x"}, TEXT), "images"),
    "Qwen's part": (asked({"image": "file:///x.png"}, {"text": "What is it?"}), "images"),
    "video": (asked({"type": "video", "video": "x.mp4"}, TEXT), "video"),
    "video by address": (asked({"type": "video_url", "video_url": {"url": "x"}}, TEXT), "video"),
    "audio": (asked({"type": "input_audio", "input_audio": {"data": ""}}, TEXT), "audio"),
    "a later message": (
        {"messages": [{"role": "user", "content": "Hi"}, ANSWER, asked({"type": "image"})["messages"][0], ANSWER]},
        "images",
    ),
    "a tool's answer": (
        {"messages": [{"role": "user", "content": "Look"}, {"role": "tool", "content": [{"type": "image"}]}, ANSWER]},
        "images",
    ),
    "the system message": (shown("Hi", system=[{"type": "image"}]), "images"),
    "LLaVA": (shown("<image>\nWhat is it?", image="coco/1.jpg"), "images"),
    "LLaVA, placeholder behind": (shown("What is it?\n<image>", image="coco/1.jpg"), "images"),
    "a column of images": (shown("<image>What is it?", images=["1.jpg", "2.jpg"]), "images"),
    "a placeholder whose image is lost": (shown("<image>\nWhat is it?"), "images"),
    "a placeholder behind whose image is lost": (shown("What is it?\n<image>"), "images"),
    "a tag and nothing else": (shown("<image>"), None),
    "images of a message": ({"messages": [{"role": "user", "content": "Hi", "images": ["1.png"]}, ANSWER]}, "images"),
    "a question with an image": ({"question": "What is it?", "image": {"bytes": "AA"}}, "images"),
    "a path": ({"prompt": "What?", "response": "A cat.", "video_path": "x.mp4"}, "video"),
    "empty columns": (shown("Hi", image=None, images=[], video="", audio=[None]), None),
    "parts of text": (asked(TEXT, {"type": "text", "text": " Say.", "image": None}), None),
    "a tag in the text": (shown("What does <image> mean in SVG?"), None),
    "a tag on a line inside": (shown("Mend this:\n<image>\n</image>"), None),
    "other fields": (shown("Hi", image_count=3, imagery="none", videogame="x"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_record_holds(name: str) -> None:
    record, media = RECORDS[name]
    assert parse_record(record, "f:1", "1").media == media


def test_text_parts_are_joined() -> None:
    conversation = parse_record(asked(TEXT, {"type": "text", "text": " Say."}), "f:1", "1")
    assert conversation.messages[0] == {"role": "user", "content": "What is it? Say."}


@pytest.mark.parametrize("part", ["image", 5, None, {}, TEXT, {"type": "imagery"}, {"text": "x", "image": 1}])
def test_parts_without_media(part: Any) -> None:
    assert media_of_part(part) is None


def mixed(write_jsonl: Any, name: str = "data.jsonl") -> Any:
    """Lines 1, 3, 4 and 6 hold text alone."""
    said = [shown(f"Say {n}") for n in range(4)]
    images = shown("<image>\nWhat is it?", image="1.jpg")
    return write_jsonl([said[0], images, said[1], said[2], RECORDS["audio"][0], said[3], images], name)


def test_training_drops_them_and_says_where(write_jsonl: Any, tokenizer: Any) -> None:
    path = mixed(write_jsonl)
    config = DataConfig(sources=[SourceConfig(path=str(path))], held_out_fraction=0.0, min_supervised=1)
    data = prepare(config, tokenizer, [tokenizer.eos_token_id])
    assert [sample.id for sample in data.train] == ["data:1", "data:3", "data:4", "data:6"]
    assert data.report.conversations == 7 and data.report.dropped_count == 3
    lines = data.report.lines()
    assert "dropped 2: the conversation holds images (data.jsonl:2, data.jsonl:7)" in lines
    assert "dropped 1: the conversation holds audio (data.jsonl:5)" in lines


def test_a_file_with_nothing_left_is_an_error(write_jsonl: Any, tokenizer: Any) -> None:
    path = write_jsonl([RECORDS["a part"][0], RECORDS["LLaVA"][0]])
    source = SourceConfig(path=str(path))
    held = r"dropped 2: the conversation holds images \(data.jsonl:1, data.jsonl:2\)"
    with pytest.raises(DataError, match=f"no conversation can be trained on(.|\n)*{held}"):
        prepare(DataConfig(sources=[source]), tokenizer, [tokenizer.eos_token_id])
    with pytest.raises(DataError, match=f"data.jsonl: holds no prompts; {held}; expected text"):
        load_prompts(str(path))


def test_evaluation_drops_them_and_notes_it(write_jsonl: Any) -> None:
    path = mixed(write_jsonl)
    prompts = load_prompts(str(path))
    assert [prompt.where.rpartition(":")[2] for prompt in prompts] == ["1", "3", "4", "6"]
    assert dropped_lines(prompts.dropped) == [
        "dropped 1: the conversation holds audio (data.jsonl:5)",
        "dropped 2: the conversation holds images (data.jsonl:2, data.jsonl:7)",
    ]
    # a published report names no file
    assert dropped_lines(prompts.dropped, places_too=False)[1] == "dropped 2: the conversation holds images"
    assert load_prompts(str(path), limit=1).dropped == []


def test_distillation_answers_the_others(write_jsonl: Any, tmp_path: Any, target: Any) -> None:
    path, said = mixed(write_jsonl), []
    prompts = read_prompts([SourceConfig(path=str(path))])
    config = DistillConfig(max_new_tokens=4, batch_size=2)
    out = distill(target, prompts, config, tmp_path / "out.jsonl", progress=lambda *words: said.append(words[2]))
    answered = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(answered) == ["data:1", "data:3", "data:4", "data:6"]
    assert "dropped 2: the conversation holds images (data.jsonl:2, data.jsonl:7)" in said
    assert not any("skipped" in line for line in said)
    skipped = json.loads((tmp_path / "out.jsonl.skipped.json").read_text())
    assert skipped == {
        "data:2": "the conversation holds images", "data:5": "the conversation holds audio",
        "data:7": "the conversation holds images",
    }  # fmt: skip
    # a run that continues has nothing left to do
    distill(target, prompts, config, out)
    assert len(out.read_text().splitlines()) == 4
    with pytest.raises(DataError, match="none of 1 prompt can be answered; the first, data:2: .*holds images"):
        distill(target, prompts[1:2], config, tmp_path / "none.jsonl")


def test_records_are_read_whatever_they_hold(write_jsonl: Any) -> None:
    path = mixed(write_jsonl)
    held = [row.media for row in load_conversations([SourceConfig(path=str(path))])]
    assert held == [None, "images", None, None, "audio", None, "images"]
