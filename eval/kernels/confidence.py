"""What a confidence head says of all drafts of a chain, where it is linear in the slot's output and knows the token
before only by a row of a table.

Shape legend: B batch, K drafts, D hidden, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.kernels.launch import await_previous, launch, launch_options, tl, triton
from headstart.heads.kernels.device import wants_kernel

#: channels that a program reads at a time
CHANNELS = 2048


def confidence_eager(
    hidden_KBD: Tensor, roots_B: Tensor, tokens_BK: Tensor, weight_D: Tensor, table_V: Tensor
) -> Tensor:
    """Logits of all drafts, float32 [B, K]: weight · hidden + table[the token before the draft].

    Args: weight_D, table_V: float32.
    """
    previous_BK = torch.cat((roots_B[:, None], tokens_BK[:, :-1]), 1)
    return (hidden_KBD.float() @ weight_D).t() + table_V[previous_BK]


def confidence(hidden_KBD: Tensor, roots_B: Tensor, tokens_BK: Tensor, weight_D: Tensor, table_V: Tensor) -> Tensor:
    """As confidence_eager, in one launch."""
    if not wants_kernel(hidden_KBD):
        return confidence_eager(hidden_KBD, roots_B, tokens_BK, weight_D, table_V)
    return confidence_kernel(hidden_KBD, roots_B, tokens_BK, weight_D, table_V)


def confidence_kernel(
    hidden_KBD: Tensor, roots_B: Tensor, tokens_BK: Tensor, weight_D: Tensor, table_V: Tensor
) -> Tensor:
    drafts, batch, size = hidden_KBD.shape
    hidden_KBD, tokens_BK = hidden_KBD.contiguous(), tokens_BK.contiguous()
    logit_BK = torch.empty((batch, drafts), dtype=torch.float32, device=hidden_KBD.device)
    if logit_BK.numel():
        launch(_confidence_kernel, (drafts, batch),
            hidden_KBD, roots_B, tokens_BK, weight_D, table_V, logit_BK, size,
            BLOCK=min(CHANNELS, triton.next_power_of_2(size)), num_warps=4, **launch_options(hidden_KBD.device),
        )  # fmt: skip
    return logit_BK


if triton is not None:

    @triton.jit
    def _confidence_kernel(
        hidden, roots, tokens, weight, table, logit, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
    ):
        await_previous(OVERLAP)
        draft, drafts = tl.program_id(0), tl.num_programs(0)
        row, batch = tl.program_id(1), tl.num_programs(1)
        slot = (draft * batch + row).to(tl.int64) * size
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            channel = first + tl.arange(0, BLOCK)
            inside = channel < size
            x = tl.load(hidden + slot + channel, mask=inside, other=0.0).to(tl.float32)
            total += x * tl.load(weight + channel, mask=inside, other=0.0)
        if draft == 0:
            previous = tl.load(roots + row)
        else:
            previous = tl.load(tokens + row * drafts + draft - 1)
        tl.store(logit + row * drafts + draft, tl.sum(total, 0) + tl.load(table + previous))
