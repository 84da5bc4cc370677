"""Live and stored features are the same numbers; a store is checked, resumable and never half-read."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import headstart.data.store as module
from headstart.data.features import OnlineFeatures, store_bytes
from headstart.data.store import StoredFeatures, build_store
from headstart.heads import files
from headstart.heads.batch import FeatureSpec
from headstart.heads.errors import ConfigError, DataError, StorageError, TargetError

SPEC = FeatureSpec((1, 3))
LENGTHS = [12, 30, 7, 25, 18, 40, 9, 16]


@pytest.fixture
def samples(random_samples):
    return random_samples(LENGTHS)


@pytest.fixture
def store(target, samples, tmp_path):
    return build_store(target, samples, SPEC, tmp_path / "features", shard_tokens=50, pack_tokens=40)


def assert_same(a, b, tolerance=1e-5):
    for name in ("tokens_R", "turn_R", "doc_R", "position_R", "teacher_argmax_A"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.anchors.row_A, b.anchors.row_A) and a.anchors.count_K == b.anchors.count_K
    assert a.sample_ids == b.sample_ids and a.doc_lengths == b.doc_lengths
    assert torch.allclose(a.hidden_RD, b.hidden_RD, atol=tolerance)
    if a.streams_RkD is None or b.streams_RkD is None:
        assert a.streams_RkD is b.streams_RkD
    else:
        assert torch.allclose(a.streams_RkD, b.streams_RkD, atol=tolerance)


def test_online_features_are_the_models_own(target, samples):
    source = OnlineFeatures(target, samples, SPEC, 3)
    batch = source.get([2, 0])
    assert source.lengths == LENGTHS and batch.sample_ids == ("s2", "s0") and batch.doc_lengths == (7, 12)
    start = 0
    for index in (2, 0):
        tokens, turns = samples[index].tensors()
        output = target.model(tokens[None], output_hidden_states=True)
        stop = start + len(tokens)
        assert torch.equal(batch.tokens_R[start:stop], tokens) and torch.equal(batch.turn_R[start:stop], turns)
        assert torch.allclose(batch.hidden_RD[start:stop], output.hidden_states[-1][0], atol=1e-5)
        for slot, layer in enumerate(SPEC.layer_ids):
            assert torch.allclose(batch.streams_RkD[start:stop, slot], output.hidden_states[layer][0], atol=1e-5)
        mine = (batch.anchors.row_A >= start) & (batch.anchors.row_A < stop)
        rows = batch.anchors.row_A[mine] - start + 1
        assert torch.equal(batch.teacher_argmax_A[mine], output.logits[0, rows].argmax(-1))
        start = stop


@pytest.mark.parametrize("depth", [1, 4])
def test_store_equals_online_for_every_depth_and_pack(target, samples, store, depth):
    online, stored = OnlineFeatures(target, samples, SPEC, depth), StoredFeatures(store, depth)
    assert stored.lengths == online.lengths and stored.sample_ids == online.sample_ids
    for pack in ([0], [5, 1], [7, 2, 0, 4], list(range(8))):
        assert_same(online.get(pack), stored.get(pack))


def test_a_store_of_whole_conversations_still_knows_the_answers(target, samples, tmp_path):
    everything = [sample.with_all_supervised() for sample in samples[:3]]
    store = build_store(target, everything, SPEC, tmp_path / "f")
    batch = StoredFeatures(store, 2, samples=everything).get([2, 0])
    assert batch.answer_R.tolist() == [*samples[2].turn_ids, *samples[0].turn_ids] and not batch.turn_R.any()


def test_store_gives_a_head_only_the_layers_it_reads(target, samples, store):
    for spec in (FeatureSpec((3,)), FeatureSpec(())):
        assert_same(
            OnlineFeatures(target, samples, spec, 2).get([1, 3]), StoredFeatures(store, 2, spec=spec).get([1, 3])
        )
    with pytest.raises(TargetError, match=r"layer_ids: found \[1, 3\], expected \[2\].*head.feature_layers"):
        StoredFeatures(store, 2, spec=FeatureSpec((2,)))


def test_manifest_says_what_the_states_are(target, samples, store):
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["norms"] == {"hidden_RD": "post_norm", "streams_RkD": "pre_norm"}
    assert manifest["layer_ids"] == [1, 3] and manifest["dtype"] == "float32" and manifest["schema"] == 1
    assert manifest["fingerprint"] == target.fingerprint()
    assert [s[:2] for s in manifest["samples"]] == [[f"s{i}", n] for i, n in enumerate(LENGTHS)]
    assert [(s["first"], s["last"], s["rows"]) for s in manifest["shards"]] == [
        (0, 2, 49),
        (3, 4, 43),
        (5, 6, 49),
        (7, 7, 16),
    ]
    size = sum(s["bytes"] for s in manifest["shards"])
    estimate = store_bytes(sum(LENGTHS), 32, 2, torch.float32)
    assert estimate == sum(LENGTHS) * (3 * 32 * 4 + 12) and 0 <= size - estimate < 4 * 1024


def test_argmax_is_stored_exactly_where_a_teacher_needs_it(samples, store):
    shard = load_file(store / "shard-00000.safetensors")
    turn, argmax = shard["turn_R"], shard["argmax_R"]
    assert shard["streams_RkD"].shape == (49, 2, 32) and argmax.dtype == torch.int32
    inside = (turn[1:] >= 0) & (turn[1:] == turn[:-1])  # x_r and x_{r+1} in one turn: row r is a teacher row
    assert torch.equal(argmax[:-1] >= 0, inside & (argmax[:-1] >= 0)) and (argmax[:-1][inside] >= 0).all()


def test_half_precision_store(target, samples, tmp_path):
    store = build_store(target, samples, SPEC, tmp_path / "f", dtype="bfloat16")
    batch = StoredFeatures(store, 2).get([1])
    assert batch.hidden_RD.dtype == batch.streams_RkD.dtype == torch.bfloat16
    exact = OnlineFeatures(target, samples, SPEC, 2).get([1])
    assert torch.equal(batch.hidden_RD, exact.hidden_RD.bfloat16()) and torch.equal(
        batch.teacher_argmax_A, exact.teacher_argmax_A
    )
    with torch.no_grad():
        target.model.get_input_embeddings().weight.mul_(1e6)
    with pytest.raises(
        DataError, match=r"sample s0: streams_RkD is not finite in float16: use data.features_dtype=bfloat16"
    ):
        build_store(target, samples, SPEC, tmp_path / "g", dtype="float16")


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_killed_build_continues_after_its_last_complete_shard(target, samples, store, tmp_path, monkeypatch):
    other, calls, real = tmp_path / "killed", [], module.write_safetensors

    def write_or_die(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(module, "write_safetensors", write_or_die)
    with pytest.raises(Killed):
        build_store(target, samples, SPEC, other, shard_tokens=50, pack_tokens=40)
    with pytest.raises(StorageError, match="incomplete: run the same command again"):
        StoredFeatures(other, 2)
    done = []
    build_store(target, samples, SPEC, other, shard_tokens=50, pack_tokens=40, progress=lambda *a: done.append(a[0]))
    assert len(calls) == 5 and done[0] == 49 + 43, "two shards were there, two were made"
    assert done == sorted(done) and len(done) == len(set(done)) > 3 and done[-1] == sum(LENGTHS), (
        "progress within shards"
    )
    for shard in sorted(store.glob("*.safetensors")):
        assert (other / shard.name).read_bytes() == shard.read_bytes()
    calls.clear()
    build_store(target, samples, SPEC, other, shard_tokens=50, pack_tokens=40)
    assert calls == []


def test_damaged_or_missing_shard_is_seen_and_rebuilt(target, samples, store):
    shard = store / "shard-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    with pytest.raises(StorageError, match=r"shard-00001.safetensors: found \d+ bytes, expected \d+: .*damaged"):
        StoredFeatures(store, 2)
    build_store(target, samples, SPEC, store, shard_tokens=50, pack_tokens=40)
    assert shard.read_bytes() == whole
    shard.unlink()
    with pytest.raises(StorageError, match="incomplete"):
        StoredFeatures(store, 2)


def test_mismatch_names_the_field_and_both_values(target, other_target, samples, store):
    mine, theirs = target.fingerprint()["weight_hash"], other_target.fingerprint()["weight_hash"]
    for attempt in (
        lambda: StoredFeatures(store, 2, fingerprint=other_target.fingerprint()),
        lambda: build_store(other_target, samples, SPEC, store, shard_tokens=50),
    ):
        with pytest.raises(TargetError, match=f"target weight_hash: found '{mine}', expected '{theirs}'"):
            attempt()
    changed = {**target.fingerprint(), "template_hash": "x"}
    with pytest.raises(TargetError, match="target template_hash: found '.*', expected 'x'"):
        StoredFeatures(store, 2, fingerprint=changed)
    StoredFeatures(store, 2, fingerprint={**target.fingerprint(), "name": "elsewhere"}, samples=samples)
    with pytest.raises(TargetError, match=r"layer_ids: found \[1, 3\], expected \[1, 2\]"):
        build_store(target, samples, FeatureSpec((1, 2)), store, shard_tokens=50)
    with pytest.raises(TargetError, match="dtype: found float32, expected bfloat16"):
        build_store(target, samples, SPEC, store, dtype="bfloat16", shard_tokens=50)
    with pytest.raises(DataError, match="samples: found 8, expected 7"):
        StoredFeatures(store, 2, samples=samples[:-1])
    swapped = [replace(samples[0], turn_ids=samples[0].turn_ids * 0), *samples[1:]]
    with pytest.raises(DataError, match=r"sample 0: found \['s0', 12, '\w+'\], expected \['s0', 12, '\w+'\]"):
        build_store(target, swapped, SPEC, store, shard_tokens=50)
    with pytest.raises(ConfigError, match="head.feature_layers"):
        build_store(target, samples, FeatureSpec((9,)), store)


def test_disk_is_checked_before_work(target, samples, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    monkeypatch.setattr(module, "extract", lambda *_: pytest.fail("the target ran before the disk was checked"))
    with pytest.raises(StorageError, match="the feature store needs about"):
        build_store(target, samples, SPEC, tmp_path / "f")
    assert not (tmp_path / "f" / "manifest.json").exists()


def test_no_store_there(tmp_path):
    with pytest.raises(StorageError, match="no feature store there"):
        StoredFeatures(tmp_path, 2)


def test_token_ids_of_another_target_are_refused(target, samples, tmp_path):
    foreign = replace(samples[3], token_ids=samples[3].token_ids + target.dims.vocab_size)
    for attempt in (
        lambda: OnlineFeatures(target, [foreign], SPEC, 2),
        lambda: build_store(target, [foreign], SPEC, tmp_path / "f"),
    ):
        with pytest.raises(DataError, match="sample s3: found token id .*the data was tokenised for another target"):
            attempt()


def test_damaged_manifest(store):
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"layer_ids"', '"layers"'))
    with pytest.raises(StorageError, match=r"manifest.json: damaged .*build the store again"):
        StoredFeatures(store, 2)
