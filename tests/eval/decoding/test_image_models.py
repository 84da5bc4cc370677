"""Decoding with targets that read images: chains and trees give the answers of transformers' own forward over text."""

from __future__ import annotations

from pathlib import Path

import pytest
from eval_help import CONTEXTS, run, tokens_of, train_briefly, tree_of
from reference.greedy import greedy
from reference.image_models import MODELS, save_image_model

from headstart.eval.config import EvalConfig
from headstart.eval.decoding.engine import attention_windows
from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.generic.model import check_decodable
from headstart.eval.drafters import DRAFTERS, build_drafter
from headstart.heads.errors import TargetError
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig

#: the family that this is tested with: any that drafts trees
FAMILY = next(family for family, drafting in DRAFTERS.items() if "dynamic" in drafting.kinds)
NEW_TOKENS = 16


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_the_models_own(name: str, tmp_path: Path) -> None:
    """In float32: plain decoding, a chain and a tree, and the fused model where there is one."""
    save_image_model(name, tmp_path)
    target = load_target(TargetConfig(name=str(tmp_path), device="cpu", dtype="float32"))
    try:
        check_decodable(target.model)
    except TargetError as refusal:
        pytest.skip(str(refusal))
    expected = [greedy(target.model, context, NEW_TOKENS) for context in CONTEXTS]
    assert min(gap for _, gap in expected) > 1e-4 and len({token for answer, _ in expected for token in answer}) > 3
    plain = run(target, None, max_new_tokens=NEW_TOKENS)
    assert tokens_of(plain) == [answer for answer, _ in expected]
    head = train_briefly(target, plain, FAMILY).head
    models: list[FusedModel | None] = [None]
    try:
        models.append(FusedModel(target.model, attention_windows(target.model.config)))
    except Unfusable:
        pass
    kinds = ("chain",) if check_decodable(target.model).chains_only else ("chain", "dynamic")
    for fused in models:
        for kind in kinds:
            drafter = build_drafter(head, EvalConfig(tree=tree_of(kind)))
            answers = run(target, drafter, max_new_tokens=NEW_TOKENS, fused=fused)
            assert tokens_of(answers) == tokens_of(plain)
            assert sum(cycle.accepted for answer in answers for cycle in answer.cycles) > 5
