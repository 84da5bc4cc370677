import torch

from headstart.train.sharing.distributed import Agreement, from_main, gather_objects, on_main


def test_agreement_is_read_one_exchange_later():
    agreement = Agreement()
    assert agreement.read() is None
    values = agreement.exchange(torch.tensor([1.0, 2.0]))
    values += 1  # what the step does with the tensor afterwards does not reach the host's copy
    assert agreement.read() == [1.0, 2.0]


def test_one_rank_helpers():
    assert gather_objects({"a": 1}) == [{"a": 1}]
    assert from_main(3) == 3
    assert on_main(lambda: 4) == 4
