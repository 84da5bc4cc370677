"""The loss of drafted blocks: terms against data tokens and against the target's distribution.

Worked example: one slot, three tokens, label 0; draft q = (.5, .3, .2), target p = (.7, .2, .1)

    ce   -log q(label)            -log .5                            = 0.693
    l1   Σ |q - p|                .2 + .1 + .1                       = 0.4
    kl   Σ p log(p / q)           .7 log 1.4 + .2 log ⅔ + .1 log .5  = 0.085
    lk   -log Σ min(p, q)         -log(.5 + .2 + .1)                 = 0.223

The overlap Σ min(p, q) = 1 - l1 / 2 = .8 is the rate at which speculative sampling accepts the draft.

Logits exist for a chunk of whole blocks at a time. While they do, they become the slots' statistics, then their own
gradient, in place. So no logits are made twice, and memory holds those of one chunk and the teacher's.

Shape legend: A anchors, K drafts of a block, M = A · K slots, C slots of a chunk, D target hidden, X = D + r inputs of
the logits, R rows of the pack, r rank of a correction, U draft vocabulary, V target vocabulary, T loss terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.ends import Teacher
from headstart.heads.kernels import block_losses as kernels
from headstart.heads.kernels.block_losses import BELOW, CE, KL, LSE, OVERLAP, STATS
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.losses import fused
from headstart.heads.losses.eager import LK_FLOOR
from headstart.heads.numerics import compute_dtype, weight_grad, wide

#: terms of a slot with draft distribution q and the target's p:
#: ce, -log q(label); l1, Σ |q - p|; kl, Σ p log(p / q); lk, -log Σ min(p, q)
KINDS = ("ce", "l1", "kl", "lk")

#: D-PACE: a draft's probability counts as (1 - DPACE_FLOOR) · q(label) + DPACE_FLOOR
DPACE_FLOOR = 0.5

#: most teacher logits that are kept for all chunks; a chunk makes its own where there would be more
TEACHER_ELEMENTS = 2 << 30


@dataclass(frozen=True)
class BlockLabels:
    """What the slots of drawn blocks learn from.

    Attributes:
        label_AK: int64, the data's tokens as draft-vocabulary ids, 0 where not active.
        active_AK: bool, slots that carry a loss: a prefix of each block.
        weight_AK: float32, weight of the slot in the sums and in their divisor, 0 where not active.
        teacher_row_AK: int64, the pack's row whose distribution teaches the slot.
        supervised_AK: bool, slots whose drafts are measured; active ones are among them.
    """

    label_AK: Tensor
    active_AK: Tensor
    weight_AK: Tensor
    teacher_row_AK: Tensor
    supervised_AK: Tensor


@dataclass(frozen=True)
class BlockLosses:
    """Sums over a pack.

    Attributes:
        sum_T: float32 [T], Σ weight · term, differentiable.
        overlap_AK: float32, Σ min(p, q) of every supervised slot, the rate at which it is accepted; no gradient. None
            where no term needs the target's distribution, and the caller does not either.
        argmax_AK: int64, draft-vocabulary ids; 0 where not supervised.
    """

    sum_T: Tensor
    overlap_AK: Tensor | None
    argmax_AK: Tensor


@dataclass(frozen=True)
class BlockTeacher:
    """The target's distributions over the draft vocabulary, which teach the slots.

    Attributes:
        head: the output head. hidden_RD: post-norm hidden states of the pack's rows. row_M: each slot's row.
        draft_ids_U: see Head.
        logits_TU, lse_T: kept for all chunks, with each slot's row of them in `kept_M`; None = made chunk by chunk.
    """

    head: Teacher
    hidden_RD: Tensor
    row_M: Tensor
    draft_ids_U: Tensor | None
    dtype: torch.dtype
    logits_TU: Tensor | None = None
    lse_T: Tensor | None = None
    kept_M: Tensor | None = None

    def kept(self) -> BlockTeacher:
        """With its logits, where they are few enough. Slots often share a row; no logits of a row are made twice."""
        rows, slots = self.hidden_RD.shape[0], self.row_M.shape[0]
        tokens = len(self.head.weight_VD if self.draft_ids_U is None else self.draft_ids_U)
        if min(rows, slots) * tokens > TEACHER_ELEMENTS:
            return self
        every = rows <= slots  # which rows teach is known on the device alone: fewer rows than slots are all taken
        logits_TU = self.logits(self.hidden_RD if every else self.hidden_RD[self.row_M])
        row_M = self.row_M if every else torch.arange(slots, device=self.row_M.device)
        lse_T = fused.row_logsumexp(logits_TU)
        return BlockTeacher(
            self.head, self.hidden_RD, self.row_M, self.draft_ids_U, self.dtype, logits_TU, lse_T, row_M
        )

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, U] in the compute dtype."""
        if self.head.plain:
            return self.head.logits(hidden_TD, self.draft_ids_U, self.dtype)
        # a cap makes float32 tensors on its way
        part = fused.chunk_rows(max(len(hidden_TD), 1), 4 * len(self.head.weight_VD), hidden_TD.device)
        return torch.cat([self.head.logits(x, self.draft_ids_U, self.dtype) for x in hidden_TD.split(part)])

    def of(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, their log-sum-exp, each slot's row of them) for the slots of a chunk."""
        if self.logits_TU is not None and self.lse_T is not None and self.kept_M is not None:
            return self.logits_TU, self.lse_T, self.kept_M[part]
        logits_CU = self.logits(self.hidden_RD[self.row_M[part]])
        return logits_CU, fused.row_logsumexp(logits_CU), torch.arange(len(logits_CU), device=logits_CU.device)


@dataclass(frozen=True)
class _Slots:
    """What the slots' loss is made of, laid end to end.

    Attributes:
        label_M, active_M, on_M: of BlockLabels: label, active, supervised. weight_M: float32, in the sums.
        depth: K. dpace: weigh by D-PACE.
        kl: whether kl is a term.
        stats: table of statistics, [STATS, M] in at least float32 (kernels/block_losses.py). argmax_M: int64.
    """

    label_M: Tensor
    active_M: Tensor
    on_M: Tensor
    weight_M: Tensor
    depth: int
    dpace: bool
    kl: bool
    stats: Tensor
    argmax_M: Tensor

    def part(self, part: slice) -> _Slots:
        return _Slots(
            self.label_M[part], self.active_M[part], self.on_M[part], self.weight_M[part], self.depth, self.dpace,
            self.kl, self.stats[:, part], self.argmax_M[part],
        )  # fmt: skip

    def weights(self) -> Tensor:
        """Of every slot in the sums, after its block was measured."""
        if not self.dpace:
            return self.weight_M
        shape = (-1, self.depth)
        return dpace_weights(self.stats[CE].view(shape), self.active_M.view(shape)).flatten()


def chunk_blocks(blocks: int, depth: int, tokens: int, device: torch.device | None = None) -> int:
    """Blocks of a chunk: as few chunks of about equal size as fused.chunk_elements allows."""
    most = max(1, fused.chunk_elements(device) // (tokens * depth))
    even = -(-blocks // max(1, -(-blocks // most)))
    return max(1, min(blocks, most, -(-even // 32) * 32))


def dpace_weights(ce_AK: Tensor, active_AK: Tensor) -> Tensor:
    """D-PACE's weight of every slot, no gradient: of draft j, the sum over active m ≥ j of the probability of getting
    to m, Π_{i ≤ m} (0.5 q(label_i) + 0.5).

    Args: ce_AK: -log q(label).

    >>> half = torch.tensor([[0.5, 0.5, 0.5]]).log().neg()
    >>> dpace_weights(half, torch.tensor([[True, True, False]]))  # .75 + .75², .75², 0
    tensor([[1.3125, 0.5625, 0.0000]])
    """
    p_AK = (1 - DPACE_FLOOR) * (-ce_AK.detach()).exp() + DPACE_FLOOR
    prefix_AK = torch.where(active_AK, p_AK, 1.0).cumprod(1) * active_AK
    return prefix_AK.flip(1).cumsum(1).flip(1) * active_AK


def _measure(logits_CU: Tensor, teacher: tuple[Tensor, Tensor, Tensor] | None, slots: _Slots) -> None:
    """Fill the slots' statistics: what the kernel's first two sweeps do."""
    z_CU = wide(logits_CU)
    lse_C = z_CU.logsumexp(-1)
    found = torch.zeros_like(slots.stats)
    found[LSE], found[CE] = lse_C, lse_C - z_CU.gather(1, slots.label_M[:, None])[:, 0]
    if teacher is not None:
        logq_CU, logp_CU = z_CU - lse_C[:, None], _log_p(teacher)
        q_CU, p_CU = logq_CU.exp(), logp_CU.exp()
        found[OVERLAP] = torch.minimum(p_CU, q_CU).sum(-1)
        found[BELOW] = torch.where(logq_CU < logp_CU, q_CU, 0).sum(-1)
        if slots.kl:
            found[KL] = torch.where(p_CU > 0, p_CU * (logp_CU - logq_CU), 0).sum(-1)
    slots.stats.copy_(torch.where(slots.on_M, found, 0))
    slots.argmax_M.copy_(torch.where(slots.on_M, z_CU.argmax(-1), 0))


def _log_p(teacher: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    logits_TU, lse_T, row_C = teacher
    return wide(logits_TU[row_C]) - lse_T[row_C, None]


def _gradient(
    logits_CU: Tensor, teacher: tuple[Tensor, Tensor, Tensor] | None, slots: _Slots, weight_C: Tensor, scale_4: Tensor
) -> Tensor:
    """Gradient of Σ weight · Σ_kind scale · term by the logits, with below = Σ of q where q < p:

        ce  q - [label]
        kl  q - p
        l1  q (s - Σ q s) with s = sign(q - p); Σ q s = 1 - 2 · below
        lk  (q · below - [q < p] q) / overlap

    all but the labels and p are multiples of q, by one factor where q < p and another elsewhere.
    """
    ce, l1, kl, lk = (weight_C[:, None] * scale for scale in scale_4)
    logq_CU = wide(logits_CU) - slots.stats[LSE][:, None]
    grad_CU = logq_CU.exp()
    if teacher is None:
        grad_CU *= ce
    else:
        logp_CU, below = _log_p(teacher), slots.stats[BELOW][:, None]
        lk = lk / (slots.stats[OVERLAP][:, None] + LK_FLOOR)
        above = ce + kl + 2 * l1 * below + lk * below
        grad_CU *= torch.where(logq_CU < logp_CU, above - 2 * l1 - lk, above)
        if slots.kl:
            grad_CU -= kl * logp_CU.exp()
    grad_CU.scatter_add_(1, slots.label_M[:, None], -ce.to(grad_CU.dtype))
    return torch.where(weight_C[:, None] != 0, grad_CU, 0).to(logits_CU.dtype)


def _take(
    logits_CU: Tensor, teacher: tuple[Tensor, Tensor, Tensor] | None, slots: _Slots, scale_4: Tensor | None
) -> Tensor:
    """Measure the slots of a chunk; with a scale, return the gradient of their logits, which takes the logits' place.

    Args: scale_4: factor of each of KINDS.
    """
    if not wants_kernel(logits_CU):
        _measure(logits_CU, teacher, slots)
        return logits_CU if scale_4 is None else _gradient(logits_CU, teacher, slots, slots.weights(), scale_4)
    known = scale_4 is not None and not slots.dpace  # the weights, before the block is measured
    unused = slots.weight_M if scale_4 is None else scale_4

    def run(weight_C: Tensor | None, measures: bool) -> None:
        kernels.slots(
            logits_CU, teacher, slots.label_M, slots.on_M, slots.stats, slots.argmax_M,
            weight_C=weight_C, scale_4=unused, floor=LK_FLOOR, measures=measures, kl=slots.kl,
        )  # fmt: skip

    run(slots.weight_M if known else None, True)
    if scale_4 is not None and not known:
        run(slots.weights(), False)
    return logits_CU


def _over_chunks(
    x_MX: Tensor,
    low_Mr: Tensor | None,
    matrix_UX: Tensor,
    teacher: BlockTeacher | None,
    slots: _Slots,
    scale_4: Tensor | None,
    up_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Measure all slots; with a scale, also (gradient of x, gradient of up, summed in float32)."""
    step = slots.depth * chunk_blocks(len(x_MX) // slots.depth, slots.depth, len(matrix_UX), x_MX.device)
    grad_MX = None if scale_4 is None else torch.empty_like(x_MX)
    sum_dtype = torch.promote_types(up_dtype, torch.float32)
    grad_Ur: Tensor | None = None
    for start in range(0, len(x_MX), step):
        part = slice(start, min(start + step, len(x_MX)))
        logits_CU = x_MX[part] @ matrix_UX.t()
        chunk = slots.part(part)
        grad_CU = _take(logits_CU, None if teacher is None else teacher.of(part), chunk, scale_4)
        if grad_MX is not None:
            torch.mm(grad_CU, matrix_UX, out=grad_MX[part])
            if low_Mr is not None:
                update = weight_grad(grad_CU, low_Mr[part], sum_dtype)
                grad_Ur = update if grad_Ur is None else grad_Ur.add_(update)
        del logits_CU, grad_CU  # free them before the next chunk's logits are made
    if grad_MX is not None and low_Mr is not None and grad_Ur is None:
        grad_Ur = low_Mr.new_zeros(len(matrix_UX), low_Mr.shape[1])
    return grad_MX, None if grad_Ur is None else grad_Ur.to(up_dtype)


def _terms(slots: _Slots, kinds: tuple[str, ...]) -> Tensor:
    """Σ weight · term of every kind, [T]."""
    overlap_M = slots.stats[OVERLAP]
    value = {
        "ce": lambda: slots.stats[CE],
        "l1": lambda: 2 * (1 - overlap_M),
        "kl": lambda: slots.stats[KL],
        "lk": lambda: -(overlap_M + LK_FLOOR).log(),
    }
    terms = torch.stack([value[kind]() for kind in kinds])
    return (torch.where(slots.active_M, terms, 0) * slots.weights()).sum(1)


class _BlockLoss(torch.autograd.Function):
    """Σ weight · term of every kind, where the caller minimises a multiple of Σ_t scale_t · S_t.

    The gradients are formed in the forward pass. The frozen output matrix has none.
    """

    @staticmethod
    def forward(ctx, hidden_MD, low_Mr, up_Ur, output_UD, teacher, slots, kinds, scale_T):
        x_MX, matrix_UX = hidden_MD, output_UD.to(hidden_MD.dtype)
        if low_Mr is not None:
            hidden, rank = hidden_MD.shape[1], low_Mr.shape[1]
            x_MX = torch.cat((hidden_MD, low_Mr), 1)
            matrix_UX = hidden_MD.new_empty(len(output_UD), hidden + rank)
            matrix_UX[:, :hidden].copy_(output_UD)
            matrix_UX[:, hidden:].copy_(up_Ur)
        scale_4 = None
        if scale_T is not None:
            place = [KINDS.index(kind) for kind in kinds]
            columns = dict(zip(place, scale_T.to(slots.stats).unbind(), strict=True))
            scale_4 = torch.stack([columns.get(i, slots.stats.new_zeros(())) for i in range(len(KINDS))])
        up_dtype = hidden_MD.dtype if up_Ur is None else up_Ur.dtype
        grad_MX, grad_Ur = _over_chunks(x_MX, low_Mr, matrix_UX, teacher, slots, scale_4, up_dtype)
        if scale_T is not None:
            ctx.save_for_backward(grad_MX, grad_Ur, scale_T)
        ctx.hidden = hidden_MD.shape[1]
        return _terms(slots, kinds)

    @staticmethod
    def backward(ctx, grad_T):
        grad_MX, grad_Ur, scale_T = fused.taken(ctx)
        multiple = (grad_T * scale_T).sum() / scale_T.square().sum().clamp(min=torch.finfo(scale_T.dtype).tiny)
        fused.scaled((grad_MX, grad_Ur), multiple)
        if grad_Ur is None:
            return grad_MX, *[None] * 7
        grad_MD, grad_Mr = grad_MX.split([ctx.hidden, grad_MX.shape[1] - ctx.hidden], 1)
        return grad_MD.contiguous(), grad_Mr.contiguous(), grad_Ur, *[None] * 5


def block_loss(
    hidden_AKD: Tensor,
    output_UD: Tensor,
    low_AKr: Tensor | None,
    up_Ur: Tensor | None,
    labels: BlockLabels,
    teacher_hidden_RD: Tensor,
    teacher: Teacher,
    draft_ids_U: Tensor | None,
    kinds: tuple[str, ...],
    dpace: bool = False,
    scale_T: Tensor | None = None,
    overlap: bool = False,
) -> BlockLosses:
    """The loss of all slots, logits = hidden · outputᵀ + low · upᵀ.

    Args:
        output_UD: frozen. low_AKr, up_Ur: correction of the logits, or None.
        teacher_hidden_RD: post-norm hidden states of the pack's rows. draft_ids_U: see Head.
        kinds: terms, in the order of KINDS.
        dpace: weigh slots by D-PACE instead (`dpace_weights`).
        scale_T: of the terms, float32: the upstream gradient of the sums *must* be a multiple of it, because gradients
            are formed with it here. None = any combination; the slots are then run once per term.
        overlap: whether the caller needs `overlap_AK` whatever the terms are.
    """
    blocks, depth, _ = hidden_AKD.shape
    dtype = compute_dtype(hidden_AKD)
    with torch.autocast(hidden_AKD.device.type, enabled=False):
        hidden_MD = hidden_AKD.flatten(0, 1).to(dtype)
        low_Mr = None if low_AKr is None else low_AKr.flatten(0, 1).to(dtype)
        teaching = None
        if overlap or set(kinds) - {"ce"}:
            with torch.no_grad():
                row_M = labels.teacher_row_AK.flatten()
                teaching = BlockTeacher(teacher, teacher_hidden_RD, row_M, draft_ids_U, dtype).kept()

        def run(some: tuple[str, ...], scale: Tensor | None) -> tuple[Tensor, _Slots]:
            stats = hidden_MD.new_zeros(STATS, len(hidden_MD), dtype=torch.promote_types(dtype, torch.float32))
            slots = _Slots(
                labels.label_AK.flatten(), labels.active_AK.flatten(), labels.supervised_AK.flatten(),
                labels.weight_AK.flatten(), depth, dpace, "kl" in some, stats,
                torch.zeros(len(hidden_MD), dtype=torch.int64, device=hidden_MD.device),
            )  # fmt: skip
            return _BlockLoss.apply(hidden_MD, low_Mr, up_Ur, output_UD.detach(), teaching, slots, some, scale), slots

        if not torch.is_grad_enabled():
            sum_T, slots = run(kinds, None)
        elif scale_T is not None or len(kinds) == 1:
            sum_T, slots = run(kinds, labels.weight_AK.new_ones(1) if scale_T is None else scale_T.detach())
        else:
            runs = [run((kind,), labels.weight_AK.new_ones(1)) for kind in kinds]
            sum_T, slots = torch.cat([sums for sums, _ in runs]), runs[0][1]
    shape = (blocks, depth)
    overlap_AK = None if teaching is None else slots.stats[OVERLAP].view(shape)
    return BlockLosses(sum_T, overlap_AK, slots.argmax_M.view(shape))
