"""Output matrix and loss in one pass over chunks of rows: the gradient is formed while a chunk's logits exist.

Logits and their gradients are freed with their chunk, so memory holds those of one chunk, whatever the rows and depths.
On CUDA one Triton kernel turns a chunk of logits into its loss, argmax and gradient, in place; elsewhere tensor
operations do the same. The idea is Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989, §3).
Shape legend: A rows, C rows of a chunk, M rows of all depths, H hidden, U draft vocabulary, T teacher rows, K depths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.kernels.device import tl, triton, wants_kernel
from headstart.heads.losses import eager
from headstart.heads.numerics import compute_dtype, weight_grad, wide

#: most logits of a chunk
CHUNK_ELEMENTS = 5 << 27

#: rows of a chunk are a multiple of this where CHUNK_ELEMENTS allows
CHUNK_MULTIPLE = 128

#: columns that a kernel holds at once; elements that one program of the scaling kernel takes
BLOCK = 4096
SCALE_BLOCK = 8192

#: (logits_CU, rows of this chunk) → (loss_C float32, argmax_C int64, gradient_CU in the dtype of logits)
RowLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor]]


def chunk_rows(rows: int, tokens: int) -> int:
    """Rows of a chunk: as few chunks of about equal size as CHUNK_ELEMENTS allows."""
    most = max(1, CHUNK_ELEMENTS // tokens)
    even = -(-rows // max(1, -(-rows // most)))
    return max(1, min(rows, most, -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE))


def _linear_loss(
    hidden_AH: Tensor, master_UH: Tensor, row_loss: RowLoss, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(loss of each row, argmax of each row, gradient of hidden, gradient of weight), made chunk by chunk.

    The product uses the matrix in the dtype of `hidden`. Its gradient is summed and returned in the dtype of `master`,
    without rounding in between.
    """
    weight_UH = master_UH.to(hidden_AH.dtype)
    rows, tokens = hidden_AH.shape[0], weight_UH.shape[0]
    chunk = chunk_rows(rows, tokens)
    loss_A = hidden_AH.new_empty(rows, dtype=torch.promote_types(hidden_AH.dtype, torch.float32))
    argmax_A = torch.empty(rows, dtype=torch.int64, device=hidden_AH.device)
    grad_hidden = torch.empty_like(hidden_AH) if wants_hidden else None
    grad_weight = torch.zeros_like(master_UH) if wants_weight and rows == 0 else None
    # the gradient of a single chunk is final; those of several are summed in float32
    sum_dtype = master_UH.dtype if rows <= chunk else torch.promote_types(master_UH.dtype, torch.float32)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        logits_CU = F.linear(hidden_AH[part], weight_UH)
        loss_A[part], argmax_A[part], grad_CU = row_loss(logits_CU, part)
        if grad_hidden is not None:
            torch.mm(grad_CU, weight_UH, out=grad_hidden[part])
        if wants_weight:
            update = weight_grad(grad_CU, hidden_AH[part], sum_dtype)
            grad_weight = update if grad_weight is None else grad_weight.add_(update)
            del update
        del logits_CU, grad_CU  # free them before the next chunk's logits are made
    return loss_A, argmax_A, grad_hidden, None if grad_weight is None else grad_weight.to(master_UH.dtype)


