"""The input of a draft's pass, each token's embedding beside its feature: one kernel on CUDA, with its eager twin.

Shape legend: R rows (B · N), B batch, N tokens of a pass, f rows of features, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.eval.kernels.norm import NormWeights, norm_eager
from headstart.eval.kernels.rows import take_rows
from headstart.heads.kernels.device import wants_kernel


@dataclass(frozen=True)
class DraftInput:
    """The weights that make a draft layer's input.

    Attributes:
        embed_VD: embeddings of the target's tokens.
        norms: RMSNorms of the embedding and of the feature (EAGLE-3), or None (EAGLE-1).
    """

    embed_VD: Tensor
    norms: tuple[NormWeights, NormWeights] | None


def draft_input_eager(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The input of a pass of the draft.

    Args:
        tokens_BN: int64, drafted or committed tokens.
        g_BfD: the target's features, or the draft's own states of the level before.
        under_BN: int64, row of `g_BfD` that each token goes with; None: the row of the same index (f = N).
    Returns: (cat(embedding, feature) [B · N, 2D] in the feature's dtype, each normed if `source.norms` is given; the
        feature of each token [B · N, D]).
    """
    g_RD = (g_BfD if under_BN is None else take_rows(g_BfD, under_BN)).flatten(0, 1)
    e_RD, normed_RD = source.embed_VD[tokens_BN.flatten()].to(g_RD.dtype), g_RD
    if source.norms is not None:
        e_RD, normed_RD = norm_eager(e_RD, source.norms[0]), norm_eager(g_RD, source.norms[1])
    return torch.cat((e_RD, normed_RD), -1), g_RD


def draft_input(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As draft_input_eager."""
    run = draft_input_kernel if wants_kernel(g_BfD) else draft_input_eager
    return run(tokens_BN, g_BfD, source, under_BN)


def draft_input_kernel(
    tokens_BN: Tensor, g_BfD: Tensor, source: DraftInput, under_BN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (batch, count), (before, width) = tokens_BN.shape, g_BfD.shape[1:]
    # the first rows of each sequence of a larger tensor are read where they stand
    if g_BfD.stride(2) != 1 or g_BfD.stride(1) != width or g_BfD.stride(0) % width:
        g_BfD = g_BfD.contiguous()
    take = under_BN is not None or not g_BfD.is_contiguous()
    rows = batch * count
    if under_BN is None and before != count:
        raise ValueError(f"{count} tokens and {before} features per sequence: give under_BN, the feature of each token")
    out_RC = g_BfD.new_empty((rows, 2 * width))
    taken_RD = g_BfD.new_empty((rows, width)) if take else g_BfD.flatten(0, 1)
    # without norms the kernel gets factors that it does not read
    of_embedding, of_feature = source.norms or (NormWeights(g_BfD, 0.0),) * 2
    if rows:
        block = triton.next_power_of_2(width)
        launch(_draft_input_kernel, (rows, 2),
            tokens_BN.contiguous(), source.embed_VD, g_BfD, tokens_BN if under_BN is None else under_BN.contiguous(),
            of_embedding.factor_D, of_feature.factor_D, out_RC, taken_RD, count, g_BfD.stride(0) // width,
            width, source.embed_VD.stride(0), of_embedding.eps, of_feature.eps, NORM=source.norms is not None,
            UNDER=under_BN is not None, TAKE=take, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            **launch_options(g_BfD.device),
        )  # fmt: skip
    return out_RC, taken_RD


if triton is not None:

    @triton.jit(do_not_specialize=["count", "before"])
    def _draft_input_kernel(
        tokens, embedding, g, under, e_factor, g_factor, out, taken, count, before, width, stride_e, e_eps, g_eps,
        NORM: tl.constexpr, UNDER: tl.constexpr, TAKE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One program per row and half: the embedding, then the feature. `before`: rows from one sequence of `g` to the
        next."""
        row = tl.program_id(0).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        inside = channel < width
        if tl.program_id(1) == 0:
            if NORM:
                by = tl.load(e_factor + channel, mask=inside, other=0.0)
            await_previous(OVERLAP)
            token = tl.load(tokens + row)
            value = tl.load(embedding + token * stride_e + channel, mask=inside, other=0.0)
            # as the eager twin: rounded before the norm
            value = value.to(out.dtype.element_ty).to(tl.float32)
            if NORM:
                value = value * tl.rsqrt(tl.sum(value * value, 0) / width + e_eps) * by
            tl.store(out + row * 2 * width + channel, value.to(out.dtype.element_ty), mask=inside)
        else:
            if NORM:
                by = tl.load(g_factor + channel, mask=inside, other=0.0)
            await_previous(OVERLAP)
            of = row // count * before
            if UNDER:
                of += tl.load(under + row)
            else:
                of += row % count
            value = tl.load(g + of * width + channel, mask=inside, other=0.0)
            if TAKE:
                tl.store(taken + row * width + channel, value, mask=inside)
            value = value.to(tl.float32)
            if NORM:
                value = value * tl.rsqrt(tl.sum(value * value, 0) / width + g_eps) * by
            tl.store(out + row * 2 * width + width + channel, value.to(out.dtype.element_ty), mask=inside)
