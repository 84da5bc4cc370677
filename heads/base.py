"""The interface of a draft head: what it reads, its loss, what it costs.

A family (heads/families/<name>/head.py) subclasses `Head`. Code outside its folder, its drafter and the engines' files
uses this interface alone, and never asks which family a head is of.

Shape legend (methods §0): R rows of a pack, A anchors (supervised rows), D target hidden, V target vocabulary,
U draft vocabulary, K draft depths, T loss terms, M metrics.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from headstart.heads.batch import FeatureBatch, FeatureSpec
from headstart.heads.dims import HeadDims
from headstart.heads.ends import TargetEnds, Teacher
from headstart.heads.errors import ConfigError
from headstart.heads.layers import DraftLayer
from headstart.heads.vocab import check_vocab_size, most_tokens

#: most depths or layers, and the largest width: a recipe or a file cannot make a head that fills all memory
MAX_LAYERS, MAX_SIZE = 64, 1 << 24


@dataclass
class HeadConfig:
    """Fields that every family shares; each family's file subclasses this."""

    #: fields that decide which tensors a head has; a head that training starts from must agree in them (`start_from`)
    structure: ClassVar[tuple[str, ...]] = ()
    #: fields that decide what the same tensors compute; a head that training starts from must agree in them, too
    behaviour: ClassVar[tuple[str, ...]] = ()
    #: fields that decide which features of the target it reads; `start_from` compares what they lead to
    reading: ClassVar[tuple[str, ...]] = ()
    #: fields that earlier versions did not have; their defaults compute what those versions did
    added: ClassVar[tuple[str, ...]] = ()
    #: field that holds a token which stands where no token is known yet; null takes one of the target's tokenizer that
    #: no text holds (data/placeholder.py)
    placeholder: ClassVar[str | None] = None
    #: field → its largest value; the smallest is 1, and null means the default
    limits: ClassVar[dict[str, int]] = {"depth": MAX_LAYERS}

    #: Family of the head. It decides which other settings `head` has.
    type: str = "???"
    #: Draft depths trained (K).
    depth: int = 1
    #: Weight of the loss of depth d, as a power: depth_decay ** (d - 1).
    depth_decay: float = 1.0

    def identity(self) -> dict[str, Any]:
        """The fields that a run's steps depend on, as JSON values.

        Added fields at their defaults are left out, so that a run of an earlier version goes on.
        """
        defaults = {f.name: f.default for f in fields(self)}
        values = asdict(self)
        return {n: value for n, value in values.items() if n not in self.added or value != defaults[n]}

    @property
    def placeholder_token(self) -> int | None:
        """What the field `placeholder` holds; None also where there is no such field."""
        return None if self.placeholder is None else getattr(self, self.placeholder)

    def with_placeholder(self, token: int) -> Self:
        """The same config with this token in the field `placeholder`."""
        assert self.placeholder is not None
        changes: dict[str, Any] = {self.placeholder: token}
        return replace(self, **changes)

    def adopting(self, given: HeadConfig) -> Self:
        """The config of a head that goes on from one with the config `given`, of the same family.

        What null leaves open is as it was there.
        """
        token = given.placeholder_token
        if self.placeholder is None or self.placeholder_token is not None or token is None:
            return self
        return self.with_placeholder(token)

    @property
    def learns_text(self) -> tuple[str, str] | None:
        """Where a loss learns the text's own tokens, not the target's distribution: (the setting that says so, what to
        set instead, "" where nothing can). By default None: no loss does.
        """
        return None

    @property
    def vocabulary_share(self) -> float | None:
        """Share of the target's choices that the draft vocabulary must hold; None where the config says its size."""
        size = getattr(self, "draft_vocab_size", 0)
        return size if isinstance(size, float) else None

    def draft_tokens(self, vocab_size: int) -> int:
        """Tokens that the head can draft, of the target's `vocab_size`; where a share decides, the most it can be."""
        size = getattr(self, "draft_vocab_size", 0)
        return most_tokens(vocab_size) if isinstance(size, float) else size or vocab_size

    def with_vocabulary(self, size: int) -> Self:
        """The same config with this many tokens in the draft vocabulary, where a share was to decide."""
        changes: dict[str, Any] = {} if self.vocabulary_share is None else {"draft_vocab_size": size}
        return replace(self, **changes)

    def check(self) -> None:
        """Raises: ConfigError for values out of their limits, which a saved head could not be read back with."""
        check_vocab_size(getattr(self, "draft_vocab_size", 0))
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


