import pytest
import torch
from train_fakes import FakeHead, FakeSource, in_order, make_documents

from headstart.data.packing import make_packs
from headstart.heads.errors import DataError, TrainingError
from headstart.train.stream import Fetcher, Pack, PackStream, choose_rows, seed_pack


def stream(count: int = 10) -> PackStream:
    return PackStream([4] * count, 8, 0, in_order)


def test_windows_run_over_epochs_in_one_sequence():
    s = stream()  # 5 packs per epoch
    assert [(p.epoch, p.index) for p in s.window(4, 3)] == [(0, 4), (1, 0), (1, 1)]
    assert s.locate(11) == Pack(2, 1, (2, 3))
    assert s.window(0, 1)[0].samples == (0, 1)


@pytest.mark.parametrize(("epochs", "packs"), [(1, 5), (2, 10), (0.4, 2), (2.6, 13), (0.01, 1)])
def test_count_of_packs_in_fractional_epochs(epochs, packs):
    assert stream().count(epochs) == packs


def test_every_epoch_of_the_real_plan_holds_every_sample_once_and_orders_differ():
    lengths = [3 + i % 7 for i in range(40)]
    s = PackStream(lengths, 20, 5, make_packs)
    per_epoch = s.count(1)
    first = [i for p in s.window(0, per_epoch) for i in p.samples]
    second = [i for p in s.window(per_epoch, s.count(2) - per_epoch) for i in p.samples]
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert [p.samples for p in PackStream(lengths, 20, 5, make_packs).window(3, 4)] == [
        p.samples for p in s.window(3, 4)
    ]


def test_fingerprint_names_lengths_and_budget():
    a = PackStream([4, 5], 8, 0, in_order).fingerprint()
    assert a != PackStream([5, 4], 8, 0, in_order).fingerprint()
    assert a != PackStream([4, 5], 9, 0, in_order).fingerprint()
    assert a == PackStream([4, 5], 8, 3, in_order).fingerprint()


def test_no_samples_is_an_error():
    with pytest.raises(DataError, match="no training samples"):
        PackStream([], 8, 0, in_order)


def test_seed_depends_on_pack_only():
    seed_pack(1, Pack(0, 3, (1,)))
    a = torch.rand(2)
    torch.rand(5)
    seed_pack(1, Pack(0, 3, (1,)))
    assert torch.equal(a, torch.rand(2))
    seed_pack(1, Pack(1, 3, (1,)))
    assert not torch.equal(a, torch.rand(2))


@pytest.mark.parametrize("ahead", [0, 1])
def test_fetcher_gives_what_the_source_gives_and_names_samples_on_failure(ahead):
    source = FakeSource(make_documents())
    fetcher = Fetcher(source, ahead)
    packs = [Pack(0, 0, (0, 1)), Pack(0, 1, (2,))]
    fetcher.prefetch(packs)
    assert torch.equal(fetcher.get(packs[1]).tokens_R, source.get([2]).tokens_R)
    bad = Pack(0, 2, (3, 99))
    fetcher.prefetch([bad])
    with pytest.raises(TrainingError, match=r"features of sample number 99 \(epoch 0, pack 2\) failed: IndexError"):
        fetcher.get(bad)
    fetcher.close()


def test_subsampled_rows_depend_on_seed_and_pack_only():
    batch = FakeSource(make_documents()).get([0, 1, 2, 3])
    head = FakeHead()
    assert choose_rows(head, batch, 0, Pack(0, 3, (0,))) is batch
    head.choose_rows = lambda batch, seed: batch.subsampled((1.0, 0.5, 0.25), seed)

    def rows(seed: int, pack: Pack) -> list[int]:
        return choose_rows(head, batch, seed, pack).anchors.row_A.tolist()

    first = rows(1, Pack(0, 3, (0,)))
    torch.rand(5)
    assert first == rows(1, Pack(0, 3, (0,)))
    assert first != rows(1, Pack(1, 3, (0,))) and first != rows(2, Pack(0, 3, (0,)))


def test_supervised_counts_reach_the_plan_and_the_fingerprint():
    asked = []

    def plan(lengths, budget, seed, epoch, supervised=None):
        asked.append(supervised)
        return in_order(lengths, budget, seed, epoch)

    with_counts, other = (PackStream([4] * 4, 8, 0, plan, counts) for counts in ([1, 2, 3, 4], [1, 2, 3, 3]))
    assert with_counts.count(1) == 2 and asked == [[1, 2, 3, 4]]
    assert len({s.fingerprint() for s in (with_counts, other, PackStream([4] * 4, 8, 0, plan))}) == 3
