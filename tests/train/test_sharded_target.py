"""A target in shards over two ranks (gloo) gives the features, the hash and the losses of the whole one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from train_fakes import on_two_ranks
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from headstart.data.features import OnlineFeatures
from headstart.data.samples import Sample
from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.families import FAMILIES, build_head
from headstart.heads.targets.load import load_target
from headstart.heads.targets.sharded import RowsTeacher, rows_of
from headstart.heads.targets.target import Target, TargetConfig
from headstart.train.config import TrainConfig
from headstart.train.launching.setup import make_accelerator
from headstart.train.loop import Observers, train
from headstart.train.stream import TrainData
from headstart.train.validate import Validator

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, initializer_range=0.2, eos_token_id=1,
)  # fmt: skip
#: 97 rows do not divide by two ranks; the second target ties its embeddings, the third has recurrent states,
#: the fourth 5 experts as well, which files hold one by one
TARGETS = {
    "untied": (LlamaForCausalLM, LlamaConfig(vocab_size=97, **SHAPE)),
    "tied": (Qwen3ForCausalLM, Qwen3Config(vocab_size=96, tie_word_embeddings=True, head_dim=8, **SHAPE)),
    "recurrent": (
        Lfm2ForCausalLM,
        Lfm2Config(
            vocab_size=97, tie_word_embeddings=False, block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", "full_attention", "conv"] * 2, **SHAPE,
        ),
    ),
    "experts": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            vocab_size=97, tie_word_embeddings=False, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=8,
            shared_expert_intermediate_size=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, head_dim=8, **SHAPE,
        ),
    ),
}  # fmt: skip
SPEC = FeatureSpec((2, 4, 5))
DRAFT_IDS = torch.arange(0, 96, 2)
#: lengths of the documents of each rank's packs; the ranks need different numbers of forwards
PACKS = [[(30, 3, 17), (9, 9)], [(5,), (40, 40, 2)]]


def documents(lengths: tuple[int, ...], seed: int) -> FeatureBatch:
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randint(0, 96, (n,), generator=generator), torch.zeros(n, dtype=torch.int64)) for n in lengths]
    return FeatureBatch.pack(made, 2)


def make_samples(count: int = 10) -> list[Sample]:
    generator = np.random.default_rng(0)
    samples = []
    for i in range(count):
        length = int(generator.integers(12, 30))
        turns = np.where(np.arange(length) < 4, -1, 0).astype(np.int32)
        tokens = np.minimum(generator.geometric(0.1, length), 95).astype(np.int32)
        samples.append(Sample(id=f"s{i}", token_ids=tokens, turn_ids=turns, finish_reason="stop", meta={}))
    return samples


def run(target: Target, run_dir: Path, accelerator=None) -> list[float]:
    torch.manual_seed(1)
    head = build_head(FAMILIES["eagle3"].config(depth=2, draft_vocab_size=len(DRAFT_IDS)), target.dims)
    head.initialise(target.ends, DRAFT_IDS)
    target.keep_rows(DRAFT_IDS)
    head.bind(target.ends)
    source = OnlineFeatures(target, make_samples(), head.spec, head.depth)
    rank, size = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    validator = Validator(source, [[0, 1], [2], [3, 4]], target.teacher, rank=rank, size=size)
    config = TrainConfig(steps=4, accumulation=3, lr=3e-3, log_every=1)
    train(
        head, TrainData(source, pack_tokens=48), target.teacher, config, run_dir,
        Observers(validator, progress=False), provenance={}, accelerator=accelerator,
    )  # fmt: skip
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record.get("train/loss", record.get("valid/loss")) for record in records]


def work(rank: int, out: Path) -> dict:
    accelerator = make_accelerator("cpu")
    found: dict = {}
    for name in TARGETS:
        target = load_target(TargetConfig(name=str(out / name), device="cpu", parallel="fsdp2"))
        target.max_forward_tokens = 40
        mine = PACKS[rank]
        for number, lengths in enumerate(mine):
            passes = max(target.passes(packs[number]) for packs in PACKS)
            with target.in_step(passes):
                batch = target.extract(documents(lengths, number), SPEC)
            found[f"{name}/{number}"] = [batch.hidden_RD, batch.streams_RkD, batch.teacher_argmax_A]
            if rank:
                target.idle(2)
            else:
                with target.in_step(2):
                    target.extract(documents((4,), 0), SPEC)
        found[f"{name}/hash"] = target.weight_hash()
        found[f"{name}/stops"] = list(target.stop_token_ids)
        layers = target.model.model.layers
        found[f"{name}/held"] = sum(p.to_local().numel() for p in layers.parameters())
        found[f"{name}/all"] = sum(p.numel() for p in layers.parameters())
        target.max_forward_tokens = 32
        found[f"{name}/losses"] = run(target, out / f"run-{name}", accelerator)
        found[f"{name}/rows"] = target.teacher.weight_VD.shape[0]
        found[f"{name}/bytes"] = target.held_bytes()
        found[f"{name}/hash after"] = target.weight_hash()
        if isinstance(target.teacher, RowsTeacher):
            try:
                target.teacher.logits(torch.zeros(1, 32))
            except TargetError as error:
                found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sharded")
    for name, (family, shape) in TARGETS.items():
        torch.manual_seed(0)
        family(shape).save_pretrained(place / name, max_shard_size="40KB")  # several files
        from tokenizers import Tokenizer, models

        raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w1").save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def ranks(place):
    return on_two_ranks(lambda rank: work(rank, place), place)


@pytest.mark.parametrize("name", TARGETS)
def test_features_and_identity_are_those_of_the_whole_target(place, ranks, name):
    whole = load_target(TargetConfig(name=str(place / name), device="cpu"))
    for rank in range(2):
        for number, lengths in enumerate(PACKS[rank]):
            batch = whole.extract(documents(lengths, number), SPEC)
            hidden_RD, streams_RkD, argmax_A = ranks[rank][f"{name}/{number}"]
            torch.testing.assert_close(hidden_RD, batch.hidden_RD, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(streams_RkD, batch.streams_RkD, rtol=1e-5, atol=1e-5)
            assert torch.equal(argmax_A, batch.teacher_argmax_A)
        assert ranks[rank][f"{name}/hash"] == ranks[rank][f"{name}/hash after"] == whole.weight_hash()
        assert ranks[rank][f"{name}/stops"] == list(whole.stop_token_ids)
        held = ranks[rank][f"{name}/held"]
        if name == "experts":  # five, three of them on rank 0
            assert 0.4 < held / ranks[rank][f"{name}/all"] < 0.6
        else:
            assert held * 2 == ranks[rank][f"{name}/all"]
        assert ranks[rank][f"{name}/rows"] == (len(DRAFT_IDS) if name != "tied" else 96)
        layers, ends, width = ranks[rank][f"{name}/all"], whole.embed_VD.numel(), whole.dims.hidden_size
        expected = ranks[0][f"{name}/held"] + ends + width  # every rank has room for as many experts as the first
        if name != "tied":
            expected += len(DRAFT_IDS) * width + (49, 48)[rank] * width
        assert ranks[rank][f"{name}/bytes"] == pytest.approx(4 * expected, rel=0.02)  # rope buffers, padding of shards
        assert whole.held_bytes() == pytest.approx(4 * (layers + ends * (1 + (name != "tied"))), rel=0.02)
        assert "target.parallel=none" in ranks[rank]["refused"]


@pytest.mark.parametrize("name", TARGETS)
def test_training_on_a_sharded_target_follows_the_same_curve(place, ranks, name, tmp_path):
    whole = load_target(TargetConfig(name=str(place / name), device="cpu"))
    losses = run(whole, tmp_path)
    assert len(losses) == 5
    assert ranks[0][f"{name}/losses"] == pytest.approx(losses, rel=1e-4)


def test_alone_there_is_nothing_to_shard_over(place):
    with pytest.raises(ConfigError, match="target.parallel: found fsdp2 in a process that is alone"):
        load_target(TargetConfig(name=str(place / "tied"), device="cpu", parallel="fsdp2"))
    with pytest.raises(ConfigError, match="target.parallel: found 'pipeline'"):
        load_target(TargetConfig(name=str(place / "tied"), device="cpu", parallel="pipeline"))


def test_rows_are_shared_out_as_chunk_does():
    assert [rows_of(97, r, 4) for r in range(4)] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    assert [rows_of(3, r, 4) for r in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    for total in (5, 8, 97):
        pieces = torch.arange(total).chunk(4)
        assert [list(range(*rows_of(total, r, 4))) for r in range(len(pieces))] == [p.tolist() for p in pieces]
