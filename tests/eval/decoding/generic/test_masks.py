"""What a model's own attention is told to see: windows, chunks, trees, padding, and the forms of a mask."""

from __future__ import annotations

import pytest
import torch

from headstart.eval.decoding.generic.masks import model_masks, seen_slots
from headstart.eval.decoding.memory import LayerMemory, Memory, Span
from headstart.eval.kernels.attention import Visibility

FULL, WINDOW, CHUNK = Span(), Span(window=2), Span(chunk=3)


def memory(spans: dict[str, Span], recurrent: tuple[str, ...] = ()) -> Memory:
    return Memory(spans, recurrent, (LayerMemory(True, 0),) * len(spans))


def prompt() -> Visibility:
    """Two rows, the second with a column of padding."""
    position_BM = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])
    return Visibility(position_BM, position_BM.clamp(min=0), position_BM[:, 0])


def tree(width: int = 3) -> Visibility:
    """Four slots of context, a root at position 4 and two children of it."""
    mask = torch.eye(3, width, dtype=torch.bool)
    mask[:, 0] = True
    return Visibility(torch.tensor([[4, 5, 5]]), torch.tensor([[4, 5, 6]]), torch.tensor([4]), mask[None])


def test_padding_sees_one_slot_and_real_tokens_what_their_span_says() -> None:
    mask = model_masks(memory({"sliding_attention": WINDOW}), prompt(), 5, None)
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 4, 5)
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]]


def test_chunks_follow_positions_in_a_tree() -> None:
    seen = seen_slots(tree(), CHUNK, 7)[0].int().tolist()
    # slot 6 holds position 5: it is in the chunk of positions 3 … 5
    assert seen == [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 1]]
    with pytest.raises(ValueError, match="square tree mask"):
        seen_slots(tree(4), CHUNK, 8)


def test_masks_that_are_added() -> None:
    boolean = model_masks(memory({"full_attention": FULL}), prompt(), 4, None)
    added = model_masks(memory({"full_attention": FULL}), prompt(), 4, torch.bfloat16)
    assert isinstance(boolean, torch.Tensor) and isinstance(added, torch.Tensor) and added.dtype == torch.bfloat16
    assert torch.equal(added == 0, boolean) and bool((added[~boolean] == torch.finfo(torch.bfloat16).min).all())


def test_one_mask_per_kind_and_none_for_recurrent_layers() -> None:
    masks = model_masks(memory({"full_attention": FULL, "sliding_attention": WINDOW}, ("mamba",)), prompt(), 4, None)
    assert isinstance(masks, dict) and list(masks) == ["full_attention", "sliding_attention", "mamba"]
    assert masks["mamba"] is None and masks["full_attention"] is not None and masks["sliding_attention"] is not None
    assert int(masks["full_attention"][0].sum()) == 10 and int(masks["sliding_attention"][0].sum()) == 7
