"""What a draft head is to the rest of the house: what it reads, its loss, what it costs.

A family (heads/families/<name>/head.py) subclasses `Head`. Everything outside its folder, its drafter and the engines'
files asks the head through this interface, and never asks which family it is.

Shape legend (methods §0): R rows of a pack, A anchors (supervised rows), D target hidden, V target vocabulary,
U draft vocabulary, K draft depths, T loss terms, M metrics.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.layers import DraftLayer

#: most depths or layers, and the largest width, that a head may have: a recipe or a file cannot ask for all memory
MAX_LAYERS, MAX_SIZE = 64, 1 << 24


@dataclass
class HeadConfig:
    """Fields that every family shares; each family's file subclasses this."""

    #: fields that decide which tensors a head has: another value makes another head (`start_from` compares them)
    structure: ClassVar[tuple[str, ...]] = ()
    #: field → its largest value; the smallest is 1, and null may stand for a default
    limits: ClassVar[dict[str, int]] = {"depth": MAX_LAYERS}

    #: Family of the head; see below.
    type: str = "???"
    #: Draft depths trained (K).
    depth: int = 1
    #: Weight of the loss of depth d, as a power: depth_decay ** (d - 1).
    depth_decay: float = 1.0

    def check(self) -> None:
        """Raises: ConfigError for sizes that no head can have, or with which a saved one is not read back."""
        for name, found, most in self.beyond_limits():
            raise ConfigError(f"head.{name}: found {found}, expected 1 to {most}")
        if not 0 <= self.depth_decay < math.inf:
            raise ConfigError(f"head.depth_decay: found {self.depth_decay}, expected a finite number, 0 or more")

    def beyond_limits(self) -> Iterator[tuple[str, int, int]]:
        """(field, value, largest value) of every field that is out of its limits."""
        for name, most in self.limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                yield name, value, most


@dataclass(frozen=True)
class LossTerm:
    """One term t of the loss L = Σ_t weight_t · S_t / N_t (methods §0).

    Attributes:
        name: the term's mean is logged as `valid/loss_<name>`.
    """

    name: str
    weight: float


def depth_terms(depth: int, decay: float, first: int = 0) -> tuple[LossTerm, ...]:
    """One term per depth, named "1" … "K", of weight decay^first, decay^(first + 1), …, each rounded to float32."""
    weight_K = decay ** torch.arange(first, first + depth, dtype=torch.float32, device="cpu")
    return tuple(LossTerm(str(d), weight) for d, weight in enumerate(weight_K.tolist(), start=1))


@dataclass
class Loss:
    """Sums over one pack. The training loop adds them over packs and ranks, and divides last.

    Attributes:
        sum_T: float32 [T], S_t of every `Head.terms`, differentiable.
        count_T: float32 [T], this pack's share of N_t: what `Head.loss_counts` says of it.
        numerator_M, denominator_M: float32 [M], of every `Head.metrics`: a metric is the ratio of the two summed over
            all packs, and is not logged where the denominator is 0.
        run_A: int64 [A], how many drafts of a greedy chain from that row are right before the first wrong one
            (acceptance.walk); None where the head drafts no chains from its anchors.
    """

    sum_T: Tensor
    count_T: Tensor
    numerator_M: Tensor
    denominator_M: Tensor
    run_A: Tensor | None = None

    @classmethod
    def per_depth(
        cls,
        loss_K: Tensor,
        weight: list[Tensor],
        hit: list[Tensor],
        rows: list[Tensor],
        terms: int,
        count_K: Tensor | None = None,
    ) -> Loss:
        """The loss of a head with one term per depth and the default metrics of `Head.metrics`.

        Args:
            loss_K: float32 [K], summed losses. K may exceed `terms`: validation asks for deeper metrics than are
                trained.
            weight: per depth, float: what a row counts for in the loss.
            hit: per depth, bool: the draft is the target's choice; False where a row is not active.
            rows: per depth, float: what a row counts for in the accuracy (Anchors.weights).
            terms: T, depths that the head trains.
            count_K: positions that carry a loss at each depth; None = the sums of `weight`.
        """

        def totals(x: list[Tensor]) -> list[Tensor]:
            return [r.sum(dtype=loss_K.dtype) for r in x]

        run = hit[0]
        run_A = run.to(torch.int64)
        for hits in hit[1:]:
            run = run[: hits.shape[0]] & hits
            run_A[: run.shape[0]] += run
        right, total = totals([flag * row for flag, row in zip(hit, rows, strict=True)]), totals(rows)
        if count_K is None:
            count_K = torch.stack(totals(weight))
        numerator_M, denominator_M = torch.stack([*right, count_K[0]]), torch.stack([*total, total[0]])
        if len(loss_K) != terms:  # a slice of all would cost a kernel in every backward pass
            loss_K, count_K = loss_K[:terms], count_K[:terms]
        return cls(loss_K, count_K, numerator_M, denominator_M, run_A)

    def with_metrics(self, numerators: Sequence[Tensor], denominators: Sequence[Tensor]) -> Loss:
        """The same loss with more metrics behind those it has; scalars that may still be part of a graph."""
        return replace(
            self,
            numerator_M=torch.cat((self.numerator_M, torch.stack(list(numerators)).detach())),
            denominator_M=torch.cat((self.denominator_M, torch.stack(list(denominators)).detach())),
        )


