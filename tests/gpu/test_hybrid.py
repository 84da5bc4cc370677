"""Targets with recurrent states on a GPU: chains give the answers of plain decoding and of the processor."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from reference.guesses import Guesses

from headstart.bench.architectures import ARCHITECTURES, random_model
from headstart.eval.decoding.decode import decode, slots_needed
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.sampling import Sampling
from headstart.eval.tree import chain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HYBRIDS = [name for name, entry in ARCHITECTURES.items() if not entry.trees and entry.vision is None]
LENGTHS, NEW = (33, 4, 19, 1), 20


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def contexts() -> list[list[int]]:
    noise = torch.Generator().manual_seed(5)
    return [torch.randint(3, 97, (length,), generator=noise).tolist() for length in LENGTHS]


def answers_of(model: Any, drafter: Any) -> list[list[int]]:
    limits = [NEW, 3, NEW, NEW - 4]
    engine = Engine(model, len(LENGTHS), slots_needed(max(LENGTHS), NEW, drafter), prefill_chunk=16)
    return [answer.tokens for answer in decode(engine, contexts(), drafter, Sampling(), limits, set()).answers]


@pytest.mark.parametrize("name", HYBRIDS)
def test_chains_are_lossless(name: str) -> None:
    expected = answers_of(random_model(name), None)
    model = random_model(name, device="cuda")
    assert answers_of(model, None) == expected
    guesses = Guesses([[*answer, *[7] * 4] for answer in expected], list(LENGTHS))
    assert answers_of(model, guesses) == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_half_precision_keeps_states(name: str) -> None:
    """After a prefill, a chain in one forward gives the logits of its tokens one by one."""
    model = random_model(name, device="cuda", dtype=torch.bfloat16)
    tokens = torch.tensor([[9, 33, 21]] * 2, device="cuda")
    together, apart = (Engine(model, 2, 64) for _ in range(2))
    for engine in (together, apart):
        engine.prefill([[5, 6, 7, 8], [11, 12]])
    roots_B, active_B = tokens[:, 0].contiguous(), torch.ones(2, dtype=torch.bool, device="cuda")
    step = together.verify(roots_B, chain(tokens[:, 1:].contiguous()))
    none_BK = torch.empty((2, 0), dtype=torch.int64, device="cuda")
    for column in range(3):
        tree = chain(none_BK)
        token_B = tokens[:, column].contiguous()
        one = apart.verify(token_B, tree)
        apart.commit(token_B, tree, one, none_BK, active_B)
        found, expected = (logits.float() for logits in (step.logits_BMV[:, column], one.logits_BMV[:, 0]))
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_a_cycle_waits_for_nothing() -> None:
    """Keeping and choosing states asks nothing of the host."""
    engine = Engine(random_model("LFM2", device="cuda"), 2, 64)
    engine.prefill([[5, 6, 7, 8], [11, 12]])
    tokens = torch.tensor([[9, 33, 21]] * 2, device="cuda")
    path_BK = torch.tensor([[0, -1], [0, 1]], device="cuda")
    active_B = torch.ones(2, dtype=torch.bool, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for round in range(2):  # kernels are compiled in the first
            torch.cuda.set_sync_debug_mode("warn" if round else "default")
            try:
                tree = chain(tokens[:, 1:])
                engine.commit(tokens[:, 0], tree, engine.verify(tokens[:, 0], tree, None, 16), path_BK, active_B)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    ours = [str(w.message) for w in caught if "decoding" in w.filename and "synchroniz" in str(w.message)]
    assert not ours
