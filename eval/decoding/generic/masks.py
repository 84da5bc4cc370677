"""The attention masks that transformers' own forward gets.

Shape legend: B batch, M tokens of a forward, S slots read, W slots of a tree mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.eval.decoding.memory import Memory, Span
from headstart.eval.kernels.attention import Visibility, visible_slots


def seen_slots(visibility: Visibility, span: Span, slots: int) -> Tensor:
    """bool [B, M, S]: the slots that each token sees; as visible_slots, for any span."""
    seen = visible_slots(visibility, span.window, slots)
    if span.chunk is None:
        return seen
    position_BM = visibility.position_BM
    at_BS = torch.arange(slots, device=position_BM.device).expand(position_BM.shape[0], slots)
    if visibility.tree_BMW is not None:
        visibility.check_window()
        place_BW = visibility.base_B[:, None] + torch.arange(position_BM.shape[1], device=position_BM.device)
        at_BS = at_BS.scatter(1, place_BW, position_BM)
    return seen & (position_BM[:, :, None] // span.chunk == at_BS[:, None, :] // span.chunk)


def model_masks(
    memory: Memory, visibility: Visibility, slots: int, additive: torch.dtype | None
) -> Tensor | dict[str, Tensor | None]:
    """The attention mask in the model's form: [B, 1, M, S], or one such mask per kind of layer.

    Recurrent layers get none.

    Args: additive: dtype of a mask that is added to the attention's logits; None = a boolean mask.
    """
    device = visibility.position_BM.device
    # padding sees slot 0: a softmax over nothing would give NaN
    padding_BMS = (visibility.position_BM < 0)[:, :, None] & (torch.arange(slots, device=device) == 0)
    made: dict[str, Tensor | None] = {}
    for kind, span in memory.spans.items():
        allowed = (seen_slots(visibility, span, slots) | padding_BMS)[:, None]
        if additive is not None:
            zero = torch.zeros((), dtype=additive, device=device)
            allowed = torch.where(allowed, zero, torch.finfo(additive).min)
        made[kind] = allowed
    if len(made) == 1:
        # models hand a 4-D mask to every layer that attends, and none to the others
        return next(iter(made.values()))  # type: ignore[return-value]
    return {**made, **dict.fromkeys(memory.recurrent)}
