import pytest
import torch
from train_fakes import FakeHead, FakeSource, make_documents

from headstart.heads.batch import FeatureBatch
from headstart.heads.dims import HeadDims
from headstart.heads.families import FAMILIES, build_head
from headstart.train.flops import matmul_flops, peak_flops, step_flops
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


def test_eagle3_of_two_layers_by_hand():
    """Below the last layer, every row runs all of it at step 1."""
    head = build_head(FAMILIES["eagle3"].config(depth=2, draft_vocab_size=10, layers=2), DIMS)
    first, second = 4, 3
    projections, rest = (8 + 4 + 4) * 8, 8 * 8 + 3 * 8 * 16  # of a half of the first layer, or of the second; o and MLP
    every_row = 24 * 8 + 2 * projections + rest + 8 * 8  # fc, the first layer, keys and values of the second
    anchors = first * (8 * 8 + rest) + second * (2 * projections + 2 * rest) + (first + second) * 10 * 8
    assert head.multiply_adds(9, (first, second)) == 9 * every_row + anchors


def test_heads_without_a_layer_count_their_matrices_on_supervised_rows():
    head, batch = FakeHead(), FakeSource(make_documents()).get([0, 1])
    matrices = sum(p.numel() for p in head.parameters())
    rows = len(batch.tokens_R)
    assert head.multiply_adds(rows, batch.anchors.count_K) == matrices * batch.anchors.count_K[0]


def test_mfu_is_the_share_of_a_gpus_speed(monkeypatch):
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


def test_a_cpu_has_no_mfu():
    """Others use it as well: measured against a disturbed product the share would be above 1."""
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32) is None
    meters = Meters(SumNames(("1",), ()), cpu, peak_flops(cpu, torch.float32))
    meters.add_host(10, 0.5, flops=3e9)
    values, _, _ = meters.read()
    assert "mfu" not in values and values["tokens_per_s"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured():
    found = matmul_flops(torch.device("cuda"), torch.bfloat16, size=1024, runs=3)
    assert found is not None and found > 1e12
