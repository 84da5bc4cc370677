"""The real target: plain decoding gives the recorded greedy answers, and so does speculation.

Skipped where the target is not in the cache (`headstart target fetch smollm2-135m-instruct`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import build_drafter
from headstart.eval.drafters.ngram import NgramDrafter
from headstart.eval.measuring.benchmark import evaluate
from headstart.heads.families import HydraConfig, build_head
from headstart.heads.targets.fetch import default_cache, find_damage
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import Target, TargetConfig

NAME = "smollm2-135m-instruct"
DATA = Path(__file__).with_name("tau_check_8.jsonl")

pytestmark = pytest.mark.target


@pytest.fixture(scope="module")
def smollm2() -> Target:
    """The released (bfloat16) weights computed in float32, which is how the answers were recorded."""
    if not (default_cache() / NAME).is_dir() or find_damage(default_cache() / NAME):
        pytest.skip(f"{NAME} is not cached")
    loaded = load_target(TargetConfig(name=NAME, dtype="bfloat16", device="cpu"))
    return Target.from_model(loaded.model.float(), loaded.tokenizer, loaded.config)


@pytest.mark.slow
def test_greedy_answers_are_the_recorded_ones(smollm2: Target) -> None:
    """Eight prompts together, float32, 40 tokens or the stop token; n-gram speculation says the same on three."""
    records = [json.loads(line) for line in DATA.read_text().splitlines()]
    decoder = Decoder(smollm2, EvalConfig())
    contexts = [record["prompt_token_ids"] for record in records]
    expected = [record["greedy_token_ids"] for record in records]
    assert sum(len(tokens) < 40 for tokens in expected) == 2  # the others are cut
    plain = decoder.run(contexts, None, 40, seed=0)
    assert [answer.tokens for answer in plain.answers] == [tokens[:40] for tokens in expected]
    drafted = [1, 4, 5]  # the first two repeat themselves, the third stops
    speculative = decoder.run([contexts[row] for row in drafted], NgramDrafter(3), 16, seed=0)
    assert [answer.tokens for answer in speculative.answers] == [expected[row][:16] for row in drafted]
    assert sum(cycle.accepted for answer in speculative.answers for cycle in answer.cycles) > 10


def test_report_on_the_real_target(smollm2: Target) -> None:
    config = EvalConfig(data=str(DATA), limit=2, max_new_tokens=6, drafter="ngram", tree=TreeConfig(depth=2))
    config.warmup_tokens = 0
    report = evaluate(smollm2, None, config)
    assert report.greedy_identity is not None and report.greedy_identity["identical"] == 2
    assert report.target["name"] == NAME


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_node_by_node_drafts_leave_the_answer_alone(smollm2: Target, kind: str) -> None:
    """Of a Hydra++ head that was trained on nothing: what it drafts is mostly wrong."""
    record = json.loads(DATA.read_text().splitlines()[0])
    torch.manual_seed(0)
    head = build_head(HydraConfig(depth=3, lm_head="shared", prefix_layer=True, num_layers=2), smollm2.dims)
    head.initialise(smollm2.ends)
    with torch.no_grad():
        # blocks that read the drafted tokens, and a layer that does something
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter += 0.02 * torch.randn(parameter.shape)
    config = EvalConfig(tree=TreeConfig(kind, 3, k=3, total_tokens=10))
    drafter = build_drafter(head.eval(), config)
    (answer,) = Decoder(smollm2, config).run([record["prompt_token_ids"]], drafter, 12, seed=0).answers
    assert answer.tokens == record["greedy_token_ids"][:12]
    assert all(cycle.drafted for cycle in answer.cycles)