class Head(nn.Module, ABC):
    """A draft head.

    A family must define `loss_counts` and `loss`. The defaults below are those of a head that trains every supervised
    row, with one loss term per depth, without decoder layers and without a draft vocabulary.

    Attributes:
        config, dims: what the head was built from.
        terms: the terms of the loss, in the order of `Loss.sum_T`. A family with other terms than one per depth assigns
            its own in `__init__`.
        draft_ids_U: int64 [U] buffer, ascending target ids that the head can draft; None = all V. A family with a draft
            vocabulary registers it in `__init__`, with U entries of any value: the data chooses the tokens, and
            `initialise` receives them.
        embed_VD, teacher: the target's frozen ends, attached by `bind`; neither parameters nor in the state dict.
    """

    family: ClassVar[str]
    draft_ids_U: Tensor | None

    def __init__(self, config: HeadConfig, dims: HeadDims):
        super().__init__()
        self.config, self.dims = config, dims
        self.terms: tuple[LossTerm, ...] = depth_terms(config.depth, config.depth_decay)
        self.embed_VD: Tensor | None = None
        self.teacher: Teacher | None = None
        self.register_buffer("draft_ids_U", None)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """K, the depths that are trained: anchors are found for so many."""
        return self.config.depth

    @property
    def longest_chain(self) -> int | None:
        """Most tokens that a chain of its drafts can have; None = any number."""
        return self.depth

    @property
    def spec(self) -> FeatureSpec:
        """Which features of the target the head reads."""
        return FeatureSpec()

    @property
    def draft_vocab_size(self) -> int | None:
        """U, the tokens of the draft vocabulary; None for a head without one, which drafts any of the V tokens."""
        return None if self.draft_ids_U is None else self.draft_ids_U.shape[0]

    @property
    def own_embeddings(self) -> bool:
        """Whether the head's files hold token embeddings of its own, which may differ from the target's."""
        return False

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        """The head's decoder layers; `train.activation_checkpointing` makes their activations again."""
        return ()

    @property
    def hidden_act(self) -> str | None:
        """Activation of the decoder layers' MLP; None for a head without decoder layers."""
        return None

    def term_weights(self) -> Tensor:
        """weight_t of every term, float32 [T], on the host."""
        return torch.tensor([term.weight for term in self.terms])

    def trained_parameters(self) -> int:
        """Numbers that training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def describe(self) -> str:
        """The head in one line, for people."""
        layers = f", reads layers {list(self.spec.layer_ids)}" if self.spec.layer_ids else ""
        act = f", {self.hidden_act}" if self.hidden_act else ""
        return f"{self.family}: {self.trained_parameters() / 1e6:.1f} M trained parameters{layers}{act}"

    # -- the target's ends -----------------------------------------------------------------------------------------

    def bind(self, ends: TargetEnds) -> None:
        """Attach the target's frozen ends; weights stay as they are.

        A head that uses a module of the target (`ends.model`) keeps it in a tuple. As an attribute of its own, the
        module would be saved with the head and trained.

        Raises: ConfigError for a target that the family cannot draft for.
        """
        self.embed_VD, self.teacher = ends.embed_VD.detach(), ends.teacher

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """Bind the ends, take over the draft vocabulary, and start from the target's weights what can start from them.

        Args: draft_ids_U: int64 [U], ascending target ids, for a head that has a draft vocabulary.
        Raises: ConfigError as `bind`, and where the draft vocabulary has not the head's size.
        """
        self.bind(ends)
        if self.draft_ids_U is not None:
            found = 0 if draft_ids_U is None else draft_ids_U.shape[0]
            if draft_ids_U is None or found != self.draft_vocab_size:
                raise ConfigError(
                    f"draft vocabulary: found {found} ids, expected head.draft_vocab_size = {self.draft_vocab_size}"
                )
            self.draft_ids_U.copy_(draft_ids_U)

    def sharpen(self) -> None:
        """Make a head of random weights about as sure of its drafts as a trained one.

        Measurements with synthetic acceptance need it: a dynamic tree of a flat distribution is broad and shallow. A
        family whose trees do not depend on it leaves this out.
        """

    # -- training --------------------------------------------------------------------------------------------------

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        """The pack with the anchors that this step trains: a random part of them, or of the blocks they begin.

        Called once per pack and step, before `loss_counts` and `loss`. The choice must depend on the pack and the seed
        alone (never on the rank), and must not wait for the device. Validation sees all rows.
        """
        return batch

    def metrics(self, depths: int) -> tuple[str, ...]:
        """Names of `Loss.numerator_M`, as they are logged behind `train/` and `valid/`.

        acc_d: share of the rows supervised at depth d whose draft was the target's choice, fed with the true tokens.
        coverage: share of the supervised rows that carry a loss: where the target's choice is in the draft vocabulary.

        Args: depths: of the pack's anchors. Training gives `depth` of them, validation those of the evaluation's chain.
        """
        return (*(f"acc_{d}" for d in range(1, depths + 1)), "coverage")

    @abstractmethod
    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        """`Loss.count_T` without running the head: float32 [T], on the pack's device, which is not waited for.

        Summed over the window and all ranks, it is N_t, what each term is divided by.
        """

    @abstractmethod
    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        """Sums of the loss terms and metrics over one pack. Gradients flow to trainable parameters only.

        It runs inside captured CUDA graphs: shapes depend on the pack's shape alone, and nothing waits for the device.

        Args:
            scale_T: float32 [T]. The caller's promise that what it differentiates is a multiple of
                `(sum_T * scale_T).sum()`: a head may form gradients with it. None = any combination of terms.
        """

    # -- what training costs: a plan asks heads that are not bound, and whose weights may be on the meta device ------

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """Multiply-adds of one pack's forward: matrices on the rows that need them, attention scores aside (< 3 %).

        By default all of the head's own weights on every row supervised at depth 1.

        Args:
            rows: of the pack, R. counts: rows supervised at depth 1 … K.
        """
        return sum(p.numel() for p in self.parameters()) * counts[0]

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """Numbers, in the compute dtype, that one pack's loss keeps for its backward pass. An estimate:

            anchors · depths · (numbers per row of a draft layer) + anchors · draft vocabulary + rows · 2 · hidden,

        fitted to measured peaks of memory; see train/plan.py for how well it meets them.

        Args:
            rows: of the pack, R. anchors: A. recompute: `train.activation_checkpointing`.
        """
        layers = self.draft_layers
        hidden = layers[0].hidden_size if layers else self.dims.hidden_size
        per_depth = sum(layer.kept_numbers(recompute) for layer in layers) if layers else 6.0 * hidden
        vocabulary = self.draft_vocab_size or self.dims.vocab_size
        return anchors * (self.depth * per_depth + vocabulary) + rows * 2 * hidden