@dataclass(frozen=True)
class Stage:
    """A part of a run that trains in its own way, with a warm-up and a schedule of its own.

    Attributes:
        name: for the terminal; "" for a run of one stage.
        share: of the run's budget.
    """

    name: str = ""
    share: float = 1.0


def counted_adds(weight: Tensor) -> float:
    """Multiply-adds of one row through a matrix, as `Head.multiply_adds` counts them: two thirds where it does not
    train, because it then has no gradient of its own.
    """
    return weight.numel() * (1.0 if weight.requires_grad else 2 / 3)


def depth_terms(depth: int, decay: float, first: int = 0) -> tuple[LossTerm, ...]:
    """One term per depth, named "1" … "K", of weight decay^first, decay^(first + 1), …, each rounded to float32."""
    weight_K = decay ** torch.arange(first, first + depth, dtype=torch.float32, device="cpu")
    return tuple(LossTerm(str(d), weight) for d, weight in enumerate(weight_K.tolist(), start=1))


@dataclass
class Loss:
    """Sums over one pack. The training loop adds them over packs and ranks before it divides.

    Attributes:
        sum_T: float32 [T], S_t of every term in `Head.terms`, differentiable.
        count_T: float32 [T], this pack's share of N_t, as `Head.loss_counts` gives it.
        numerator_M, denominator_M: float32 [M], for every name in `Head.metrics`. A metric is the ratio of the two
            after summation over all packs; with denominator 0 it is not logged.
        run_A: int64 [A], right drafts before the first wrong one of the greedy chain from each anchor
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

        A head with other terms takes metrics and `run_A` from here, and puts its own sums and counts in their place.

        Args:
            loss_K: float32 [K], summed losses. K may exceed `terms`: validation may measure more depths than are
                trained.
            weight: per depth, float, the weight of each row in the loss.
            hit: per depth, bool: the draft is the target's choice; False where a row is not active.
            rows: per depth, float, the weight of each row in the accuracy (Anchors.weights).
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
        if len(loss_K) != terms:  # even a slice of everything costs a kernel in the backward pass
            loss_K, count_K = loss_K[:terms], count_K[:terms]
        return cls(loss_K, count_K, numerator_M, denominator_M, run_A)

    def with_metrics(self, numerators: Sequence[Tensor], denominators: Sequence[Tensor]) -> Loss:
        """The same loss with more metrics after those it has. The scalars may require gradients; they are detached."""
        return replace(
            self,
            numerator_M=torch.cat((self.numerator_M, torch.stack(list(numerators)).detach())),
            denominator_M=torch.cat((self.denominator_M, torch.stack(list(denominators)).detach())),
        )


class Head(nn.Module, ABC):
    """A draft head.

    A family must define `loss`. The defaults below fit a head that trains every supervised row, with one loss term per
    depth, without decoder layers and without a draft vocabulary.

    Attributes:
        config, dims: what the head was built from.
        terms: the terms of the loss, in the order of `Loss.sum_T`. A family with other terms than one per depth assigns
            its own in `__init__`.
        draft_ids_U: int64 [U] buffer, ascending target ids that the head can draft; None = all V. A family with a draft
            vocabulary registers it in `__init__` with U entries of any value. The data chooses the tokens, and
            `initialise` receives them.
        embed_VD, teacher: the target's frozen ends, which `bind` attaches. They are not in the state dict.
        joint_obstacle: why the target cannot be trained together with it (joint.enabled); None if it can.
        without_muon: beginnings of the names of parameters that Muon does not train, whatever their shape.
        weighs_drafts: whether its loss weighs drafts by Anchors.emphasis_AK (train.rounds).
    """

    family: ClassVar[str]
    joint_obstacle: ClassVar[str | None] = None
    without_muon: ClassVar[tuple[str, ...]] = ()
    weighs_drafts: ClassVar[bool] = False
    draft_ids_U: Tensor | None

    def __init__(self, config: HeadConfig, dims: HeadDims):
        super().__init__()
        self.config, self.dims = config, dims
        self.terms: tuple[LossTerm, ...] = depth_terms(config.depth, config.depth_decay)
        self.embed_VD: Tensor | None = None
        self.teacher: Teacher | None = None
        self.register_buffer("draft_ids_U", None)

    @property
    def depth(self) -> int:
        """K, the depths that are trained. Anchors are found for K depths."""
        return self.config.depth

    @property
    def longest_chain(self) -> int | None:
        """Length of the longest chain that it can draft; None = any length."""
        return self.depth

    @property
    def spec(self) -> FeatureSpec:
        """The target's features that the head reads."""
        return FeatureSpec()

    @property
    def draft_vocab_size(self) -> int | None:
        """U, the size of the draft vocabulary; None for a head without one, which can draft all V tokens."""
        return None if self.draft_ids_U is None else self.draft_ids_U.shape[0]

    @property
    def own_embeddings(self) -> bool:
        """Whether the head's files hold token embeddings of its own, which may differ from the target's."""
        return False

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        """The head's decoder layers. `train.activation_checkpointing` recomputes their activations."""
        return ()

    @property
    def shardable(self) -> bool:
        """Whether ranks may each hold a shard of it; not so where a module outside it uses its parameters."""
        return True

    @property
    def capture_obstacle(self) -> str | None:
        """Why its loss cannot run as a captured CUDA graph; None if it can."""
        return None

    @property
    def recomputable(self) -> bool:
        """Whether `train.activation_checkpointing` has something to recompute."""
        return bool(self.draft_layers)

    def recompute_activations(self) -> None:
        """Compute activations again in the backward pass from now on, instead of keeping them."""
        for layer in self.draft_layers:
            layer.recompute = True

    @property
    def hidden_act(self) -> str | None:
        """Activation of the decoder layers' MLP; None for a head without decoder layers."""
        return None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a run, in their order; their shares add up to 1."""
        return (Stage(),)

    def enter_stage(self, number: int) -> None:
        """Train as stage `number` does from now on. Called when a stage begins, and when a run resumes within one."""

    @property
    def weights_vary(self) -> bool:
        """Whether `term_weights` depends on how much of the stage is done."""
        return False

    def term_weights(self, part: float = 1.0) -> Tensor:
        """weight_t of every term, float32 [T], on the host.

        Args: part: of the stage that is done after this step, 0 … 1. Validation takes 1, so that losses compare.
        """
        return torch.tensor([term.weight for term in self.terms])

    def rate_factor(self, name: str, stage: int) -> float:
        """The learning rate of the parameter `name` in a stage, as a multiple of the run's."""
        return 1.0

    def trained_parameters(self) -> int:
        """Number of parameters that training changes."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def describe(self) -> str:
        """The head in one line for the terminal."""
        layers = f", reads layers {list(self.spec.layer_ids)}" if self.spec.layer_ids else ""
        act = f", {self.hidden_act}" if self.hidden_act else ""
        return f"{self.family}: {self.trained_parameters() / 1e6:.1f} M trained parameters{layers}{act}"

    def bind(self, ends: TargetEnds) -> None:
        """Attach the target's frozen ends. Weights do not change.

        A head that uses a module of the target (`ends.model`) keeps it in a tuple. As an attribute of its own, the
        module would be saved with the head and trained.

        Raises: ConfigError for a target that the family cannot draft for.
        """
        self.embed_VD, self.teacher = ends.embed_VD.detach(), ends.teacher

    def bound_ends(self) -> TargetEnds:
        """What `bind` attached. Raises: RuntimeError before it was called."""
        if self.embed_VD is None or self.teacher is None:
            raise RuntimeError(f"this {self.family} head is not bound to its target: call bind(target.ends) first")
        return TargetEnds(self.embed_VD, self.teacher)

    def initialise(self, ends: TargetEnds, draft_ids_U: Tensor | None = None) -> None:
        """Bind the ends, store the draft vocabulary, and copy the target's weights where the head starts from them.

        Args: draft_ids_U: int64 [U], ascending target ids, for a head that has a draft vocabulary.
        Raises: ConfigError as `bind`, and for a draft vocabulary of another size than the head's.
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
        """Make a head with random weights about as sure of its drafts as a trained one.

        Speed is measured with such heads. A dynamic tree takes its shape from the draft's probabilities, and random
        weights give flat ones, hence broad and shallow trees. Other families need not define this.
        """

    def drafting_head(self) -> Head:
        """What drafts: this head, or the one inside it. A target that is trained with it is made ready to decode."""
        return self

    def choose_rows(self, batch: FeatureBatch, seed: int) -> FeatureBatch:
        """The pack with the anchors that this step trains: by default all, else a random part of them.

        Called once per pack and training step, before `loss_counts` and `loss`. The choice must depend on the pack and
        the seed alone (never on the rank), and must not wait for the device. Validation uses all anchors.
        """
        return batch

    def chosen_anchors(self, rows: float, anchors: float) -> float:
        """How many anchors `choose_rows` leaves of a pack that has `anchors`, for plans. By default all."""
        return anchors

    def metrics(self, depths: int) -> tuple[str, ...]:
        """Names of the metrics in `Loss`, which are logged as `train/<name>` and `valid/<name>`.

        acc_d: share of the rows supervised at depth d whose draft is the target's choice, when the head reads the true
        tokens before it.
        coverage: share of the supervised rows that carry a loss: those whose right token is in the draft vocabulary. It
            is the target's choice, or the data's token for a head that learns that.

        Args: depths: of the pack's anchors: `depth` in training, in validation at least the evaluation's chain.
        """
        return (*(f"acc_{d}" for d in range(1, depths + 1)), "coverage")

    def loss_counts(self, batch: FeatureBatch) -> Tensor:
        """`Loss.count_T`, without running the head: float32 [T], on the pack's device, without waiting for it.

        Their sum over the window and all ranks is N_t, the divisor of each term. By default, term d counts the anchors
        that are supervised at depth d.
        """
        return batch.anchors.active_counts()[: len(self.terms)]

    def covered_rows(self, batch: FeatureBatch) -> Tensor:
        """How many of the rows supervised at depth 1 carry a loss, without running the head (`coverage` of metrics)."""
        return self.loss_counts(batch)[0]

    @abstractmethod
    def loss(self, batch: FeatureBatch, teacher: Teacher, scale_T: Tensor | None = None) -> Loss:
        """Sums of the loss terms and metrics over one pack. Gradients flow to trainable parameters only.

        It runs inside captured CUDA graphs: shapes depend on the pack's shape alone, and nothing waits for the device.

        Args:
            scale_T: float32 [T]. If given, the caller differentiates only multiples of `(sum_T * scale_T).sum()`, so
                the head may form gradients in the forward pass (and add them to `.grad` there, where heads/gradients.py
                allows it). None = any combination of the terms.
        """

    def multiply_adds(self, rows: float, counts: Sequence[float]) -> float:
        """Multiply-adds of one pack's forward, without attention scores (less than 3 % of the sum).

        By default every row supervised at depth 1 passes through all of the head's own weights. The head is bound:
        matrices of the target that it multiplies with count too. Its weights may be on the meta device. A step is taken
        to compute 6 FLOPs for each: a family whose frozen matrices are a large part counts them by their share of that.

        Args:
            rows: of the pack, R. counts: rows supervised at depth 1 … K.
        """
        return sum(p.numel() for p in self.parameters()) * counts[0]

    def copied_numbers(self) -> int:
        """Numbers of the weights, trained or not, copied to the compute dtype at the same time. By default all."""
        return sum(p.numel() for p in self.parameters())

    def kept_numbers(self, rows: float, anchors: float, recompute: bool) -> float:
        """Numbers, in the compute dtype, that one pack's loss keeps for its backward pass. The estimate

            anchors · depths · (numbers per row of a draft layer) + anchors · draft vocabulary + rows · 2 · hidden

        is fitted to measured peaks of memory; train/plan.py says how close it comes.

        Args:
            rows: of the pack, R. anchors: A. recompute: `train.activation_checkpointing`.
        """
        layers = self.draft_layers
        hidden = layers[0].hidden_size if layers else self.dims.hidden_size
        per_depth = sum(layer.kept_numbers(recompute) for layer in layers) if layers else 6.0 * hidden
        vocabulary = self.draft_vocab_size or self.dims.vocab_size
        return anchors * (self.depth * per_depth + vocabulary) + rows * 2 * hidden

    def chunk_numbers(self, anchors: float) -> float:
        """How many of `kept_numbers` are a chunk of logits (losses/fused.py), which is smaller on a CPU. By default 0.

        Args: anchors: A.
        """
        return 0.0
