"""Output matrix and loss in one pass over chunks of rows: the gradient is formed while a chunk's logits exist.

Logits and their gradients are freed with their chunk, so memory holds those of one chunk, whatever the rows and depths.
On CUDA one Triton kernel (heads/kernels/losses.py) turns a chunk of logits into its loss, argmax and gradient, in
place; elsewhere tensor operations do the same. The idea is Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989,
§3).
Shape legend: A rows, C rows of a chunk, M rows of all depths, H hidden, L rank of an update, U draft vocabulary,
T teacher rows, K depths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headstart.heads.kernels import losses as kernels
from headstart.heads.kernels.device import wants_kernel
from headstart.heads.losses import eager
from headstart.heads.numerics import add_weight_grad, compute_dtype, weight_grad, wide

#: most logits of a chunk
CHUNK_ELEMENTS = 5 << 27
#: the same on a CPU, where no kernel works in place: a loss there holds about eight tensors of a chunk's size
HOST_CHUNK_ELEMENTS = 1 << 24

#: rows of a chunk are a multiple of this where CHUNK_ELEMENTS allows
CHUNK_MULTIPLE = 128

#: (logits_CU, rows of this chunk) → (loss_C float32, argmax_C int64, gradient_CU in the dtype of logits)
RowLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor]]

#: (low_AL, up_UL): a second product, which is added to the logits (eager.output_logits)
Update = tuple[Tensor, Tensor]


def chunk_elements(device: torch.device | None = None) -> int:
    """Most logits of a chunk on a device (None: a GPU)."""
    on_host = device is not None and device.type == "cpu"
    return min(CHUNK_ELEMENTS, HOST_CHUNK_ELEMENTS) if on_host else CHUNK_ELEMENTS


def chunk_rows(rows: int, tokens: int, device: torch.device | None = None) -> int:
    """Rows of a chunk: as few chunks of about equal size as `chunk_elements` allows."""
    most = max(1, chunk_elements(device) // tokens)
    even = -(-rows // max(1, -(-rows // most)))
    return max(1, min(rows, most, -(-even // CHUNK_MULTIPLE) * CHUNK_MULTIPLE))


class _Product:
    """One product input · weightᵀ of the logits. Its gradients are summed chunk by chunk.

    The product uses the matrix in the dtype of `input`. Its gradient is summed and returned in the dtype of `master`,
    without rounding in between.

    Args:
        wants: whether the gradients of (input, master) are needed.
        chunk: rows of a chunk.
        sum_UH: takes the sum of master's gradient on top of what it holds; None = a new tensor.
    """

    def __init__(
        self, input_AH: Tensor, master_UH: Tensor, wants: tuple[bool, bool], chunk: int, sum_UH: Tensor | None = None
    ):
        self.input_AH, self.weight_UH, self.sum_UH = input_AH, master_UH.to(input_AH.dtype), sum_UH
        self.grad_input = torch.empty_like(input_AH) if wants[0] else None
        rows = input_AH.shape[0]
        self.wants_weight = wants[1]
        self.grad_weight = torch.zeros_like(master_UH) if wants[1] and rows == 0 else None
        self.dtype = master_UH.dtype
        # the gradient of a single chunk is final; those of several are summed in float32
        self.sum_dtype = self.dtype if rows <= chunk else torch.promote_types(self.dtype, torch.float32)

    def take(self, grad_CU: Tensor, part: slice) -> None:
        """Form the gradients of a chunk's rows."""
        if self.grad_input is not None:
            torch.mm(grad_CU, self.weight_UH, out=self.grad_input[part])
        if not self.wants_weight:
            return
        if self.sum_UH is not None:
            add_weight_grad(self.sum_UH, grad_CU, self.input_AH[part])
            return
        update = weight_grad(grad_CU, self.input_AH[part], self.sum_dtype)
        self.grad_weight = update if self.grad_weight is None else self.grad_weight.add_(update)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Those of (input, master); None where not wanted, or added to `sum_UH`."""
        if self.sum_UH is not None:
            return self.grad_input, None
        return self.grad_input, None if self.grad_weight is None else self.grad_weight.to(self.dtype)


def _linear_loss(
    tensors: Sequence[Tensor], row_loss: RowLoss, wants: Sequence[bool], sum_UH: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """(loss of each row, argmax of each row, a gradient per tensor), made chunk by chunk.

    Args:
        tensors: input and matrix of every product; the logits are the sum of the products.
        wants: one per tensor.
        sum_UH: see _Product; of the first product.
    """
    hidden_AH, tokens = tensors[0], tensors[1].shape[0]
    rows = hidden_AH.shape[0]
    chunk = chunk_rows(rows, tokens, hidden_AH.device)
    products = [
        _Product(tensors[i], tensors[i + 1], (wants[i], wants[i + 1]), chunk, None if i else sum_UH)
        for i in range(0, len(tensors), 2)
    ]
    loss_A = hidden_AH.new_empty(rows, dtype=torch.promote_types(hidden_AH.dtype, torch.float32))
    argmax_A = torch.empty(rows, dtype=torch.int64, device=hidden_AH.device)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        logits_CU = F.linear(products[0].input_AH[part], products[0].weight_UH)
        for product in products[1:]:
            logits_CU.addmm_(product.input_AH[part], product.weight_UH.t())
        loss_A[part], argmax_A[part], grad_CU = row_loss(logits_CU, part)
        for product in products:
            product.take(grad_CU, part)
        del logits_CU, grad_CU  # free them before the next chunk's logits are made
    return loss_A, argmax_A, tuple(gradient for product in products for gradient in product.gradients())


class _LinearLoss(torch.autograd.Function):
    """Σ rows loss(logits), with the gradients of every product formed in the forward pass.

    With `sum_UH`, they carry the caller's scale already, and the first matrix's is added to `sum_UH`.
    """

    @staticmethod
    def forward(ctx, row_loss: RowLoss, sum_UH: Tensor | None, *tensors: Tensor):
        loss_A, argmax_A, gradients = _linear_loss(tensors, row_loss, ctx.needs_input_grad[2:], sum_UH)
        ctx.save_for_backward(*gradients)
        ctx.scaled = sum_UH is not None
        ctx.mark_non_differentiable(argmax_A)
        return loss_A.sum(), argmax_A

    @staticmethod
    def backward(ctx, grad_total: Tensor, _grad_argmax):
        gradients = taken(ctx)
        return None, None, *(gradients if ctx.scaled else scaled(gradients, grad_total))


class _LinearLossDepths(torch.autograd.Function):
    """As _LinearLoss, for K depths laid end to end, where the caller minimises a multiple of Σ_d scale_d · S_d.

    The scale is known in the forward pass, so one weight gradient for all depths is formed there.
    """

    @staticmethod
    def forward(ctx, hidden_MH: Tensor, weight_UH: Tensor, row_loss: RowLoss, row_weight_M, depth_M, scale_K):
        loss_M, argmax_M, gradients = _linear_loss((hidden_MH, weight_UH), row_loss, ctx.needs_input_grad[:2])
        loss_K = loss_M.new_zeros(scale_K.shape[0]).index_add_(0, depth_M, loss_M * row_weight_M)
        ctx.save_for_backward(*gradients, scale_K)
        ctx.mark_non_differentiable(argmax_M)
        return loss_K, argmax_M

    @staticmethod
    def backward(ctx, grad_K: Tensor, _grad_argmax):
        *gradients, scale_K = taken(ctx)
        multiple = (grad_K * scale_K).sum() / scale_K.square().sum().clamp(min=torch.finfo(scale_K.dtype).tiny)
        return (*scaled(gradients, multiple), None, None, None, None)


def taken(ctx) -> tuple[Tensor, ...]:
    """The saved tensors, which the backward pass scales in place. Raises: RuntimeError at a second backward pass."""
    if getattr(ctx, "taken", False):
        raise RuntimeError("fused loss: found a second backward pass, expected one; compute the loss again")
    ctx.taken = True
    return ctx.saved_tensors


def scaled(gradients: Sequence[Tensor | None], by: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients times `by`, in place. `by` is nearly always 1."""
    for gradient in gradients:
        if gradient is not None:
            _scale_(gradient, by)
    return tuple(gradients)


