"""The block drafter: one forward drafts a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.drafters.medusa import MedusaDrafter
from headstart.eval.tree import Tree
from headstart.heads.families.miniblock.head import MiniBlockHead


class MiniBlockDrafter(MedusaDrafter):
    """As Medusa's, it keeps the feature of the last committed token; the block depends on the root as well."""

    head: MiniBlockHead

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        logits_BKV = self.head.draft_logits(self.hidden_BD, roots_B)[:, : self.drafted]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV.scatter(1, roots_B[:, None], True)
        return self.chain_of(logits_BKV, generator)


def miniblock_everywhere(
    head: MiniBlockHead, tokens_BT: Tensor, hidden_BTD: Tensor, streams: Tensor | None, row_BA: Tensor, depth: int
) -> Tensor:
    """int64 [B, A, K]. Args: see Drafting.draft_everywhere."""
    batch_B1 = torch.arange(len(row_BA), device=row_BA.device)[:, None]
    hidden_ND = hidden_BTD[batch_B1, row_BA].flatten(0, 1)
    root_N = tokens_BT.gather(1, (row_BA + 1).clamp(max=tokens_BT.shape[1] - 1)).flatten()
    return head.draft_logits(hidden_ND, root_N)[:, :depth].argmax(-1).unflatten(0, row_BA.shape)
