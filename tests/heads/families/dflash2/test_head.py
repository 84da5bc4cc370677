"""DFlash 2's convolutions and selector. Its loss is compared with a naive loop in the contract suite."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from reference.families import Example, dflash, dflash2, documents, example_head
from reference.tiny import ends_of, feature_batch, gradients, teacher_of

from headstart.heads.errors import ConfigError
from headstart.heads.families import build_head
from headstart.heads.families.block.convolutions import BlockConvolution
from headstart.heads.losses.select import among_likeliest

PATTERNS = ["..AAAAAA.B..CCC", "AAAA", "...AABBBBB"]


def head_of(**fields: object):
    head, ends = example_head(Example(dflash2(**fields)), torch.float64)
    return head, ends, feature_batch(documents(PATTERNS), ends, head.depth, 40)


def test_a_new_head_drafts_as_dflash_does() -> None:
    """Convolutions that change nothing, a selector that adds nothing: the two ways through the layers agree."""
    head, ends, batch = head_of()
    new = build_head(head.config, head.dims)
    new.initialise(ends_of(ends))
    new.double()
    known = asdict(dflash())
    shared = {name: value for name, value in asdict(head.config).items() if name in known} | {"type": "dflash"}
    plain = build_head(dflash(**shared), head.dims)
    plain.initialise(ends_of(ends))
    plain.double().load_state_dict({name: new.state_dict()[name] for name in plain.state_dict()})
    torch.testing.assert_close(new.slots(batch), plain.slots(batch))
    found, expected = (x.loss(batch, teacher_of(ends)) for x in (new, plain))
    torch.testing.assert_close(found.sum_T[0], expected.sum_T[0])
    assert torch.equal(found.numerator_M, expected.numerator_M)
    # but all of it learns from the first steps on
    first = gradients(new, found.sum_T.sum())
    for name in ("candidate_selector.successor_codebook", "layers.0.attention_conv.kernel_projection.weight",
                 "layers.1.mlp_conv.base_kernel"):  # fmt: skip
        assert first[name].any(), name


def test_slots_without_gradients_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    head, _, batch = head_of(conv_taps=3)
    expected = head.slots(batch).detach()
    monkeypatch.setattr("headstart.heads.families.block.head.SLOTS_AT_ONCE", 3 * head.block_size)
    with torch.no_grad():
        torch.testing.assert_close(head.slots(batch), expected)


def test_under_autocast_the_layers_compute_in_its_dtype() -> None:
    head, ends = example_head(Example(dflash2()))
    batch = feature_batch(documents(PATTERNS, dtype=torch.float32), ends, head.depth, 40)
    expected = head.loss(batch, teacher_of(ends)).sum_T
    with torch.autocast("cpu", torch.bfloat16):
        trained = head.slots(batch)
        found = head.loss(batch, teacher_of(ends)).sum_T
    assert trained.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_convolution_stays_in_its_block_and_looks_back() -> None:
    torch.manual_seed(0)
    conv = BlockConvolution(8, 2, 4).double()
    for parameter in conv.parameters():
        parameter.data.normal_()
    x = torch.randn(6, 8, dtype=torch.float64)
    other = x.clone()
    other[1] += 1
    (y, taps), (z, more) = conv.before(x, 3), conv.before(other, 3)
    assert (y != z).any(-1).tolist() == [False, True, True, False, False, False]
    after = (conv.after(y, taps, 3) != conv.after(z, more, 3)).any(-1).tolist()
    assert after == [False, True, True, False, False, False]


def test_drafts_come_from_the_likeliest_tokens() -> None:
    base, scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[0.0, 9.0, 1.0, 5.0]])
    assert among_likeliest(scores, base, 2).tolist() == [[0.0, -torch.inf, 1.0, -torch.inf]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_group": 5}, "head.conv_group: found 5, expected a divisor of the 32 channels"),
        ({"conv_taps": 6}, "head.conv_taps: found 6, expected 1 to 5"),
        ({"selector_candidates": 1}, "head.selector_candidates: found 1, expected 2 or more"),
    ],
)
def test_what_is_refused(fields: dict[str, int], message: str) -> None:
    head, _, _ = head_of()
    with pytest.raises(ConfigError, match=message):
        build_head(replace(head.config, **fields), head.dims)
