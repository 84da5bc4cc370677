import pytest
import torch
from train_fakes import DIMS, FakeHead, FakeSource, make_documents, teacher

from headstart.train.step import SumNames
from headstart.train.validate import Validator


def test_ratios_by_hand():
    names = SumNames.of(FakeHead())
    assert names.terms == ("1", "2", "3") and len(names) == 3 + 2 * 5
    sums_S = torch.tensor([8.0, 4.0, 0.0, 6.0, 2.0, 0.0, 8.0, 30.0, 10.0, 5.0, 0.0, 10.0, 12.0])
    assert names.counts(sums_S).tolist() == [8.0, 4.0, 0.0]
    assert names.ratios(sums_S, "v") == {
        "v/acc_1": pytest.approx(0.6),
        "v/acc_2": pytest.approx(0.4),
        "v/coverage": pytest.approx(0.8),
        "v/walked_tau": pytest.approx(2.5),
    }


def test_nothing_is_not_zero():
    names = SumNames.of(FakeHead())
    assert names.ratios(torch.zeros(len(names)), "v") == {}
    # no answer of two tokens: neither loss nor accuracy
    source = FakeSource([(torch.arange(6), torch.tensor([-1, -1, -1, -1, -1, 0]))])
    assert Validator(source, [[0]], teacher())(FakeHead(), 1) == {}


def test_numbers_do_not_depend_on_packs_and_equal_a_naive_count():
    head, source = FakeHead(noise=0.5), FakeSource(make_documents(6))
    head.train()
    values = Validator(source, [[0, 1, 2], [3, 4, 5]], teacher())(head, 1)
    again = Validator(source, [[5], [3, 1], [0, 2, 4]], teacher())(head, 1)
    assert head.training and values == pytest.approx(again, rel=1e-5)
    hits = total = 0
    for i in range(6):
        batch = source.get([i])
        for t in range(len(batch.tokens_R) - 2):
            if batch.turn_R[t + 1] >= 0:
                total += 1
                hits += int(head.heads[0](batch.hidden_RD[t]).argmax() == batch.tokens_R[t + 2])
    assert values["valid/acc_1"] == pytest.approx(hits / total)
    assert values["valid/loss"] == pytest.approx(
        sum(0.8 ** (d - 1) * values[f"valid/loss_{d}"] for d in (1, 2, 3)), rel=1e-5
    )


def test_a_head_that_is_always_right_is_cut_by_the_answer_s_end_alone():
    tokens = torch.full((9,), 3)
    head, source = FakeHead(), FakeSource([(tokens, torch.zeros(9, dtype=torch.int64))])
    for linear in head.heads:
        torch.nn.init.zeros_(linear.weight)
        linear.bias.data = torch.nn.functional.one_hot(torch.tensor(3), DIMS.vocab_size).float()
    assert Validator(source, [[0]], teacher())(head, 1)["valid/walked_tau"] == 3.5  # 4 + 3 of 7 tokens


def test_probe_runs_when_due_on_rank_0():
    seen = []

    def probe(head):
        assert not head.training
        seen.append(1)
        return 2.5

    source = FakeSource(make_documents(2))
    validator = Validator(source, [[0, 1]], teacher(), probe, tau_every=10)
    head = FakeHead()
    assert "valid/tau" not in validator(head, 5)
    assert validator(head, 10)["valid/tau"] == 2.5
    assert validator(head, 13, final=True)["valid/tau"] == 2.5
    assert "valid/tau" not in Validator(source, [[0, 1]], teacher(), probe, rank=1, size=1)(head, 10)
    assert len(seen) == 2