class _LinearLoss(torch.autograd.Function):
    """Σ rows loss(hidden · weightᵀ), with both gradients formed in the forward pass."""

    @staticmethod
    def forward(ctx, hidden_AH: Tensor, weight_UH: Tensor, row_loss: RowLoss):
        loss_A, argmax_A, grad_hidden, grad_weight = _linear_loss(
            hidden_AH, weight_UH, row_loss, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(argmax_A)
        return loss_A.sum(), argmax_A

    @staticmethod
    def backward(ctx, grad_total: Tensor, _grad_argmax):
        grad_hidden, grad_weight = _taken(ctx)
        return (*_scaled(grad_hidden, grad_weight, grad_total), None)


class _LinearLossDepths(torch.autograd.Function):
    """As _LinearLoss, for K depths laid end to end, where the caller minimises a multiple of Σ_d scale_d · S_d.

    The scale is known in the forward pass, so one weight gradient for all depths is formed there.
    """

    @staticmethod
    def forward(ctx, hidden_MH: Tensor, weight_UH: Tensor, row_loss: RowLoss, row_weight_M, depth_M, scale_K):
        loss_M, argmax_M, grad_hidden, grad_weight = _linear_loss(
            hidden_MH, weight_UH, row_loss, *ctx.needs_input_grad[:2]
        )
        loss_K = loss_M.new_zeros(scale_K.shape[0]).index_add_(0, depth_M, loss_M * row_weight_M)
        ctx.save_for_backward(grad_hidden, grad_weight, scale_K)
        ctx.mark_non_differentiable(argmax_M)
        return loss_K, argmax_M

    @staticmethod
    def backward(ctx, grad_K: Tensor, _grad_argmax):
        grad_hidden, grad_weight, scale_K = _taken(ctx)
        multiple = (grad_K * scale_K).sum() / scale_K.square().sum().clamp(min=torch.finfo(scale_K.dtype).tiny)
        return (*_scaled(grad_hidden, grad_weight, multiple), None, None, None, None)


def _taken(ctx) -> tuple[Tensor, ...]:
    """The saved tensors, which the backward pass scales in place. Raises: RuntimeError at a second backward pass."""
    if getattr(ctx, "taken", False):
        raise RuntimeError("fused loss: found a second backward pass, expected one; compute the loss again")
    ctx.taken = True
    return ctx.saved_tensors


def _scaled(grad_hidden: Tensor | None, grad_weight: Tensor | None, by: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients times `by`, in place. `by` is nearly always 1."""
    for gradient in (grad_hidden, grad_weight):
        if gradient is not None:
            _scale_(gradient, by)
    return grad_hidden, grad_weight


def _scale_(x: Tensor, by: Tensor) -> None:
    if not wants_kernel(x):
        x.copy_(wide(x) * by)
    elif x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), SCALE_BLOCK),)](x, by, x.numel(), BLOCK=SCALE_BLOCK, num_warps=8)


def _apply(hidden_AH: Tensor, weight_UH: Tensor, row_loss: RowLoss) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(weight_UH)
    with torch.autocast(hidden_AH.device.type, enabled=False):
        return _LinearLoss.apply(hidden_AH.to(dtype), weight_UH, row_loss)


def row_logsumexp(x_TU: Tensor) -> Tensor:
    """log Σ exp of every row, [T] in at least float32, without another tensor of the size of x."""
    if wants_kernel(x_TU):
        return _lse_triton(x_TU)
    chunk = chunk_rows(max(x_TU.shape[0], 1), x_TU.shape[1])
    return torch.cat([wide(part_CU).logsumexp(-1) for part_CU in x_TU.split(chunk)])


def _soft_rows(kind: str, teacher_TU: Tensor, teacher_row_A: Tensor, grad_weight_A: Tensor) -> RowLoss:
    """Unweighted losses; gradients weighted by `grad_weight_A`."""
    # several depths read the same teacher row, so its log-sum-exp is computed once
    teacher_lse_T = _lse_triton(teacher_TU) if wants_kernel(teacher_TU) else None

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        teacher_row_C, weight_C = teacher_row_A[part], grad_weight_A[part]
        if teacher_lse_T is not None:
            return _soft_triton(kind, logits_CU, teacher_TU, teacher_lse_T, teacher_row_C, weight_C)
        logits, teacher_CU = wide(logits_CU), wide(teacher_TU[teacher_row_C])
        p_CU, q_CU = teacher_CU.softmax(-1), logits.softmax(-1)
        loss_C = eager.divergence(logits, teacher_CU, kind)
        if kind == "lk":
            # acceptance rate α = Σ min(p, q): dα/dz = q (m - Σ m q) with m = [q < p]
            below_CU = torch.where(q_CU < p_CU, q_CU, 0.0)
            grad_CU = (q_CU * below_CU.sum(-1, keepdim=True) - below_CU) * loss_C.exp()[:, None]
        else:
            grad_CU = q_CU - p_CU
        return loss_C, logits.argmax(-1), (grad_CU * weight_C[:, None]).to(logits_CU.dtype)

    return row_loss


def soft_loss(
    hidden_AH: Tensor,
    weight_UH: Tensor,
    teacher_TU: Tensor,
    teacher_row_A: Tensor,
    row_weight_A: Tensor,
    kind: str = "soft_ce",
) -> tuple[Tensor, Tensor]:
    """As eager.soft_loss."""
    rows = _soft_rows(kind, teacher_TU, teacher_row_A, row_weight_A)

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        loss_C, argmax_C, grad_CU = rows(logits_CU, part)
        return loss_C * row_weight_A[part], argmax_C, grad_CU

    return _apply(hidden_AH, weight_UH, row_loss)


def soft_loss_depths(
    hidden_MH: Tensor,
    weight_UH: Tensor,
    teacher_TU: Tensor,
    teacher_row: list[Tensor],
    row_weight: list[Tensor],
    scale_K: Tensor,
    kind: str = "soft_ce",
) -> tuple[Tensor, list[Tensor]]:
    """`soft_loss` of K depths with one output matrix, for a caller that minimises a multiple of Σ_d scale_d · S_d.

    Args:
        hidden_MH: the depths' rows laid end to end.
        teacher_row, row_weight: one entry per depth, as soft_loss's.
        scale_K: float32 [K]. The upstream gradient of the result *must* be a multiple of it, because the weight
            gradient is formed with it here.
    Returns: (S_d, float32 [K]; argmax of each depth's rows).
    """
    counts = [len(rows) for rows in row_weight]
    scale_K = scale_K.detach()
    row_weight_M, teacher_row_M = torch.cat(row_weight), torch.cat(teacher_row)
    depth_M = torch.cat([torch.full_like(rows, d) for d, rows in enumerate(teacher_row)])
    row_loss = _soft_rows(kind, teacher_TU, teacher_row_M, row_weight_M * scale_K[depth_M])
    dtype = compute_dtype(weight_UH)
    with torch.autocast(weight_UH.device.type, enabled=False):
        loss_K, argmax_M = _LinearLossDepths.apply(
            hidden_MH.to(dtype), weight_UH, row_loss, row_weight_M, depth_M, scale_K
        )
    return loss_K, list(argmax_M.split(counts))


def hard_ce(hidden_AH: Tensor, weight_UH: Tensor, label_A: Tensor, row_weight_A: Tensor) -> tuple[Tensor, Tensor]:
    """As eager.hard_ce."""

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        label_C, weight_C = label_A[part, None], row_weight_A[part]
        logits = wide(logits_CU)
        lse_C = logits.logsumexp(-1)
        loss_C = (lse_C - logits.gather(1, label_C).squeeze(1)) * weight_C
        grad_CU = (logits - lse_C[:, None]).exp()
        grad_CU.scatter_add_(1, label_C, torch.full_like(label_C, -1, dtype=grad_CU.dtype))
        return loss_C, logits.argmax(-1), (grad_CU * weight_C[:, None]).to(logits_CU.dtype)

    return _apply(hidden_AH, weight_UH, row_loss)


if triton is not None:

    @triton.jit
    def _scale_kernel(x, by, count, BLOCK: tl.constexpr):
        """x *= by; a factor of 1 reads and writes nothing."""
        factor = tl.load(by).to(tl.float32)
        if factor != 1.0:
            index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32) * factor
            tl.store(x + index, value.to(x.dtype.element_ty), mask=index < count)

    @triton.jit
    def _lse_kernel(x, out, tokens, stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        top, total = float("-inf"), 0.0
        for start in range(0, tokens, BLOCK):
            value = tl.load(x + row * stride + start + column, mask=start + column < tokens, other=float("-inf"))
            value = value.to(tl.float32)
            new_top = tl.maximum(top, tl.max(value, 0))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top), 0)
            top = new_top
        tl.store(out + row, top + tl.log(total))

    @triton.jit
    def _soft_kernel(
        logits, teacher, teacher_lse, teacher_row, row_weight, loss, argmax, tokens, stride, teacher_stride, floor,
        KIND: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program per row: the log-sum-exp, then loss and gradient, the gradient over the logits.

        KIND: index into eager.SOFT_LOSSES.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        source = tl.load(teacher_row + row)
        teacher += source * teacher_stride
        t_lse = tl.load(teacher_lse + source)
        weight = tl.load(row_weight + row)
        column = tl.arange(0, BLOCK)
        z_max, z_sum, best = float("-inf"), 0.0, 0
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            block_max = tl.max(z, 0)
            best = tl.where(block_max > z_max, start + tl.argmax(z, 0), best)
            new_max = tl.maximum(z_max, block_max)
            z_sum = z_sum * tl.exp(z_max - new_max) + tl.sum(tl.exp(z - new_max), 0)
            z_max = new_max
        z_lse = z_max + tl.log(z_sum)
        total = 0.0  # Σ p z, Σ p log(p / q) or Σ min(p, q)
        below = 0.0  # Σ of q where q < p
        if KIND == 2:
            for start in range(0, tokens, BLOCK):
                inside = start + column < tokens
                z = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
                p, q = tl.exp(t - t_lse), tl.exp(z - z_lse)
                total += tl.sum(tl.minimum(p, q), 0)
                below += tl.sum(tl.where(q < p, q, 0.0), 0)
            total += floor
        for start in range(0, tokens, BLOCK):
            inside = start + column < tokens
            z = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
            t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
            p, q = tl.exp(t - t_lse), tl.exp(z - z_lse)
            if KIND == 0:
                total += tl.sum(p * z, 0)
                grad = (q - p) * weight
            elif KIND == 1:
                total += tl.sum(tl.where(p > 0.0, p * ((t - t_lse) - (z - z_lse)), 0.0), 0)
                grad = (q - p) * weight
            else:
                grad = (q * below - tl.where(q < p, q, 0.0)) / total * weight
            tl.store(logits + start + column, grad.to(logits.dtype.element_ty), mask=inside)
        if KIND == 0:
            total = z_lse - total
        elif KIND == 2:
            total = -tl.log(total)
        tl.store(loss + row, total)
        tl.store(argmax + row, best)


def _lse_triton(x_TU: Tensor) -> Tensor:
    rows, tokens = x_TU.shape
    lse_T = torch.empty(rows, dtype=torch.float32, device=x_TU.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(tokens))
        _lse_kernel[(rows,)](x_TU, lse_T, tokens, x_TU.stride(0), BLOCK=block, num_warps=8)
    return lse_T


def _soft_triton(
    kind: str, logits_CU: Tensor, teacher_TU: Tensor, teacher_lse_T: Tensor, teacher_row_C: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = logits_CU.shape
    loss_C = torch.empty(rows, dtype=torch.float32, device=logits_CU.device)
    argmax_C = torch.empty(rows, dtype=torch.int64, device=logits_CU.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(tokens))
        _soft_kernel[(rows,)](
            logits_CU, teacher_TU, teacher_lse_T, teacher_row_C.contiguous(), weight_C.float().contiguous(), loss_C,
            argmax_C, tokens, logits_CU.stride(0), teacher_TU.stride(0), eager.LK_FLOOR,
            KIND=eager.SOFT_LOSSES.index(kind), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return loss_C, argmax_C, logits_CU
