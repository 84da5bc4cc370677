"""Samples in a file are the samples in memory; and a preparation that uses the file gives what one in memory gives."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
from functools import partial

import numpy as np
import pytest
from chat_templates import TEMPLATES, word_tokenizer

from headstart.data import prepare as preparing
from headstart.data.config import DataConfig, SourceConfig
from headstart.data.prepare import prepare
from headstart.data.samples import COPIED, Sample, answer_turns, token_counts
from headstart.data.spool import Spool, StoredSample
from headstart.heads.errors import StorageError

TOKENS, TURNS = np.arange(10, 17, dtype=np.int32), np.array([-1, 0, 0, -1, COPIED, 1, 1], np.int32)


def both(**changes) -> tuple[Sample, StoredSample]:
    spool, fields = Spool(0), {"finish_reason": "length", "meta": {"task": "t"}}
    spool.sample("before", TURNS, TOKENS, "stop", {})  # so that the sample does not begin where the file does
    made = spool.sample("a", TOKENS, TURNS, **fields)
    assert isinstance(made, StoredSample)
    spool.sample("after", TURNS[:3], TOKENS[:3], "stop", {})
    return Sample("a", TOKENS, TURNS, **fields), made


def require_equal(one: Sample, other: Sample) -> None:
    assert (one.id, len(one), one.finish_reason, one.meta) == (other.id, len(other), other.finish_reason, other.meta)
    assert one.supervised == other.supervised and one.digest() == other.digest()
    for name in ("token_ids", "turn_ids", "answer_ids"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None)
        if first is not None:
            assert first.dtype == second.dtype == np.int32 and first.tolist() == second.tolist()


def test_a_stored_sample_is_the_sample():
    held, stored = both()
    require_equal(held, stored)
    require_equal(held.renamed("b"), stored.renamed("b"))
    turns = np.array([-1, -2, -2, -1, 0, 1, 1], np.int32)
    require_equal(held.with_turns(turns), stored.with_turns(turns))
    require_equal(held.with_turns(turns).renamed("c"), stored.with_turns(turns).renamed("c"))
    require_equal(held.with_all_supervised(), stored.with_all_supervised())
    require_equal(held.with_turns(turns).with_all_supervised(), stored.with_turns(turns).with_all_supervised())
    assert stored.with_all_supervised().turn_ids.tolist() == [0, 0, 0, 0, COPIED, 0, 0]
    assert stored.with_all_supervised().answer_ids.tolist() == TURNS.tolist()
    for one, other in zip(held.tensors(), stored.tensors(), strict=True):
        assert one.tolist() == other.tolist()
    assert answer_turns([held]) is answer_turns([stored]) is None
    assert answer_turns([stored.with_all_supervised()])[0].tolist() == TURNS.tolist()
    assert token_counts([stored], 20).tolist() == token_counts([held], 20).tolist()


def test_what_is_read_may_be_changed_and_does_not_change_the_file():
    _, stored = both()
    stored.token_ids[:] = 0
    assert stored.token_ids.tolist() == TOKENS.tolist()


def test_the_first_samples_stay_in_memory():
    spool = Spool(2 * (TOKENS.nbytes + TURNS.nbytes))
    made = [spool.sample(str(n), TOKENS, TURNS, "stop", {}) for n in range(4)]
    assert [isinstance(sample, StoredSample) for sample in made] == [False, False, True, True]


def test_other_processes_read_it_too():
    """Forked ones share the file at any time, others get the arrays."""
    held, stored = both()
    copy = pickle.loads(pickle.dumps(stored))
    assert type(copy) is Sample
    require_equal(held, copy)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(partial(_digest, stored), range(8)) == [held.digest()] * 8


def _digest(sample: Sample, _: int) -> str:
    return sample.digest()


def test_a_full_disk_is_told_with_the_remedy(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="found no room .* set TMPDIR to a folder with more room"):
        Spool(0).sample("a", TOKENS, TURNS, "stop", {})


def test_a_file_that_was_cut_is_noticed():
    _, stored = both()
    os.ftruncate(stored._spool._file.fileno(), 70)
    with pytest.raises(StorageError, match="are gone"):
        stored.turn_ids  # noqa: B018


def test_preparing_with_the_file_gives_what_preparing_in_memory_gives(monkeypatch, write_jsonl):
    """With duplicates, weights that repeat a source, truncation, and held-out answers that leave training."""
    tokenizer = word_tokenizer(TEMPLATES["chatml"], "<|im_end|>")
    said = lambda n: "One two three " * (3 + n % 9) + ("think fast " * 9 if n % 5 == 0 else "now " * (n % 7))  # noqa: E731
    rows = [
        {"messages": [{"role": "user", "content": f"Hi {n}"}, {"role": "assistant", "content": said(n)}]}
        for n in range(60)
    ]
    sources = [
        SourceConfig(path=str(write_jsonl(rows[:40], name="a.jsonl")), weight=2.0),
        SourceConfig(path=str(write_jsonl(rows[30:], name="b.jsonl")), weight=1.0),
    ]
    config = DataConfig(sources=sources, max_length=60, held_out_fraction=0.2)
    made = []
    for spool in (Spool, partial(Spool, 0), partial(Spool, 4000)):
        monkeypatch.setattr(preparing, "Spool", spool)
        made.append(prepare(config, tokenizer, [tokenizer.eos_token_id]))
    for data in made[1:]:
        assert data.report.as_dict() == made[0].report.as_dict() and data.split.as_dict() == made[0].split.as_dict()
        for one, other in ((made[0].train, data.train), (made[0].held_out, data.held_out)):
            assert [sample.id for sample in one] == [sample.id for sample in other]
            for first, second in zip(one, other, strict=True):
                require_equal(first, second)
    assert made[0].split.copied_answers and made[0].report.truncated and made[0].held_out
    assert all(isinstance(sample, StoredSample) for sample in made[1].train)
    assert {isinstance(sample, StoredSample) for sample in made[2].train} == {True, False}
