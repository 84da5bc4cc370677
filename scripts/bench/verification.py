"""What the verification of drawn chains costs by each lossless rule, and how many drafts it accepts: no target is run.

    python -m headstart.bench.verification --vocab 49152 128256 --batch 1 8 32 --depth 3 7 15

Logits are random, and those of the draft are near the target's. Times hold everything after the target's forward:
p from its logits, the rule, and the draw of the target's own token. Shape legend: B batch, N drafts, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.bench.decode import repeat_time
from headstart.eval.config import VERIFICATION
from headstart.eval.decoding.sampling import Sampling, draw, probabilities
from headstart.eval.decoding.verify import Verified, acceptance, block_acceptance, verify
from headstart.eval.tree import Tree, chain

#: standard deviation of the target's logits, and of what the draft adds to them
SPREAD, NOISE = 3.0, 1.0


def random_chains(batch: int, depth: int, vocab: int, device: torch.device) -> tuple[Tree, Tensor]:
    """Chains drawn from a draft, and the target's logits [B, N + 1, V] at their rows."""
    noise = torch.Generator(device).manual_seed(0)
    logits_BMV = torch.randn((batch, depth + 1, vocab), device=device, generator=noise) * SPREAD
    more_BNV = torch.randn((batch, depth, vocab), device=device, generator=noise) * NOISE
    q_BNV = (logits_BMV[:, :-1] + more_BNV).softmax(-1)
    return chain(draw(q_BNV, noise), q_BKV=q_BNV), logits_BMV


def expected(tree: Tree, logits_BMV: Tensor) -> dict[str, float]:
    """Rule → drafts that a row accepts on average, given these drafts. Exact: nothing is drawn."""
    p_BMV = probabilities(logits_BMV, Sampling(1.0))
    assert tree.q_BNV is not None
    reach_BM, _ = block_acceptance(tree, tree.q_BNV, p_BMV)
    ratio_BN, _ = acceptance(tree, p_BMV)
    return {
        "block": float(reach_BM[:, 1:].sum(1).mean()),
        "token": float(ratio_BN.cumprod(1).sum(1).mean()),
    }


def bench(vocab: list[int], batch: list[int], depth: list[int], device: torch.device, repeats: int) -> list[Any]:
    """One row per case and rule, printed as they come."""
    rows: list[dict[str, Any]] = []
    for v, b, n in itertools.product(vocab, batch, depth):
        tree, logits_BMV = random_chains(b, n, v, device)
        accepted = expected(tree, logits_BMV)
        for rule in VERIFICATION:
            ms = repeat_time(_run(tree, logits_BMV, Sampling(1.0, verification=rule)), device, repeats)
            rows.append({"vocab": v, "batch": b, "depth": n, "rule": rule, "ms": ms, "accepted": accepted[rule]})
            print(f"vocab {v}, batch {b}, depth {n}, {rule}: {ms:.4f} ms, {accepted[rule]:.3f} accepted", flush=True)
    return rows


def _run(tree: Tree, logits_BMV: Tensor, sampling: Sampling) -> Callable[[], Verified]:
    return torch.inference_mode()(lambda: verify(tree, logits_BMV, sampling))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m headstart.bench.verification",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depth", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--repeats", type=int, default=50, help="replays per case")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench(arguments.vocab, arguments.batch, arguments.depth, device, arguments.repeats)


if __name__ == "__main__":
    main()
