import pytest
import torch
from train_fakes import FakeHead, FakeSource, make_documents

from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.families import FAMILIES, build_head
from headstart.train.flops import matmul_flops, step_flops
from headstart.train.step import SumNames
from headstart.train.tracking.meters import Meters

DIMS = HeadDims(
    hidden_size=8, vocab_size=20, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16
)


def test_eagle3_by_hand():
    head = build_head(FAMILIES["eagle3"].config(depth=2, draft_vocab_size=10), DIMS)
    tokens, turns = torch.arange(9), torch.tensor([-1, -1, -1, 0, 0, 0, 0, 0, 0])
    batch = FeatureBatch.pack([(tokens, turns)], 2)
    first, second = batch.anchors.count_K
    every_row = 24 * 8 + (8 + 4 + 4) * 8 + 8 * 8  # fc, embedding half of q k v, feature half of k v
    anchor = 8 * 8 + 10 * 8 + 3 * 8 * 16  # o, output, MLP
    expected = 9 * every_row + first * 8 * 8 + second * 16 * 8 + (first + second) * anchor
    counts = batch.anchors.count_K
    assert head.multiply_adds(9, counts) == expected
    assert step_flops(head, 9, counts, target_parameters=1000) == 6 * expected + 2 * 1000 * 9


def test_heads_without_a_layer_count_their_matrices_on_supervised_rows():
    head, batch = FakeHead(), FakeSource(make_documents()).get([0, 1])
    matrices = sum(p.numel() for p in head.parameters())
    rows = len(batch.tokens_R)
    assert head.multiply_adds(rows, batch.anchors.count_K) == matrices * batch.anchors.count_K[0]


def test_a_device_is_measured_and_mfu_is_a_share_of_it(monkeypatch):
    assert matmul_flops(torch.device("cpu"), torch.float32, size=64) > 1e6
    now = [100.0]
    monkeypatch.setattr("headstart.train.tracking.meters.time.perf_counter", lambda: now[0])
    meters = Meters(SumNames(("1",), ()), torch.device("cpu"), peak_flops=1e9)
    meters.restart_clock()
    meters.add_host(10, 0.5, flops=3e9)
    now[0] += 10.0
    values, _, _ = meters.read()
    assert values["mfu"] == pytest.approx(0.3)
    assert values["tokens_per_s"] == pytest.approx(1.0)
    assert values["data_wait"] == pytest.approx(0.05)


def test_a_cpu_that_others_use_meanwhile_is_measured_by_its_fastest_product(monkeypatch):
    """Most runs are interrupted for 99 s: the share of such a speed would be above 1 once the others are gone."""
    ticks = iter([0.0, 100.0] * 12 + [0.0, 2.0] + [0.0, 100.0] * 9)
    monkeypatch.setattr("headstart.train.flops.time.perf_counter", lambda: next(ticks))
    assert matmul_flops(torch.device("cpu"), torch.float32, size=10) == 1000
