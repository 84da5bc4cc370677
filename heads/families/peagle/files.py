"""P-EAGLE on disk: EAGLE-3's tensors, `mask_hidden` [1, 1, 3D], and all embeddings, the mask token's trained one too.

vLLM takes the mask token from config.json and the tensors from the file. A saved head that uses the target's embeddings
holds the mask token's alone (the compact form); the portable form has the whole table. Other trainers train the whole
table, so a file that does not say `train_embeddings` is read with embeddings of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.geometry import flag, integer
from headstart.heads.checkpoints.head_files import Contents, HeadFiles
from headstart.heads.checkpoints.raw import RawCheckpoint
from headstart.heads.checkpoints.tensor_map import Piece
from headstart.heads.dims import HeadDims
from headstart.heads.errors import FormatError
from headstart.heads.families.eagle3.files import VARIANTS, Eagle3Files
from headstart.heads.families.eagle_files import MASK_HIDDEN, MASK_TOKENS, has_draft_layer, is_eagle3, is_parallel
from headstart.heads.families.paper import Paper
from headstart.heads.families.peagle.head import PEagleHead

PAPER = Paper(
    method="P-EAGLE",
    title="P-EAGLE: Parallel-Drafting EAGLE with Scalable Training",
    authors=(
        "Hui, Mude and Huang, Xin and Salas, Jaime Campos and Sun, Yue and Pemberton, Nathan and Song, Xiang and "
        "Khetan, Ashish and Karypis, George"
    ),
    arxiv="2602.01469",
)
#: the table, and the field of config.json that says whether all of it was trained
EMBEDDINGS, TRAINED = "embed_tokens.weight", "train_embeddings"


class PEagleFiles(Eagle3Files):
    """EAGLE-3's files with the masked places' feature and embedding."""

    facts = {
        **Eagle3Files.facts,
        "recycled": "nothing: masked places read mask_hidden and the mask token's embedding",
        "method": f"{PAPER.method}, arXiv {PAPER.arxiv}",
    }
    layouts = ("P-EAGLE",)
    speculators = "peagle"
    title = "P-EAGLE"
    family = "peagle"
    #: SGLang knows the other name, LlamaForCausalLMEagle3: under it, it would run this head as EAGLE-3
    architecture = "Eagle3LlamaForCausalLM"
    normed_residual = False
    variants = (*VARIANTS, *MASK_TOKENS, "parallel_drafting")
    compact_note = "Saved without the target's embeddings: run `headstart export` before serving."

    def facts_of(self, config: HeadConfig) -> dict[str, str]:
        return self.facts

    def recognise(self, raw: RawCheckpoint) -> bool:
        return has_draft_layer(raw) and is_eagle3(raw.tensors) and is_parallel(raw)

    def more_fields(self, config: dict[str, Any], dims: HeadDims, where: str) -> dict[str, Any]:
        token = mask_token(config, dims.vocab_size, where)
        # nothing is recycled, so norm_output changes nothing
        return {
            "mask_token_id": token,
            "norm_output": False,
            "train_embeddings": flag(config, TRAINED, where, True),
        }

    def shares_embeddings(self, fields: dict[str, Any]) -> bool:
        return super().shares_embeddings(fields) and not fields["train_embeddings"]

    def pieces(
        self, raw: RawCheckpoint, names: dict[str, str], fields: dict[str, Any], dims: HeadDims
    ) -> dict[str, Piece]:
        found = {MASK_HIDDEN: Piece(MASK_HIDDEN)}
        if self.shares_embeddings(fields):
            found["mask_embedding"] = Piece(EMBEDDINGS, fields["mask_token_id"])
        return found

    def shared_embeddings(self, raw: RawCheckpoint, names: dict[str, str], dims: HeadDims) -> dict[str, str]:
        if EMBEDDINGS not in names:
            raise FormatError(
                f"{raw.directory}: {EMBEDDINGS} is missing, and the mask token's embedding with it, which P-EAGLE "
                "trains. Copy it from where the head was trained."
            )
        super().shared_embeddings(raw, names, dims)  # the shape
        return {}

    def from_speculators(
        self, outer: dict[str, Any], flat: dict[str, Any], tensors: Iterable[str], where: str
    ) -> dict[str, str]:
        flat |= {name: outer[name] for name in MASK_TOKENS if outer.get(name) is not None}
        return super().from_speculators(outer, flat, tensors, where)

    def tensors(self, head: Head) -> dict[str, Tensor]:
        """Raises: FormatError for a head with the target's embeddings that is not bound to its target."""
        tensors, peagle = super().tensors(head), cast(PEagleHead, head)
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].view(1, 1, -1)
        if peagle.replaced is not None:
            if peagle.embed_VD is None:
                raise FormatError("this P-EAGLE head uses the target's embeddings: bind it to the target to export it")
            token, own_H = peagle.replaced
            embed_VD = peagle.embed_VD.to(own_H.device, own_H.dtype, copy=True)  # a head may be planned, on `meta`
            embed_VD[token] = own_H.detach()
            del tensors["mask_embedding"]
            tensors[EMBEDDINGS] = embed_VD
        return tensors

    def config_json(self, head: Head) -> dict[str, Any]:
        peagle = cast(PEagleHead, head)
        return super().config_json(head) | {
            "mask_token_id": peagle.mask_token,
            TRAINED: peagle.config.train_embeddings,
        }

    def contents(self, head: Head) -> Contents:
        shares = cast(PEagleHead, head).replaced is not None
        return HeadFiles.contents(self, head) if shares else self.portable(head)

    def drafted_tokens(self, depth: int, chain: int | None) -> int:
        """`chain` if given, else the trained depth, at most 7: one pass drafts them all."""
        return min(depth, 7) if chain is None else chain


def mask_token(config: dict[str, Any], vocab_size: int, where: str) -> int:
    """The mask token that config.json names. Raises: FormatError where it names none, several, or no token."""
    named = [name for name in MASK_TOKENS if config.get(name) is not None]
    if not named:
        raise FormatError(f"{where}: mask_token_id is missing: the token whose embedding masked places read")
    tokens = {name: integer(config, name, where, bounds=(0, vocab_size - 1)) for name in named}
    if len(set(tokens.values())) > 1:
        raise FormatError(f"{where}: names several mask tokens: {tokens}. Keep the one that the head was trained with.")
    return tokens[named[0]]