def _scale_(x: Tensor, by: Tensor) -> None:
    if wants_kernel(x):
        kernels.scale_(x, by)
    else:
        x.copy_(wide(x) * by)


def _apply(
    hidden_AH: Tensor, weight_UH: Tensor, row_loss: RowLoss, update: Update | None, sum_UH: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(weight_UH)
    more = () if update is None else (update[0].to(dtype), update[1])
    with torch.autocast(hidden_AH.device.type, enabled=False):
        return _LinearLoss.apply(row_loss, sum_UH, *_wanting(hidden_AH.to(dtype), weight_UH, *more))


def _wanting(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, constants where no gradient is formed (validation): autograd asks for gradients there as well."""
    return tensors if torch.is_grad_enabled() else tuple(x.detach() for x in tensors)


def _sum_into(weight_UH: Tensor, adds_scale: Tensor | None) -> Tensor | None:
    """The gradient tensor that the forward pass adds to; None where gradients are formed for the backward pass."""
    return weight_UH.grad if adds_scale is not None and torch.is_grad_enabled() else None


def row_logsumexp(x_TU: Tensor) -> Tensor:
    """log Σ exp of every row, [T] in at least float32, without another tensor of the size of x."""
    if wants_kernel(x_TU):
        return kernels.logsumexp(x_TU)
    chunk = chunk_rows(max(x_TU.shape[0], 1), x_TU.shape[1], x_TU.device)
    return torch.cat([wide(part_CU).logsumexp(-1) for part_CU in x_TU.split(chunk)])


def teacher_logsumexp(teacher_TU: Tensor) -> Tensor | None:
    """`teacher_lse_T` of soft_loss, for a caller that uses the same teacher several times; None where none is used."""
    return kernels.logsumexp(teacher_TU) if wants_kernel(teacher_TU) else None


def _soft_rows(
    kind: str, teacher_TU: Tensor, teacher_row_A: Tensor, grad_weight_A: Tensor, teacher_lse_T: Tensor | None = None,
    mix: eager.Mix = eager.PURE,
) -> RowLoss:  # fmt: skip
    """Unweighted losses; gradients weighted by `grad_weight_A`."""
    if teacher_lse_T is None:  # several depths read the same teacher row, so its log-sum-exp is computed once
        teacher_lse_T = teacher_logsumexp(teacher_TU)

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        teacher_row_C, weight_C = teacher_row_A[part], grad_weight_A[part]
        if teacher_lse_T is not None:
            number = eager.SOFT_LOSSES.index(kind)
            return kernels.soft_rows(
                number, eager.LK_FLOOR, logits_CU, teacher_TU, teacher_lse_T, teacher_row_C, weight_C, mix
            )
        logits, teacher_CU = wide(logits_CU), wide(teacher_TU[teacher_row_C])
        p_CU, q_CU = teacher_CU.softmax(-1), logits.softmax(-1)
        loss_C = eager.divergence(logits, teacher_CU, kind, mix)
        grad_CU = q_CU - p_CU if kind != "lk" else torch.zeros_like(q_CU)
        if kind == "lk" or any(mix):
            # acceptance rate α = Σ min(p, q): -dα/dz = q (Σ m q - m) with m = [q < p]
            below_CU = torch.where(q_CU < p_CU, q_CU, 0.0)
            alpha_C1 = torch.where(q_CU < p_CU, q_CU, p_CU).sum(-1, keepdim=True) + eager.LK_FLOOR
            lk, l1 = (1.0, 0.0) if kind == "lk" else mix
            grad_CU += (lk / alpha_C1 + 2.0 * l1) * (q_CU * below_CU.sum(-1, keepdim=True) - below_CU)
        return loss_C, logits.argmax(-1), (grad_CU * weight_C[:, None]).to(logits_CU.dtype)

    return row_loss


def soft_loss(
    hidden_AH: Tensor,
    weight_UH: Tensor,
    teacher_TU: Tensor,
    teacher_row_A: Tensor,
    row_weight_A: Tensor,
    kind: str = "soft_ce",
    update: Update | None = None,
    adds_scale: Tensor | None = None,
    teacher_lse_T: Tensor | None = None,
    mix: eager.Mix = eager.PURE,
) -> tuple[Tensor, Tensor]:
    """As eager.soft_loss.

    Args:
        adds_scale: float32 scalar, for a caller that minimises exactly adds_scale · loss (heads/gradients.py). The
            forward pass then adds the matrix's gradient to `weight_UH.grad`, where there is one.
        teacher_lse_T: see teacher_logsumexp.
    """
    sum_UH = _sum_into(weight_UH, adds_scale)
    grad_weight_A = row_weight_A if sum_UH is None else row_weight_A * adds_scale
    rows = _soft_rows(kind, teacher_TU, teacher_row_A, grad_weight_A, teacher_lse_T, mix)

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        loss_C, argmax_C, grad_CU = rows(logits_CU, part)
        return loss_C * row_weight_A[part], argmax_C, grad_CU

    return _apply(hidden_AH, weight_UH, row_loss, update, sum_UH)


def soft_loss_depths(
    hidden_MH: Tensor,
    weight_UH: Tensor,
    teacher_TU: Tensor,
    teacher_row: list[Tensor],
    row_weight: list[Tensor],
    scale_K: Tensor,
    kind: str = "soft_ce",
    mix: eager.Mix = eager.PURE,
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
    row_loss = _soft_rows(kind, teacher_TU, teacher_row_M, row_weight_M * scale_K[depth_M], mix=mix)
    dtype = compute_dtype(weight_UH)
    with torch.autocast(weight_UH.device.type, enabled=False):
        loss_K, argmax_M = _LinearLossDepths.apply(
            *_wanting(hidden_MH.to(dtype), weight_UH), row_loss, row_weight_M, depth_M, scale_K
        )
    return loss_K, list(argmax_M.split(counts))


def hard_ce(
    hidden_AH: Tensor,
    weight_UH: Tensor,
    label_A: Tensor,
    row_weight_A: Tensor,
    update: Update | None = None,
    adds_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As eager.hard_ce. Args: adds_scale: see soft_loss."""
    sum_UH = _sum_into(weight_UH, adds_scale)
    grad_weight_A = row_weight_A if sum_UH is None else row_weight_A * adds_scale

    def row_loss(logits_CU: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        if wants_kernel(logits_CU):
            return kernels.hard_rows(logits_CU, label_A[part], row_weight_A[part], grad_weight_A[part])
        label_C = label_A[part, None]
        logits = wide(logits_CU)
        lse_C = logits.logsumexp(-1)
        loss_C = (lse_C - logits.gather(1, label_C).squeeze(1)) * row_weight_A[part]
        grad_CU = (logits - lse_C[:, None]).exp()
        grad_CU.scatter_add_(1, label_C, torch.full_like(label_C, -1, dtype=grad_CU.dtype))
        return loss_C, logits.argmax(-1), (grad_CU * grad_weight_A[part, None]).to(logits_CU.dtype)

    return _apply(hidden_AH, weight_UH, row_loss, update, sum_UH)
