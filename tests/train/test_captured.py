"""Shapes of captured steps, and when steps are captured at all (the graphs themselves: tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from headstart.heads.batch import FeatureBatch
from headstart.heads.errors import ConfigError
from headstart.train.captured import PackShape, tensors_of
from headstart.train.config import TrainConfig
from headstart.train.launching.setup import captures
from headstart.train.sharing.parallel import resolve_kind


def documents(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.arange(n), torch.tensor([-1] * 2 + [0] * (n - 2))) for n in lengths]


def batch_of(*lengths: int) -> FeatureBatch:
    return FeatureBatch.pack(documents(*lengths), 3)


def test_a_shape_covers_what_it_was_made_for_and_every_pack_gets_equal_shapes():
    small, large = batch_of(5, 9), batch_of(100, 60, 7)
    shape = PackShape.covering(small).union(PackShape.covering(large))
    assert shape == PackShape(rows=256, anchors=256, documents=4)
    assert shape.holds(PackShape.covering(large)) and not PackShape.covering(small).holds(shape)
    first, second = tensors_of(shape.pad(small)), tensors_of(shape.pad(large))
    assert [x.shape for x in first] == [x.shape for x in second]
    assert shape.pad(small).longest == shape.pad(large).longest == 256


def test_a_full_pack_needs_no_padding():
    batch = batch_of(64, 64)
    shape = PackShape.covering(batch)
    assert shape.rows == 128
    padded = shape.pad(batch)
    assert padded.tokens_R is batch.tokens_R
    # row 127 ends a document, so it is nobody's anchor
    assert padded.anchors.row_A[len(batch.anchors) :].tolist() == [127] * (128 - len(batch.anchors))
    assert 127 not in batch.anchors.row_A
    loose = FeatureBatch.pack(documents(64, 64), 3, pad_to=140)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(shape.pad(loose)), tensors_of(padded), strict=True))
    with pytest.raises(ValueError, match="does not fit 127 rows"):
        batch.padded(127, 128, 2)


@pytest.mark.parametrize(
    ("device", "kind", "precision", "possible"),
    [
        ("cuda", DistributedType.NO, "bf16", True),
        ("cuda", DistributedType.MULTI_GPU, "bf16", True),
        ("cuda", DistributedType.FSDP, "bf16", False),
        ("cuda", DistributedType.NO, "no", False),  # float32 attention loops over documents on the host
        ("cpu", DistributedType.NO, "bf16", False),
    ],
)
def test_steps_are_captured_only_where_graphs_can_be(device, kind, precision, possible):
    accelerator = SimpleNamespace(device=torch.device(device), distributed_type=kind, num_processes=2)

    def captured(capture: str) -> bool:
        config = TrainConfig(steps=1, mixed_precision=precision, capture=capture)
        return captures(resolve_kind(config, accelerator), config, accelerator.device)

    assert captured("auto") is possible
    assert captured("off") is False
    if possible:
        assert captured("on") is True
    else:
        with pytest.raises(ConfigError, match="train.capture: found on"):
            captured("on")
