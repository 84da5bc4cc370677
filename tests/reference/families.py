"""What the contract suites need of each head family: small heads, and the naive twin of their loss.

The contract suites run over `FAMILIES` and name no family. A new family is listed here, and nowhere else in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Head, HeadConfig
from headstart.heads.dims import HeadDims
from headstart.heads.families import (
    FAMILIES,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    JetSpecConfig,
    MedusaConfig,
    PEagleConfig,
    build_head,
)
from reference.block import Block, block_loss
from reference.documents import Document, Ends, Sums
from reference.eagle import eagle_loss
from reference.eagle3 import eagle3_loss
from reference.hydra import hydra_loss
from reference.llama import Shape, Weights
from reference.medusa import medusa_loss
from reference.peagle import peagle_loss
from reference.tiny import (
    FAVOURITES,
    double_document,
    double_ends,
    ends_of,
    favour,
    random_document,
    random_ends,
    randomise,
)

VOCAB, WIDTH = 97, 32
PATTERNS = ["..AAAAAA.B..CCC", ".", "AAAA", "...AABBBBB", ".A", "....AA"]
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DIMS = HeadDims(WIDTH, VOCAB, 8, 4, 2, 8, 48, rms_norm_eps=1e-5, rope_parameters=ROPE)
WIDE = replace(DIMS, head_dim=16, num_kv_heads=1, intermediate_size=40)


@dataclass(frozen=True)
class Example:
    """A head that runs in milliseconds.

    Attributes:
        config: without randomness in training.
        dims: of its target.
        ends: how the target's output head differs from a plain matrix: `bias`, `softcap`, `scale`.
        loss_only: it differs from another example in its loss alone; its files would be the same.
        refused: engines that its family is exported for, and this head is not.
    """

    config: HeadConfig
    dims: HeadDims = DIMS
    ends: dict[str, Any] = field(default_factory=dict)
    loss_only: bool = False
    refused: frozenset[str] = frozenset()


#: (head, its weights in float64, the target's ends, documents) → the sums that `head.loss` must give
Twin = Callable[[Any, Weights, Ends, list[Document]], Sums]


@dataclass(frozen=True)
class Reference:
    """Attributes:
    twin: the family's loss, one position at a time.
    examples: the first is the family as it is usually trained.
    random: a config with all the randomness that the family's training has: chosen rows, noise.
    small: the size of a target's vocabulary → a config for decoding tests, on a target of four layers.
    variants: fields of `small` that make other drafters of the family, by a name: other layers, caches or norms.
    steps: after so many steps on an answer, some of its drafts are right and some wrong.
    tolerance: of gradients in float64. Rope's angles are float32; without them nothing but rounding may differ.
    """

    twin: Twin
    examples: dict[str, Example]
    random: HeadConfig
    small: Callable[[int], HeadConfig]
    steps: int
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: float = 2e-5


def shape_of(head: Any) -> Shape:
    dims = head.dims
    act = head.hidden_act or dims.hidden_act
    return Shape(dims.num_heads, dims.num_kv_heads, dims.head_dim, dims.rms_norm_eps, act, dims.rope_parameters)


def _medusa(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    c = head.config
    return medusa_loss(weights, ends, documents, c.depth, c.num_layers, c.lm_head, c.loss)


def _hydra(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    c = head.config
    scale = float(head.embed_scale)
    return hydra_loss(weights, ends, documents, shape_of(head), scale, c.depth, c.num_layers, c.lm_head, c.loss)


def _eagle(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    c = head.config
    top = {"top_weight": c.top_tokens_loss_weight, "top_tokens": c.top_tokens}
    terms = (c.hidden_loss_weight, c.logit_loss_weight)
    return eagle_loss(weights, ends, documents, shape_of(head), *terms, depth=c.depth, kind=c.loss, **top)


def _eagle3(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    ids = None if head.draft_ids_U is None else head.draft_ids_U.tolist()
    c = head.config
    return eagle3_loss(weights, ends, documents, shape_of(head), c.depth, ids, c.loss, c.norm_output,
                       (c.lk_weight, c.l1_weight), c.teacher_temperature)  # fmt: skip


def block_of(head: Any) -> Block:
    ids = None if head.draft_ids_U is None else head.draft_ids_U.tolist()
    c = head.config
    markov = getattr(c, "markov_head", None)
    return Block(shape_of(head), c.depth, c.sample_from_anchor, c.mask_token_id, ids, markov, head.causal,
                 getattr(c, "uncorrected", None), head.selects)  # fmt: skip


def _block(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Any:
    c = head.config
    confident = getattr(c, "confidence_weight", 0) > 0
    kinds = tuple(kind for kind in ("ce", "l1", "kl", "lk") if getattr(c, f"{kind}_weight") > 0)
    dpace = c.weighting == "dpace"
    if head.lm_head is not None:  # frozen
        weights = {**weights, "lm_head.weight": head.lm_head.weight.detach().double()}
    return block_loss(weights, ends, documents, block_of(head), kinds, c.depth_decay, dpace, confident,
                      getattr(c, "base_weight", 0) > 0)  # fmt: skip


def _peagle(head: Any, weights: Weights, ends: Ends, documents: list[Document]) -> Sums:
    ids = None if head.draft_ids_U is None else head.draft_ids_U.tolist()
    c = head.config
    return peagle_loss(weights, ends, documents, shape_of(head), c.mask_token_id, c.depth, ids, c.loss,
                       (c.lk_weight, c.l1_weight), c.teacher_temperature)  # fmt: skip


def medusa(**fields: Any) -> MedusaConfig:
    return MedusaConfig(**{"depth": 4, "rank": 5, **fields})


def hydra(**fields: Any) -> HydraConfig:
    return HydraConfig(**{"depth": 4, "rank": 5, **fields})


def hydrapp(**fields: Any) -> HydraConfig:
    """Hydra++, whose usual dropout is off: what it draws is random."""
    return hydra(**{"prefix_layer": True, "num_layers": 2, **fields})


def eagle(**fields: Any) -> EagleConfig:
    return EagleConfig(**{"feature_noise": 0.0, **fields})


def eagle3(**fields: Any) -> Eagle3Config:
    return Eagle3Config(**{"depth": 4, "draft_vocab_size": 40, "feature_layers": [1, 3, 5], **fields})


BLOCK: dict[str, Any] = {"depth": 4, "layers": 2, "feature_layers": [1, 3, 5], "mask_token_id": 90}
REDUCED = {"draft_vocab_size": 40}


def dflash(**fields: Any) -> DFlashConfig:
    return DFlashConfig(**{**BLOCK, **fields})


def dspark(**fields: Any) -> DSparkConfig:
    return DSparkConfig(**{**BLOCK, "markov_rank": 6, **REDUCED, **fields})


def dflash2(**fields: Any) -> DFlash2Config:
    given = {"conv_group": 8, "selector_rank": 6, "selector_candidates": 5}
    return DFlash2Config(**{**BLOCK, **given, **fields})


def domino(**fields: Any) -> DominoConfig:
    return DominoConfig(**{**BLOCK, "correction_rank": 6, "gru_size": 10, **fields})


def jetspec(**fields: Any) -> JetSpecConfig:
    return JetSpecConfig(**{**BLOCK, **fields})


def peagle(**fields: Any) -> PEagleConfig:
    """Its usual draw of rows is off: it is random. The mask token occurs in the documents, too."""
    given = {"depth": 4, "draft_vocab_size": 40, "feature_layers": [1, 3, 5], "row_fraction": 1.0, "mask_token_id": 11}
    return PEagleConfig(**{**given, **fields})


PARTIAL_ROPE: dict[str, Any] = {**ROPE, "partial_rotary_factor": 0.5}
PARTIAL = replace(DIMS, hidden_act="gelu_pytorch_tanh", rope_parameters=PARTIAL_ROPE)
GELU = replace(WIDE, hidden_act="gelu_pytorch_tanh")
#: engines that do not know a head which vLLM serves
VLLM_ALONE = frozenset({"portable", "sglang", "tensorrt_llm", "llama_cpp"})
#: llama.cpp's graph has one layer, and one norm before fc
NOT_LLAMA_CPP = frozenset({"llama_cpp"})
#: SGLang's block drafters have no draft vocabulary
NOT_SGLANG = frozenset({"portable", "sglang"})
ODD_ENDS: dict[str, Any] = {"softcap": 3.0, "scale": 0.7, "bias": True}

REFERENCES: dict[str, Reference] = {
    "medusa": Reference(
        twin=_medusa,
        examples={
            "two layers, kl": Example(medusa(loss="kl", num_layers=2)),
            "one layer": Example(medusa(loss="kl")),
            "shared matrix": Example(medusa(lm_head="shared", num_layers=2, loss="kl")),
            "low rank": Example(medusa(lm_head="lowrank", loss="kl")),
            "two layers, ce": Example(medusa(loss="ce", num_layers=2), loss_only=True),
            "one layer, ce": Example(medusa(loss="ce"), loss_only=True),
            "shared matrix, ce": Example(medusa(lm_head="shared", num_layers=2, loss="ce"), loss_only=True),
            "low rank, ce": Example(medusa(lm_head="lowrank", loss="ce"), loss_only=True),
        },
        random=medusa(),
        small=lambda vocab: MedusaConfig(depth=3),
        steps=12,
        tolerance=1e-10,
    ),
    "hydra": Reference(
        twin=_hydra,
        examples={
            "own matrices": Example(hydra()),
            "shared matrix, two layers": Example(hydra(lm_head="shared", num_layers=2)),
            "low rank": Example(hydra(lm_head="lowrank")),
            "low rank, ce": Example(hydra(lm_head="lowrank", loss="ce"), loss_only=True),
            "shared matrix, ce": Example(hydra(lm_head="shared", loss="ce"), loss_only=True),
            "own matrices, ce": Example(hydra(loss="ce"), loss_only=True),
            "scaled logits": Example(hydra(lm_head="lowrank"), ends={"scale": 0.7}, loss_only=True),
            "prefix layer": Example(hydrapp()),
            "prefix layer, low rank": Example(hydrapp(lm_head="lowrank", num_layers=3)),
            "prefix layer, wide heads, llama3 rope": Example(
                hydrapp(lm_head="shared"), replace(WIDE, rope_parameters=LLAMA3_ROPE)
            ),
            "prefix layer, partial rope": Example(hydrapp(loss="ce"), replace(DIMS, rope_parameters=PARTIAL_ROPE)),
        },
        random=hydrapp(dropout=0.2),
        small=lambda vocab: HydraConfig(depth=3, num_layers=2, prefix_layer=True),
        steps=12,
    ),
    "eagle": Reference(
        twin=_eagle,
        examples={
            "published": Example(eagle()),
            "three passes": Example(eagle(depth=3), loss_only=True),
            "bias of fc": Example(eagle(fc_bias=True), refused=frozenset({"portable", "vllm"})),
            "narrow": Example(eagle(intermediate_size=40)),
            "bias of fc, three passes": Example(eagle(fc_bias=True, depth=3), loss_only=True),
            "features alone": Example(eagle(logit_loss_weight=0.0), loss_only=True),
            "logits alone": Example(eagle(hidden_loss_weight=0.0, logit_loss_weight=1.0), loss_only=True),
            "wide heads, gelu": Example(eagle(depth=2), GELU, loss_only=True),
            "kl": Example(eagle(depth=2, loss="kl", logit_loss_weight=1.0), loss_only=True),
            "lk": Example(eagle(depth=2, loss="lk", logit_loss_weight=1.0), loss_only=True),
            "top tokens": Example(eagle(depth=3, top_tokens_loss_weight=1.0), loss_only=True),
            "the top token": Example(eagle(depth=3, top_tokens_loss_weight=0.3, top_tokens=1), loss_only=True),
            "more top tokens than there are": Example(
                eagle(depth=3, top_tokens_loss_weight=2.0, top_tokens=200), loss_only=True
            ),
            "odd output head": Example(eagle(), ends=ODD_ENDS, loss_only=True),
            "odd output head, kl": Example(
                eagle(depth=2, loss="kl", logit_loss_weight=1.0), ends={"scale": 0.7}, loss_only=True
            ),
            "odd output head, lk": Example(
                eagle(depth=2, loss="lk", logit_loss_weight=1.0), ends={"scale": 0.7}, loss_only=True
            ),
            "odd output head, top tokens": Example(
                eagle(depth=3, top_tokens_loss_weight=1.0), ends={"scale": 0.7}, loss_only=True
            ),
        },
        random=eagle(depth=3, loss="kl", row_fraction=0.5, feature_noise=0.01),
        small=lambda vocab: EagleConfig(logit_loss_weight=1.0, feature_noise=0.0),
        steps=25,
    ),
    "eagle3": Reference(
        twin=_eagle3,
        examples={
            "draft vocabulary": Example(eagle3()),
            "whole vocabulary": Example(eagle3(draft_vocab_size=VOCAB)),
            "vocabulary 0 is whole": Example(eagle3(draft_vocab_size=0, intermediate_size=40)),
            "own width": Example(eagle3(hidden_size=24, intermediate_size=20)),
            "wide heads, llama3 rope": Example(eagle3(), replace(WIDE, rope_parameters=LLAMA3_ROPE)),
            "partial rope, gelu": Example(eagle3(), PARTIAL, loss_only=True),
            "kl": Example(eagle3(loss="kl"), loss_only=True),
            "lk": Example(eagle3(loss="lk"), loss_only=True),
            "kl, lk and l1": Example(eagle3(loss="kl", lk_weight=0.3, l1_weight=0.7), loss_only=True),
            "soft ce and lk of a sharp teacher": Example(
                eagle3(lk_weight=0.5, teacher_temperature=0.6), loss_only=True
            ),
            "odd output head": Example(eagle3(), ends=ODD_ENDS, loss_only=True),
            "as many key heads as query heads": Example(eagle3(num_key_value_heads=4)),
            "two layers": Example(eagle3(layers=2), refused=NOT_LLAMA_CPP),
            "two layers, one key head": Example(eagle3(layers=2, num_key_value_heads=1), refused=NOT_LLAMA_CPP),
            "q/k norms": Example(eagle3(qk_norm=True), refused=VLLM_ALONE),
            "three layers, q/k norms, partial rope": Example(
                eagle3(layers=3, qk_norm=True), replace(DIMS, rope_parameters=PARTIAL_ROPE), refused=VLLM_ALONE
            ),
            "norms of the streams, normed output": Example(
                eagle3(fc_norm="stream", norm_output=True), refused=NOT_LLAMA_CPP
            ),
            "norm before fc, two layers, own width": Example(
                eagle3(fc_norm="concat", layers=2, hidden_size=24, intermediate_size=20), refused=NOT_LLAMA_CPP
            ),
            "all of EAGLE-3.1": Example(
                eagle3(fc_norm="stream", layers=2, norm_output=True, draft_vocab_size=VOCAB, loss="kl"),
                refused=NOT_LLAMA_CPP,
            ),
        },
        random=eagle3(loss="lk", row_fraction=0.6, feature_dropout=0.2, feature_noise=0.1),
        small=lambda vocab: Eagle3Config(depth=4, draft_vocab_size=5 * vocab // 6, feature_layers=[1, 2, 3]),
        steps=12,
        variants={
            "two layers, q/k norms": {"layers": 2, "qk_norm": True},
            "three layers, norms of the streams, normed output": {
                "layers": 3,
                "fc_norm": "stream",
                "norm_output": True,
                "row_fraction": 0.5,
            },
            "norm before fc, normed output": {"fc_norm": "concat", "norm_output": True},
            "as many key heads as query heads": {"num_key_value_heads": 2},
        },
    ),
    "dflash": Reference(
        twin=_block,
        examples={
            "fill in": Example(dflash()),
            "draft vocabulary": Example(dflash(**REDUCED), refused=NOT_SGLANG),
            "anchor first, draft vocabulary": Example(dflash(sample_from_anchor=True, **REDUCED), refused=NOT_SGLANG),
            "anchor first": Example(dflash(sample_from_anchor=True)),
            "three layers, wide heads, llama3 rope": Example(
                dflash(layers=3), replace(WIDE, rope_parameters=LLAMA3_ROPE)
            ),
            "as many key heads as query heads": Example(dflash(num_key_value_heads=4)),
            "kl": Example(dflash(ce_weight=0.0, kl_weight=1.0), loss_only=True),
            "lk and l1": Example(dflash(ce_weight=0.0, lk_weight=1.0, l1_weight=0.5), loss_only=True),
            "d-pace": Example(dflash(weighting="dpace", **REDUCED), loss_only=True),
            "partial rope, gelu": Example(dflash(), PARTIAL, loss_only=True),
        },
        random=dflash(anchor_share=0.2),
        small=lambda vocab: DFlashConfig(depth=4, layers=2, feature_layers=[1, 2, 3], mask_token_id=vocab - 1),
        steps=25,
        variants={
            "anchor first, deeper, draft vocabulary": {
                "sample_from_anchor": True,
                "draft_vocab_size": 50,
                "layers": 3,
                "num_key_value_heads": 2,
            },
        },
    ),
    "dspark": Reference(
        twin=_block,
        examples={
            "vanilla": Example(dspark(), refused=NOT_SGLANG),
            "vanilla, whole vocabulary": Example(dspark(draft_vocab_size=0)),
            "gated": Example(dspark(markov_head="gated"), refused=NOT_SGLANG | {"vllm"}),
            "rnn, whole vocabulary": Example(
                dspark(markov_head="rnn", draft_vocab_size=0), refused=frozenset({"portable", "vllm"})
            ),
            "without confidence head, fill in": Example(
                dspark(confidence_weight=0.0, sample_from_anchor=False), refused=NOT_SGLANG
            ),
            "d-pace": Example(dspark(weighting="dpace"), loss_only=True),
        },
        random=dspark(anchor_share=0.2),
        small=lambda vocab: DSparkConfig(
            depth=4, layers=2, feature_layers=[1, 2, 3], mask_token_id=vocab - 1, markov_rank=8, ce_weight=1.0,
            draft_vocab_size=5 * vocab // 6,
        ),
        steps=25,
        variants={
            "gated, whole vocabulary": {"markov_head": "gated", "draft_vocab_size": 0},
            "rnn": {"markov_head": "rnn"},
            "whole vocabulary, fill in": {"draft_vocab_size": 0, "sample_from_anchor": False},
        },
    ),
    "dflash2": Reference(
        twin=_block,
        examples={
            "fill in": Example(dflash2()),
            "draft vocabulary, three taps": Example(dflash2(conv_taps=3, **REDUCED)),
            "anchor first": Example(
                dflash2(sample_from_anchor=True, conv_group=32), refused=frozenset({"portable", "vllm"})
            ),
            "kl": Example(dflash2(kl_weight=1.0, select_weight=0.5), loss_only=True),
        },
        random=dflash2(anchor_share=0.2),
        small=lambda vocab: DFlash2Config(
            depth=4, layers=2, feature_layers=[1, 2, 3], mask_token_id=vocab - 1, conv_group=8, selector_rank=8,
            selector_candidates=6,
        ),
        steps=25,
        variants={"anchor first, draft vocabulary": {"sample_from_anchor": True, "draft_vocab_size": 50}},
    ),
    "domino": Reference(
        twin=_block,
        examples={
            "anchor first": Example(domino()),
            "draft vocabulary, corrected from the first": Example(
                domino(uncorrected=0, **REDUCED), refused=NOT_SGLANG
            ),
            "fill in, without the base's loss": Example(
                domino(sample_from_anchor=False, base_weight=0.0), refused=NOT_SGLANG
            ),
            "kl and ce": Example(domino(kl_weight=0.5, uncorrected=2, base_weight=0.7), loss_only=True),
            "d-pace": Example(domino(weighting="dpace"), loss_only=True),
        },
        random=domino(anchor_share=0.2),
        small=lambda vocab: DominoConfig(
            depth=4, layers=2, feature_layers=[1, 2, 3], mask_token_id=vocab - 1, correction_rank=8, gru_size=12,
        ),
        steps=25,
        variants={
            "fill in, draft vocabulary, all corrected": {
                "sample_from_anchor": False, "draft_vocab_size": 50, "uncorrected": 0,
            },
        },
    ),
    "jetspec": Reference(
        twin=_block,
        examples={
            "fill in": Example(jetspec()),
            "draft vocabulary": Example(jetspec(**REDUCED), refused=NOT_SGLANG),
            "anchor first": Example(jetspec(sample_from_anchor=True), refused=NOT_SGLANG | {"vllm"}),
        },
        random=jetspec(anchor_share=0.2),
        small=lambda vocab: JetSpecConfig(
            depth=4, layers=2, feature_layers=[1, 2, 3], mask_token_id=vocab - 1, ce_weight=1.0, kl_weight=0.0
        ),
        steps=25,
        variants={"anchor first, draft vocabulary": {"sample_from_anchor": True, "draft_vocab_size": 50}},
    ),
    "peagle": Reference(
        twin=_peagle,
        examples={
            "draft vocabulary": Example(peagle()),
            "whole vocabulary": Example(peagle(draft_vocab_size=0, intermediate_size=40)),
            "two layers": Example(peagle(layers=2)),
            "as many key heads as query heads, two layers": Example(peagle(num_key_value_heads=4, layers=2)),
            "own width": Example(peagle(hidden_size=24, intermediate_size=20)),
            "embeddings of its own, two layers": Example(peagle(train_embeddings=True, layers=2)),
            "three layers, q/k norms, partial rope": Example(
                peagle(layers=3, qk_norm=True), replace(DIMS, rope_parameters=PARTIAL_ROPE)
            ),
            "norms of the streams": Example(peagle(fc_norm="stream")),
            "norm before fc, two layers, own width": Example(
                peagle(fc_norm="concat", layers=2, hidden_size=24, intermediate_size=20)
            ),
            "wide heads, llama3 rope": Example(peagle(), replace(WIDE, rope_parameters=LLAMA3_ROPE)),
            "soft_ce, two layers": Example(peagle(loss="soft_ce", layers=2), loss_only=True),
            "lk": Example(peagle(loss="lk"), loss_only=True),
            "odd output head": Example(peagle(), ends=ODD_ENDS, loss_only=True),
        },
        random=peagle(loss="lk", row_fraction=0.6, layers=2),
        small=lambda vocab: PEagleConfig(
            depth=4,
            draft_vocab_size=5 * vocab // 6,
            feature_layers=[1, 2, 3],
            row_fraction=1.0,
            mask_token_id=vocab - 1,
        ),
        steps=12,
        variants={
            "two layers, q/k norms": {"layers": 2, "qk_norm": True},
            "as many key heads as query heads, two layers": {"num_key_value_heads": 2, "layers": 2},
            "three layers, norms of the streams, embeddings of its own": {
                "layers": 3,
                "fc_norm": "stream",
                "train_embeddings": True,
            },
        },
    ),
}


def examples() -> Iterator[tuple[str, Example]]:
    """(name, example) of every family that there is."""
    for family in FAMILIES:
        for name, example in REFERENCES[family].examples.items():
            yield f"{family}, {name}", example


def documents(patterns: list[str] = PATTERNS, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Document]:
    """Documents of the examples' target, by the patterns of their turns."""
    made = [random_document(pattern, VOCAB, WIDTH, 3, seed + i) for i, pattern in enumerate(patterns)]
    return [double_document(document) for document in made] if dtype == torch.float64 else made


def draft_ids(size: int) -> Tensor:
    """`size` of the `VOCAB` target ids, ascending; two of the three favourites are among them."""
    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7)).tolist()
    others = [token for token in shuffled if token not in FAVOURITES]
    return torch.tensor(sorted([*others[: size - 2], *FAVOURITES[:2]]))


def example_head(example: Example, dtype: torch.dtype = torch.float32) -> tuple[Head, Ends]:
    """The head with random weights that say the target's favourites most of the time, and its target's ends."""
    given = dict(example.ends)
    biased = given.pop("bias", False)
    ends = random_ends(VOCAB, WIDTH, 50, **given)
    if biased:
        ends.bias_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    ends = double_ends(ends) if dtype == torch.float64 else ends
    head = build_head(example.config, example.dims)
    size = head.draft_vocab_size
    ids = None if size is None else draft_ids(size)
    head.initialise(ends_of(ends), ids)
    randomise(head, 1)
    listed = list(range(VOCAB)) if ids is None else ids.tolist()
    favourites = [listed.index(token) for token in FAVOURITES if token in listed]
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2 and parameter.shape[0] == len(listed) and "lm_head" in name:
            favour(parameter, favourites)
    return head.to(dtype), ends
