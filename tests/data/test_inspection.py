"""What `headstart inspect` shows of a sample: marks stated by hand, texts of tokens, conversations by id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES, word_tokenizer

from headstart.data.choosing.split import Split
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.inspection import as_json, characters, find_samples, pieces, shown_tokens, token_texts
from headstart.data.prepare import PreparedData, TokenizeReport, tokenize
from headstart.data.records.conversation import Conversation
from headstart.data.samples import Sample
from headstart.heads.errors import ConfigError, DataError
from headstart.heads.vocab import membership


class Letters:
    """A tokenizer of readable tokens: 0 = "a", 1 = "b", …"""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(97 + i) for i in ids)


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Words:
    """A tokenizer that drops the space in front of the first word, as sentencepiece ones do."""

    words = (" Hello", " there", ".")

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def sample(turns: list[int], name: str = "s", tokens: list[int] | None = None, **meta: object) -> Sample:
    ids = list(range(len(turns))) if tokens is None else tokens
    return Sample(name, np.array(ids, np.int32), np.array(turns, np.int32), meta=meta)


#: two prompt tokens, an answer of four, a prompt token, an answer that repeats held-out text, an answer of two
TURNS = [-1, -1, 0, 0, 0, 0, -1, -2, -2, -1, 2, 2]
BY_HAND = [
    # id  turn  supervised  depths of K = 2   mark
    (0, -1, False, 0, "prompt"),
    (1, -1, False, 0, "prompt"),
    (2, 0, True, 0, "supervised"),  # the root of row 1: the target gives it
    (3, 0, True, 1, "drafted"),  # row 1 at depth 1
    (4, 0, True, 2, "drafted"),  # row 1 at depth 2, row 2 at depth 1
    (5, 0, True, 2, "drafted"),
    (6, -1, False, 0, "prompt"),
    (7, -2, False, 0, "copy"),
    (8, -2, False, 0, "copy"),
    (9, -1, False, 0, "prompt"),
    (10, 2, True, 0, "supervised"),
    (11, 2, True, 1, "drafted"),
]


def test_marks_are_those_stated_by_hand():
    shown = shown_tokens(sample(TURNS), Letters(), 2)
    assert [(t.id, t.turn, t.supervised, t.depths, t.mark) for t in shown] == BY_HAND
    assert "".join(token.text for token in shown) == "abcdefghijkl"


def test_a_token_outside_the_draft_vocabulary_is_supervised_and_not_drafted():
    # token 2 is outside as well, but no head ever drafts the first token of an answer
    inside_V = membership(torch.tensor([0, 1, 3, 5, 11]), 12)
    shown = shown_tokens(sample(TURNS), Letters(), 2, inside_V)
    assert {t.id: t.mark for t in shown if t.supervised} == {
        2: "supervised", 3: "drafted", 4: "outside", 5: "drafted", 10: "supervised", 11: "drafted",
    }  # fmt: skip
    assert {t["id"]: t["drafted"] for t in as_json(shown)["tokens"] if t["supervised"]} == {
        2: 0, 3: 1, 4: 0, 5: 2, 10: 0, 11: 1,
    }  # fmt: skip


def test_where_everything_is_supervised_the_first_two_tokens_are_never_drafted():
    """Row 0 is the first row, and token 1 its root. Answers keep their turns; copies of held-out text do not train."""
    shown = shown_tokens(sample(TURNS).with_all_supervised(), Letters(), 2)
    assert [t.turn for t in shown] == TURNS
    assert [t.mark for t in shown] == [
        "supervised", "supervised", *["drafted"] * 5, "copy", "copy", "supervised", "drafted", "drafted",
    ]  # fmt: skip
    # behind the copied answer a root may stand in front of any token of the same turn: row 8 has the root 9
    assert [t.depths for t in shown] == [0, 0, 1, 2, 2, 2, 2, 0, 0, 0, 1, 2]


def test_pieces_are_turns():
    tokens = shown_tokens(sample([-1, 0, 0, 1, -1]), Letters(), 2)
    assert list(pieces(tokens)) == [("a", False), ("bc", True), ("d", True), ("e", False)]


def test_the_values_of_json():
    assert as_json(shown_tokens(sample([-1, 0, 0]), Letters(), 1)) == {
        "pieces": [{"text": "a", "supervised": False}, {"text": "bc", "supervised": True}],
        "tokens": [
            {"id": 0, "text": "a", "turn": -1, "supervised": False, "drafted": 0, "in_draft_vocabulary": True,
             "mark": "prompt"},
            {"id": 1, "text": "b", "turn": 0, "supervised": True, "drafted": 0, "in_draft_vocabulary": True,
             "mark": "supervised"},
            {"id": 2, "text": "c", "turn": 0, "supervised": True, "drafted": 1, "in_draft_vocabulary": True,
             "mark": "drafted"},
        ],
    }  # fmt: skip


def test_a_character_of_several_tokens_stands_with_the_last_of_them():
    ids = list("aé😀b".encode())
    assert token_texts(ids, Bytes()) == ["a", "", "é", "", "", "", "😀", "b"]
    assert token_texts(ids[:2], Bytes()) == ["a", "\ufffd"]  # cut within a character
    assert "".join(token_texts([0x80] * 20, Bytes())) == "\ufffd" * 20
    shown = list(characters(shown_tokens(sample([-1, 0, 0, 0, 0, 0, 0, 0], tokens=ids), Bytes(), 9)))
    # the first token of é is the root of the row before: the character is not the head's to draft
    assert [(t.text, t.mark) for t in shown] == [
        ("a", "prompt"), ("é", "supervised"), ("😀", "drafted"), ("b", "drafted"),
    ]  # fmt: skip
    assert shown[2].depths == 2


def test_spaces_between_words_stay():
    assert token_texts([0, 1, 1, 2], Words()) == ["Hello", " there", " there", "."]
    assert token_texts([], Words()) == []


def test_a_real_template_is_marked():
    tokenizer = word_tokenizer(TEMPLATES["chatml"], "<|im_end|>")
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."})
    config = DataConfig(sources=[SourceConfig(path="x")])
    (made,), _ = tokenize([Conversation("c", messages, "stop")], tokenizer, config, [tokenizer.eos_token_id])
    shown = shown_tokens(made, tokenizer, 7)
    assert list(pieces(shown))[1:] == [("Hello there.<|im_end|>", True), ("\n", False)]
    assert [(t.text, t.turn, t.depths) for t in shown[-5:]] == [
        ("Hello", 0, 0), (" there", 0, 1), (".", 0, 2), ("<|im_end|>", 0, 3), ("\n", -1, 0),
    ]  # fmt: skip


def prepared() -> PreparedData:
    train = [sample([-1, 0, 0], name, conversation=name.split("/")[0]) for name in ("talk1/turn0", "talk1/turn1", "b")]
    held = [sample([-1, 0, 0], "talk2", conversation="talk2")]
    report = TokenizeReport(dropped={"no assistant answer": ["talk7"]})
    return PreparedData(Split(train, held, copies=["twice"]), report)


def test_a_conversation_is_found_by_its_id():
    assert [s.id for s in find_samples(prepared(), "talk1")] == ["talk1/turn0", "talk1/turn1"]
    assert [s.id for s in find_samples(prepared(), "talk1/turn1")] == ["talk1/turn1"]
    assert [s.id for s in find_samples(prepared(), "talk2")] == ["talk2"]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("talk3", ConfigError, "--id: found 'talk3', expected the id of one of 3 conversations; the nearest are talk"),
        ("zzzzzz", ConfigError, "the first are talk1, b, talk2"),
        ("talk7", DataError, "--id: talk7 was dropped: no assistant answer"),
        ("twice", DataError, "--id: twice was dropped: repeats held-out text and has no other answer"),
    ],
)
def test_a_wrong_id_is_told(name: str, error: type[Exception], said: str):
    with pytest.raises(error) as found:
        find_samples(prepared(), name)
    assert said in str(found.value)
