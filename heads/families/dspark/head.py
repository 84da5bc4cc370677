"""DSpark: DFlash's backbone, anchor first, with a Markov head and a confidence head (arXiv 2607.05147).

Shape legend: A anchors, B batch, K drafts of a block, D target hidden, r rank, V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import MAX_SIZE, LossTerm
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds
from headstart.heads.errors import ConfigError
from headstart.heads.families.block.corrections import Drafts, Metrics
from headstart.heads.families.block.head import BlockConfig, BlockHead
from headstart.heads.losses.block import BlockLabels, BlockLosses
from headstart.heads.numerics import wide

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass
class DSparkConfig(BlockConfig):
    """Recipe node `head` for DSpark."""

    structure: ClassVar[tuple[str, ...]] = (*BlockConfig.structure, "markov_head", "markov_rank")
    weights: ClassVar[tuple[str, ...]] = (*BlockConfig.weights, "confidence_weight")
    limits: ClassVar[dict[str, int]] = {**BlockConfig.limits, "markov_rank": MAX_SIZE}

    type: str = "dspark"
    sample_from_anchor: bool = True
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    #: How a draft depends on the one before it: vanilla (by its token), gated (by the slot's output as well) or rnn (by
    #: all drafts before it). vLLM serves vanilla alone.
    markov_head: str = "vanilla"
    #: Rank of the Markov head's product (r).
    markov_rank: int = 256
    #: Weight of the confidence head's loss. 0 leaves that head out.
    confidence_weight: float = 1.0


class MarkovHead(nn.Module):
    """`low` and `up` of the correction: vanilla e, gated σ(G [h ; e]) ⊙ e, rnn tanh(o), with e = W1[previous token].

    The recurrent form has a state s, 0 at the first draft: [g ; c ; o] = J [s ; e ; h], and the next s is
    σ(g) s + (1 - σ(g)) tanh(c). G and J have biases, as in published heads.
    """

    def __init__(self, config: DSparkConfig, dims: HeadDims):
        super().__init__()
        rank, size = config.markov_rank, config.draft_tokens(dims.vocab_size)
        self.kind = config.markov_head
        self.markov_w1 = nn.Embedding(dims.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)  # training starts from the base logits
        width = dims.hidden_size + rank
        self.gate_proj = nn.Linear(width, rank) if self.kind == "gated" else None
        self.joint_proj = nn.Linear(width + rank, 3 * rank) if self.kind == "rnn" else None

    def embed(self, previous: Tensor, dtype: torch.dtype) -> Tensor:
        """int64 [...] → e [..., r]."""
        return self.markov_w1(previous).to(dtype)

    @property
    def low_is_e(self) -> bool:
        """Whether `low` is the embedding itself."""
        return self.kind == "vanilla"

    def all_steps(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        """`low` of all drafts, whose earlier tokens are known: [A, K, r]."""
        if self.joint_proj is None:
            return self.step(hidden_AKD, previous_AK, None)[0]
        e_AKr = self.embed(previous_AK, hidden_AKD.dtype)
        rank, weight = e_AKr.shape[-1], self.joint_proj.weight
        # one product for what is known of all drafts; the state's part follows draft by draft
        known_AK3r = F.linear(torch.cat((e_AKr, hidden_AKD), -1), weight[:, rank:], self.joint_proj.bias)
        s_Ar, outs = torch.zeros_like(e_AKr[:, 0]), []
        for known_A3r in known_AK3r.unbind(1):
            gate, cand, out = (known_A3r + F.linear(s_Ar, weight[:, :rank])).chunk(3, -1)
            keep = torch.sigmoid(gate)
            s_Ar = keep * s_Ar + (1 - keep) * torch.tanh(cand)
            outs.append(out)
        return torch.tanh(torch.stack(outs, 1))

    def step(self, hidden_BD: Tensor, previous_B: Tensor, state_Br: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(low [B, r], the next state)."""
        e_Br = self.embed(previous_B, hidden_BD.dtype)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat((hidden_BD, e_Br), -1))) * e_Br, None
        if self.joint_proj is None:
            return e_Br, None
        s_Br = torch.zeros_like(e_Br) if state_Br is None else state_Br
        gate, cand, out = self.joint_proj(torch.cat((s_Br, e_Br, hidden_BD), -1)).chunk(3, -1)
        keep = torch.sigmoid(gate)
        return torch.tanh(out), keep * s_Br + (1 - keep) * torch.tanh(cand)


