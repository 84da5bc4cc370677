"""`python -m headstart.bench.verification` at sizes of a toy."""

from __future__ import annotations

import pytest
import torch

from headstart.bench.verification import bench, expected, random_chains
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.decoding.verify import verify


def test_every_case_is_timed_by_both_rules(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench([50], [1, 2], [1, 3], torch.device("cpu"), repeats=1)
    assert [(row["batch"], row["depth"], row["rule"]) for row in rows] == [
        (b, n, rule) for b in (1, 2) for n in (1, 3) for rule in ("block", "token")
    ]
    assert all(row["ms"] > 0 for row in rows) and capsys.readouterr().out.count("accepted") == 8
    for block, token in zip(rows[::2], rows[1::2], strict=True):
        assert block["accepted"] >= token["accepted"] - 1e-6


@pytest.mark.parametrize("rule", ["block", "token"])
def test_what_is_expected_is_accepted(rule: str) -> None:
    """4,000 rows: the mean of what is accepted is the expected one, within five standard errors."""
    tree, logits_BMV = random_chains(4000, 3, 20, torch.device("cpu"))
    verified = verify(tree, logits_BMV, Sampling(1.0, verification=rule), torch.Generator().manual_seed(1))
    error = float(verified.accepted_B.double().std()) / 4000**0.5
    assert abs(float(verified.accepted_B.double().mean()) - expected(tree, logits_BMV)[rule]) < 5 * error
