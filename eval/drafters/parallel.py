"""P-EAGLE as a drafter: a whole chain, or a tree over marginals, from one pass (families §2).

The pass runs the newly committed rows, whose features are the target's, and K - 1 masked places behind them. The last
committed row drafts the first token and the places draft the others. Keys and values of masked places are scratch, as
those of drafted tokens are (autoregressive.py). The drafts of a chain do not depend on each other, so what they are
drawn from is exactly the distribution of each one.

Shape legend: B batch, W committed rows of a pass, K drafts, H head hidden, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstart.eval.config import TreeConfig
from headstart.eval.decoding.sampling import Sampling, penalise
from headstart.eval.drafters.autoregressive import AutoregressiveDrafter
from headstart.eval.drafters.draft_vocabulary import in_draft_vocabulary, in_target_vocabulary
from headstart.eval.drafters.independent import choose_each
from headstart.eval.kernels.attention import Visibility
from headstart.eval.kernels.linear import Linear
from headstart.eval.kernels.marginals import drafted_marginals
from headstart.eval.tree import Tree
from headstart.heads.families.peagle.head import PEagleHead


class ParallelDrafter(AutoregressiveDrafter):
    """Drafts chains and trees over marginals with a P-EAGLE head bound to its target.

    The first `start` copies its weights. It raises ConfigError for a head whose mask token is not known.
    """

    head: PEagleHead

    def __init__(self, head: PEagleHead, tree: TreeConfig, sampling: Sampling):
        super().__init__(head, tree, sampling)
        self.marginals = drafted_marginals(tree, tree.depth, head.draft_vocab_size or head.dims.vocab_size)
        if self.marginals is not None:
            self.max_nodes = self.marginals.nodes

    def products(self, batch: int) -> list[tuple[list[Linear], int]]:
        depth = self.drafted
        rows = {batch * (self.waiting + depth - 1), batch * self.waiting, batch * depth}
        return self._products(batch, rows)

    def _place(self, batch: int, device: torch.device) -> None:
        super()._place(batch, device)
        places, mask_1kD = self.tree.depth - 1, self.head.mask_hidden.detach().view(1, 1, *self._streams())
        self._mask_tokens = torch.full((batch, places), self.head.mask_token, dtype=torch.int64, device=device)
        self._mask_g = self.step.fuse(mask_1kD, mask_1kD).expand(batch, places, -1).contiguous()
        if self.marginals is not None:
            self.marginals = self.marginals.to(device)
        self._columns = torch.arange(self.width + places, device=device)

    def _streams(self) -> tuple[int, int]:
        count = len(self.head.spec.layer_ids)
        return count, self.head.mask_hidden.numel() // count

    @torch.inference_mode()
    def propose(self, roots_B: Tensor, generator: torch.Generator | None = None) -> Tree:
        lined, g_BWH = self._line_up(roots_B)
        # a row sees none behind it, so places of levels that are not drafted are left out
        places = self.drafted - 1
        ahead_BP = lined.ahead_DB[:places].t()
        visibility = Visibility(
            torch.cat((lined.position_BW, ahead_BP), 1), torch.cat((lined.write_BW, ahead_BP), 1), self.length_B
        )
        tokens_BN = torch.cat((lined.tokens_BW, self._mask_tokens[:, :places]), 1)
        g_BNH = torch.cat((g_BWH, self._mask_g[:, :places]), 1)
        # the last committed row, whose column each cycle finds, and the masked places behind the committed rows
        columns_P = self._columns[self.waiting : self.waiting + places]
        drafting_BK = torch.cat((lined.last_B1, columns_P.expand(len(roots_B), -1)), 1)
        _, logits_BKU = self._pass(tokens_BN, g_BNH, visibility, drafting_BK)
        self.length_B = lined.length_B
        if self.marginals is not None:
            # only the context's tokens are penalised: nodes of one depth and rank share a token
            seen_BU = in_draft_vocabulary(self.seen_BV, self.head.draft_ids_U)
            seen_B1U = None if seen_BU is None else seen_BU[:, None]
            logits_BKU = penalise(logits_BKU, self.sampling, seen_B1U)
            best = self.marginals.first(self.drafted)
            return best.tree(best.marginals(logits_BKU), self.head.draft_ids_U, self.nodes)
        ids_U = self.head.draft_ids_U
        tokens_BK, q_BKU, confidence_BK = choose_each(
            logits_BKU, self.sampling, self._sampled, self.seen_BV, ids_U, generator, self.says_confidence
        )
        q_BKV = None if q_BKU is None else in_target_vocabulary(q_BKU, ids_U, self.head.dims.vocab_size)
        drafted = self._chain.first(self.drafted)
        return replace(drafted, tokens_BN=tokens_BK, q_BNV=q_BKV, confidence_BN=confidence_BK)