class DSparkHead(BlockHead):
    """The backbone with a Markov head, whose correction of draft k reads the token before it, and a confidence head.

    The confidence head estimates, for every draft, the rate at which the target accepts it if all before it were.
    """

    family = "dspark"
    config: DSparkConfig
    terms: tuple[LossTerm, ...]

    def __init__(self, config: DSparkConfig, dims: HeadDims):
        if config.markov_head not in MARKOV_HEADS:
            raise ConfigError(
                f"head.markov_head: found {config.markov_head!r}, expected one of {', '.join(MARKOV_HEADS)}"
            )
        super().__init__(config, dims)
        self.markov_head = MarkovHead(config, dims)
        self.confidence_head: nn.ModuleDict | None = None
        if config.confidence_weight > 0:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(dims.hidden_size + config.markov_rank, 1)})
            self.terms = (*self.terms, LossTerm("confidence", config.confidence_weight))

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        super().initialise(ends, draft_ids_U)
        if self.confidence_head is not None:  # it begins by expecting that every second draft is accepted
            nn.init.zeros_(self.confidence_head["proj"].weight)
            nn.init.zeros_(self.confidence_head["proj"].bias)

    @property
    def correction_Ur(self) -> Tensor:
        return self.markov_head.markov_w2.weight

    @property
    def correction_table_Vr(self) -> Tensor | None:
        return self.markov_head.markov_w1.weight if self.config.markov_head == "vanilla" else None

    def corrections(self, hidden_AKD: Tensor, previous_AK: Tensor) -> Tensor:
        return self.markov_head.all_steps(hidden_AKD, previous_AK)

    def walk_step(self, hidden_BD: Tensor, previous_B: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.markov_head.step(hidden_BD, previous_B, state)

    def confidence_logits(self, hidden: Tensor, previous: Tensor, e: Tensor | None = None) -> Tensor:
        """Of every draft, [...].

        Args:
            hidden: outputs of the slots [..., D]. previous: int64 [...], the token before each draft.
            e: its embedding, where the caller has it already.
        """
        assert self.confidence_head is not None
        e = self.markov_head.embed(previous, hidden.dtype) if e is None else e
        return self.confidence_head["proj"](torch.cat((hidden, e), -1))[..., 0]

    @property
    def has_confidence(self) -> bool:
        return self.confidence_head is not None

    @property
    def confidence_parts(self) -> tuple[Tensor, Tensor] | None:
        if self.confidence_head is None:
            return None
        proj, size = self.confidence_head["proj"], self.dims.hidden_size
        weight, w1_Vr = proj.weight.detach().float()[0], self.markov_head.markov_w1.weight.detach().float()
        return weight[:size].contiguous(), w1_Vr @ weight[size:] + proj.bias.detach().float()

    @property
    def reads_overlap(self) -> bool:
        return self.has_confidence

    def metrics(self, depths: int) -> tuple[str, ...]:
        """As the base class's; with a confidence head, also the means, over the drafts that carry a loss, of

        confidence: the rate of acceptance that the head expects.
        overlap: the rate itself, Σ min(p, q).
        """
        more = () if self.confidence_head is None else ("confidence", "overlap")
        return (*super().metrics(depths), *more)

    def more_terms(self, drafts: Drafts, labels: BlockLabels, losses: BlockLosses) -> tuple[list[Tensor], Metrics]:
        """The confidence head's cross-entropy against the overlap. Its gradient reaches the backbone and W1.

        With a draft vocabulary, the overlap is with the target's distribution over that vocabulary. It overstates the
        true rate by the target's probability of all other tokens, which the data makes small. The true one would cost
        the target's logits of all V tokens at every row.
        """
        if self.confidence_head is None:
            return [], []
        assert losses.overlap_AK is not None
        e_AKr = drafts.low_AKr if self.markov_head.low_is_e else None
        logits_AK = wide(self.confidence_logits(drafts.hidden_AKD, drafts.previous_AK, e_AKr))
        bce_AK = F.binary_cross_entropy_with_logits(logits_AK, losses.overlap_AK, reduction="none")
        count = labels.active_AK.sum().float()
        means = (logits_AK.detach().sigmoid(), losses.overlap_AK)
        return [(bce_AK * labels.weight_AK).sum()], [((x * labels.active_AK).sum(), count) for x in means]
