"""Domino on disk: DFlash's file with a recurrent network and a correction; settings stand inside `dflash_config`
(families §1b). SGLang serves it by its DFLASH algorithm (`projector_type: domino`), vLLM does not.
"""

from __future__ import annotations

from typing import Any, cast

from headstart.heads.base import MAX_LAYERS, MAX_SIZE, HeadConfig
from headstart.heads.checkpoints.geometry import integer
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.families.block.files import BlockFiles
from headstart.heads.families.block.head import BlockHead
from headstart.heads.families.block.published import CORRECTION, GRU, NESTED, addition, stated
from headstart.heads.families.domino.head import DominoConfig
from headstart.heads.families.eagle_files import is_block_draft
from headstart.heads.families.paper import Paper

PAPER = Paper(
    method="Domino",
    title="Domino: Decoupling Causal Modeling from Autoregressive Drafting in Speculative Decoding",
    authors="Huang, Jianuo and others",
    arxiv="2605.29707",
)
TENSORS = (f"{GRU}weight_ih_l0", f"{GRU}weight_hh_l0", f"{CORRECTION}0.weight", f"{CORRECTION}2.weight")
#: our field → the published one
NAMES = {"gru_size": "gru_hidden_dim", "correction_rank": "emb_dim", "uncorrected": "pure_draft_prefix_len"}


class DominoFiles(BlockFiles):
    """Read are the authors' files and SpecForge's."""

    facts = {**BlockFiles.facts, "method": f"{PAPER.method}, arXiv {PAPER.arxiv}"}
    layouts = ("Domino",)
    title = "Domino"
    architecture = "DFlashDraftModel"
    family = "domino"
    own_fields = ("projector_type",)
    zero_at_start = {
        f"{CORRECTION}2": "every value is zero, as before training: a draft does not depend on those before it",
    }

    def recognise(self, raw: RawCheckpoint) -> bool:
        return is_block_draft(raw) and addition(raw) == GRU

    def added(
        self, raw: RawCheckpoint, config: dict[str, Any], names: dict[str, str], where: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        given = {name: stated(config, name, where) for name in NAMES.values()}
        sizes = ("gru_size", "correction_rank")
        fields = {ours: integer(given, NAMES[ours], where, bounds=(1, MAX_SIZE)) for ours in sizes}
        fields["uncorrected"] = integer(given, NAMES["uncorrected"], where, default=0, bounds=(0, MAX_LAYERS))
        return fields, {name: name for name in TENSORS}

    def block_json(self, head: BlockHead) -> dict[str, Any]:
        config = cast(DominoConfig, head.config)
        nested = {
            **self.inputs_json(head),
            "causal": head.causal,
            "projector_type": "domino",
            "shift_label": config.sample_from_anchor,
            **{name: getattr(config, ours) for ours, name in NAMES.items()},
        }
        return {NESTED: nested}

    def added_facts(self, config: HeadConfig) -> dict[str, str]:
        given = cast(DominoConfig, config)
        correction = (
            f"logits + W2 SiLU(W1 [output ; state]), rank {given.correction_rank}; the state of a GRU of "
            f"{given.gru_size} over the embeddings from the committed token on; not for the first {given.uncorrected}"
        )
        return {"correction": correction}
